"""Whole blocks as CUDA graphs, where launching a block takes the host about as long as running it takes the devices.

At image sizes on several GPUs a block of a diffusion transformer is over in one or two milliseconds, and its sixty or
so launches take the host as long. Every kind of input is run eagerly once, so that everything is planned and compiled,
and once more to be timed; blocks that wait for the host are captured in the third forward and replayed from then on.
Others are timed a few times more.

A graph reads and writes memory that stays: inputs are copied there unless the last block has left them there, and
outputs are copied out, so that whoever keeps one keeps what it was. Each rank decides for itself: a replay does to
the other ranks what the eager block does.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.adapters.block_guard import Kept, why_not
from chitu_diffusion.parallel.cp.fast.adapters.block_times import BlockTimes
from chitu_diffusion.parallel.cp.fast.adapters.block_values import NotPlainError, mapped, shape_of, tensors_of
from chitu_diffusion.parallel.cp.recorder import NotRecordedError, Recorder, Recording

NEW, TIMED, GRAPHS = "new", "timed", "graphs"
# How many forwards have ended before those that are timed once more where blocks have stayed eager for their length:
# where another rank's host was slow for a while, its devices kept these ones waiting, and blocks seemed long.
TIMED_AGAIN = (2, 4, 8)
MOST_KINDS = 8  # of inputs: sizes, and lengths of prompts
MOST_TURNS = 4  # of the windows at which one block is captured

Forward = Callable[..., Any]
Source = int | None  # place of an input among the outputs of the last block; None: it was copied in

_log = logging.getLogger(__name__)


@dataclass
class _Kind:
    """One kind of inputs, and what is kept for it.

    ``state`` is NEW, then TIMED, then GRAPHS, or why it stays eager.
    """

    state: str = NEW
    ended: int = 0  # forwards
    long: bool = False  # whether it stays eager since its blocks take long
    inputs: list[torch.Tensor] = field(default_factory=list)
    made: Any = None  # an output of a block, for its structure: without memory
    outputs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # two sets, written in turn by block after block
    graphs: dict[tuple[int, int, tuple[Source, ...]], list[Recording]] = field(default_factory=dict)

    @property
    def to_time(self) -> bool:
        """Whether the blocks of this forward are to be timed."""
        return self.state == TIMED or (self.long and self.ended in TIMED_AGAIN)

    def hold(self, given: Sequence[torch.Tensor]) -> None:
        """Take the memory that graphs read and write."""
        self.inputs = [torch.empty_like(tensor) for tensor in given]
        made, device = tensors_of(self.made), given[0].device
        one, other = ([torch.empty_like(tensor, device=device) for tensor in made] for _ in range(2))
        self.outputs = one, other


@dataclass(frozen=True)
class _Left:
    """What the last block returned, each with its version, and which set of its kind's outputs holds the same."""

    kind: _Kind
    side: int
    returned: list[tuple[torch.Tensor, int]]

    def place(self, tensor: torch.Tensor, kind: _Kind) -> Source:
        """Where among the outputs ``tensor`` lies unchanged, or None."""
        if kind is not self.kind:
            return None
        return next((i for i, held in enumerate(self.returned) if _is_still(held, tensor)), None)


@dataclass(frozen=True)
class _BlockCall:
    """One call of one block: its ``inputs``, args and kwargs, and where the memory is that its graph works on."""

    kind: _Kind
    forward: Forward
    inputs: Any
    side: int  # which set of outputs it writes; it reads the other
    sources: tuple[Source, ...]  # of the tensors in ``inputs``

    def work(self) -> None:
        """The block, on memory that stays."""
        kind = self.kind
        before, after = kind.outputs[1 - self.side], kind.outputs[self.side]
        held = iter([kind.inputs[i] if place is None else before[place] for i, place in enumerate(self.sources)])
        args, kwargs = mapped(self.inputs, lambda _: next(held))
        for kept, made in zip(after, tensors_of(self.forward(*args, **kwargs)), strict=True):
            assert kept.shape == made.shape, "blocks of one kind return the same shapes"
            kept.copy_(made)


class BlockGraphs:
    """The graphs of one transformer's blocks; ``begin`` and ``end`` stand around each of its forwards.

    ``unfit`` says why what the blocks do cannot be recorded, or None; it is asked when they have run.
    """

    def __init__(self, blocks: Sequence[nn.Module], recorder: Recorder, unfit: Callable[[], str | None]) -> None:
        self._blocks, self._recorder, self._unfit = list(blocks), recorder, unfit
        self._kinds: OrderedDict[object, _Kind] = OrderedDict()
        self._kept: Kept | None = None
        self._version = -1  # of what graphs could be captured on
        self._off: str | None = "no forward has begun"
        self._met: _Kind | None = None  # by the last block that ran
        self._times = BlockTimes(recorder)  # of this forward
        self._copied: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
        self._left: _Left | None = None

    @property
    def told(self) -> tuple[str, ...]:
        """For each kind of inputs, the latest last: ``graphs``, or why its blocks are none."""
        return tuple(kind.state for kind in self._kinds.values()) or (self._off or NEW,)

    def wrapped(self, index: int) -> Forward:
        """The forward of block ``index``, by a graph where there is one."""
        return partial(self._call, index, self._blocks[index].forward)

    def begin(self) -> None:
        """A forward of the transformer begins."""
        self._forget()
        self._off = "torch.compile traces the blocks" if torch.compiler.is_compiling() else self._recorder.busy()
        if self._off is None and (self._kept is None or not self._kept.unchanged()):
            self._kinds.clear()
            self._off = why_not(self._blocks)
            self._kept = Kept(self._blocks) if self._off is None else None
        if self._off is None and self._version != (version := self._recorder.version()):
            self._version = version
            for kind in self._kinds.values():
                kind.graphs.clear()

    def end(self) -> None:
        """It has ended."""
        if (kind := self._met) is not None:
            if kind.state == NEW:
                kind.state = TIMED
            elif kind.to_time and self._times:
                unfit = self._unfit()
                too_long = None if unfit else self._times.too_long()
                kind.long = too_long is not None
                kind.state = unfit or too_long or GRAPHS
            kind.ended += 1
        self._forget()

    def close(self) -> None:
        """Drop everything that is kept."""
        self._forget()
        self._kinds.clear()
        self._kept = None

    def _forget(self) -> None:
        self._met = self._left = None
        self._copied.clear()
        self._times.clear()

    def _call(self, index: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        kind = self._kind_of((args, kwargs)) if self._off is None else None
        if kind is not None and kind.state == GRAPHS:
            return self._by_graph(kind, index, forward, (args, kwargs))
        if kind is None or not kind.to_time:
            return forward(*args, **kwargs)
        return self._timed(kind, forward, (args, kwargs))

    def _timed(self, kind: _Kind, forward: Forward, inputs: Any) -> Any:
        args, kwargs = inputs
        made = self._times.timed(partial(forward, *args, **kwargs))
        if kind.made is None:
            kind.made = mapped(made, partial(torch.empty_like, device="meta"))
        return made

    def _kind_of(self, inputs: Any) -> _Kind | None:
        try:
            key = shape_of(inputs)
        except NotPlainError as error:
            self._off = str(error)
            return None
        self._met = kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)
        return kind

    def _by_graph(self, kind: _Kind, index: int, forward: Forward, inputs: Any) -> Any:
        given, left = tensors_of(inputs), self._left
        if not kind.inputs:
            kind.hold(given)
        sources = tuple(None if left is None else left.place(tensor, kind) for tensor in given)
        call = _BlockCall(kind, forward, inputs, 0 if left is None else 1 - left.side, sources)
        self._copy_in(kind, given, sources)
        graphs = kind.graphs.setdefault((index, call.side, sources), [])
        if any(graph.replay() for graph in graphs) or self._capture(call, graphs):
            return self._copy_out(kind, call.side)
        args, kwargs = inputs
        return forward(*args, **kwargs)

    def _capture(self, call: _BlockCall, graphs: list[Recording]) -> bool:
        """Capture one block and replay it; False, with one note, where that cannot be done."""
        try:
            if len(graphs) == MOST_TURNS:
                raise NotRecordedError("the windows do not come again in the same turns")
            graphs.append(self._recorder.record(call.work))
        except NotRecordedError as error:
            call.kind.state = f"a block cannot be captured: {error}"
            _log.warning("blocks run eagerly and not as CUDA graphs: %s", error)
            return False
        return graphs[-1].replay()

    def _copy_in(self, kind: _Kind, given: Sequence[torch.Tensor], sources: Sequence[Source]) -> None:
        """What the last block has not left there, unless another block of this forward was given the same."""
        for i, (tensor, place) in enumerate(zip(given, sources, strict=True)):
            known = self._copied.get((id(kind), i))
            if place is None and (known is None or not _is_still(known, tensor)):
                kind.inputs[i].copy_(tensor)
                self._copied[id(kind), i] = tensor, _version(tensor)

    def _copy_out(self, kind: _Kind, side: int) -> Any:
        held = iter(kind.outputs[side])
        made = mapped(kind.made, lambda _: next(held).clone())
        self._left = _Left(kind, side, [(tensor, _version(tensor)) for tensor in tensors_of(made)])
        return made


def _is_still(held: tuple[torch.Tensor, int], tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is the one that was held, and has not been written since."""
    mine, version = held
    return mine is tensor and 0 <= version == _version(tensor)


def _version(tensor: torch.Tensor) -> int:
    """It grows with every write; -1 where torch does not count them."""
    return -1 if tensor.is_inference() else tensor._version
