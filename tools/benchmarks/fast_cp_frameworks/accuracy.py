"""Is the output right? Fresh random input, every row, against float32 or float64 attention, before it is timed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chitu_diffusion.parallel.cp.fast.attention.execution import run
from tools.benchmarks.fast_cp_frameworks.contender import Contender
from tools.benchmarks.fast_cp_frameworks.inputs import Source, Tensors
from tools.benchmarks.fast_cp_frameworks.result import Accuracy

# a call may err twice as much as its kernel does in one process, and by one rounding of float32
FACTOR, FLOOR = 2.0, 1e-6
# however wrong its kernel is: relative L2 error over all, and of the worst row, per dtype
CEILING = {"bfloat16": (2e-2, 1e-1), "float16": (4e-3, 2e-2), "float32": (1e-5, 1e-4)}
# float64 where it takes no longer than about a second
EXACT_FLOPS = {"cpu": 1e10, "cuda": 2e11}
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}

Corrupt = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Errors:
    """Relative L2 error over all elements, and of the worst (token, head) row."""

    overall: float
    worst_row: float


@dataclass(frozen=True)
class Measured:
    """One rank's output and its kernel in one process, against the same reference."""

    call: Errors
    kernel: Errors
    limit: Errors
    against: str = ""  # what both were compared with

    @property
    def strain(self) -> float:
        """The larger share of a limit that was used; more than 1 is wrong."""
        return max(self.call.overall / self.limit.overall, self.call.worst_row / self.limit.worst_row)


class Judge:
    """Measures on one rank; keeps the reference of the last rows it saw, which methods of one shape share."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def _reference_name(self) -> str:
        dtype = str(_exact_dtype(self._source)).removeprefix("torch.")
        return f"softmax attention in {dtype} over all keys, every row of every rank"

    def measure(
        self, contender: Contender, corrupt: Corrupt | None = None, wait: Callable[[], None] = lambda: None
    ) -> Measured:
        """Both errors on this rank. ``wait`` returns when the device is done; ``corrupt`` spoils the output."""
        keys = self._source.whole()
        mine = contender.tensors(self._source)
        poison([mine.q, mine.k, mine.v, keys.k, keys.v])
        out = contender.attend(mine)
        wait()
        if corrupt is not None:
            out = corrupt(out)
        exact, mask = self._exact(mine.q, keys), self._source.key_mask()
        alone = run(contender.plan, mine.q, keys.k, keys.v, scale=contender.case.head_dim**-0.5, key_mask=mask)
        call, kernel = errors(out, exact), errors(alone, exact)
        return Measured(call, kernel, limits(kernel, contender.case.dtype), self._reference_name)

    def _exact(self, q: torch.Tensor, keys: Tensors) -> torch.Tensor:
        """The reference for ``q``: this rank's queries or, with ``single``, everyone's."""
        shape = tuple(q.shape)
        if shape not in self._known:
            dtype, mask = _exact_dtype(self._source), self._source.key_mask()
            self._known[shape] = exact_attention(q, keys.k, keys.v, dtype, mask)
        return self._known[shape]


def record(per_rank: list[Measured | None], seed: int) -> Accuracy:
    """What the result file says: the measures of the rank nearest to its limit, or furthest beyond it."""
    worst = max((m for m in per_rank if m is not None), key=lambda measured: measured.strain)
    return Accuracy(
        checked=True,
        reference=worst.against,
        error=worst.call.overall,
        max_row_error=worst.call.worst_row,
        limit=worst.limit.overall,
        max_row_limit=worst.limit.worst_row,
        kernel_error=worst.kernel.overall,
        seed=seed,
    )


def verdict(per_rank: list[Measured | None]) -> str | None:
    """Why the output is wrong, None where it is right."""
    for rank, measured in enumerate(per_rank):
        if measured is not None and measured.strain > 1:
            call, limit = measured.call, measured.limit
            return (
                f"wrong output on rank {rank}: relative error {call.overall:.2e} (limit {limit.overall:.2e}), "
                f"worst row {call.worst_row:.2e} (limit {limit.worst_row:.2e})"
            )
    return None


def limits(kernel: Errors, dtype: str) -> Errors:
    """What a call may err whose kernel errs as much as ``kernel`` in one process."""
    overall, worst_row = CEILING[dtype]
    return Errors(
        min(FACTOR * kernel.overall + FLOOR, overall),
        min(FACTOR * kernel.worst_row + FLOOR, worst_row),
    )


def errors(out: torch.Tensor, exact: torch.Tensor) -> Errors:
    """Of ``out`` against ``exact``, both (B, S, H, D); infinite where a shape differs or any element is not finite."""
    if out.shape != exact.shape:
        return Errors(float("inf"), float("inf"))
    if not out.numel():
        return Errors(0.0, 0.0)
    rows = torch.linalg.vector_norm(out.to(exact.dtype) - exact, dim=-1)
    sizes = torch.linalg.vector_norm(exact, dim=-1)
    overall = torch.linalg.vector_norm(rows) / torch.linalg.vector_norm(sizes)
    return Errors(_number(overall), _number((rows / sizes).max()))


def _number(measure: torch.Tensor) -> float:
    """NaN compares as smaller than nothing, so it would pass for right; infinity does not."""
    return float(measure.nan_to_num(nan=float("inf"), posinf=float("inf")))


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, key_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(D)) v in ``dtype`` without TF32, one head and some rows at a time.

    ``key_mask`` (B, Sk) bool leaves out the keys where it is False.
    """
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    rows = max(1, CHUNK_BYTES[q.device.type] // (k.shape[1] * dtype.itemsize))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for b in range(batch):
            for h in range(heads):
                keys, values = (x[b, :, h * k.shape[2] // heads].to(dtype) for x in (k, v))
                for start in range(0, tokens, rows):
                    part = slice(start, start + rows)
                    scores = (q[b, part, h].to(dtype) * head_dim**-0.5) @ keys.T
                    if key_mask is not None:
                        scores.masked_fill_(~key_mask[b], float("-inf"))
                    out[b, part, h] = torch.softmax(scores, -1) @ values
    finally:
        torch.set_float32_matmul_precision(before)
    return out


def poison(like: list[torch.Tensor]) -> None:
    """Fill freed memory with NaN, so that an output which is only partly written does not hold the last call's values.

    The call allocates its output and its windows itself: it gets what is freed here, as the allocator hands a block of
    the same size out again.
    """
    held = [torch.full_like(x, float("nan")) for x in like for _ in range(2)]
    del held


def _exact_dtype(source: Source) -> torch.dtype:
    case = source.case
    flops = 4 * case.batch * case.heads * case.sequence**2 * case.head_dim
    return torch.float64 if flops <= EXACT_FLOPS[source.device.type] else torch.float32
