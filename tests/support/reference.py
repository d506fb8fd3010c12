"""Attention as it is defined, slowly: the one oracle that every kernel, merge and schedule is measured against."""

import torch

SCORES = 1 << 24  # scores held at a time


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    key_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Sq, H, D) and log-sum-exp (B, H, Sq) in ``dtype``, for q (B, Sq, H, D) and k, v (B, Sk, Hk, D).

    ``key_mask`` (B, Sk) is True where a key is attended to; a row without a key gives 0 and −inf, and what a masked
    key or value holds does not matter.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_k, kv_heads = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(batch, seq_q, heads, head_dim, dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seq_q), -torch.inf, dtype=dtype, device=q.device)
    rows = max(1, SCORES // max(seq_k, 1))
    for b in range(batch):
        keys = slice(None) if key_mask is None else key_mask[b]
        for head in range(heads):
            kv_head = head * kv_heads // heads
            k_head, v_head = k[b, :, kv_head][keys].to(dtype), v[b, :, kv_head][keys].to(dtype)
            if not len(k_head):
                continue
            for start in range(0, seq_q, rows):
                scores = q[b, start : start + rows, head].to(dtype) @ k_head.T * scale
                out[b, start : start + rows, head] = scores.softmax(dim=1) @ v_head
                lse[b, head, start : start + rows] = scores.logsumexp(dim=1)
    return out, lse


def row_errors(out: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """‖out − reference‖ / ‖reference‖ of each row (B, Sq, H); of a row that must be 0, ‖out‖."""
    norm = reference.norm(dim=-1)
    return (out.to(reference.dtype) - reference).norm(dim=-1) / norm.where(norm > 0, 1)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ over the whole tensor (L2); of a reference that is 0, ‖out‖."""
    norm = float(reference.norm())
    return float((out.to(reference.dtype) - reference).norm()) / (norm or 1.0)
