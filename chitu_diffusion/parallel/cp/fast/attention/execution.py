"""Attention by a plan, over keys and values that may still be on their way."""

from typing import Protocol

import torch

from chitu_diffusion.parallel.cp.fast.attention.kernels import OwnRows
from chitu_diffusion.parallel.cp.fast.attention.lanes import Lanes
from chitu_diffusion.parallel.cp.fast.attention.merge import Part, merge
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate
from chitu_diffusion.parallel.cp.fast.attention.schedule import head_groups
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from chitu_diffusion.parallel.cp.layout import Span


class Arriving(Protocol):
    """What a rank attends with, group of heads by group of heads.

    ``q`` (B, Sq, h, D) and ``k``, ``v`` (B, Sk, hk, D) are whole tensors whose groups may be read after ``wait``.
    ``own_k`` and ``own_v`` are this rank's own rows ``own_rows`` of ``k`` and ``v`` where they lie from the start.
    """

    @property
    def q(self) -> torch.Tensor: ...  # noqa: D102  # described above
    @property
    def k(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def v(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def own_k(self) -> torch.Tensor | None: ...  # noqa: D102
    @property
    def own_v(self) -> torch.Tensor | None: ...  # noqa: D102
    @property
    def own_rows(self) -> Span: ...  # noqa: D102

    def wait(self, group: int) -> None:
        """Let the current stream wait until a group of heads has arrived from every rank."""

    def ticket(self) -> torch.Tensor:
        """What a kernel needs to know that waits for ``k`` and ``v`` itself; it must then be the next to read them."""

    def finished(self, group: int, out: torch.Tensor) -> None:
        """The current stream has written this group's heads of ``out``, which is the same tensor for every group."""


def run(
    plan: Candidate,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The plan's kernel over keys that are all there: q (B, Sq, H, D), k and v (B, Sk, Hk, D) → (B, Sq, H, D)."""
    return KERNELS[plan.kernel].run(q, k, v, scale=scale, key_mask=key_mask)[0]


def attend(
    plan: Candidate,
    arriving: Arriving,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by ``plan`` as its keys arrive: (B, Sq, h, D), in ``out`` where that is given.

    ``key_mask`` (B, Sk) bool covers the rows of ``arriving.k``.
    """
    kernel, q, groups = KERNELS[plan.kernel], arriving.q, plan.schedule.groups
    if plan.schedule.fused:
        assert kernel.run_arriving is not None, "the planner asks which kernels can wait"
        assert key_mask is None, "kernels that wait take no mask"
        own_k, own_v = arriving.own_k, arriving.own_v
        at_home = None if own_k is None or own_v is None else OwnRows(own_k, own_v, arriving.own_rows)
        return kernel.run_arriving(q, arriving.k, arriving.v, arriving.ticket(), scale=scale, own=at_home, out=out)
    if groups == (1,) and not plan.schedule.local_first:
        arriving.wait(0)
        out = kernel.run(q, arriving.k, arriving.v, scale=scale, key_mask=key_mask, out=out)[0]
        arriving.finished(0, out)
        return out
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    with Lanes(q.device) as lanes:
        own = _own_part(plan, arriving, scale, key_mask) if plan.schedule.local_first else None
        for group, heads in enumerate(head_groups(q.shape[2], arriving.k.shape[2], groups)):
            with lanes.next():
                arriving.wait(group)
                landing = _heads(out, heads[0])
                if own is None:
                    q_part, k_part, v_part = (
                        _heads(q, heads[0]), _heads(arriving.k, heads[1]), _heads(arriving.v, heads[1])
                    )  # fmt: skip
                    kernel.run(q_part, k_part, v_part, scale=scale, key_mask=key_mask, out=landing)
                else:
                    others = _other_parts(plan, arriving, heads, scale, key_mask, landing)
                    lanes.after_entry()  # the rank's own part is in the current stream's order
                    merge([_part_of_heads(own, heads[0]), *others], out_dtype=out.dtype, out=landing)
                arriving.finished(group, out)
    return out


def _own_part(plan: Candidate, arriving: Arriving, scale: float, key_mask: torch.Tensor | None) -> Part:
    """Attention of all heads to the rank's own keys, which need not arrive."""
    k, v = arriving.own_k, arriving.own_v
    assert k is not None
    assert v is not None, "the planner lets a rank without own keys attend to nothing locally"
    return _part(plan, arriving.q, k, v, scale, _mask_rows(key_mask, arriving.own_rows))


def _other_parts(
    plan: Candidate,
    arriving: Arriving,
    heads: tuple[Span, Span],
    scale: float,
    key_mask: torch.Tensor | None,
    landing: torch.Tensor,
) -> list[Part]:
    """Attention to all other keys: those before the rank's own and those behind them.

    The last part lies where the whole will, so that the merge touches less memory.
    """
    own = arriving.own_rows
    spans = [span for span in (Span(0, own.start), Span(own.stop, arriving.k.shape[1])) if span.size]
    parts = []
    for span in spans:
        k, v = (_heads(x, heads[1])[:, span.start : span.stop] for x in (arriving.k, arriving.v))
        place = landing if span == spans[-1] else None
        parts.append(_part(plan, _heads(arriving.q, heads[0]), k, v, scale, _mask_rows(key_mask, span), place))
    return parts


def _part_of_heads(part: Part, heads: Span) -> Part:
    out, lse = part
    return _heads(out, heads), lse[:, heads.start : heads.stop]


def _part(
    plan: Candidate,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    key_mask: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> Part:
    kernel = KERNELS[plan.kernel]
    # rounded to q's dtype a partial output loses what the kernel's own error is made of: float32 where it can be had
    if kernel.float32_out:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    elif not kernel.in_place:
        out = None
    result, lse = kernel.run(q, k, v, scale=scale, key_mask=key_mask, return_lse=True, out=out)
    assert lse is not None
    return result, lse


def _heads(x: torch.Tensor, heads: Span) -> torch.Tensor:
    return x[:, :, heads.start : heads.stop]


def _mask_rows(key_mask: torch.Tensor | None, rows: Span) -> torch.Tensor | None:
    return None if key_mask is None else key_mask[:, rows.start : rows.stop]
