"""The fast transport: one exchange over symmetric memory for AGKV, Ulysses and the hybrid.

What arrives lies in windows of the pool that the next call but one may overwrite; ``receive`` gives the output in
memory of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chitu_diffusion.parallel.cp.blocks import block_of, window_for
from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.fast import extension
from chitu_diffusion.parallel.cp.fast.runtime import FastCP
from chitu_diffusion.parallel.cp.layout import Layout, Span
from chitu_diffusion.parallel.cp.transport import Arrived, Inputs

TRANSFERS = ("ce", "sm", "tma")  # the simplest first: a copy engine takes no SM from what runs beside it
TUNING_ROUNDS = 5


class FastTransport:
    """Carries the blocks of a layout within the group of ``fast``.

    ``transfer`` is ``ce``, ``sm``, ``tma``, or ``auto`` for what ``choose_transfer`` finds fastest.
    """

    name = "fast"

    def __init__(self, fast: FastCP, transfer: str) -> None:
        self.fast, self.transfer = fast, transfer
        self.rank = fast.rank
        self._chosen: dict[Layout, str] = {}
        self._ops: Any = extension.load()
        self._arrived: tuple[torch.Tensor, ...] | None = None

    def choose_transfer(self, layout: Layout, inputs: Inputs, control: ControlChannel) -> Choice:
        """The transfer for this layout from now on. Collective; ``auto`` measures all of them on these inputs."""
        if self.transfer != "auto":
            return Choice(self.transfer, self.transfer, "asked for")
        if not _travels(layout, inputs):
            return Choice("auto", TRANSFERS[0], "nothing travels")
        mine: dict[str, list[float]] = {name: [] for name in TRANSFERS}
        for _ in range(TUNING_ROUNDS):  # in turn, so that all of them see the same clocks
            for name in TRANSFERS:
                mine[name].append(self._timed_exchange(layout, inputs, name))
        medians = {name: sorted(ms)[len(ms) // 2] for name, ms in mine.items()}
        choice = fastest(control.gather(medians))
        self._chosen[layout] = choice.used
        return choice

    def send(self, layout: Layout, inputs: Inputs) -> Arrived:
        """Start the exchange and let the current stream wait for it; the host does not wait."""
        self.fast.check()
        if not _travels(layout, inputs):
            return self._stay(layout, inputs)
        q_window, k, v = self._arrived = self._start(layout, inputs, self._transfer_of(layout))
        self._place_text(layout, inputs, q_window, k, v)
        self._ops.exchange_wait(self._arrived, 0, tag="in")
        return Arrived(q_window if layout.degree > 1 else self._own_q(layout, inputs), k, v)

    def receive(self, layout: Layout, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tell the peers that their blocks have been read, and bring the output home."""
        if self._arrived is not None:
            self._ops.exchange_done(self._arrived, tag="in")
            self._arrived = None
        if layout.degree == 1:
            text = block_of(out, layout.q_text_rows(self.rank), Span(0, out.shape[2])) if layout.text_queries else None
            return out.narrow(1, layout.q_token_offset, layout.shards[self.rank].size), text
        window = self._ops.return_start(
            _dense(out),
            self._split(layout),
            tag="out",
            transfer=self._transfer_of(layout),
            send_text=layout.text_queries,
        )
        self._ops.exchange_wait((window,), 0, tag="out")
        home = window.clone()
        self._ops.exchange_done((window,), tag="out")
        tokens = layout.shards[self.rank].size
        if not layout.text_queries:
            return home, None
        text_rows = Span(0, layout.text_len).shifted(0 if layout.text_in_front else tokens)
        return home.narrow(1, layout.q_token_offset, tokens), block_of(home, text_rows, Span(0, home.shape[2]))

    def _transfer_of(self, layout: Layout) -> str:
        return self._chosen.get(layout, TRANSFERS[0]) if self.transfer == "auto" else self.transfer

    def _start(self, layout: Layout, inputs: Inputs, transfer: str) -> tuple[torch.Tensor, ...]:
        assert inputs.k is not None
        assert inputs.v is not None
        q = _dense(inputs.q) if layout.degree > 1 else None
        windows: tuple[torch.Tensor, ...] = self._ops.exchange_start(
            q, _dense(inputs.k), _dense(inputs.v), self._split(layout), tag="in", transfer=transfer
        )
        return windows

    def _timed_exchange(self, layout: Layout, inputs: Inputs, transfer: str) -> float:
        """Milliseconds of one exchange on the current stream, which the host waits for."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        windows = self._start(layout, inputs, transfer)
        self._ops.exchange_wait(windows, 0, tag="in")
        self._ops.exchange_done(windows, tag="in")
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _stay(self, layout: Layout, inputs: Inputs) -> Arrived:
        """One rank, or keys that every rank holds: nothing travels."""
        text, heads = inputs.text, layout.kv_heads(self.rank)
        k, v = (text.k, text.v) if text is not None else (None, None)
        rows, text_rows = layout.kv_rows, layout.kv_text_rows
        full = [window_for(x, t, rows, text_rows, heads) for x, t in ((inputs.k, k), (inputs.v, v))]
        q = self._own_q(layout, inputs)
        if inputs.k is not None:
            for window, own in zip(full, (inputs.k, inputs.v), strict=True):
                assert own is not None
                if window is not own:
                    window.narrow(1, layout.kv_token_offset, own.shape[1]).copy_(own)
        return Arrived(q, full[0], full[1])

    def _own_q(self, layout: Layout, inputs: Inputs) -> torch.Tensor:
        """The queries of one rank per group: its own, with the text's in their place."""
        text = inputs.text
        if text is None or text.q is None:
            return inputs.q
        return torch.cat([text.q, inputs.q] if layout.text_in_front else [inputs.q, text.q], 1)

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

    def _split(self, layout: Layout) -> Any:
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
            text=rows,
        )


def fastest(ms_by_rank: Sequence[Mapping[str, float]]) -> Choice:
    """The transfer that is fastest on the slowest rank; within 1 % of it, the first in the order of ``TRANSFERS``."""
    slowest = {name: max(ms[name] for ms in ms_by_rank) for name in ms_by_rank[0]}
    used = next(name for name in TRANSFERS if slowest[name] <= 1.01 * min(slowest.values()))
    rejected = tuple(Rejected(name, f"{slowest[name]:.3f} ms") for name in TRANSFERS if name != used)
    return Choice("auto", used, f"{slowest[used]:.3f} ms, the fastest when measured on this shape", rejected)


def _travels(layout: Layout, inputs: Inputs) -> bool:
    return inputs.k is not None and layout.world > 1


def _dense(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of it whose rows (H, D) are contiguous and start at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    rows_are_dense = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    aligned = x.data_ptr() % 16 == 0 and x.stride(1) % unit == 0 and x.stride(0) % unit == 0
    return x if rows_are_dense and aligned else x.contiguous()
