"""Stands in for compare's worker: by the names of its methods a case is right, hangs, or ends the process."""

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tools.benchmarks.fast_cp_frameworks.compare.jobfile import Job, write_results, write_step
from tools.benchmarks.fast_cp_frameworks.result import CaseRecord, Result


def main(folder: Path) -> None:
    job, rank, world = Job.read(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results: list[tuple[int, Result]] = []
    for number, case in enumerate(job.cases):
        if rank == 0:
            write_step(folder, number, number + 1)
        if case.method == "hangs":
            time.sleep(1000)
        if case.method == "ends":
            os._exit(7 if rank == 0 else 0)
        record = CaseRecord(**asdict(case), world_size=world)
        results.append((number, Result(status="complete", case=record)))
        if rank == 0:
            write_results(folder, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
