"""Device code of the merge. Imports Triton: import it only where Triton is known to be there."""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    lse_a_ptr: tl.tensor,
    lse_b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    stride_ab: int,
    stride_as: int,
    stride_ah: int,
    stride_bb: int,
    stride_bs: int,
    stride_bh: int,
    stride_ob: int,
    stride_os: int,
    stride_oh: int,
    stride_lab: int,
    stride_lah: int,
    stride_las: int,
    stride_lbb: int,
    stride_lbh: int,
    stride_lbs: int,
    num_heads: int,
    seq: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """One program merges BLOCK_S rows of one head; heads come first, so that neighbours read adjacent memory."""
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    block = tl.program_id(0) // num_heads
    num_blocks = tl.cdiv(seq, BLOCK_S)
    batch = (block // num_blocks).to(tl.int64)
    row = block % num_blocks * BLOCK_S + tl.arange(0, BLOCK_S)
    row_64 = row.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    in_seq = row < seq
    inside = in_seq[:, None] & (column < HEAD_DIM)[None, :]

    lse_a = tl.load(lse_a_ptr + batch * stride_lab + head * stride_lah + row_64 * stride_las, in_seq, float("-inf"))
    lse_b = tl.load(lse_b_ptr + batch * stride_lbb + head * stride_lbh + row_64 * stride_lbs, in_seq, float("-inf"))
    larger = tl.maximum(lse_a, lse_b)
    shift = tl.where(larger == float("-inf"), 0.0, larger)  # −inf − (−inf) would be NaN
    weight_a = tl.exp2((lse_a - shift) * LOG2_E)
    weight_b = tl.exp2((lse_b - shift) * LOG2_E)
    total = weight_a + weight_b
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)

    a_rows = a_ptr + batch * stride_ab + head * stride_ah + row_64[:, None] * stride_as + column[None, :]
    b_rows = b_ptr + batch * stride_bb + head * stride_bh + row_64[:, None] * stride_bs + column[None, :]
    a = tl.load(a_rows, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_rows, mask=inside, other=0.0).to(tl.float32)
    # a part without weight may hold anything, also NaN
    a = tl.where(weight_a[:, None] == 0.0, 0.0, a * weight_a[:, None])
    b = tl.where(weight_b[:, None] == 0.0, 0.0, b * weight_b[:, None])
    rows = out_ptr + batch * stride_ob + head * stride_oh + row_64[:, None] * stride_os + column[None, :]
    tl.store(rows, ((a + b) * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + (batch * num_heads + head) * seq + row, shift + tl.log2(total) * LN2, mask=in_seq)
