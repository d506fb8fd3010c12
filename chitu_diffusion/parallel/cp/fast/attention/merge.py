"""Merging partial attention over disjoint sets of keys, by their log-sum-exp.

With o_i and l_i the output and log-sum-exp over the keys of part i, the whole is l = log Σ exp(l_i) and
o = Σ exp(l_i − l) · o_i (Milakov and Gimelshein, 2018, section 3.1, applied to whole parts).
"""

from collections.abc import Sequence

import torch

from chitu_diffusion.parallel.cp.errors import InputError
from chitu_diffusion.parallel.cp.fast.attention.triton import import_problem

Part = tuple[torch.Tensor, torch.Tensor]

BLOCK_S = 32  # rows per program of the Triton merge
NUM_WARPS = 4


def merge(parts: Sequence[Part], *, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> Part:
    """The attention over all keys from the attention over parts of them.

    Args:
        parts: (out, lse) of each part: out (B, S, H, D) of any floating dtype, any strides with the last dimension
            contiguous; lse (B, H, S) float32, natural logarithm, −inf where a row has no key in this part. The
            output of such a row is ignored.
        out_dtype: of the merged output; sums are FP32 whatever it is.
        out: where the merged output goes, of ``out_dtype``, any strides with the last dimension contiguous; by
            default new memory.

    Returns:
        out (B, S, H, D) of ``out_dtype`` and lse (B, H, S) float32; a row that has no key in any part is 0 and −inf.

    Raises:
        InputError: no part, or parts whose shapes differ.

    """
    _check(parts)
    one_pass = len(parts) > 1 and parts[0][0].is_cuda and import_problem() is None
    return (merge_triton if one_pass else merge_torch)(parts, out_dtype=out_dtype, out=out)


def _check(parts: Sequence[Part]) -> None:
    if not parts:
        raise InputError("merge was given no part; give at least one (out, lse)")
    batch, seq, heads, _ = shape = parts[0][0].shape
    for i, (out, lse) in enumerate(parts):
        if out.shape != shape or lse.shape != (batch, heads, seq):
            raise InputError(
                f"part {i} has out {tuple(out.shape)} and lse {tuple(lse.shape)}; "
                f"every part must have {tuple(shape)} and {(batch, heads, seq)}"
            )


def merge_torch(parts: Sequence[Part], *, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> Part:
    """``merge`` in torch operations: any device; the plain statement of what the Triton kernel computes."""
    lses = torch.stack([lse.float() for _, lse in parts])
    largest = lses.amax(dim=0)
    shift = largest.masked_fill(largest == -torch.inf, 0)
    weights = torch.exp(lses - shift)
    total = weights.sum(dim=0)
    shares = (weights / total.masked_fill(total == 0, 1)).transpose(2, 3)[..., None]  # (n, B, S, H, 1)
    merged = torch.zeros(parts[0][0].shape, dtype=torch.float32, device=total.device)
    for (part, _), share in zip(parts, shares, strict=True):
        merged += (part.float() * share).masked_fill(share == 0, 0)
    return (merged.to(out_dtype) if out is None else out.copy_(merged)), shift + torch.log(total)


def merge_triton(parts: Sequence[Part], *, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> Part:
    """``merge`` in one pass over memory per pair of parts; two parts at least, on a GPU that Triton serves."""
    merged = parts[0]
    for part in parts[1:-1]:
        merged = _merge_pair(merged, part, torch.empty(part[0].shape, dtype=torch.float32, device=part[0].device))
    if out is None:
        out = torch.empty(parts[0][0].shape, dtype=out_dtype, device=parts[0][0].device)
    return _merge_pair(merged, parts[-1], out)


def _merge_pair(a: Part, b: Part, out: torch.Tensor) -> Part:
    from chitu_diffusion.parallel.cp.fast.attention.triton_merge import merge_kernel

    (out_a, lse_a), (out_b, lse_b) = a, b
    batch, seq, heads, head_dim = out_a.shape
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    programs = batch * heads * -(-seq // BLOCK_S)
    if not programs:
        return out, lse
    with torch.cuda.device(out_a.get_device()):  # Triton launches on the current device
        merge_kernel[(programs,)](
            out_a, out_b, lse_a, lse_b, out, lse,
            *out_a.stride()[:3], *out_b.stride()[:3], *out.stride()[:3], *lse_a.stride(), *lse_b.stride(), heads, seq,
            HEAD_DIM=head_dim, BLOCK_D=1 << (head_dim - 1).bit_length(), BLOCK_S=BLOCK_S, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out, lse
