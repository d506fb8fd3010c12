"""One rank of the acceptance test: ``python -m …test.worker``, started by ``launch``."""

import json
import os
import sys
import traceback
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import CPError, ExitCode
from chitu_diffusion.parallel.cp.fast.test import report
from chitu_diffusion.parallel.cp.fast.test.case import Place, RowRun
from chitu_diffusion.parallel.cp.fast.test.rows import ROWS, Case

JOB, FAILURE = "job.json", "failure-{rank}.txt"
GROUP_LIMIT_S = 600.0


def main() -> int:
    """Run the job's cases in order; rank 0 writes a record for each and prints its line."""
    folder, rank = Path(os.environ["CHITU_ACCEPTANCE_JOB"]), int(os.environ["RANK"])
    job = json.loads((folder / JOB).read_text())
    cases = [Case(**case) for case in job["cases"]]
    try:
        place = join(job["device"], rank, int(os.environ["WORLD_SIZE"]), folder)
        for name, group in groupby(cases, key=lambda case: case.row):
            run_row(name, list(group), place, Path(job["outdir"]))
    except Exception as error:
        told = str(error) if isinstance(error, CPError) else f"{type(error).__name__}: {error}"
        (folder / FAILURE.format(rank=rank)).write_text(told.splitlines()[0] if told else "no message")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(ExitCode.CHECK_FAILED)  # no clean-up, which would wait for the others
    dist.destroy_process_group()
    return ExitCode.RIGHT


def run_row(name: str, cases: list[Case], place: Place, outdir: Path) -> None:
    """All methods of one row, which share what one GPU computes."""
    row = ROWS[name] if place.device.type == "cuda" else ROWS[name].reduced()
    run = RowRun(row, place)
    for case in cases:
        record = run.run(case)
        if place.rank == 0:
            report.write(outdir, record)
            print(report.line(record), flush=True)
    run.close()


def join(device_type: str, rank: int, world: int, folder: Path) -> Place:
    """The process group of this job, and a group for this rank alone."""
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_LIMIT_S),
        device_id=device if on_gpu else None,
    )
    alone = [dist.new_group([other]) for other in range(world)][rank]
    whole = dist.group.WORLD
    assert whole is not None
    control = ControlChannel(whole, 60.0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return Place(rank, world, device, dtype, whole, alone, control, describe(device, dtype, world))


def describe(device: torch.device, dtype: torch.dtype, world: int) -> dict[str, Any]:
    """Facts about the run."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU, reduced shapes",
        "ranks": world,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "commit": os.environ.get("CHITU_COMMIT"),
    }


if __name__ == "__main__":
    raise SystemExit(main())
