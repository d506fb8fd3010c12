"""Which ways to run a call are worth measuring: the cost model prunes, and never decides.

Its constants are measured on H200; on other hardware the order it gives is rougher, and the measurement that follows
decides in any case.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.cost import Work, estimate_s
from chitu_diffusion.parallel.cp.fast.attention.hardware import H200, Hardware
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST, ONE_SHOT, Schedule
from chitu_diffusion.parallel.cp.fast.attention.wanted import Wanted

# Cautious: transfers slowed by what runs beside them, lasting load, and no kernel that fills another's last wave.
# Other numbers prune other splits of the heads, so whoever changes these measures again.
PRUNING = replace(H200.steady, link_bytes_per_s=340e9, prologue_s=0.0, shares_waves=False)
SMALLEST_ROW_BYTES = 1024  # a copy engine is slow on shorter rows
GRAPH_BELOW_S = 20e-3  # the host's share of a call is worth capturing, and the memory of partial outputs is small
MOST_SEARCHED_HEADS = 64
LOCAL_GROUPS = (2, 4)
FUSED_GROUPS = (2, 3, 4, 8)
USUALLY_BEST = (LOCAL_FIRST, Schedule((1,) * 4, fused=True))  # always among the first to be measured
BUDGET_S = 1.2  # of a GPU's time that warming up may take; candidates beyond it are not measured
CALLS_MEASURED, FEWEST_MEASURED = 5, 3  # of one candidate before the rounds that are counted, and some of those


def schedules(work: Work, local: bool, hardware: Hardware = PRUNING, fused: bool = False) -> list[Schedule]:
    """Schedules worth measuring on ``hardware``, simplest first; ``local``: also those that attend locally first;
    ``fused``: also those whose kernel waits by itself.
    """
    best: dict[int, tuple[float, Schedule]] = {}  # of every number of groups
    for schedule in _pipelines(work):
        groups, seconds = len(schedule.groups), estimate_s(work, schedule, hardware)
        if groups not in best or seconds < best[groups][0]:
            best[groups] = seconds, schedule
    equal = [Schedule((1,) * n) for n in (2, 4) if work.num_kv_heads >= 2 * n]
    # in groups where more keys come than are there: with two ranks all of them have come when the own ones are done
    more = work.kv_rows > 2 * work.least_own_rows + 2
    split = [Schedule((1,) * n, local_first=True) for n in LOCAL_GROUPS if more and work.num_kv_heads >= 2 * n]
    waiting = [Schedule((1,) * n, fused=True) for n in FUSED_GROUPS if fused and work.num_kv_heads >= n]
    found = [*waiting, *([LOCAL_FIRST, *split] if local else []), *equal, *(schedule for _, schedule in best.values())]
    return [ONE_SHOT, *sorted(dict.fromkeys(found), key=_complexity)]


def _complexity(schedule: Schedule) -> tuple[bool, int, bool, int]:
    """One kernel before several, and a merge, which rounds partial outputs, behind what does without."""
    groups = len(schedule.groups)
    kernels = 1 if schedule.fused else groups + schedule.local_first
    return len(set(schedule.groups)) > 1, kernels, schedule.local_first, groups


def _pipelines(work: Work) -> Iterator[Schedule]:
    """Two and three groups of every size that copies well."""
    heads = work.num_kv_heads
    least = max(1, -(-SMALLEST_ROW_BYTES // work.head_bytes))
    if heads > MOST_SEARCHED_HEADS:
        return
    for cuts in range(1, 3):
        for bounds in combinations(range(least, heads - least + 1), cuts):
            edges = (0, *bounds, heads)
            groups = tuple(b - a for a, b in pairwise(edges))
            if min(groups) >= least:
                yield _reduced(groups)


def _reduced(groups: tuple[int, ...]) -> Schedule:
    divisor = math.gcd(*groups)
    return Schedule(tuple(g // divisor for g in groups))


def candidates(
    works: Sequence[Work],
    kernels: Sequence[str],
    with_lse: Collection[str],
    transfers: Sequence[str],
    wanted: Wanted | None = None,
    waiting: Collection[str] = (),
) -> list[Candidate]:
    """What is worth measuring, simplest first, for the methods of ``works``.

    ``kernels`` serve the call on every rank, the preferred first; those ``with_lse`` also give the log-sum-exp there,
    those ``waiting`` can wait for their keys; ``transfers`` likewise. Raises UnavailableError, the same on every rank,
    where nothing is left of what was ``wanted``.
    """
    wanted, offer = wanted or Wanted(), _Offer(kernels, with_lse, waiting, transfers)
    found = list(dict.fromkeys(c for work in works for c in _of_method(work, offer, wanted)))
    allowed = [candidate for candidate in found if wanted.allows(candidate)]
    if not allowed:
        why = _why_not(works, offer, wanted)
        raise UnavailableError(f"the plan that was asked for ({wanted}) cannot run here: {why}")
    by_method = {work.method: work for work in works}
    seconds = {candidate: estimate_s(by_method[candidate.method], candidate.schedule, PRUNING) for candidate in allowed}
    plain = allowed[0]  # what everything else has to beat is always measured; then what is best at most shapes
    kept, spent = [plain], CALLS_MEASURED * seconds[plain]
    for candidate in sorted(allowed[1:], key=lambda c: (c.schedule not in USUALLY_BEST, seconds[c])):
        spent += CALLS_MEASURED * seconds[candidate]
        if spent < BUDGET_S or len(kept) < FEWEST_MEASURED:
            kept.append(candidate)
    return sorted(kept, key=lambda c: (c.graph, *_complexity(c.schedule)))


@dataclass(frozen=True)
class _Offer:
    """What there is on every rank; see ``candidates``."""

    kernels: Sequence[str]
    with_lse: Collection[str]
    waiting: Collection[str]
    transfers: Sequence[str]

    def no_local_first(self, work: Work, kernel: str) -> str | None:
        """Why ``kernel`` cannot run that schedule, or None."""
        if work.ulysses_degree > 1:
            return "local_first belongs to agkv: under ulysses a rank's queries come from the others too"
        if kernel not in self.with_lse:
            return f"local_first merges by the log-sum-exp, which kernel {kernel} does not give here"
        if work.text_queries:
            return "local_first would round the text's output differently on every rank"
        return None if work.least_own_rows else "local_first needs a token on every rank"

    def no_fused(self, work: Work, kernel: str) -> str | None:
        """Why ``kernel`` cannot run that schedule, or None."""
        if work.ulysses_degree > 1:
            return "a fused schedule belongs to agkv: under ulysses a rank's queries come from the others too"
        if kernel not in self.waiting:
            return f"a fused schedule needs a kernel that waits for keys itself, which {kernel} does not here"
        if "ce" not in self.transfers:
            return "a fused schedule needs copy engines: its kernel leaves no SM to other transfers"
        return None if work.least_own_rows else "a fused schedule needs a token on every rank"


def _of_method(work: Work, offer: _Offer, wanted: Wanted) -> Iterator[Candidate]:
    preferred = wanted.kernel or offer.kernels[0]
    transfers = [name for name in offer.transfers if wanted.transfer in (None, name)]
    for kernel in offer.kernels:
        local, fused = offer.no_local_first(work, kernel) is None, offer.no_fused(work, kernel) is None
        every = schedules(work, local, fused=fused) if kernel == preferred else [ONE_SHOT]
        for schedule in [wanted.schedule] if wanted.schedule else every:
            if (schedule.local_first and not local) or (schedule.fused and not fused):
                continue
            short = estimate_s(work, schedule, PRUNING) < GRAPH_BELOW_S
            # copy engines are best beside a kernel; where nothing runs beside a short transfer, SMs may start sooner
            choice = transfers if short and schedule == ONE_SHOT and kernel == preferred else transfers[:1]
            if schedule.fused:
                choice = [name for name in transfers if name == "ce"]
            for transfer, graph in product(choice, _graphs(schedule, short, wanted)):
                yield Candidate(work.method, work.ulysses_degree, transfer, schedule, kernel, graph)


def _graphs(schedule: Schedule, short: bool, wanted: Wanted) -> tuple[bool, ...]:
    """Eagerly, as a graph, or both: where the host's share counts, more launches make it only worse without one."""
    if wanted.graph is not None:
        return (wanted.graph,)
    return (False, True) if short and len(schedule.groups) == 1 else (short,)


def _why_not(works: Sequence[Work], offer: _Offer, wanted: Wanted) -> str:
    if wanted.method not in (None, *(work.method for work in works)):
        return f"the session's method is {' or '.join(work.method for work in works)}"
    if wanted.kernel not in (None, *offer.kernels):
        return f"kernel {wanted.kernel} does not serve this call; {', '.join(offer.kernels)} would"
    if wanted.transfer not in (None, *offer.transfers):
        return f"the session's transfer is {' or '.join(offer.transfers)}"
    ways = [(work, kernel) for work in works for kernel in offer.kernels]
    reasons: list[str | None] = []
    if wanted.schedule is not None and wanted.schedule.local_first:
        reasons = [offer.no_local_first(*way) for way in ways]
    if wanted.schedule is not None and wanted.schedule.fused:
        told = f"a fused schedule travels by copy engine, not by {wanted.transfer}"
        reasons = [offer.no_fused(*way) for way in ways] + [None if wanted.transfer in (None, "ce") else told]
    return next((why for why in reasons if why is not None), "nothing fits it")
