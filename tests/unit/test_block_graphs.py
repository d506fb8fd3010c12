"""Blocks as graphs: when they are captured, what they read and write, and what stands in the way."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.adapters import block_guard
from chitu_diffusion.parallel.cp.fast.adapters.block_graphs import GRAPHS, MOST_KINDS, MOST_TURNS, BlockGraphs
from tests.support.fake_recorder import FakeRecorder


class Angles(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


class Block(nn.Module):
    """Two streams, as Qwen-Image has them, and something that all blocks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(
        self, hidden: torch.Tensor, text: torch.Tensor, rope: Angles, scale: float = 1.0, mask: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        moved = self.inner(hidden) * rope.cos + text.mean() * scale
        return text + rope.sin * moved.mean(), moved


class Model:
    """Three blocks whose forwards are taken over, and the same blocks as they are."""

    def __init__(self, recorder: FakeRecorder, unfit: Callable[[], str | None] = lambda: None) -> None:
        torch.manual_seed(0)
        self.blocks = [Block() for _ in range(3)]
        self.recorder = recorder
        self.graphs = BlockGraphs(self.blocks, recorder, unfit)
        self.forwards = [self.graphs.wrapped(i) for i in range(3)]

    @torch.no_grad()
    def run(
        self,
        seed: int,
        tokens: int = 6,
        between: Callable[[torch.Tensor], Any] = lambda hidden: hidden,
        scales: tuple[float, ...] = (0.5, 0.5, 0.5),
    ) -> bool:
        """One forward by the graphs; whether it gives what the blocks alone give."""
        inputs = self.inputs(seed, tokens)
        self.graphs.begin()
        outputs = [self.through(self.forwards, *inputs, between, scales)]
        self.graphs.end()
        outputs.append(self.through([block.forward for block in self.blocks], *inputs, between, scales))
        return all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))

    def inputs(self, seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, Angles]:
        generator = torch.Generator().manual_seed(seed)
        shapes = (1, tokens, 4), (1, 3, 4), (1, 1, 1), (1, 1, 1)
        hidden, text, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
        return hidden, text, Angles(cos, sin)

    def through(
        self, forwards: Any, hidden: Any, text: Any, rope: Angles, between: Any, scales: tuple[float, ...]
    ) -> list[torch.Tensor]:
        kept = []
        for forward, scale in zip(forwards, scales, strict=True):
            text, hidden = forward(hidden, text=text, rope=rope, scale=scale)
            kept += [text, hidden]  # what a caller keeps must stay what it was
            hidden = between(hidden)
        return kept


@pytest.fixture(autouse=True)
def _these_blocks_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_guard, "PACKAGES", (*block_guard.PACKAGES, __name__.split(".")[0]))


def captured(recorder: FakeRecorder | None = None) -> Model:
    """A model whose next forward of 6 tokens replays."""
    model = Model(recorder or FakeRecorder())
    for seed in range(3):
        assert model.run(seed)
    assert model.recorder.took() == ["record", "replay"] * 3
    return model


def test_the_third_forward_captures_and_later_ones_replay() -> None:
    model = captured()
    assert [model.run(seed) for seed in (3, 4)] == [True, True]
    assert model.recorder.took() == ["replay"] * 6
    assert model.graphs.told == (GRAPHS,)


def test_kinds_of_inputs_have_graphs_of_their_own_and_take_turns() -> None:
    model = captured()
    for seed in range(3):
        assert model.run(seed, tokens=9)
        assert model.run(seed)
    assert model.recorder.took() == [*["replay"] * 6, *["record", "replay"] * 3, *["replay"] * 3]


def test_kinds_of_inputs_may_change_within_a_forward() -> None:
    model = captured()
    for seed in range(3):
        assert model.run(seed, scales=(0.25, 0.25, 0.25))
    for seed in range(3, 6):
        assert model.run(seed, scales=(0.5, 0.25, 0.5))
    assert model.recorder.took()[-3:] == ["replay"] * 3


def test_what_is_changed_between_blocks_reaches_the_next_one() -> None:
    model = captured()
    assert model.run(5, between=lambda hidden: hidden + 1)
    assert model.run(6, between=lambda hidden: hidden.mul_(2))
    assert model.recorder.took()[:1] == ["replay"]  # the first block has the same inputs as ever


@pytest.mark.parametrize(("block_ms", "graphs"), [(1.2, True), (1.9, True), (2.1, False), (100.0, False)])
def test_blocks_whose_launch_the_devices_hide_stay_eager(block_ms: float, graphs: bool) -> None:
    model = Model(FakeRecorder(blocks_ms=(block_ms,), launch_ms=1.0))
    assert all(model.run(seed) for seed in range(4))
    assert bool(model.recorder.took()) is graphs
    told = f"a block takes {block_ms:.1f} ms, of which the host needs 1.0 to launch it"
    assert model.graphs.told == (GRAPHS if graphs else told,)


def test_a_block_that_was_held_up_once_does_not_count() -> None:
    """By a capture of attention, say: on average a block would seem to take 3.4 ms."""
    model = Model(FakeRecorder(blocks_ms=(8.0, 1.1, 1.2), launch_ms=1.0))
    assert all(model.run(seed) for seed in range(4))
    assert model.graphs.told == (GRAPHS,)


def test_blocks_that_seemed_long_are_timed_again() -> None:
    """Another rank, whose host was slow for a while, kept the devices waiting."""
    recorder = FakeRecorder(blocks_ms=(100.0,), launch_ms=1.0)
    model = Model(recorder)
    assert all(model.run(seed) for seed in range(3))  # timed in the second and third
    recorder.blocks_ms = (1.2,)
    assert model.run(3)
    assert model.graphs.told == ("a block takes 100.0 ms, of which the host needs 1.0 to launch it",)
    assert model.run(4)  # the fifth
    assert model.graphs.told == (GRAPHS,)
    assert all(model.run(seed) for seed in (5, 6))
    assert model.recorder.took() == [*["record", "replay"] * 3, *["replay"] * 3]


def test_in_the_end_blocks_that_take_long_are_not_timed_any_more() -> None:
    model = Model(FakeRecorder(blocks_ms=(100.0,), launch_ms=1.0))
    assert all(model.run(seed) for seed in range(9))
    stamps = model.recorder.stamps
    assert all(model.run(seed) for seed in range(20))
    assert model.recorder.stamps == stamps == 4 * (1 + 3)  # four forwards of three blocks


def test_blocks_that_stay_eager_take_no_memory() -> None:
    model = Model(FakeRecorder(blocks_ms=(100.0,)))
    assert all(model.run(seed) for seed in range(3))
    (kind,) = model.graphs._kinds.values()
    assert (kind.inputs, kind.outputs) == ([], ([], []))
    assert {tensor.device.type for tensor in kind.made} == {"meta"}


def test_blocks_that_run_over_something_else_stay_eager() -> None:
    model = Model(FakeRecorder(), lambda: "blocks run over nccl")
    assert all(model.run(seed) for seed in range(4))
    assert (model.recorder.took(), model.graphs.told) == ([], ("blocks run over nccl",))


def test_a_block_that_cannot_be_captured_runs_eagerly_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(FakeRecorder(fails=True))
    assert all(model.run(seed) for seed in range(5))
    assert model.recorder.took() == []
    assert model.graphs.told == ("a block cannot be captured: a copy from the host",)
    assert len(caplog.records) == 1


def test_windows_that_moved_are_captured_anew() -> None:
    model = captured()
    for _ in range(2 * MOST_TURNS):
        model.recorder.now += 1
        assert model.run(3)
        assert model.recorder.took() == ["record", "replay"] * 3


def test_every_turn_of_the_windows_has_a_graph() -> None:
    model = captured(FakeRecorder(turns=2))  # three blocks: the next forward begins in the other turn
    assert model.run(3)
    assert model.recorder.took() == ["record", "replay"] * 3
    assert model.run(4)
    assert model.recorder.took() == ["replay"] * 3


def test_turns_that_never_come_again_end_it() -> None:
    model = captured(FakeRecorder(turns=97))
    assert all(model.run(seed) for seed in range(3, 8))
    assert model.graphs.told == ("a block cannot be captured: the windows do not come again in the same turns",)


@pytest.mark.parametrize("what", ["weight", "module", "hook", "forward"])
def test_a_block_that_was_changed_is_not_replayed(what: str) -> None:
    model = captured()
    inner = model.blocks[1].inner
    if what == "weight":
        inner.weight = nn.Parameter(torch.ones(4, 4))
    elif what == "module":
        model.blocks[1].inner = nn.Linear(4, 4)
    elif what == "hook":
        inner.register_forward_hook(lambda module, args, out: out * 2)
    else:
        inner.forward = lambda x: x * 2  # type: ignore[method-assign]
    assert model.run(3)
    assert model.recorder.took() == []


def test_a_weight_that_changed_in_its_place_counts() -> None:
    model = captured()
    with torch.no_grad():
        model.blocks[1].inner.weight.mul_(2)
    assert model.run(3)
    assert model.recorder.took() == ["replay"] * 3


def test_modules_that_nobody_knows_stay_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_guard, "PACKAGES", ("torch",))
    model = Model(FakeRecorder())
    assert all(model.run(seed) for seed in range(4))
    assert model.recorder.took() == []
    assert "Block in a block may change without being seen" in model.graphs.told[0]


class Quantised(torch.Tensor):
    """A tensor without an address, as those of quantisers are."""

    def data_ptr(self) -> int:
        raise RuntimeError("there is no storage")


def test_quantised_weights_stay_eager() -> None:
    model = Model(FakeRecorder())
    weight = model.blocks[2].inner.weight.data
    model.blocks[2].inner.weight = nn.Parameter(weight.as_subclass(Quantised), requires_grad=False)
    assert all(model.run(seed) for seed in range(4))
    assert model.recorder.took() == []
    assert "a weight in a block is a" in model.graphs.told[0]


def test_an_input_that_may_change_without_being_seen_stays_eager() -> None:
    model = Model(FakeRecorder())
    for _ in range(4):
        model.graphs.begin()
        with torch.no_grad():
            model.forwards[0](*model.inputs(0, 6), mask=object())
        model.graphs.end()
    assert (model.recorder.took(), model.graphs.told) == (
        [],
        ("an input is a object, which may change without being seen",),
    )


def test_a_busy_device_is_left_alone() -> None:
    model = captured()
    model.recorder.in_use = "a graph is being captured"
    assert model.run(3)
    assert model.recorder.took() == []


def test_numbers_among_the_inputs_tell_kinds_apart() -> None:
    model = captured()
    hidden, text, rope = model.inputs(0, 6)
    with torch.no_grad():
        model.graphs.begin()
        made = model.forwards[0](hidden, text=text, rope=rope, scale=0.25)
        model.graphs.end()
        wanted = model.blocks[0](hidden, text=text, rope=rope, scale=0.25)
    assert torch.equal(made[1], wanted[1])
    assert model.recorder.took() == []


def test_only_so_many_kinds_are_kept() -> None:
    model = captured()
    for tokens in range(10, 10 + MOST_KINDS):
        assert model.run(0, tokens)
    assert len(model.graphs.told) == MOST_KINDS
    assert model.run(0)  # forgotten: new again
    assert model.recorder.took() == []
