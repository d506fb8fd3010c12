"""Device code of the norm and rotation. Imports Triton: import it only where Triton is known to be there."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """FP32 numbers, each rounded to what ``dtype`` can hold."""
    return x.to(dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _normed_per_head(
    x: tl.tensor, weight_ptr: tl.tensor, eps: float, column: tl.tensor, HEAD_DIM: tl.constexpr
) -> tl.tensor:
    """Rows (token, head) of the FP32 tile x, each over its root mean square, rounded, times the weight, rounded."""
    dtype = weight_ptr.dtype.element_ty
    mean_square = tl.sum(x * x, 2) / HEAD_DIM
    x = _rounded(x * tl.rsqrt(mean_square + eps)[:, :, None], dtype)
    weight = tl.load(weight_ptr + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    return _rounded(x * weight[None, None, :], dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _normed_over_heads(
    x: tl.tensor,
    weight_ptr: tl.tensor,
    eps: float,
    num_heads: int,
    head: tl.tensor,
    column: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Tokens of the FP32 tile x, each over its root mean square, times the weight, rounded once."""
    mean_square = tl.sum(tl.sum(x * x, 2), 1) / (num_heads * HEAD_DIM)
    inside = (head < num_heads)[:, None] & (column < HEAD_DIM)[None, :]
    weight = tl.load(weight_ptr + head[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return _rounded(x * tl.rsqrt(mean_square + eps)[:, None, None] * weight[None], weight_ptr.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """The tile x with columns 2i and 2i + 1 turned by the angle of their token and pair i."""
    even, odd = tl.split(tl.reshape(x, [BLOCK_S, BLOCK_H, BLOCK_D // 2, 2]))
    cos, sin = cos[:, None, :], sin[:, None, :]
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [BLOCK_S, BLOCK_H, BLOCK_D])


@triton.jit  # type: ignore[untyped-decorator]
def norm_rope_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_xb: tl.int64,
    stride_xs: tl.int64,
    stride_xh: tl.int64,
    stride_cb: tl.int64,
    stride_cs: tl.int64,
    stride_cp: tl.int64,
    stride_sb: tl.int64,
    stride_ss: tl.int64,
    stride_sp: tl.int64,
    stride_ob: tl.int64,
    stride_os: tl.int64,
    stride_oh: tl.int64,
    num_heads: int,
    seq: int,
    eps: float,
    PER_HEAD: tl.constexpr,
    OVER_HEADS: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program does BLOCK_S tokens with all their heads, so each number is read once and each angle serves them all.

    Strides are declared with 64 bits, since an annotation of ``int`` means 32 to Triton.
    """
    num_blocks = tl.cdiv(seq, BLOCK_S)
    batch = (tl.program_id(0) // num_blocks).to(tl.int64)
    token = tl.program_id(0) % num_blocks * BLOCK_S + tl.arange(0, BLOCK_S)
    head = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    token_64, head_64 = token.to(tl.int64)[:, None, None], head.to(tl.int64)[None, :, None]
    inside = (token < seq)[:, None, None] & (head < num_heads)[None, :, None] & (column < HEAD_DIM)[None, None, :]

    source = x_ptr + batch * stride_xb + token_64 * stride_xs + head_64 * stride_xh + column[None, None, :]
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if PER_HEAD:
        x = _normed_per_head(x, weight_ptr, eps, column, HEAD_DIM)
    if OVER_HEADS:
        x = _normed_over_heads(x, weight_ptr, eps, num_heads, head, column, HEAD_DIM)
    if HAS_ROPE:
        row = token.to(tl.int64)[:, None]
        pair = tl.arange(0, BLOCK_D // 2)[None, :]
        known = (row < seq) & (pair < HEAD_DIM // 2)
        cos = tl.load(cos_ptr + batch * stride_cb + row * stride_cs + pair * stride_cp, mask=known, other=0.0)
        sin = tl.load(sin_ptr + batch * stride_sb + row * stride_ss + pair * stride_sp, mask=known, other=0.0)
        x = _rotated(x, cos, sin, BLOCK_S, BLOCK_H, BLOCK_D)
    target = out_ptr + batch * stride_ob + token_64 * stride_os + head_64 * stride_oh + column[None, None, :]
    tl.store(target, x.to(out_ptr.dtype.element_ty), mask=inside)
