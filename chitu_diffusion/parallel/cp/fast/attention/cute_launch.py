"""Calls CuTe's compiled kernels, with FlashAttention's wrapper or, where that was tried, without it.

The wrapper checks its arguments and builds a compile key at every call: 41 to 46 µs of host time. What it then calls
takes a few. ``direct`` lets the wrapper run once, sees which compiled function it called with which arguments, and
calls that function from then on. What the wrapper would check again, ``cute.run`` has made sure of: shapes by the
protocol, layouts by ``readable``. Everything else in the compile key is the same for all calls of a class.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from chitu_diffusion.parallel.cp.fast.attention.cute_load import Forward

# q, k, v, out, lse or None, scale: writes out and lse
Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], object]
NUM_TENSORS_AND_SCALE = 6
ALIGN_BYTES = 16


def by_wrapper(forward: Forward) -> Launch:
    """Calls ``_flash_attn_fwd``; compiles where a class of calls is new."""

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
    ) -> object:
        # num_splits: more than one compiles for neither SM90 nor SM120
        return forward(
            q=q, k=k, v=v, softmax_scale=scale, causal=False, num_splits=1, return_lse=lse is not None, out=out, lse=lse
        )

    return launch


@dataclass
class _Recorder:
    """Stands in for FlashAttention's cache of compiled functions, and notes which one is called with what."""

    cache: Any
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)

    def __contains__(self, key: object) -> bool:
        return key in self.cache

    def __setitem__(self, key: object, function: object) -> None:
        self.cache[key] = function

    def __getitem__(self, key: object) -> Callable[..., Any]:
        function = self.cache[key]

        def called(*args: Any) -> Any:
            self.calls.append((function, args))
            return function(*args)

        return called


def direct(
    forward: Forward,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
) -> Launch | None:
    """Run the wrapper once on these tensors; what it called, or None where that is not as expected."""
    wrapper: Any = forward
    recorder = _Recorder(wrapper.compile_cache)
    wrapper.compile_cache = recorder
    try:
        by_wrapper(forward)(q, k, v, out, lse, scale)
    finally:
        wrapper.compile_cache = recorder.cache
    if len(recorder.calls) != 1:
        return None
    function, args = recorder.calls[0]
    given, rest = args[:NUM_TENSORS_AND_SCALE], args[NUM_TENSORS_AND_SCALE:]
    same = all(_same(a, b) for a, b in zip(given, (q, k, v, out, lse, scale), strict=True))
    if not same or any(isinstance(value, torch.Tensor) for value in rest):
        return None
    compiled = without_keywords(function)
    return lambda q, k, v, out, lse, scale: compiled(q, k, v, out, lse, scale, *rest)


def without_keywords(function: Any) -> Callable[..., object]:
    """A function that was just compiled has one that takes keywords around the one that is called."""
    inner = getattr(function, "__tvm_ffi_object__", None)
    called: Callable[..., object] = inner() if inner is not None else function
    return called


def _same(passed: object, given: object) -> bool:
    if isinstance(passed, torch.Tensor) and isinstance(given, torch.Tensor):
        return passed.data_ptr() == given.data_ptr() and passed.shape == given.shape
    return passed is given or (isinstance(given, float) and passed == given)


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` (B, S, H, D) of two bytes to an element, or a copy of it where the kernel's loads cannot read it."""
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def aligned(x: torch.Tensor) -> bool:
    """Contiguous in D; the address and the other strides multiples of 16 bytes, and no stride 0."""
    b, s, h, d = x.stride()
    misplaced = (x.data_ptr() | (b | s | h) * 2) % ALIGN_BYTES
    return d == 1 and misplaced == 0 and b != 0 and s != 0 and h != 0
