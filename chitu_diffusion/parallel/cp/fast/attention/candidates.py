"""Which ways to run a call are worth measuring: the cost model prunes, and never decides.

Its constants are measured on H200; on other hardware the order it gives is rougher, and the measurement that follows
decides in any case.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
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
BUDGET_S = 1.2  # of a GPU's time that warming up may take; candidates beyond it are not measured
CALLS_MEASURED, FEWEST_MEASURED = 5, 3  # of one candidate before the rounds that are counted, and some of those


def schedules(work: Work, local: bool, hardware: Hardware = PRUNING) -> list[Schedule]:
    """Schedules worth measuring on ``hardware``, simplest first; ``local``: also those that attend locally first."""
    best: dict[int, tuple[float, Schedule]] = {}  # of every number of groups
    for schedule in _pipelines(work):
        groups, seconds = len(schedule.groups), estimate_s(work, schedule, hardware)
        if groups not in best or seconds < best[groups][0]:
            best[groups] = seconds, schedule
    equal = [Schedule((1,) * n) for n in (2, 4) if work.num_kv_heads >= 2 * n]
    # in groups where more keys come than are there: with two ranks all of them have come when the own ones are done
    more = work.kv_rows > 2 * work.least_own_rows + 2
    split = [Schedule((1,) * n, local_first=True) for n in LOCAL_GROUPS if more and work.num_kv_heads >= 2 * n]
    found = [*([LOCAL_FIRST, *split] if local else []), *equal, *(schedule for _, schedule in best.values())]
    return [ONE_SHOT, *sorted(dict.fromkeys(found), key=_complexity)]


def _complexity(schedule: Schedule) -> tuple[bool, int, bool]:
    return len(set(schedule.groups)) > 1, len(schedule.groups), schedule.local_first


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
) -> list[Candidate]:
    """What is worth measuring, simplest first, for the methods of ``works``.

    ``kernels`` serve the call on every rank, the preferred first, and those ``with_lse`` also give the log-sum-exp
    there; ``transfers`` likewise. Raises UnavailableError, the same on every rank, where nothing is left of what was
    ``wanted``.
    """
    wanted = wanted or Wanted()
    found = list(dict.fromkeys(c for work in works for c in _of_method(work, kernels, with_lse, transfers, wanted)))
    allowed = [candidate for candidate in found if wanted.allows(candidate)]
    if not allowed:
        why = _why_not(works, kernels, with_lse, transfers, wanted)
        raise UnavailableError(f"the plan that was asked for ({wanted}) cannot run here: {why}")
    by_method = {work.method: work for work in works}
    seconds = {candidate: estimate_s(by_method[candidate.method], candidate.schedule, PRUNING) for candidate in allowed}
    plain = allowed[0]  # what everything else has to beat is always measured; then what is best at most shapes
    kept, spent = [plain], CALLS_MEASURED * seconds[plain]
    for candidate in sorted(allowed[1:], key=lambda c: (c.schedule != LOCAL_FIRST, seconds[c])):
        spent += CALLS_MEASURED * seconds[candidate]
        if spent < BUDGET_S or len(kept) < FEWEST_MEASURED:
            kept.append(candidate)
    return sorted(kept, key=lambda c: (c.graph, *_complexity(c.schedule)))


def _of_method(
    work: Work, kernels: Sequence[str], with_lse: Collection[str], transfers: Sequence[str], wanted: Wanted
) -> Iterator[Candidate]:
    preferred = wanted.kernel or kernels[0]
    transfers = [name for name in transfers if wanted.transfer in (None, name)]
    for kernel in kernels:
        local = _no_local_first(work, kernel, with_lse) is None
        named = [wanted.schedule] if wanted.schedule else schedules(work, local) if kernel == preferred else [ONE_SHOT]
        for schedule in named:
            if schedule.local_first and not local:
                continue
            short = estimate_s(work, schedule, PRUNING) < GRAPH_BELOW_S
            # copy engines are best beside a kernel; where nothing runs beside a short transfer, SMs may start sooner
            choice = transfers if short and schedule == ONE_SHOT and kernel == preferred else transfers[:1]
            for transfer, graph in product(choice, _graphs(schedule, short, wanted)):
                yield Candidate(work.method, work.ulysses_degree, transfer, schedule, kernel, graph)


def _graphs(schedule: Schedule, short: bool, wanted: Wanted) -> tuple[bool, ...]:
    """Eagerly, as a graph, or both: where the host's share counts, more launches make it only worse without one."""
    if wanted.graph is not None:
        return (wanted.graph,)
    return (False, True) if short and len(schedule.groups) == 1 else (short,)


def _no_local_first(work: Work, kernel: str, with_lse: Collection[str]) -> str | None:
    if work.ulysses_degree > 1:
        return "local_first belongs to agkv: under ulysses a rank's queries come from the others too"
    if kernel not in with_lse:
        return f"local_first merges by the log-sum-exp, which kernel {kernel} does not give here"
    if work.text_queries:
        return "local_first would round the text's output differently on every rank"
    return None if work.least_own_rows else "local_first needs a token on every rank"


def _why_not(
    works: Sequence[Work], kernels: Sequence[str], with_lse: Collection[str], transfers: Sequence[str], wanted: Wanted
) -> str:
    if wanted.method not in (None, *(work.method for work in works)):
        return f"the session's method is {' or '.join(work.method for work in works)}"
    if wanted.kernel not in (None, *kernels):
        return f"kernel {wanted.kernel} does not serve this call; {', '.join(kernels)} would"
    if wanted.transfer not in (None, *transfers):
        return f"the session's transfer is {' or '.join(transfers)}"
    if wanted.schedule is not None and wanted.schedule.local_first:
        reasons = [why for work in works for kernel in kernels if (why := _no_local_first(work, kernel, with_lse))]
        return reasons[0] if reasons else "nothing fits it"
    return "nothing fits it"
