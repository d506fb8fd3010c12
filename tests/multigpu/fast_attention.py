"""cp_attention over the extension: against the exact reference, and bit by bit against NCCL.

    FAST_CP_LIBRARY=build/libfast_cp.so python -m torch.distributed.run --standalone --nproc-per-node=2 \
        tests/multigpu/fast_attention.py --output fast_attention.json

Prints a short table last; exit code 0 where everything is right. With ``--one-gpu`` there is no NCCL to compare with.
"""

import argparse
import random
import sys
from collections import Counter
from functools import cache
from typing import Any

import attention_cases as cases
import common
import torch
from common import Place

from chitu_diffusion.parallel.cp.fast.attention import cute_load
from chitu_diffusion.parallel.cp.fast.runtime import FastCP, init_fast_cp
from chitu_diffusion.parallel.cp.layout import ulysses_degree
from tests.gloo.scenarios import Case


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__, limit=200)
    parser.add_argument("--cases", type=int, default=500, help="compared with NCCL, bit by bit")
    parser.add_argument("--exact", type=int, default=160, help="of them, compared with the exact reference too")
    return parser.parse_args()


class Tally:
    """What was seen on this rank."""

    def __init__(self) -> None:
        self.inexact: list[str] = []
        self.unlike_nccl: list[str] = []
        self.counts: Counter[str] = Counter()
        self.worst = 0.0
        self.compared = 0


def kernel_for(case: Case, rng: random.Random) -> str:
    """A kernel that serves the case and gives the log-sum-exp, by name: then the only one on both transports."""
    names = ["cudnn", "triton"]
    if not case.valid_text:
        names.append("flash")
        names += ["cute"] * (3 * (cute_problem() is None))
    return rng.choice(names)


def way_of(case: Case, world: int) -> str:
    """Which of the three ways the heads take."""
    degree = ulysses_degree(case.method, world, case.kv_heads or case.heads)
    return "by AGKV" if degree == 1 else "by Ulysses" if degree == world else "by the hybrid"


def ways_of(world: int) -> list[str]:
    """Those that there are: the hybrid needs a number of ranks that something divides."""
    hybrid = any(world % degree == 0 for degree in range(2, world))
    return ["by AGKV", "by Ulysses"] + ["by the hybrid"] * hybrid


def next_case(rng: random.Random, seed: int, world: int) -> Case:
    """A random one; the first are one of each way, which few random ones may lack."""
    case, ways = cases.random_case(rng, seed), ways_of(world)
    while seed < len(ways) and way_of(case, world) != ways[seed]:
        case = cases.random_case(rng, seed)
    return case


@cache
def cute_problem() -> str | None:
    """Why CuTe is not tried, where it is not installed."""
    return cute_load.source().problem


class Overlap:
    """Keeps the SMs busy beside some of the calls."""

    def __init__(self, place: Place) -> None:
        self.stream = torch.cuda.Stream(place.device)  # type: ignore[no-untyped-call]
        self.a = torch.randn(4096, 4096, device=place.device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.a)
        torch.cuda.synchronize()

    def begin(self) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(4):
                torch.mm(self.a, self.a, out=self.out)


def one_case(
    seed: int, rng: random.Random, sessions: cases.Sessions, overlap: Overlap, exact: bool, tally: Tally
) -> None:
    place = sessions.place
    case = next_case(rng, seed, place.world)
    transfer, busy = rng.choice(cases.TRANSFERS), rng.random() < 0.3
    plan = cases.random_plan(rng, case, place.world)
    kernel = kernel_for(case, rng)
    if plan is not None and plan.startswith("fused"):
        kernel, transfer = "cute", "ce"
    given = cases.give(case, place)
    fast_session = sessions.get(case.method, kernel=kernel, transfer=transfer, plan=plan)
    if busy:
        overlap.begin()
    fast = given.attend_again(fast_session)
    ran = given.plan(fast_session)
    tally.counts[f"{case.method}, {transfer}"] += 1
    tally.counts[way_of(case, place.world)] += 1
    tally.counts[str(ran.schedule) + (" as a graph" if ran.graph else "")] += 1
    tally.counts["beside a GEMM"] += busy
    tally.counts[f"kernel {kernel}"] += 1
    if fast is None:
        tally.inexact.append(f"repeats differ, {ran.name}: {case}")
        return
    if not place.one_gpu and ran.schedule.exact:
        nccl = given.attend(sessions.get(case.method, kernel=kernel, backend="nccl"))
        tally.compared += 1
        if not cases.same_bits(fast, nccl):
            tally.unlike_nccl.append(f"{ran.name}: {case}")
    if exact:
        excess = given.excess(fast, place, ran.kernel)
        tally.worst = max(tally.worst, excess)
        if not excess <= 1:
            tally.inexact.append(f"{excess:.1f} times the limit, {ran.name}: {case}")


def random_calls(place: Place, options: argparse.Namespace, fast: FastCP) -> dict[str, Any]:
    sessions, overlap, tally, rng = cases.Sessions(place, fast), Overlap(place), Tally(), random.Random(3)
    count = options.exact if place.one_gpu else options.cases
    for seed in range(count):
        one_case(seed, rng, sessions, overlap, seed < options.exact, tally)
    common.together()
    fast.check()
    return {
        "cases": count,
        "exact": min(options.exact, count),
        "compared_with_nccl": tally.compared,
        "inexact": common.total(tally.inexact),
        "unlike_nccl": common.total(tally.unlike_nccl),
        "worst_error_over_limit": round(common.largest(tally.worst), 3),
        "counts": dict(sorted(tally.counts.items())),
    }


def main() -> int:
    options = arguments()
    place = common.start(options)
    torch.set_num_threads(4)  # the reference's; torch.distributed.run asks for 1
    report: dict[str, Any] = {"world": place.world, "one_gpu": place.one_gpu}
    with init_fast_cp(device=place.device, pool_bytes=cases.POOL_BYTES, timeout_s=cases.TIMEOUT_S) as fast:
        common.step("calls", report, lambda: random_calls(place, options, fast), options.output)
    found = report["calls"]
    if place.rank == 0:
        print(", ".join(f"{name}: {count}" for name, count in found["counts"].items()))
        print(f"{found['exact']} exact, worst error {found['worst_error_over_limit']} of the limit; ", end="")
        print(f"{found['compared_with_nccl']} compared with NCCL")
    checks = {
        f"{found['exact']} cases within the error of one process": found["inexact"] == 0,
        "as many as were asked for": found["exact"] == options.exact,
    }
    if not place.one_gpu:
        checks[f"{found['compared_with_nccl']} cases equal to NCCL's bits"] = found["unlike_nccl"] == 0
    return common.finish(report, checks, options.output)


if __name__ == "__main__":
    sys.exit(main())
