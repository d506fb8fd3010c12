"""The pure planner: what is asked and what each rank can do, to one plan that all ranks share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.schedule import Schedule

# why_not of every kernel on one rank: None where it serves the call
KernelReasons = Mapping[str, str | None]


@dataclass(frozen=True)
class Candidate:
    """One way to run an attention call.

    ``method`` and ``ulysses_degree`` say what travels, ``transfer`` what carries it, ``schedule`` how kernel and
    transfer interleave, ``kernel`` which row of the table computes, ``graph`` whether the whole call is captured once
    and replayed as a CUDA graph.
    """

    method: str
    ulysses_degree: int
    transfer: str
    schedule: Schedule
    kernel: str
    graph: bool = False

    @property
    def name(self) -> str:
        """Short and unique, as ``--plan`` takes it: ``agkv/ce/head_pipeline(5)/cute/graph``."""
        parts = (self.method, self.transfer, str(self.schedule), self.kernel, "graph" if self.graph else "eager")
        return "/".join(parts)


@dataclass(frozen=True)
class AttentionPlan(Candidate):
    """The candidate that runs, and why.

    ``rejected`` lists the kernels that were preferred to it and why they do not serve, and the candidates that were
    measured and are slower, or failed. ``bytes_received`` is what the busiest rank would receive by each method.
    ``ms`` is how many milliseconds the call took when it was measured, None where it was not.
    """

    reason: str = ""
    rejected: tuple[Rejected, ...] = ()
    bytes_received: dict[str, int] = field(default_factory=dict)
    ms: float | None = None


@dataclass(frozen=True)
class Decision:
    """The candidate that is taken among others, why, and what became of those.

    ``ms`` is how many milliseconds it took on the slowest rank, None where nothing was measured.
    """

    used: Candidate
    why: str = ""
    rejected: tuple[Rejected, ...] = ()
    ms: float | None = None


def choose_kernel(requested: str, reasons_by_rank: Sequence[KernelReasons]) -> Choice:
    """The first kernel that serves the call on every rank, or ``requested`` itself.

    Every mapping lists the kernels in order of preference. Raises ConfigError for an unknown name and
    UnavailableError where ``requested``, or with ``auto`` every kernel, fails on some rank.
    """
    names = list(reasons_by_rank[0])
    if requested not in ("auto", *names):
        raise ConfigError(f"kernel {requested!r} is unknown; choose auto or one of {', '.join(names)}")
    refused = {name: _first_reason(name, reasons_by_rank) for name in names}
    if requested != "auto":
        reason = refused[requested]
        if reason is not None:
            raise UnavailableError(f"kernel {requested} was asked for, but {reason}; choose another kernel, or auto")
        return Choice(requested, requested, "asked for")
    rejected: list[Rejected] = []
    for name in names:
        reason = refused[name]
        if reason is None:
            return Choice(requested, name, "first in the table that serves this call on every rank", tuple(rejected))
        rejected.append(Rejected(name, reason))
    told = "; ".join(f"{r.name}: {r.reason}" for r in rejected)
    raise UnavailableError(f"no attention kernel serves this call on every rank ({told})")


def serving(reasons_by_rank: Sequence[KernelReasons], choice: Choice | None = None) -> list[str]:
    """The kernels that serve the call on every rank, in order of preference; what ``choice`` leaves of them."""
    if choice is not None and choice.requested != "auto":
        return [choice.used]
    names = list(reasons_by_rank[0])
    return [name for name in names if _first_reason(name, reasons_by_rank) is None]


def _first_reason(name: str, reasons_by_rank: Sequence[KernelReasons]) -> str | None:
    """Why ``name`` does not serve; names the ranks unless all agree."""
    reasons = {rank: told for rank, reasons in enumerate(reasons_by_rank) if (told := reasons[name]) is not None}
    if not reasons:
        return None
    rank, told = next(iter(reasons.items()))
    return told if len(reasons) == len(reasons_by_rank) else f"on rank {rank} {told}"


def _kernel_reason(candidate: Candidate, kernel: Choice) -> str:
    if candidate.kernel != kernel.used:
        return f"kernel {candidate.kernel}: faster here than {kernel.used}, which stands before it in the table"
    return f"kernel {kernel.used}: {kernel.reason}"


def make_plan(
    candidate: Candidate,
    *,
    world: int,
    kernel: Choice,
    why: str = "",
    rejected: tuple[Rejected, ...] = (),
    bytes_received: dict[str, int] | None = None,
    ms: float | None = None,
) -> AttentionPlan:
    """The plan that runs ``candidate``: with the choice of its kernel, ``why`` it was taken among others, its time."""
    travels = _degree_reason(candidate.method, candidate.ulysses_degree, world)
    reason = f"{_kernel_reason(candidate, kernel)}; {travels}"
    if why:
        reason += f"; {why}"
    parts = {f.name: getattr(candidate, f.name) for f in fields(Candidate)}
    return AttentionPlan(
        **parts, reason=reason, rejected=kernel.rejected + rejected, bytes_received=bytes_received or {}, ms=ms
    )


# what a rank tells of every candidate: milliseconds, or why it failed there; nothing where another rank's failure
# came before it was timed
Measured = Mapping[str, float | str]
TIE = 1.01  # a simpler candidate may be slower by this much


def decide(candidates: Sequence[Candidate], measured_by_rank: Sequence[Measured]) -> Decision:
    """The candidate that is fastest on the slowest rank, why, and what became of the others.

    ``candidates`` come simplest first, and the first within 1 % of the fastest is taken. One that failed on any rank
    is out. Raises UnavailableError where all of them failed.
    """
    failed, slowest = {}, {}
    for candidate in candidates:
        told = [measured.get(candidate.name) for measured in measured_by_rank]
        failures = [f"on rank {rank}: {what}" for rank, what in enumerate(told) if isinstance(what, str)]
        if failures:
            failed[candidate.name] = failures[0]
        else:
            slowest[candidate.name] = max(ms for ms in told if isinstance(ms, float))
    if not slowest:
        told_all = "; ".join(f"{name} {why}" for name, why in failed.items())
        raise UnavailableError(f"no way to run this attention call works on every rank ({told_all})")
    limit = TIE * min(slowest.values())
    used = next(c for c in candidates if slowest.get(c.name, math.inf) <= limit)
    rejected = [Rejected(name, f"{ms:.3f} ms", ms) for name, ms in slowest.items() if name != used.name]
    rejected += [Rejected(name, why) for name, why in failed.items()]
    count = len(slowest)
    why = f"{used.name} took {slowest[used.name]:.3f} ms" + (
        f", the fastest of {count} measured on this shape (a tie within 1 % goes to the simpler)" if count > 1 else ""
    )
    return Decision(used, why, tuple(rejected), slowest[used.name])


def as_before(kept_ms: Mapping[str, float], by_name: Mapping[str, Candidate]) -> Decision:
    """The decision that an earlier process made: ``kept_ms`` by name, the candidate that it took first."""
    (name, ms), *others = kept_ms.items()
    return Decision(
        by_name[name],
        f"{name} took {ms:.3f} ms when it was measured, earlier, and is the fastest",
        tuple(Rejected(other, f"{slower:.3f} ms, earlier", slower) for other, slower in others),
        ms,
    )


def _degree_reason(method: str, degree: int, world: int) -> str:
    if world == 1:
        return "one rank: nothing travels"
    if method == "agkv":
        return f"agkv: K and V are gathered from {world} ranks"
    if degree == world:
        return f"ulysses: the heads are split over {world} ranks"
    return f"hybrid: the heads are split over {degree} ranks, K and V are gathered across {world // degree} such groups"
