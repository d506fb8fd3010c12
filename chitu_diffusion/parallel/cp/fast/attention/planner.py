"""The pure planner: what is asked and what each rank can do, to one plan that all ranks share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError

# why_not of every kernel on one rank: None where it serves the call
KernelReasons = Mapping[str, str | None]


@dataclass(frozen=True)
class AttentionPlan:
    """How one attention call runs.

    ``method`` and ``ulysses_degree`` say what travels, ``transfer`` what carries it, ``schedule`` how kernel and
    transfer interleave, ``kernel`` which row of the table computes. ``rejected`` lists the kernels that were
    preferred to it and why they do not serve, and the transfers that were measured and are slower. ``bytes_received``
    is what the busiest rank would receive by each method.
    """

    method: str
    ulysses_degree: int
    transfer: str
    schedule: str
    kernel: str
    reason: str
    rejected: tuple[Rejected, ...] = ()
    bytes_received: dict[str, int] = field(default_factory=dict)


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


def _first_reason(name: str, reasons_by_rank: Sequence[KernelReasons]) -> str | None:
    """Why ``name`` does not serve; names the ranks unless all agree."""
    reasons = {rank: told for rank, reasons in enumerate(reasons_by_rank) if (told := reasons[name]) is not None}
    if not reasons:
        return None
    rank, told = next(iter(reasons.items()))
    return told if len(reasons) == len(reasons_by_rank) else f"on rank {rank} {told}"


def make_plan(
    *,
    method: str,
    ulysses_degree: int,
    world: int,
    transfer: Choice,
    kernel: str,
    reasons_by_rank: Sequence[KernelReasons],
    bytes_received: dict[str, int] | None = None,
) -> AttentionPlan:
    """The plan for one call: the kernel by the table, the only schedule there is, and the reasons."""
    choice = choose_kernel(kernel, reasons_by_rank)
    reason = f"kernel {choice.used}: {choice.reason}; {_degree_reason(method, ulysses_degree, world)}"
    if transfer.reason:
        reason += f"; transfer {transfer.used}: {transfer.reason}"
    rejected = choice.rejected + transfer.rejected
    return AttentionPlan(
        method, ulysses_degree, transfer.used, "one_shot", choice.used, reason, rejected, bytes_received or {}
    )


def _degree_reason(method: str, degree: int, world: int) -> str:
    if world == 1:
        return "one rank: nothing travels"
    if method == "agkv":
        return f"agkv: K and V are gathered from {world} ranks"
    if degree == world:
        return f"ulysses: the heads are split over {world} ranks"
    return f"hybrid: the heads are split over {degree} ranks, K and V are gathered across {world // degree} such groups"
