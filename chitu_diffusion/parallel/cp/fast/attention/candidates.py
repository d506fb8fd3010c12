"""Which ways to run a call are worth measuring: a cost model in plain numbers, that prunes and never decides.

The model plays a schedule through: groups of heads arrive one after the other, a kernel runs whole waves of tiles over
the SMs, and waits where its keys are not there yet. Its constants are measured on H200 (docs/results/NOTES.md); on
other hardware the order it gives is rougher, and the measurement that follows decides in any case.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product

from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST, ONE_SHOT, Schedule
from chitu_diffusion.parallel.cp.fast.attention.wanted import Wanted

TILE_ROWS = 128  # queries that one SM attends for at a time
FLOPS_PER_SM = 660e12 / 132
LAUNCH_S, SIGNAL_S = 6e-6, 18e-6  # of a kernel behind another; from a send to its announced arrival
COPY_BYTES_PER_S = 3.5e12  # one pass of the merge, or of a copy, over the GPU's memory
LINK_BYTES_PER_S = 340e9
SMALLEST_ROW_BYTES = 1024  # a copy engine is slow on shorter rows
GRAPH_BELOW_S = 20e-3  # the host's share of a call is worth capturing, and the memory of partial outputs is small
MOST_SEARCHED_HEADS = 64
LOCAL_GROUPS = (2, 4)
BUDGET_S = 1.2  # of a GPU's time that warming up may take; candidates beyond it are not measured
CALLS_MEASURED, FEWEST_MEASURED = 5, 3  # of one candidate before the rounds that are counted, and some of those


@dataclass(frozen=True)
class Work:
    """One method's share of a call on the rank that has most of it; bytes are received from other ranks."""

    method: str
    ulysses_degree: int
    batch: int
    q_rows: int
    kv_rows: int
    num_heads: int
    num_kv_heads: int
    head_bytes: int
    bytes_in: int
    bytes_out: int
    least_own_rows: int  # on any rank, of the keys
    text_queries: bool
    num_sms: int = 132

    def kernel_s(self, q_heads: int, keys: float) -> float:
        """Seconds of the kernel for ``q_heads`` heads and that many keys."""
        tiles = self.batch * q_heads * -(-self.q_rows // TILE_ROWS)
        tile_flops = 2 * TILE_ROWS * keys * self.head_bytes  # 4 · rows · keys · D, and 2 bytes to an element
        return LAUNCH_S + math.ceil(tiles / self.num_sms) * tile_flops / FLOPS_PER_SM

    def out_bytes(self, q_heads: int) -> int:
        """Bytes of the output of ``q_heads`` heads on this rank."""
        return self.batch * self.q_rows * q_heads * self.head_bytes


def estimate_s(work: Work, schedule: Schedule) -> float:
    """Seconds that ``schedule`` takes by the model."""
    total, ratio = sum(schedule.groups), work.num_heads // work.num_kv_heads
    bounds = [work.num_kv_heads * w // total for w in accumulate(schedule.groups, initial=0)]
    kv_heads = [b - a for a, b in pairwise(bounds)]
    own = work.least_own_rows if schedule.local_first else 0
    now = work.kernel_s(work.num_heads, own) if schedule.local_first else 0.0
    sent = returned = 0.0
    for count in kv_heads:
        share, heads = count / work.num_kv_heads, count * ratio
        sent += share * work.bytes_in / LINK_BYTES_PER_S
        now = max(now, SIGNAL_S + sent) + work.kernel_s(heads, work.kv_rows - own)
        returned = max(returned, now) + share * work.bytes_out / LINK_BYTES_PER_S
    if schedule.local_first:  # the last merge; those before it run beside attention
        now += LAUNCH_S + 3 * work.out_bytes(kv_heads[-1] * ratio) / COPY_BYTES_PER_S
    if work.bytes_out:
        now = returned + SIGNAL_S + 2 * work.out_bytes(work.num_heads) / COPY_BYTES_PER_S
    return now


def schedules(work: Work, local: bool) -> list[Schedule]:
    """Schedules worth measuring, simplest first; ``local``: also those that attend locally first."""
    best: dict[int, Schedule] = {}  # of every number of groups
    for schedule in _pipelines(work):
        groups = len(schedule.groups)
        if groups not in best or estimate_s(work, schedule) < estimate_s(work, best[groups]):
            best[groups] = schedule
    equal = [Schedule((1,) * n) for n in (2, 4) if work.num_kv_heads >= 2 * n]
    # in groups where more keys come than are there: with two ranks all of them have come when the own ones are done
    more = work.kv_rows > 2 * work.least_own_rows + 2
    split = [Schedule((1,) * n, local_first=True) for n in LOCAL_GROUPS if more and work.num_kv_heads >= 2 * n]
    found = [*([LOCAL_FIRST, *split] if local else []), *equal, *best.values()]
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
    seconds = {candidate: estimate_s(by_method[candidate.method], candidate.schedule) for candidate in allowed}
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
            short = estimate_s(work, schedule) < GRAPH_BELOW_S
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
