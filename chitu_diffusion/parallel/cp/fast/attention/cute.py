"""CuTe FlashAttention: the fastest row on SM90. Needs the uv extra ``cute``, or a checkout of FlashAttention.

It ran on SM90; for SM120 it compiles and never ran, so there it rests on ``prepare``, which compares a small result
with the definition before the row serves anything. Every class of calls is compiled (1 to 3 s, kept on disk) by
``prepare``, which ``why_not`` asks: never in a call that is timed or overlapped.
"""

from functools import cache
from typing import NamedTuple

import torch

from chitu_diffusion.parallel.cp.errors import first_line
from chitu_diffusion.parallel.cp.fast.attention import cute_fused, cute_load
from chitu_diffusion.parallel.cp.fast.attention.cute_launch import Launch, aligned, by_wrapper, direct, readable
from chitu_diffusion.parallel.cp.fast.attention.cute_load import load_cute_flash_attn_fwd
from chitu_diffusion.parallel.cp.fast.attention.kernels import Kernel, KernelNeeds
from chitu_diffusion.parallel.cp.fast.attention.rows import HALF, answers_empty, first_reason, gpu_checks

__all__ = ["ROW", "load_cute_flash_attn_fwd", "prepare", "run", "why_not"]

CAPABILITIES = ((9, 0), (12, 0))
ARRIVING_CAPABILITIES = ((9, 0),)
BOUND = 2e-2  # relative L2 error of the small result
_DEVICE = "cuda"  # where it is computed


class CallClass(NamedTuple):
    """What a kernel is compiled for; lengths, heads, strides and scale are arguments."""

    dtype: torch.dtype
    head_dim: int
    ratio: int  # query heads to a K/V head
    lse: bool
    arriving: bool = False


_launchers: dict[tuple[torch.dtype, int, int, bool], Launch] = {}  # by CallClass, without those of keys on their way


def why_not(needs: KernelNeeds) -> str | None:
    """Why CuTe does not serve the call, or None; imports and compiles it where nothing cheaper stands in the way."""
    checks = gpu_checks(needs, dtypes=HALF, head_dim_step=8, max_head_dim=128)
    major, minor = needs.capability or (0, 0)
    heads, kv_heads = needs.num_heads, needs.num_kv_heads
    checks += [
        (needs.capability not in CAPABILITIES, f"it is for SM90 and SM120, and this GPU is SM{major}{minor}"),
        (heads % kv_heads != 0, f"{heads} heads are no multiple of {kv_heads} K/V heads"),
        (needs.key_mask, "it takes no key mask here"),
    ]
    if needs.arriving:
        checks += [
            (needs.capability not in ARRIVING_CAPABILITIES, "its kernel that waits for keys is for SM90"),
            (heads != kv_heads, "its kernel that waits for keys takes a K/V head for each query head"),
        ]
    return first_reason(checks) or cute_load.source().problem or prepare(needs)


def prepare(needs: KernelNeeds) -> str | None:
    """Import, compile and try what ``needs`` is served with, once per class; None, or the reason why it fails."""
    ratio = needs.num_heads // needs.num_kv_heads
    return _prepare(CallClass(needs.dtype, needs.head_dim, ratio, needs.lse, needs.arriving))


@cache
def _prepare(call: CallClass) -> str | None:
    if _DEVICE == "cuda" and not torch.cuda.is_available():
        return "torch can use no GPU here"
    if problem := cute_load.load_problem():
        return problem
    tried = cute_load.source().tried
    if call.arriving and not (tried is not None and tried.direct):
        return "its kernel that waits for keys was tried with the package of the extra cute only, not with a checkout"
    try:
        error = _first_call(call)
    except Exception as raised:  # a compiler raises anything
        return f"its first call fails: {first_line(raised)}"
    return None if error <= BOUND else f"its first call is wrong: relative error {error:.1e}"


def _first_call(call: CallClass) -> float:
    """Compile, choose how the class is launched, and give the relative error of the small result."""
    generator = torch.Generator(_DEVICE).manual_seed(0)  # of its own: the caller's random numbers stay the same
    kv_heads, seq_q, seq_k = 2, 192, 333
    shapes = [(2, seq_q, kv_heads * call.ratio, call.head_dim), *[(2, seq_k, kv_heads, call.head_dim)] * 2]
    q, k, v = (torch.randn(s, device=_DEVICE, generator=generator).to(call.dtype) for s in shapes)
    scale, forward, out = call.head_dim**-0.5, load_cute_flash_attn_fwd(), torch.empty_like(q)
    lse = q.new_empty(q.shape[0], q.shape[2], seq_q, dtype=torch.float32) if call.lse else None
    if call.arriving:
        cute_fused.prepare(q, k, v, out.fill_(torch.nan), scale)
        return _error(q, k, v, scale, out, None)
    tried, launch = cute_load.source().tried, None
    if tried is not None and tried.direct:
        launch = direct(forward, q, k, v, out, lse, scale)
    launch = launch or by_wrapper(forward)
    out.fill_(torch.nan)
    launch(q, k, v, out, lse, scale)
    _launchers[call[:4]] = launch
    return _error(q, k, v, scale, out, lse)


def _error(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor, lse: torch.Tensor | None
) -> float:
    ratio = q.shape[2] // k.shape[2]
    k, v = (x.float().repeat_interleave(ratio, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * scale
    pairs = [(out.float(), torch.einsum("bhqk,bkhd->bqhd", scores.softmax(3), v))]
    if lse is not None:
        pairs.append((lse, scores.logsumexp(3)))
    errors = torch.stack([(x - exact).norm() / exact.norm() for x, exact in pairs])
    return float(errors.nan_to_num(torch.inf).max())


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
    """Attention by CuTe; arguments and result as in ``KernelCall``, ``key_mask`` must be None."""
    assert key_mask is None, "why_not refuses key masks"
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    batch, seq_q, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seq_q), dtype=torch.float32) if return_lse else None
    # as an operator it costs 10 µs more, so only torch.compile, which cannot look inside, gets it as one
    launch = _operator if torch.compiler.is_compiling() else _launch
    launch(q, k, v, out, lse, scale)
    return out, lse


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
) -> None:
    if q.is_cuda and q.get_device() != torch.cuda.current_device():  # kernels are launched on the current device
        with torch.cuda.device(q.get_device()):
            return _launch(q, k, v, out, lse, scale)
    heads, head_dim = q.shape[2:]
    launch = _launchers.get((q.dtype, head_dim, heads // k.shape[2], lse is not None)) or by_wrapper(
        load_cute_flash_attn_fwd()
    )
    target = out if aligned(out) else torch.empty_like(q, memory_format=torch.contiguous_format)
    launch(readable(q), readable(k), readable(v), target, lse, scale)
    if target is not out:
        out.copy_(target)
    return None


@torch.library.custom_op("chitu::cute_attention", mutates_args=("out", "lse"))
def _operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
) -> None:
    _launch(q, k, v, out, lse, scale)


@_operator.register_fake
def _operator_on_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
) -> None:
    """Everything is written in place."""


ROW = Kernel("cute", why_not, run, in_place=True, run_arriving=cute_fused.run)
