"""What the rows of the kernel table share: the usual refusals, and the answer to inputs with nothing to attend to."""

from collections.abc import Collection, Iterable

import torch

from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelCall, KernelNeeds

HALF = (torch.float16, torch.bfloat16)

# (whether it stands in the way, the clause that says so)
Check = tuple[bool, str]


def first_reason(checks: Iterable[Check]) -> str | None:
    """The first clause that stands in the way, or None."""
    return next((clause for wrong, clause in checks if wrong), None)


def gpu_checks(
    needs: KernelNeeds, *, dtypes: Collection[torch.dtype], head_dim_step: int, max_head_dim: int
) -> list[Check]:
    """The checks of a kernel for tensor cores: an SM80 or later, its dtypes, its head dimensions."""
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    capability = needs.capability or (0, 0)
    return [
        (needs.device_type != "cuda", f"it needs a CUDA GPU and the tensors are on {needs.device_type}"),
        (capability < (8, 0), f"it needs compute capability 8.0 and this GPU has {capability[0]}.{capability[1]}"),
        (needs.dtype not in dtypes, f"it takes {names} and not {str(needs.dtype).removeprefix('torch.')}"),
        (
            needs.head_dim % head_dim_step != 0 or needs.head_dim > max_head_dim,
            f"it takes head dimensions in steps of {head_dim_step} up to {max_head_dim}, not {needs.head_dim}",
        ),
    ]


def answers_empty(run: KernelCall) -> KernelCall:
    """``run``, except that inputs without a query or without a key never reach it: they give 0 and −inf."""

    def guarded(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        key_mask: torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if q.numel() and k.numel():
            return run(q, k, v, scale=scale, key_mask=key_mask, return_lse=return_lse, out=out)
        batch, seq_q, heads, head_dim = q.shape
        lse = q.new_full((batch, heads, seq_q), -torch.inf, dtype=torch.float32) if return_lse else None
        return (q.new_zeros(batch, seq_q, heads, head_dim) if out is None else out.zero_()), lse

    return guarded


def placed(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """``result``, copied into ``out`` where one was given: for kernels that allocate their own output."""
    return result if out is None else out.copy_(result)


def attend_to_one_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention to a single key, for kernels that refuse it: every query gets its value, or 0 where it is masked."""
    ratio = q.shape[2] // k.shape[2]
    out = v.repeat_interleave(ratio, 2).expand_as(q).contiguous()
    lse = None
    if return_lse:
        lse = ((q.float() * k.repeat_interleave(ratio, 2).float()).sum(-1) * scale).transpose(1, 2).contiguous()
    if key_mask is not None:
        masked = ~key_mask[:, :, None]
        out = out.masked_fill(masked[..., None], 0)
        lse = None if lse is None else lse.masked_fill(masked, -torch.inf)
    return out, lse
