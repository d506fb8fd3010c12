"""Our own flash attention in Triton: any SM80 or later, key masks, FP16, BF16 and FP32, with log-sum-exp.

It is the portable row, and the only one that keeps a partial result in FP32. This module is importable without
Triton; the device code in ``triton_forward`` is not, and is imported at the first launch.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from chitu_diffusion.parallel.cp.fast.attention.kernels import Kernel, KernelNeeds
from chitu_diffusion.parallel.cp.fast.attention.rows import HALF, answers_empty, first_reason, gpu_checks

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """How the work is cut: queries and keys per step, warps, and buffers of K and V that are loaded ahead."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    use_tma: bool = False


# (padded head dimension, bytes per element) → tile. K and V by TMA, SM90 only. Small tiles win: several blocks share
# an SM, so one's softmax hides behind the other's matrix products (docs/results/NOTES.md).
TMA_TILES = {
    (16, 2): Tile(128, 128, 8, 3, use_tma=True),
    (32, 2): Tile(128, 128, 8, 3, use_tma=True),
    (64, 2): Tile(64, 128, 4, 3, use_tma=True),
    (128, 2): Tile(64, 64, 4, 3, use_tma=True),
}
# Elsewhere, and where TMA cannot read K or V: within the 99 KiB of shared memory that SM86 and SM120 have.
POINTER_TILES = {
    (16, 2): Tile(128, 64, 8, 2),
    (32, 2): Tile(128, 64, 8, 2),
    (64, 2): Tile(128, 64, 8, 2),
    (128, 2): Tile(128, 64, 8, 2),
    # FP32 runs on the ordinary cores, where larger tiles spill
    (16, 4): Tile(32, 32, 8, 1),
    (32, 4): Tile(32, 32, 8, 1),
    (64, 4): Tile(32, 32, 8, 1),
    (128, 4): Tile(32, 32, 8, 1),
}


@cache
def import_problem() -> str | None:
    """None where Triton can be imported, else a clause with its error."""
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken installation may raise anything
        return f"triton is not importable: {error}"
    return None


def why_not(needs: KernelNeeds) -> str | None:
    """Why the Triton kernel does not serve the call, or None."""
    checks = gpu_checks(needs, dtypes=(*HALF, torch.float32), head_dim_step=16, max_head_dim=128)
    return first_reason(checks) or import_problem()


@answers_empty
def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention by the Triton kernel; arguments and result as in ``KernelCall``."""
    return flash_forward(q, k, v, scale=scale, key_mask=key_mask, return_lse=return_lse, out=out)


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel on inputs that have at least one query and one key.

    Args:
        q: (B, Sq, H, D), D a multiple of 16 up to 128; any strides with the last dimension contiguous.
        k: (B, Sk, Hk, D), H a multiple of Hk, same dtype; strides likewise.
        v: as ``k``.
        scale: factor of the scores.
        key_mask: (B, Sk) bool, True where a key is attended to.
        return_lse: whether to give the log-sum-exp.
        out: where the output goes, by default new memory of q's dtype; float32 is as exact as the accumulator.
        tile: by default the row of ``TMA_TILES`` or ``POINTER_TILES`` that fits.

    Returns:
        The output (B, Sq, H, D), and the log-sum-exp (B, H, Sq) float32 or None.

    """
    from chitu_diffusion.parallel.cp.fast.attention.triton_forward import forward_kernel

    batch, seq_q, heads, head_dim = q.shape
    seq_k, kv_heads = k.shape[1:3]
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1, "the last dimension must be contiguous"
    block_d = 1 << (head_dim - 1).bit_length()
    tile = tile or choose_tile(q, k, v, block_d)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, heads, seq_q), dtype=torch.float32) if return_lse else None
    sources = [_descriptor(x, tile.block_n, block_d) if tile.use_tma else x for x in (k, v)]
    mask = q if key_mask is None else key_mask.contiguous().view(torch.uint8)
    blocks = -(-seq_q // tile.block_m)
    with torch.cuda.device(q.get_device()):  # Triton launches on the current device
        forward_kernel[(batch * heads * blocks,)](
            q, *sources, mask, out, out if lse is None else lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            heads, heads // kv_heads, seq_q, seq_k, scale * LOG2_E,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            HAS_MASK=key_mask is not None, HAS_LSE=return_lse, USE_TMA=tile.use_tma,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out, lse


def choose_tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_d: int) -> Tile:
    """The tile for this GPU and these tensors."""
    key = block_d, q.element_size()
    sm90 = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    if sm90 and key in TMA_TILES and all(tma_reads(x) for x in (k, v)):
        return TMA_TILES[key]
    return POINTER_TILES[key]


def tma_reads(x: torch.Tensor) -> bool:
    """Whether TMA can read K or V (B, Sk, Hk, D): 16-byte aligned, strides positive multiples of 16 bytes.

    Strides also have to fit the 32 bits in which Triton passes them.
    """
    strides = _descriptor_strides(x)
    return x.data_ptr() % 16 == 0 and all(0 < s < 2**31 and s * x.element_size() % 16 == 0 for s in strides[:3])


def _descriptor_strides(x: torch.Tensor) -> list[int]:
    """Strides in the order (B, Hk, Sk, D); a dimension of size 1 may carry any stride, so it gets a harmless one."""
    return [x.stride(i) if x.shape[i] > 1 else x.shape[3] for i in (0, 2, 1)] + [1]


def _descriptor(x: torch.Tensor, block_n: int, block_d: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, seq, heads, head_dim = x.shape
    return TensorDescriptor(x, [batch, heads, seq, head_dim], _descriptor_strides(x), [1, 1, block_n, block_d])


ROW = Kernel("triton", why_not, run, in_place=True, float32_out=True)
