"""torch's scaled_dot_product_attention: serves every device, dtype and mask, and gives no log-sum-exp."""

import torch
import torch.nn.functional as F

from chitu_diffusion.parallel.cp.fast.attention.kernels import Kernel, KernelNeeds
from chitu_diffusion.parallel.cp.fast.attention.rows import answers_empty, first_reason, placed


def why_not(needs: KernelNeeds) -> str | None:
    """Why SDPA does not serve the call, or None."""
    return first_reason([(needs.lse, "torch's scaled_dot_product_attention returns no log-sum-exp")])


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
    """Attention by SDPA; arguments and result as in ``KernelCall``, ``return_lse`` must be False."""
    assert not return_lse, "why_not refuses calls that want the log-sum-exp"
    group_size = q.shape[2] // k.shape[2]
    if group_size > 1:
        # enable_gqa together with a mask or float32 leaves only the backend that stores all the scores
        k, v = (x.repeat_interleave(group_size, dim=2) for x in (k, v))
    mask = None if key_mask is None else key_mask[:, None, None, :]
    q_bhsd, k_bhsd, v_bhsd = (x.transpose(1, 2) for x in (q, k, v))
    result = F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
    if key_mask is not None:
        # SDPA does not promise what a row without any key gives
        result = result.masked_fill(~key_mask.any(dim=1)[:, None, None, None], 0)
    return placed(result.transpose(1, 2), out), None


ROW = Kernel("sdpa", why_not, run)
