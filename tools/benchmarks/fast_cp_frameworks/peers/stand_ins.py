"""On CPUs: plain kernels for torch's CUDA operators, and the gather that gloo lacks, so that libraries' own code runs.

Libraries call some operators by their CUDA names. What is checked on a CPU is what a library sends where, what it
merges and what it masks; its kernels are checked on GPUs only.
"""

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

_LIBRARIES: list[torch.library.Library] = []  # an operator lives as long as its library


def install() -> None:
    """Register them in this process; the second time it does nothing."""
    if _LIBRARIES:
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in (("cudnn", _cudnn), ("flash", _flash)):
        library.impl(f"_scaled_dot_product_{name}_attention", kernel, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
    _let_any_kernel_be_asked_for()
    _let_gloo_gather_unequal_parts()


def scaled_dot_product_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's, by cuDNN's operator, which it never takes on a CPU; by this name, under which torch puts its ring."""
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]
    return out


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, H, S, D) → the output in the CUDA kernels' memory order, which is (B, S, H, D), and the log-sum-exp."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    out = (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), torch.logsumexp(scores, -1)


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = _attention(query, key, value, attn_bias, scale)
    # without being asked for it, the real one leaves zeros
    lse = lse.unsqueeze(-1) if compute_log_sumexp else torch.zeros_like(lse).unsqueeze(-1)
    return out, lse, _empty(), _empty(), query.shape[2], key.shape[2], _empty(), _empty(), _empty()


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = _attention(query, key, value, None, scale)
    return out, lse, _empty(), _empty(), query.shape[2], key.shape[2], _empty(), _empty(), _empty()


def _let_any_kernel_be_asked_for() -> None:
    """``sdpa_kernel`` of kernels that CPUs lack allows those that they have."""
    original = torch.nn.attention.sdpa_kernel

    @wraps(original)
    def sdpa_kernel(*_: Any, **__: Any) -> Any:
        return original([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])

    torch.nn.attention.sdpa_kernel = sdpa_kernel


def _empty() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def _let_gloo_gather_unequal_parts() -> None:
    """``dist.all_gather`` of parts whose last dimension differs, as NCCL has it: padded, then cut."""
    original = dist.all_gather

    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if len({part.shape for part in tensor_list}) == 1:
            return original(tensor_list, tensor, *args, **options)
        most = max(part.shape[-1] for part in tensor_list)
        parts = [part.new_empty(*part.shape[:-1], most) for part in tensor_list]
        original(parts, pad(tensor, (0, most - tensor.shape[-1])), *args, **options)
        for part, padded in zip(tensor_list, parts, strict=True):
            part.copy_(padded[..., : part.shape[-1]])
        return None

    dist.all_gather = all_gather
