"""Whole calls as CUDA graphs: transfers, waits and kernels are captured once and launched as one.

A graph works on the memory that it was captured with, so it is kept per set of addresses, its output's included: in a
denoising loop the caching allocator hands out the same blocks step after step. A set of addresses that comes for the
first time runs eagerly, one that comes again is captured, so that inputs which never come again cost nothing. Ranks
decide this on their own: a replay does to its peers what the eager call does.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from chitu_diffusion.parallel.cp.call import Call, Outputs, perform
from chitu_diffusion.parallel.cp.fast.transport import FastTransport
from chitu_diffusion.parallel.cp.recorder import GraphRecorder, NotRecordedError, Recording
from chitu_diffusion.parallel.cp.transport import Inputs, Text

MOST_INPUTS = 512  # sets of input addresses: the layers of a model, times the branches of guidance
MOST_PLACES = 8  # of one set: two turns of the windows, and a few places for the output

_log = logging.getLogger(__name__)


# the turns of the windows, and the address of the output
_Place = tuple[tuple[int, ...], int]


@dataclass
class _Entry:
    """What is kept for one set of inputs."""

    call: Call
    home_shape: tuple[int, int, int, int]
    seen: set[_Place] = field(default_factory=set)
    graphs: dict[_Place, Recording] = field(default_factory=dict)


def input_key(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    text: Text | None,
    key_mask: torch.Tensor | None,
    seq_len: int | None,
    scale: float | None,
) -> tuple[object, ...]:
    """Everything that a captured call depends on but the place of its output: addresses, shapes, numbers."""
    tensors = (q, k, v) if text is None and key_mask is None else (q, k, v, key_mask, *_text_tensors(text))
    return seq_len, scale, *[None if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors]


def _text_tensors(text: Text | None) -> tuple[torch.Tensor | None, ...]:
    if text is None:
        return ()
    return (text.k, text.v, text.q) if text.in_front else (text.k, text.v, text.q, None)


class CallGraphs:
    """The graphs of one session. Calls of one session belong to one stream at a time, as its windows do."""

    def __init__(self, transport: FastTransport) -> None:
        self._transport = transport
        self._entries: OrderedDict[tuple[object, ...], _Entry] = OrderedDict()
        self._recorder = GraphRecorder(transport)
        self._failure: str | None = None

    def replay(self, key: tuple[object, ...], q: torch.Tensor) -> Outputs | None:
        """The call of ``input_key`` by its graph, None where there is none yet: the short way of calls that repeat."""
        entry = self._entries.get(key)
        if entry is None or not entry.graphs or torch.cuda.is_current_stream_capturing():
            return None
        transport = self._transport
        home = torch.empty(entry.home_shape, dtype=q.dtype, device=q.device)
        captured = entry.graphs.get((transport.turns(entry.call.layout), home.data_ptr()))
        if captured is None or not captured.replay():
            return None
        self._entries.move_to_end(key)
        return split_home(entry.call, home, transport.rank)

    def run(self, key: tuple[object, ...], call: Call, inputs: Inputs, key_mask: torch.Tensor | None) -> Outputs:
        """The call that was not replayed: by a new graph where its addresses come again, else eagerly."""
        transport, q, layout = self._transport, inputs.q, call.layout
        rows = layout.shards[transport.rank].size + (layout.text_len if layout.text_queries else 0)
        entry = self._entry(key, call, (q.shape[0], rows, layout.num_heads, q.shape[3]))
        home = torch.empty(entry.home_shape, dtype=q.dtype, device=q.device)
        place = transport.turns(layout), home.data_ptr()
        if place in entry.seen and self._failure is None:
            captured = self._capture(call, inputs, key_mask, home)
            if captured is not None and captured.replay():
                entry.graphs[place] = captured
                return split_home(call, home, transport.rank)
        entry.seen.add(place)
        return perform(transport, layout, call.plan, inputs, scale=call.scale, key_mask=key_mask, home=home)

    def close(self) -> None:
        """Drop the graphs; the windows that they use may then go."""
        self._entries.clear()

    def _entry(self, key: tuple[object, ...], call: Call, home_shape: tuple[int, int, int, int]) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(call, home_shape)
        self._entries.move_to_end(key)
        if len(entry.seen) > MOST_PLACES:  # places that do not come again
            entry.seen.clear()
            entry.graphs.clear()
        if len(self._entries) > MOST_INPUTS:
            self._entries.popitem(last=False)
        return entry

    def _capture(
        self, call: Call, inputs: Inputs, key_mask: torch.Tensor | None, home: torch.Tensor
    ) -> Recording | None:
        """The call as a graph that has not run yet; None, with one note, where it cannot be captured."""
        transport, layout, plan = self._transport, call.layout, call.plan
        try:
            return self._recorder.record(
                lambda: perform(transport, layout, plan, inputs, scale=call.scale, key_mask=key_mask, home=home)
            )
        except NotRecordedError as error:
            self._failure = str(error)
            _log.warning("calls are not captured as CUDA graphs any more and run eagerly: %s", self._failure)
            return None


def split_home(call: Call, home: torch.Tensor, rank: int) -> Outputs:
    """The tokens' part of the output, and the text's where it has queries: views."""
    layout = call.layout
    if not layout.text_queries:
        return home, None
    tokens, start = layout.shards[rank].size, layout.q_token_offset
    text_start = 0 if layout.text_in_front else tokens
    return home.narrow(1, start, tokens), home.narrow(1, text_start, layout.text_len)
