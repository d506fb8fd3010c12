"""A case on its way through the benchmark, and the result that it becomes."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from chitu_diffusion.parallel.cp.errors import ExitCode
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.contender import Contender, Operands
from tools.benchmarks.fast_cp_frameworks.result import Implementation, PlanRecord, Result, Timing, TransportRecord
from tools.benchmarks.fast_cp_frameworks.timing import Sample


@dataclass(frozen=True)
class Outcome:
    """A case that has ended, and the exit code that it asks for."""

    result: Result
    exit_code: ExitCode
    trace: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known of a case before it runs, the same on every rank."""

    implementation: Implementation
    ranks: tuple[int, ...]
    bytes_received: int
    warm_calls_per_set: int


# medians of one repeat on one rank, in milliseconds, by component
Beside = Mapping[str, float]


@dataclass
class Entry:
    """A case on its way through the steps; ``contender`` is None on a rank that does not compute.

    ``samples`` and ``beside`` hold one list per repeat, with one entry per rank, None for a rank that was idle.
    """

    case: Case
    facts: Facts
    contender: Contender | None
    result: Result
    sets: list[Operands] = field(default_factory=list)
    samples: list[list[Sample | None]] = field(default_factory=list)
    beside: list[list[Beside | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Fastest:
    """The best of one GPU alone at one shape, whichever kernel it took; None where none was measured."""

    median_ms: float | None
    back_to_back_ms: float | None


def fastest(singles: Sequence[Timing]) -> Fastest:
    """Each figure on its own: the kernel that is best in one need not be so in the other."""
    return Fastest(
        min((timed.median_ms for timed in singles), default=None),
        min((timed.back_to_back_ms for timed in singles), default=None),
    )


def facts_of(contender: Contender) -> Facts:
    """The facts of a case that is about to run."""
    plan = asdict(contender.plan) | {"schedule": str(contender.plan.schedule), "name": contender.plan.name}
    choice = asdict(contender.transport)
    implementation = Implementation(attention_plan=PlanRecord(**plan), transport=TransportRecord(**choice))
    return Facts(implementation, contender.ranks, contender.bytes_received, contender.warm_calls_per_set)


def complete(entry: Entry, timed: Timing, single: Fastest) -> Result:
    """The record of a case that was checked and timed."""
    case = entry.case
    flops = 4 * case.batch * case.heads * case.sequence**2 * case.head_dim
    travels = case.component == "communication"
    update: dict[str, object] = {
        "status": "complete",
        "timing": timed,
        "tflops_per_rank": None if travels else flops / len(entry.facts.ranks) / timed.median_ms / 1e9,
        "received_gb_per_s": entry.facts.bytes_received / timed.median_ms / 1e6 if travels else None,
    }
    if case.component == "e2e":
        update["speedup_over_single"] = _ratio(single.median_ms, timed.median_ms)
        update["speedup_back_to_back"] = _ratio(single.back_to_back_ms, timed.back_to_back_ms)
    if entry.beside:
        update |= hidden(timed.median_ms, entry.beside, entry.facts.bytes_received)
    return entry.result.model_copy(update=update)


def _ratio(single_ms: float | None, ms: float) -> float | None:
    return single_ms / ms if single_ms and ms else None


def hidden(e2e_ms: float, repeats: Sequence[Sequence[Beside | None]], bytes_received: int) -> dict[str, float | None]:
    """What of the communication was hidden behind the kernel, from the medians over ``repeats`` of the slowest rank.

    What the communication alone takes is None where a library cannot be called without its kernel.
    """
    attention_ms, transfer_ms = (_slowest(repeats, component) for component in ("attention", "communication"))
    assert attention_ms is not None, "the kernel alone is timed beside every call"
    exposed_ms = e2e_ms - attention_ms
    return {
        "attention_ms": attention_ms,
        "transfer_ms": transfer_ms,
        "exposed_ms": exposed_ms,
        "hidden_share": 1 - exposed_ms / transfer_ms if bytes_received and transfer_ms else None,
    }


def _slowest(repeats: Sequence[Sequence[Beside | None]], component: str) -> float | None:
    """Of the slowest rank, the median over ``repeats``; None where ``component`` was not timed."""
    told = [[ms[component] for ms in ranks if ms is not None and component in ms] for ranks in repeats]
    return statistics.median(max(times) for times in told) if all(told) else None
