"""How often every call is made: a whole comparison takes minutes, and a long call varies less than a short one."""

from dataclasses import dataclass

from tools.benchmarks.fast_cp_frameworks.cases import Case

TYPICAL_TFLOPS = 600.0  # of one GPU that attends; only to tell long calls from short ones
LONG_MS = 10.0
REPEAT_MS = 80.0  # about as long as the single calls of one repeat take
MOST = 8


@dataclass(frozen=True)
class Effort:
    """Calls before the first that counts, single calls that count, and repeats of both."""

    warmup: int
    iterations: int
    repeats: int


def effort(case: Case, world: int, device_type: str) -> Effort:
    """For all methods at the shape of ``case`` alike. CPUs are not compared in speed: one call, to see that it ends."""
    if device_type == "cpu":
        return Effort(0, 1, 1)
    flops = 4 * case.batch * case.heads * case.sequence**2 * case.head_dim
    expected_ms = flops / world / TYPICAL_TFLOPS / 1e9
    iterations = max(2, min(MOST, int(REPEAT_MS / expected_ms)))
    return Effort(1 if expected_ms > LONG_MS else 2, iterations, 3)
