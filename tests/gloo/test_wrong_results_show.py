"""The ways in which this field is silently wrong, each done on purpose: the check of these tests sees every one.

The numbers are how far each is off; the limit that right results keep is 1e-6.
"""

import torch

from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.collective import CollectiveTransport
from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.fast.attention.merge import merge
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT, Schedule
from chitu_diffusion.parallel.cp.layout import Layout, split_spans
from chitu_diffusion.parallel.cp.transport import Arrived, Inputs, Text
from tests.gloo.checks import error, one_process, sdpa
from tests.gloo.scenarios import Case, attend, share, whole
from tests.support.pool import Worker, pool
from tests.support.reference import reference_attention

CASE = Case(96, 4, text_len=13, valid_text=(9,))
SEEN = 1e-3  # a thousand times the limit


class NoGather(CollectiveTransport):
    """Attends with this rank's own keys only."""

    def send(
        self, layout: Layout, inputs: Inputs, schedule: Schedule = ONE_SHOT, transfer: str | None = None
    ) -> Arrived:
        assert inputs.k is not None
        assert inputs.v is not None
        return Arrived(inputs.q, inputs.k, inputs.v)


def without_gather(worker: Worker) -> torch.Tensor:
    session = worker.session(Case(96, 4).config)
    right, session.transport = session.transport, NoGather(worker.group, session.device)
    try:
        return attend(worker, Case(96, 4))[0]
    finally:
        session.transport = right


def rotate(x: torch.Tensor, first_row: int) -> torch.Tensor:
    """Interleaved RoPE for rows first_row, first_row + 1, …"""
    rows = torch.arange(first_row, first_row + x.shape[1], dtype=torch.float64)
    angle = rows[:, None] * 100.0 ** (-torch.arange(0, x.shape[3], 2, dtype=torch.float64) / x.shape[3])
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * turn).flatten(-2).float()


def with_rope(worker: Worker, right: bool) -> torch.Tensor:
    inputs = whole(Case(96, 4))
    span = split_spans(96, worker.world)[worker.rank]
    q, k, v = (share(x, worker.rank, worker.world) for x in (inputs.q, inputs.k, inputs.v))
    first = span.start if right else 0
    return cp_attention(worker.session(CPConfig()), rotate(q, first), rotate(k, first), v)[0]


def without_mask(worker: Worker) -> torch.Tensor:
    inputs = whole(CASE)
    q, k, v = (share(x, worker.rank, worker.world) for x in (inputs.q, inputs.k, inputs.v))
    return cp_attention(worker.session(CPConfig()), q, k, v, text=inputs.text)[0]


def text_counted_per_rank(worker: Worker) -> torch.Tensor:
    """Every rank sends the text along with its tokens, as if it were its own."""
    inputs = whole(Case(96, 4, text_len=13))
    q, k, v = (share(x, worker.rank, worker.world) for x in (inputs.q, inputs.k, inputs.v))
    text = inputs.text
    assert isinstance(text, Text)
    assert text.q is not None
    q, k, v = (torch.cat(pair, 1) for pair in ((text.q, q), (text.k, k), (text.v, v)))
    return cp_attention(worker.session(CPConfig()), q, k, v)[0][:, 13:]


def worst(case: Case, outputs: list[torch.Tensor]) -> float:
    tokens, _ = one_process(case, whole(case))
    return max(error(out, share(tokens, rank, len(outputs))) for rank, out in enumerate(outputs))


def test_no_gather() -> None:
    assert worst(Case(96, 4), pool().run(3, without_gather)) > SEEN


def test_rope_rows_of_another_rank() -> None:
    inputs = whole(Case(96, 4))
    wanted = sdpa(rotate(inputs.q, 0), rotate(inputs.k, 0), inputs.v, None)
    off = [
        max(error(out, share(wanted, rank, 3)) for rank, out in enumerate(pool().run(3, with_rope, right)))
        for right in (True, False)
    ]
    assert off[0] <= 2e-6, "right rows are right"
    assert off[1] > SEEN


def test_dropped_mask() -> None:
    assert worst(CASE, pool().run(3, without_mask)) > SEEN


def test_text_counted_once_per_rank() -> None:
    assert worst(Case(96, 4, text_len=13), pool().run(3, text_counted_per_rank)) > SEEN


def test_ignored_log_sum_exp() -> None:
    """Merging halves by equal weights: seen because the keys of the halves differ in size."""
    case = Case(96, 4)
    inputs = whole(case)
    halves = [
        reference_attention(inputs.q, k, v) for k, v in zip(inputs.k.chunk(2, 1), inputs.v.chunk(2, 1), strict=True)
    ]
    parts = [(out.float(), lse.float()) for out, lse in halves]
    ignored = [(out, torch.zeros_like(lse)) for out, lse in parts]
    right, _ = one_process(case, inputs)
    assert error(merge(parts, out_dtype=torch.float32)[0], right) <= 1e-6
    assert error(merge(ignored, out_dtype=torch.float32)[0], right) > SEEN
