"""A few small exchanges by SM and TMA, for compute-sanitizer: see sanitize.sh. Right results are checked too."""

import random
import sys
from dataclasses import replace
from typing import Any

import common
import extension_cases as cases
import torch
from common import Place

from chitu_diffusion.parallel.cp.fast.runtime import init_fast_cp

LONGEST = 40
TIMEOUT_S = 60.0  # under the sanitizer everything is slow


def small_cases(world: int, count: int) -> list[cases.Case]:
    """``count`` cases for each transfer by a kernel: few tokens, uneven and empty shards, text, GQA, chunks."""
    rng, found = random.Random(23), list[cases.Case]()
    while len(found) < 2 * count:
        case = cases.random_case(rng, 80_000 + len(found), world)
        if max(case.split.seq_lens) <= LONGEST:
            transfer = cases.TRANSFERS[1 + len(found) % 2]
            found.append(replace(case, transfer=transfer, overlapped=False))
    return found


def run(place: Place, count: int) -> dict[str, Any]:
    unused = torch.empty(0, device=place.device)
    wrong: list[str] = []
    chosen = small_cases(place.world, count)
    for case in chosen:
        wrong += cases.run_in(case, place.rank, unused) + cases.run_out(case, place.rank, unused)
        wrong += cases.run_calls(case, place.rank)
        torch.cuda.synchronize()
    return {"cases": len(chosen), "wrong": common.total(wrong)}


def main() -> int:
    parser = common.parser(__doc__, limit=60)
    parser.add_argument("--cases", type=int, default=4, help="for each of SM and TMA")
    options = parser.parse_args()
    place = common.start(options)
    report: dict[str, Any] = {"world": place.world, "one_gpu": place.one_gpu}
    with init_fast_cp(device=place.device, pool_bytes=64 * common.MB, timeout_s=TIMEOUT_S) as fast:
        common.step("exchanges", report, lambda: run(place, options.cases), options.output)
        fast.check()
    found = report["exchanges"]
    return common.finish(report, {f"{found['cases']} cases right": found["wrong"] == 0}, options.output)


if __name__ == "__main__":
    sys.exit(main())
