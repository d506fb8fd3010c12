"""Starting the ranks of one degree, and going on without a case that fails: no rank is left waiting. No torch."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from chitu_diffusion.parallel.cp.fast.test import report
from chitu_diffusion.parallel.cp.fast.test.report import Record
from chitu_diffusion.parallel.cp.fast.test.rows import Case
from chitu_diffusion.parallel.cp.interrupts import uninterrupted

WORKER = "chitu_diffusion.parallel.cp.fast.test.worker"
GRACE_S = 10.0  # for the other ranks to end by themselves when one has failed
START_S = 120.0  # for importing, beside the first case's limit
POLL_S = 0.05
# one host whose GPUs others may share: NVLink multicast stays off
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def run(cases: Sequence[Case], outdir: Path, device: str, limit_s: float, module: str = WORKER) -> list[Record]:
    """Every case of one degree, by as many starts as it takes; ``module`` is what a rank runs."""
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            reason = _start(left, outdir, device, limit_s, Path(folder), module)
        left = [case for case in left if report.read(outdir, case) is None]
        if left:
            failed = Record(left[0], report.FAILED, reason or "the ranks ended without a result")
            report.write(outdir, failed)
            print(report.line(failed), flush=True)
            left = left[1:]
    return [record for case in cases if (record := report.read(outdir, case)) is not None]


def _start(cases: Sequence[Case], outdir: Path, device: str, limit_s: float, folder: Path, module: str) -> str | None:
    """Why the ranks did not come to the end, None where they did."""
    job = {"cases": [asdict(case) for case in cases], "outdir": str(outdir), "device": device}
    (folder / "job.json").write_text(json.dumps(job))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with uninterrupted():
            ranks += [_rank(rank, cases[0].cp, folder, module) for rank in range(cases[0].cp)]
        return _watch(ranks, lambda: sum((outdir / f"{case.name}.json").exists() for case in cases), limit_s, folder)
    finally:
        _end(ranks)


def _rank(rank: int, world: int, folder: Path, module: str) -> subprocess.Popen[bytes]:
    threads = str(max(1, len(os.sched_getaffinity(0)) // world))
    own = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "CHITU_ACCEPTANCE_JOB": str(folder)}
    environment = {"OMP_NUM_THREADS": threads, **NO_MULTICAST, **os.environ, **own}
    return subprocess.Popen([sys.executable, "-m", module], env=environment, start_new_session=True)


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], done: Callable[[], int], limit_s: float, folder: Path
) -> str | None:
    finished, since, allowed = 0, time.monotonic(), limit_s + START_S
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return None
        if any(codes):
            return _reason(ranks, folder)
        if (now_done := done()) > finished:
            finished, since, allowed = now_done, time.monotonic(), limit_s
        if time.monotonic() - since > allowed:
            return f"it did not end within {limit_s:g} s; --limit gives it more"
        time.sleep(POLL_S)


def _reason(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> str:
    """What the first rank that says something says; the others get a moment to say it."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)
    for number, rank in enumerate(ranks):
        told = folder / f"failure-{number}.txt"
        if told.exists():
            return f"rank {number}: {told.read_text()}"
        if (code := rank.poll()) not in (None, 0):
            return f"rank {number} ended with code {code}"
    return "a rank failed"


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # it may wait for a rank that is gone
        rank.wait()
