"""One rank of extension_faults.py: calls attention over Fast CP until it is ended, or until a call fails."""

import argparse
import faulthandler
import time
from pathlib import Path

import common
import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.fast.attention import cudnn
from chitu_diffusion.parallel.cp.fast.runtime import FastCP, init_fast_cp
from chitu_diffusion.parallel.cp.session import CPSession

CALLS_BEFORE_RUNNING = 50
RUNNING, RAISES = "[running]", "[raises]"  # lines for the driver
PLANNED = "planned by the test"  # what the raising rank says
TOLD = "[told after"  # how the line with the sentence begins


def call_for_ever(options: argparse.Namespace, fast: FastCP, q: torch.Tensor) -> None:
    """Says so once it is; the last rank raises a second later where the scenario asks for that."""
    config = CPConfig(method=options.method, backend="fast", transfer="ce", timeout_s=options.timeout_s)
    session, calls, running_since = CPSession(config, device=q.device, fast=fast), 0, 0.0
    while True:
        cp_attention(session, q, q, q)
        calls += 1
        if calls % 10 == 0:
            torch.cuda.synchronize()
        if calls == CALLS_BEFORE_RUNNING:
            running_since = time.monotonic()
            print(RUNNING, flush=True)
        last = options.rank == options.world - 1
        if options.scenario == "raising" and last and running_since and time.monotonic() - running_since > 1:
            print(RAISES, flush=True)
            raise ValueError(PLANNED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--limit", type=int, required=True)
    parser.add_argument("--one-gpu", action="store_true")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    place = common.join_group(options.rank, options.world, options.one_gpu, f"file://{options.store}")
    q = torch.randn(1, 512, 8, 64, device=place.device, dtype=torch.bfloat16)
    cudnn.run(q, torch.cat([q, q], 1), torch.cat([q, q], 1), scale=0.125)  # loading it takes longer than a wait may
    common.together()
    began = time.monotonic()
    with init_fast_cp(device=place.device, pool_bytes=256 * common.MB, timeout_s=options.timeout_s) as fast:
        try:
            call_for_ever(options, fast, q)
        except Exception as error:
            print(f"{TOLD} {time.monotonic() - began:.1f} s] {error}", flush=True)
            raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
