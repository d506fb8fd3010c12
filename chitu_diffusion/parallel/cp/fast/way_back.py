"""The way back of one call over the fast transport: the output leaves group of heads by group of heads."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Use:
    """Which windows an exchange uses, as the extension takes it."""

    tag: str
    generation: int
    in_turn: bool


class WayBack:
    """The output's exchange of one call: groups of heads leave as attention finishes them."""

    def __init__(self, ops: Any, split: Any, transfer: str, send_text: bool, use: Use) -> None:
        self._ops, self._split, self._transfer, self._send_text, self._use = ops, split, transfer, send_text, use
        self._out: torch.Tensor | None = None
        self._window: torch.Tensor | None = None
        self._sent = 0

    def send(self, group: int, out: torch.Tensor) -> None:
        """The current stream has written this group's heads of ``out``; groups come in order."""
        if self._window is None:
            self._start(out)
        self._ops.exchange_send((self._out,), (self._window,), group, tag=self._use.tag)
        self._sent = group + 1

    def arrive(self, out: torch.Tensor, home: torch.Tensor | None) -> torch.Tensor:
        """Everything in memory of its own: what was not sent yet is sent, and everything awaited."""
        groups = range(len(self._split.chunks))
        for group in groups[self._sent :]:
            self.send(group, out)
        assert self._window is not None
        for group in groups:
            self._ops.exchange_wait((self._window,), group, tag=self._use.tag)
        home = self._window.clone() if home is None else home.copy_(self._window)
        self._ops.exchange_done((self._window,), tag=self._use.tag)
        return home

    def _start(self, out: torch.Tensor) -> None:
        self._out = dense(out)
        self._window = self._ops.return_start(
            self._out,
            self._split,
            transfer=self._transfer,
            send_text=self._send_text,
            send_now=False,
            **vars(self._use),
        )


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of it whose rows (H, D) are contiguous and start at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    rows_are_dense = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    aligned = x.data_ptr() % 16 == 0 and x.stride(1) % unit == 0 and x.stride(0) % unit == 0
    return x if rows_are_dense and aligned else x.contiguous()
