"""FlashAttention 2 as torch ships it: FP16 and BF16 on SM80 and later, with log-sum-exp, without masks."""

import torch

from chitu_diffusion.parallel.cp.fast.attention.kernels import Kernel, KernelNeeds
from chitu_diffusion.parallel.cp.fast.attention.rows import HALF, answers_empty, first_reason, gpu_checks, placed


def why_not(needs: KernelNeeds) -> str | None:
    """Why torch's flash attention does not serve the call, or None. Grouped K/V heads are served as they are."""
    checks = gpu_checks(needs, dtypes=HALF, head_dim_step=8, max_head_dim=256)
    return first_reason([*checks, (needs.key_mask, "it takes no key mask")])


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
    """Attention by aten's flash operator; arguments and result as in ``KernelCall``, ``key_mask`` must be None."""
    assert key_mask is None, "why_not refuses key masks"
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    # dropout 0, not causal, no debug mask; the log-sum-exp (B, H, Sq) is computed in any case
    result, lse = flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, False, False, scale=scale)[:2]
    return placed(result.transpose(1, 2), out), lse if return_lse else None


ROW = Kernel("flash", why_not, run)
