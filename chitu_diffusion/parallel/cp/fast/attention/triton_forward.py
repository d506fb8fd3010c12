"""Device code of the Triton flash-attention forward. Imports Triton: import it only where Triton is known to be there.

The online softmax is that of FlashAttention-2 (Dao, 2023, algorithm 1), in base 2: exp(s·x) = 2^(s·log2(e)·x), so that
one multiply-add and one exp2 instruction per score do.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(
    source: tl.tensor,
    start: tl.tensor,
    stride: int,
    end: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> tl.tensor:
    """Rows [start, start + BLOCK_ROWS) of a (end, HEAD_DIM) matrix by pointers; what lies outside of it is 0."""
    row = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    pointers = source + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if BOUNDED and HEAD_DIM != BLOCK_D:
        rows = tl.load(pointers, mask=(start + row < end)[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    elif BOUNDED:
        rows = tl.load(pointers, mask=(start + row < end)[:, None], other=0.0)
    elif HEAD_DIM != BLOCK_D:
        rows = tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def _load_keys(
    source: tl.tensor,
    batch: int,
    head: int,
    start: tl.tensor,
    stride: int,
    end: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BOUNDED: tl.constexpr,
    USE_TMA: tl.constexpr,
) -> tl.tensor:
    """Rows of K or V: by a (B, Hk, Sk, D) descriptor, which fills with 0 by itself, or by the head's base pointer."""
    if USE_TMA:
        rows = source.load([batch, head, start, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        rows = _load_rows(source, start, stride, end, HEAD_DIM, BLOCK_D, BLOCK_N, BOUNDED)
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    q: tl.tensor,
    k_source: tl.tensor,
    v_source: tl.tensor,
    mask_row: tl.tensor,
    batch: int,
    head: int,
    start: tl.tensor,
    stride_k: int,
    stride_v: int,
    seq_k: int,
    scale_log2: float,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    USE_TMA: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the keys [start, start + BLOCK_N) and fold them into (acc, row_max, row_sum)."""
    k = _load_keys(k_source, batch, head, start, stride_k, seq_k, HEAD_DIM, BLOCK_D, BLOCK_N, BOUNDED, USE_TMA)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if BOUNDED or HAS_MASK:
        key = start + tl.arange(0, BLOCK_N)
        valid = key < seq_k
        if HAS_MASK:
            valid = valid & (tl.load(mask_row + key, mask=valid, other=0) != 0)
        scores = tl.where(valid[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # with a mask, every key so far may be masked, and −inf − (−inf) would be NaN
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if HAS_MASK else new_max
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    v = _load_keys(v_source, batch, head, start, stride_v, seq_k, HEAD_DIM, BLOCK_D, BLOCK_N, BOUNDED, USE_TMA)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(
    q_ptr: tl.tensor,
    k_source: tl.tensor,
    v_source: tl.tensor,
    mask_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    stride_qb: tl.int64,
    stride_qs: tl.int64,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_ks: tl.int64,
    stride_kh: tl.int64,
    stride_vb: tl.int64,
    stride_vs: tl.int64,
    stride_vh: tl.int64,
    stride_ob: tl.int64,
    stride_os: tl.int64,
    stride_oh: tl.int64,
    num_heads: int,
    group_size: int,
    seq_q: int,
    seq_k: int,
    scale_log2: float,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    USE_TMA: tl.constexpr,
) -> None:
    """One program attends for BLOCK_M queries of one head; neighbouring programs share K and V, so L2 serves them.

    Strides are declared with 64 bits, since an annotation of ``int`` means 32 to Triton.
    """
    num_blocks = tl.cdiv(seq_q, BLOCK_M)
    first = tl.program_id(0) % num_blocks * BLOCK_M
    batch_head = tl.program_id(0) // num_blocks
    batch, head = batch_head // num_heads, batch_head % num_heads
    kv_head = head // group_size
    batch_64, head_64 = batch.to(tl.int64), head.to(tl.int64)
    if not USE_TMA:
        k_source += batch_64 * stride_kb + kv_head.to(tl.int64) * stride_kh
        v_source += batch_64 * stride_vb + kv_head.to(tl.int64) * stride_vh
    mask_row = mask_ptr + batch_64 * seq_k

    q_source = q_ptr + batch_64 * stride_qb + head_64 * stride_qh
    q = _load_rows(q_source, first, stride_qs, seq_q, HEAD_DIM, BLOCK_D, BLOCK_M, True)
    q = tl.where(scale_log2 < 0, -q, q)  # the row maximum is taken before scaling, so the scale must not be negative
    scale_log2 = tl.maximum(tl.abs(scale_log2), 1e-30)  # 0 · −inf would be NaN
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    whole = seq_k // BLOCK_N * BLOCK_N
    for start in tl.range(0, whole, BLOCK_N):
        acc, row_max, row_sum = _attend(
            q, k_source, v_source, mask_row, batch, kv_head, start, stride_ks, stride_vs, seq_k, scale_log2,
            acc, row_max, row_sum, HEAD_DIM, BLOCK_D, BLOCK_N, False, HAS_MASK, USE_TMA,
        )  # fmt: skip
    if whole < seq_k:
        acc, row_max, row_sum = _attend(
            q, k_source, v_source, mask_row, batch, kv_head, whole, stride_ks, stride_vs, seq_k, scale_log2,
            acc, row_max, row_sum, HEAD_DIM, BLOCK_D, BLOCK_N, True, HAS_MASK, USE_TMA,
        )  # fmt: skip

    row = first + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out = out_ptr + batch_64 * stride_ob + head_64 * stride_oh + row.to(tl.int64)[:, None] * stride_os + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(row < seq_q)[:, None] & (column < HEAD_DIM)[None, :])
    if HAS_LSE:
        tl.store(lse_ptr + batch_head.to(tl.int64) * seq_q + row, (row_max + tl.log2(row_sum)) * LN2, mask=row < seq_q)
