"""The extension over a long time: very many calls, many shapes, and beginning and ending beside its neighbours.

    FAST_CP_LIBRARY=build/libfast_cp.so python -m torch.distributed.run --standalone --nproc-per-node=2 \
        tests/multigpu/extension_endurance.py --output endurance.json

Prints a short table last; exit code 0 where everything holds. With ``--one-gpu`` processes take turns on the GPU, so
fewer calls are made, and NCCL and torch's symmetric memory are left out. ``--steps`` chooses parts.
"""

import argparse
import sys
from functools import partial
from typing import Any

import attention_cases
import common
import torch
from common import Place
from endurance_calls import many_calls
from endurance_sessions import living_together, resolutions

from chitu_diffusion.parallel.cp.fast.runtime import init_fast_cp

STEPS = ("neighbours", "calls", "resolutions")
GROWTH_PERCENT = {"gpu": 1.0, "tensors": 1.0, "host": 2.0}


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__, limit=280)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--calls", type=int, default=None, help="default: 100000, and 4000 with --one-gpu")
    parser.add_argument("--budget", type=float, default=100, help="seconds for the calls")
    parser.add_argument("--every", type=int, default=7, help="each so many-th call is checked")
    parser.add_argument("--resolutions", type=int, default=200)
    options = parser.parse_args()
    options.calls = options.calls or (4_000 if options.one_gpu else 100_000)
    return options


def run_step(name: str, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """One part, with a runtime of its own."""
    if name == "neighbours":
        return living_together(place, times=3)
    with init_fast_cp(
        device=place.device, pool_bytes=attention_cases.POOL_BYTES, timeout_s=attention_cases.TIMEOUT_S
    ) as fast:
        found = many_calls(place, options) if name == "calls" else resolutions(place, fast, options.resolutions, 20)
        common.together()
        return found


def verdict(report: dict[str, Any]) -> dict[str, bool]:
    checks: dict[str, bool] = {}
    if "neighbours" in report:
        found = report["neighbours"]
        checks[f"{found['times']} lives: results right" + (" (no neighbours)" if found["skipped"] else "")] = (
            found["wrong"] == 0
        )
        checks[f"memory back within 64 MB ({found['left_mb']} MB left)"] = found["left_mb"] <= 64
    if "calls" in report:
        found = report["calls"]
        checks[f"{found['calls']} of {found['asked']} calls made"] = found["calls"] == found["asked"]
        checks[f"{found['checked']} calls checked, {found['wrong']} wrong"] = found["wrong"] == 0
        for name, percent in found["growth_percent"].items():
            checks[f"memory ({name}) grows {percent} %"] = percent <= GROWTH_PERCENT[name]
    if "resolutions" in report:
        found = report["resolutions"]
        grown = found["last_100_growth_percent"]
        checks[f"{found['resolutions']} resolutions: the last 100 grow {grown['gpu']} % (host {grown['host']} %)"] = (
            grown["gpu"] < 2
        )
        checks[f"the first {found['again']} again: equal bits"] = found["unlike"] == 0 and found["again"] == 20
        checks[f"no tuning again ({found['timed_calls']} calls timed before)"] = (
            found["timed_again"] == 0 and found["timed_calls"] > 0
        )
    return checks


def main() -> int:
    options = arguments()
    place = common.start(options)
    torch.set_num_threads(4)  # the reference's; torch.distributed.run asks for 1
    report: dict[str, Any] = {"world": place.world, "one_gpu": place.one_gpu}
    for name in STEPS:
        if name in options.steps:
            common.step(name, report, partial(run_step, name, place, options), options.output)
    return common.finish(report, verdict(report), options.output)


if __name__ == "__main__":
    sys.exit(main())
