"""One call is send, attend, receive, also where the kernel fails: nobody waits for a rank that has raised."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp.call import Call, perform
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.fast.attention.kernels import Kernel
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate, make_plan
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT, Schedule
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from chitu_diffusion.parallel.cp.graphs import split_home
from chitu_diffusion.parallel.cp.layout import Layout
from chitu_diffusion.parallel.cp.transport import Arrived, Inputs
from tests.support.reference import reference_attention, relative_error
from tests.support.reference_row import EXACT


@dataclass
class Transport:
    """Everything is there already; what is asked of it is written down."""

    name = "none"
    sent: list[tuple[Schedule, str | None]] = field(default_factory=list)
    received: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    def send(
        self, layout: Layout, inputs: Inputs, schedule: Schedule = ONE_SHOT, transfer: str | None = None
    ) -> Arrived:
        self.sent.append((schedule, transfer))
        assert inputs.k is not None
        assert inputs.v is not None
        return Arrived(inputs.q, inputs.k, inputs.v, finished=lambda group, out: self.finished.append(group))

    def receive(
        self, layout: Layout, out: torch.Tensor, home: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.received.append((out, home))
        return out, None


def fails_at(number: int) -> Kernel:
    """A row whose call ``number`` raises."""
    calls = []

    def run(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > number:
            raise RuntimeError("the kernel broke")
        return EXACT.run(*args, **options)

    return Kernel("breaks", lambda needs: None, run)


AGKV, ULYSSES = Layout(2, 1, 12, 4, 4), Layout(2, 2, 12, 8, 8)
PIPELINE = Schedule((1, 1))


def inputs() -> Inputs:
    q, k, v = torch.randn(3, 1, 6, 4, 8, generator=torch.Generator().manual_seed(0)).unbind()
    return Inputs(q, k, v)


@pytest.mark.parametrize(("layout", "in_place"), [(AGKV, True), (ULYSSES, False)], ids=["agkv", "ulysses"])
def test_the_output_is_written_where_it_stays_unless_it_has_to_travel(
    layout: Layout, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, "exact", EXACT)
    transport, given, home = Transport(), inputs(), torch.zeros(1, 6, 4, 8)
    plan = Candidate("agkv", layout.degree, "sm", PIPELINE, "exact")
    out, text = perform(transport, layout, plan, given, scale=0.5, home=home)
    assert text is None
    assert transport.sent == [(PIPELINE, "sm")]
    assert transport.finished == [0, 1]
    ((handed_over, its_home),) = transport.received
    assert its_home is home
    assert (handed_over is home) is in_place
    assert relative_error(out, reference_attention(given.q, given.k, given.v, scale=0.5)[0]) <= 1e-6  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [0, 1], ids=["first group", "second group"])
@pytest.mark.parametrize("layout", [AGKV, ULYSSES], ids=["agkv", "ulysses"])
def test_where_the_kernel_fails_the_others_still_get_everything(
    layout: Layout, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, "breaks", fails_at(number))
    transport, given = Transport(), inputs()
    plan = Candidate("agkv", layout.degree, "ce", PIPELINE, "breaks")
    with pytest.raises(RuntimeError, match="the kernel broke"):
        perform(transport, layout, plan, given, scale=0.5, home=torch.zeros(1, 6, 4, 8))
    assert transport.finished == list(range(number))
    ((handed_over, _),) = transport.received
    assert handed_over.shape == given.q.shape
    assert handed_over.isnan().all()  # the others must not take it for a result


@pytest.mark.parametrize("in_front", [True, False])
def test_an_output_is_split_into_tokens_and_text(in_front: bool) -> None:
    layout = Layout(2, 1, 7, 2, 2, text_len=3, text_in_front=in_front, text_queries=True)
    plan = make_plan(Candidate("agkv", 1, "ce", ONE_SHOT, "exact"), world=2, kernel=Choice("auto", "exact", "here"))
    rows = torch.arange(6)[None, :, None, None].expand(1, 6, 2, 8)  # rank 1: three tokens, and the text
    tokens, text = split_home(Call(layout, plan, 1.0), rows, 1)
    assert text is not None
    front, behind = (x[0, :, 0, 0].tolist() for x in ((text, tokens) if in_front else (tokens, text)))
    assert (front, behind) == ([0, 1, 2], [3, 4, 5])
