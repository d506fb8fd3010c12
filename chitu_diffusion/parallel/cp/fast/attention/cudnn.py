"""cuDNN's fused attention through aten: the fastest row without further packages; with log-sum-exp and key masks."""

import torch

from chitu_diffusion.parallel.cp.fast.attention.kernels import Kernel, KernelNeeds
from chitu_diffusion.parallel.cp.fast.attention.rows import (
    HALF,
    answers_empty,
    attend_to_one_key,
    first_reason,
    gpu_checks,
    placed,
)


def why_not(needs: KernelNeeds) -> str | None:
    """Why cuDNN does not serve the call, or None. Grouped K/V heads are served as they are."""
    return first_reason(gpu_checks(needs, dtypes=HALF, head_dim_step=8, max_head_dim=128))


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
    """Attention by aten's cuDNN operator; arguments and result as in ``KernelCall``."""
    if k.shape[1] == 1:  # cuDNN refuses a single key
        result, lse = attend_to_one_key(q, k, v, scale=scale, key_mask=key_mask, return_lse=return_lse)
        return placed(result, out), lse
    bias = None
    if key_mask is not None:
        bias = torch.zeros_like(key_mask, dtype=q.dtype).masked_fill_(~key_mask, -torch.inf)[:, None, None, :]
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    q_bhsd, k_bhsd, v_bhsd = (x.transpose(1, 2) for x in (q, k, v))
    # dropout 0, not causal, no debug mask; the log-sum-exp comes as (B, H, Sq, 1)
    result, lse = cudnn(q_bhsd, k_bhsd, v_bhsd, bias, return_lse, 0.0, False, False, scale=scale)[:2]
    return placed(result.transpose(1, 2), out), lse.squeeze(-1) if return_lse else None


ROW = Kernel("cudnn", why_not, run)
