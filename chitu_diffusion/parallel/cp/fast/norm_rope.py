"""RMSNorm of Q or K and its rotary embedding in one pass over memory, equal to what diffusers computes.

RMSNorm: y = w · x / √(mean(x²) + eps) (Zhang and Sennrich, 2019, equation 4). RoPE turns each pair of neighbours
(x₂ᵢ, x₂ᵢ₊₁) by an angle of its token and pair (Su et al., 2021, equation 34). Everything is computed in float32; where
it is rounded to the dtype of x follows the module that diffusers uses, since that decides half of the last bits:

| model | norm | rounded |
|---|---|---|
| Wan | over all heads of a token, ``torch.nn.RMSNorm`` | after the weight, after RoPE |
| Qwen-Image, Z-Image | per head, diffusers' ``RMSNorm`` | before the weight, after the weight, after RoPE |

The torch operations give the same bits as diffusers. The Triton kernel adds up the squares in another order, which
moves float32 results by a few units in the last place; in half precision a number that lies on the edge between two
neighbours may then be rounded the other way at each of the points above.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from chitu_diffusion.parallel.cp.errors import InputError
from chitu_diffusion.parallel.cp.fast.attention.triton import import_problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

TILE_ELEMENTS = 4096  # per program, where one token has fewer; more would only lengthen the last wave of programs
ENOUGH_PROGRAMS = 1024  # a token each up to here, so that a short text reaches every SM
ELEMENTS_PER_WARP = 1024  # 32 FP32 numbers per thread
MAX_WARPS = 16


class Rope(NamedTuple):
    """The angles of the rotation, as cosine and sine: (1 or B, S, D/2) float32 each, with any strides."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Tile:
    """What one program covers: tokens, heads and columns, the last two rounded up to powers of two; and its warps."""

    block_s: int
    block_h: int
    block_d: int
    num_warps: int


def rope_from_real(cos: torch.Tensor, sin: torch.Tensor) -> Rope:
    """Wan's angles, without a copy.

    Args:
        cos: (1 or B, S, 1, D) float32; columns 2i and 2i + 1 hold the same number, and the even one is read.
        sin: likewise, and the odd one is read.

    Raises:
        InputError: other shapes or dtypes.

    """
    for name, x in (("cos", cos), ("sin", sin)):
        if x.ndim != 4 or x.shape[2] != 1 or x.shape[3] % 2 or x.dtype != torch.float32:
            raise InputError(
                f"RoPE's {name} is {tuple(x.shape)} {x.dtype}; Wan's are (1, S, 1, D) torch.float32 with D even"
            )
    return Rope(cos[:, :, 0, 0::2], sin[:, :, 0, 1::2])


def rope_from_complex(freqs: torch.Tensor) -> Rope:
    """Qwen-Image's frequencies, (S, D/2) complex64, or Z-Image's, (B, S, D/2) complex64, without a copy.

    Raises:
        InputError: another shape or dtype.

    """
    if freqs.ndim not in (2, 3) or freqs.dtype != torch.complex64:
        raise InputError(
            f"RoPE's frequencies are {tuple(freqs.shape)} {freqs.dtype}; "
            "expected (S, D/2) or (B, S, D/2) torch.complex64"
        )
    cos, sin = torch.view_as_real(freqs if freqs.ndim == 3 else freqs[None]).unbind(-1)
    return Rope(cos, sin)


def norm_rope(
    x: torch.Tensor, weight: torch.Tensor | None, rope: Rope | None, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Q or K after its RMSNorm and its rotation; no gradient flows through it.

    Args:
        x: (B, S, H, D) BF16, FP16 or FP32, any strides with the last dimension contiguous.
        weight: of the norm, contiguous, in the dtype of x. (D,) is a norm of each head, (H·D,) one over all heads
            together; with one head it is a norm of the head. None: no norm.
        rope: the angles, with S tokens and D/2 pairs; D even. None: no rotation.
        eps: added to the mean of the squares.
        out: where the result goes: shape, dtype and device of x, any strides with the last dimension contiguous. It may
            be x itself and must not overlap x otherwise.

    Returns:
        ``out``, or a contiguous tensor like x.

    Raises:
        InputError: tensors that do not fit each other.

    """
    _check_tensor("x", x)
    if weight is not None:
        _check_weight(weight, x)
    if rope is not None:
        _check_rope(rope, x)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        _check_out(out, x)
    if x.is_cuda and import_problem() is None:
        norm_rope_triton(x, weight, rope, eps=eps, out=out)
    else:
        out.copy_(norm_rope_torch(x, weight, rope, eps=eps))
    return out


def _check_tensor(name: str, x: torch.Tensor) -> None:
    if x.ndim != 4 or x.dtype not in DTYPES:
        raise InputError(f"{name} is {tuple(x.shape)} {x.dtype}; expected (B, S, H, D) in BF16, FP16 or FP32")
    if x.stride(3) != 1 and x.shape[3] > 1:
        raise InputError(f"{name} has stride {x.stride(3)} in its last dimension, which must be contiguous")


def _check_weight(weight: torch.Tensor, x: torch.Tensor) -> None:
    heads, head_dim = x.shape[2:]
    if weight.shape not in ((head_dim,), (heads * head_dim,)):
        raise InputError(
            f"the norm's weight has shape {tuple(weight.shape)}; with {heads} heads of {head_dim} it must be "
            f"({head_dim},), a norm of each head, or ({heads * head_dim},), one over all heads"
        )
    if (weight.dtype, weight.device) != (x.dtype, x.device) or not weight.is_contiguous():
        raise InputError(
            f"the norm's weight is {weight.dtype} on {weight.device} with stride {weight.stride(0)}; "
            f"it must be contiguous and, as x, {x.dtype} on {x.device}"
        )


def _check_rope(rope: Rope, x: torch.Tensor) -> None:
    batch, seq, _, head_dim = x.shape
    if head_dim % 2:
        raise InputError(f"RoPE turns pairs of columns, and x has a head dimension of {head_dim}, which is odd")
    shapes = (1, seq, head_dim // 2), (batch, seq, head_dim // 2)
    for name, angles in zip(rope._fields, rope, strict=True):
        if angles.shape not in shapes or (angles.dtype, angles.device) != (torch.float32, x.device):
            raise InputError(
                f"RoPE's {name} is {tuple(angles.shape)} {angles.dtype} on {angles.device}; for x {tuple(x.shape)} "
                f"it must be {shapes[0]} or {shapes[1]} torch.float32 on {x.device}"
            )


def _check_out(out: torch.Tensor, x: torch.Tensor) -> None:
    _check_tensor("out", out)
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise InputError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; "
            f"it must be like x, {tuple(x.shape)} {x.dtype} on {x.device}"
        )


def norm_rope_torch(x: torch.Tensor, weight: torch.Tensor | None, rope: Rope | None, *, eps: float) -> torch.Tensor:
    """``norm_rope`` in torch operations: any device; the plain statement of what the Triton kernel computes."""
    if weight is not None and weight.shape[0] == x.shape[3]:
        mean_square = x.float().square().mean(-1, keepdim=True)
        x = (x * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight
    elif weight is not None:
        x = F.rms_norm(x.flatten(2), (weight.shape[0],), weight, eps).view(x.shape)
    if rope is None:
        return x
    cos, sin = (angles[:, :, None] for angles in rope)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def norm_rope_triton(
    x: torch.Tensor, weight: torch.Tensor | None, rope: Rope | None, *, eps: float, out: torch.Tensor
) -> None:
    """``norm_rope`` into ``out`` in one pass over memory, on a GPU that Triton serves."""
    from chitu_diffusion.parallel.cp.fast.norm_rope_triton import norm_rope_kernel

    batch, seq, heads, head_dim = x.shape
    tile = choose_tile(batch * seq, heads, head_dim)
    per_head = weight is not None and weight.shape[0] == head_dim
    cos, sin = (x, x) if rope is None else (angles.expand(batch, -1, -1) for angles in rope)
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device
        norm_rope_kernel[(batch * -(-seq // tile.block_s),)](
            x, x if weight is None else weight, cos, sin, out,
            *x.stride()[:3], *cos.stride()[:3], *sin.stride()[:3], *out.stride()[:3], heads, seq, eps,
            PER_HEAD=per_head, OVER_HEADS=weight is not None and not per_head, HAS_ROPE=rope is not None,
            HEAD_DIM=head_dim, BLOCK_S=tile.block_s, BLOCK_H=tile.block_h, BLOCK_D=tile.block_d,
            num_warps=tile.num_warps,
            enable_fp_fusion=False,  # torch rounds each product, and memory is the limit anyway
        )  # fmt: skip


def choose_tile(tokens: int, heads: int, head_dim: int) -> Tile:
    """The tile for this many tokens (B·S): several tokens per program where they are small and many."""
    block_h, block_d = (1 << (n - 1).bit_length() for n in (heads, head_dim))
    block_s = max(1, min(TILE_ELEMENTS // (block_h * block_d), tokens // ENOUGH_PROGRAMS))
    block_s = 1 << (block_s.bit_length() - 1)
    warps = block_s * block_h * block_d // ELEMENTS_PER_WARP
    return Tile(block_s, block_h, block_d, num_warps=min(MAX_WARPS, max(1, warps)))
