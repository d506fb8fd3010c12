"""The fast transport: one exchange over symmetric memory for AGKV, Ulysses and the hybrid, by groups of heads.

What arrives lies in windows of the pool that the next call but one may overwrite; ``receive`` gives the output in
memory of its own. The windows of one tag have two generations that take turns (``FastCP.turns``). This module names the
one to use, since a call that is replayed as a CUDA graph advances nothing in the extension, and ranks need not agree
whether they replay. Calls that a user captures have tags of their own: their replays take no turns.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from chitu_diffusion.parallel.cp.blocks import block_of, window_for
from chitu_diffusion.parallel.cp.fast import extension
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT, Schedule
from chitu_diffusion.parallel.cp.fast.graph_pool import GraphPool
from chitu_diffusion.parallel.cp.fast.runtime import FastCP
from chitu_diffusion.parallel.cp.fast.way_back import Use, WayBack, dense
from chitu_diffusion.parallel.cp.layout import Layout, Span
from chitu_diffusion.parallel.cp.transport import Arrived, Inputs

TRANSFERS = ("ce", "sm", "tma")  # the simplest first: a copy engine takes no SM from what runs beside it


class FastTransport:
    """Carries the blocks of a layout within the group of ``fast``."""

    name = "fast"

    def __init__(self, fast: FastCP) -> None:
        self.fast = fast
        self.rank = fast.rank
        self.graph_pool = GraphPool(fast.device)
        self._ops: Any = extension.load()
        self._split = lru_cache(maxsize=1024)(self._make_split)
        self._way_in: tuple[tuple[torch.Tensor, ...], str] | None = None
        self._way_back: WayBack | None = None
        self._token: torch.Tensor | None = None
        self._in_capture: set[str] | None = None

    def send(
        self, layout: Layout, inputs: Inputs, schedule: Schedule = ONE_SHOT, transfer: str | None = None
    ) -> Arrived:
        """Start the exchange; the current stream waits for a group of heads when it needs it, and the host never."""
        self.fast.check()
        if not travels(layout, inputs):
            return self._stay(layout, inputs)
        assert inputs.k is not None
        assert inputs.v is not None
        transfer = transfer or TRANSFERS[0]
        split = self._split(layout, schedule.groups)
        q, k, v = dense(inputs.q) if layout.degree > 1 else None, dense(inputs.k), dense(inputs.v)
        fused = schedule.fused
        placed = 0 if schedule.local_first or fused else -1
        use, *back = [self.use_of(tag) for tag in _tags(layout)]
        # the last rows are attended to first; but text must be answered alike on every rank, so in one order of rows
        own_last = fused and not layout.text_queries
        windows = self._ops.exchange_start(
            q, k, v, split, transfer=transfer, own_chunks=placed, own_last=own_last, ticket=fused, **vars(use)
        )
        self._way_in = windows, use.tag
        self._place_text(layout, inputs, *windows)
        if layout.degree > 1:
            self._way_back = WayBack(self._ops, split, transfer, layout.text_queries, back[0])
        return Arrived(
            q=windows[0] if layout.degree > 1 else _own_q(layout, inputs),
            k=windows[1],
            v=windows[2],
            wait=lambda group: self._ops.exchange_wait(windows, group, tag=use.tag),
            finished=self._way_back.send if self._way_back is not None else _not_sent,
            own_k=k if layout.degree == 1 else None,
            own_v=v if layout.degree == 1 else None,
            own_rows=self._own_rows(layout, own_last),
            ticket=lambda: self._ops.exchange_ticket(windows, tag=use.tag),
        )

    def receive(
        self, layout: Layout, out: torch.Tensor, home: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tell the peers that their blocks have been read, and bring the output home.

        Every group must have been finished, or none of them: then the output goes home as a whole.
        """
        if self._way_in is not None:
            (windows, tag), self._way_in = self._way_in, None
            self._ops.exchange_done(windows, tag=tag)
        if self._way_back is not None:
            way_back, self._way_back = self._way_back, None
            out = way_back.arrive(out, home)
        elif home is not None and out is not home:
            out = home.copy_(out)
        tokens = layout.shards[self.rank].size
        if not layout.text_queries:
            return out, None
        text_rows = Span(0, layout.text_len).shifted(0 if layout.text_in_front else tokens)
        return out.narrow(1, layout.q_token_offset, tokens), block_of(out, text_rows, Span(0, out.shape[2]))

    def link(self) -> str:
        """How this rank reaches the other GPUs, in the extension's words."""
        return json.dumps(self._ops.device_info(self.fast.device.index or 0).get("peers"))

    def check(self) -> int:
        """The version of the windows' layout, which grows when they change places: what was captured before must not
        be replayed. Raises CPError where a wait has given up. The host waits for nothing.
        """
        return self.fast.check()

    @contextmanager
    def managed_capture(self) -> Iterator[set[str]]:
        """While it lasts, a CUDA graph may be captured that does not hold its windows in their places for ever.

        Yields the tags of the windows that it comes to use.
        """
        self._in_capture = set()
        try:
            with self._ops.managed_capture():
                yield self._in_capture
        finally:
            self._in_capture = None

    def turns(self, layout: Layout) -> tuple[int, ...]:
        """The generations of the windows that the next call of ``layout`` uses, in and back."""
        return tuple(self.fast.turns.get(tag, 0) for tag in _tags(layout))

    def use_of(self, tag: str) -> Use:
        """The windows of the next use of ``tag``; the one after it takes the others."""
        if self._in_capture is not None:
            self._in_capture.add(tag)
        elif torch.cuda.is_current_stream_capturing():
            return Use(f"{tag} captured", -1, False)
        turn = self.fast.turns.get(tag, 0)
        self.fast.turns[tag] = 1 - turn
        return Use(tag, turn, True)

    def abandon(self, tags: Iterable[str], turns: Mapping[str, int]) -> None:
        """Forget uses of ``tags`` whose capture failed: nothing of them has run. ``turns`` are those before it."""
        self._way_in = self._way_back = None
        for tag in tags:
            self._ops.forget(tag)
        self.fast.turns.update(turns)

    def meet(self) -> None:
        """The current stream goes on when every rank's has come as far."""
        if self._token is None:
            self._token = torch.zeros(1, 1, 1, 8, device=self.fast.device, dtype=torch.bfloat16)
        self._ops.all_gather_kv_4d(self._token, self._token, tag="meet")

    def _own_rows(self, layout: Layout, last: bool) -> Span:
        """Where this rank's tokens lie in the windows of K and V."""
        own = layout.shards[self.rank]
        tokens = Span(layout.seq_len - own.size, layout.seq_len) if last else own
        return tokens.shifted(layout.kv_token_offset)

    def _stay(self, layout: Layout, inputs: Inputs) -> Arrived:
        """One rank, or keys that every rank holds: nothing travels."""
        text, heads = inputs.text, layout.kv_heads(self.rank)
        k, v = (text.k, text.v) if text is not None else (None, None)
        rows, text_rows = layout.kv_rows, layout.kv_text_rows
        full = [window_for(x, t, rows, text_rows, heads) for x, t in ((inputs.k, k), (inputs.v, v))]
        q = _own_q(layout, inputs)
        if inputs.k is not None:
            for window, own in zip(full, (inputs.k, inputs.v), strict=True):
                assert own is not None
                if window is not own:
                    window.narrow(1, layout.kv_token_offset, own.shape[1]).copy_(own)
        return Arrived(q, full[0], full[1])

    def _place_text(self, layout: Layout, inputs: Inputs, *windows: torch.Tensor) -> None:
        text, q_heads, kv_heads = inputs.text, layout.q_heads(self.rank), layout.kv_heads(self.rank)
        if text is None:
            return
        every_head = Span(0, windows[1].shape[2])
        for window, rows in zip(windows[1:], (text.k, text.v), strict=True):
            own = block_of(rows, Span(0, layout.text_len), kv_heads)
            block_of(window, layout.kv_text_rows, every_head).copy_(own)
        if text.q is not None and layout.degree > 1:
            own = block_of(text.q, Span(0, layout.text_len), q_heads)
            block_of(windows[0], layout.q_text_rows(self.rank), Span(0, q_heads.size)).copy_(own)

    def _make_split(self, layout: Layout, chunks: tuple[int, ...]) -> Any:
        """The layout as the extension takes it."""
        front, q = layout.text_in_front, layout.text_queries
        text = layout.text_len
        indices = range(layout.degree)
        rows = self._ops.TextRows(
            kv_front=text if front else 0,
            kv_back=0 if front else text,
            q_front=text if front and q else 0,
            q_back=text if q and not front else 0,
        )
        return self._ops.Split(
            seq_lens=tuple(span.size for span in layout.shards),
            q_heads=tuple(layout.q_heads(index).size for index in indices),
            kv_heads=tuple(layout.kv_heads(index).size for index in indices),
            chunks=chunks,
            text=rows,
        )


def _tags(layout: Layout) -> tuple[str, ...]:
    """The windows' tags. All ranks take part in the way in; the way back is between those of a group."""
    return ("in", f"out {layout.degree}") if layout.degree > 1 else ("in",)


def travels(layout: Layout, inputs: Inputs) -> bool:
    """Whether anything has to go from rank to rank."""
    return inputs.k is not None and layout.world > 1


def _not_sent(group: int, out: torch.Tensor) -> None:
    """The output is home already."""


def _own_q(layout: Layout, inputs: Inputs) -> torch.Tensor:
    """The queries of one rank per group: its own, with the text's in their place."""
    text = inputs.text
    if text is None or text.q is None:
        return inputs.q
    return torch.cat([text.q, inputs.q] if layout.text_in_front else [inputs.q, text.q], 1)
