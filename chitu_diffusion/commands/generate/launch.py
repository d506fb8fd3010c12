"""Starting the ranks without a launcher, and leaving none behind, however it ends. Imports no torch."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from chitu_diffusion.commands.children import Interrupted, end, end_with, how_it_ended, interrupt, wait
from chitu_diffusion.parallel.cp.errors import ExitCode
from chitu_diffusion.parallel.cp.interrupts import STOPPING

PARENT = "CHITU_GENERATE_PARENT"  # tells a child who started it
STORE = "CHITU_GENERATE_STORE"  # and where the ranks meet
GRACE_S = 10.0  # for ranks to notice that one has failed
TOLD = (ExitCode.CHECK_FAILED, ExitCode.WRONG_USAGE, ExitCode.INCOMPLETE)  # codes of ranks whose job has said why


def say(message: str, environ: Mapping[str, str]) -> None:
    """The job's one message, on stderr, and where torch.distributed.run looks for what it ends its report with."""
    print(f"chitu: {message}", file=sys.stderr, flush=True)
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"timestamp": str(int(time.time())), "py_callstack": message}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def launched_world(environ: Mapping[str, str]) -> int | None:
    """The number of ranks that a launcher started, this one among them; None without a launcher."""
    return int(environ.get("WORLD_SIZE", "1")) if "RANK" in environ else None


def run(command: Sequence[str], size: int) -> int:
    """Start ``size`` ranks of ``command``, wait for all of them, and return the job's exit code."""
    for number in STOPPING:
        signal.signal(number, interrupt)
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="chitu-generate-") as folder:
        try:
            for rank in range(size):
                environ = child_environment(os.environ, rank, size, Path(folder) / "store")
                # a session of its own: Ctrl-C reaches this process alone, which ends the others
                children.append(
                    subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
                )
            codes = wait(children, GRACE_S)
        except Interrupted as interruption:
            print("chitu: interrupted; all processes were ended", file=sys.stderr)
            return 128 + interruption.number
        finally:
            end(children)
    return conclude(codes)


def child_environment(ours: Mapping[str, str], rank: int, size: int, store: Path) -> dict[str, str]:
    """The variables of one rank, as torch.distributed.run would set them, but for the place where ranks meet."""
    return {
        # one rank must not take the cores of another; what the user has set stands
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // size)),
        # torch's own account of a lost rank would stand around our sentence
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **ours,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        STORE: str(store),
        PARENT: str(os.getpid()),
    }


def conclude(codes: Sequence[int | None]) -> int:
    """The job's exit code. Where no rank has said what is wrong, say which one ended and how."""
    if all(code == 0 for code in codes):
        return ExitCode.RIGHT
    told = [code for code in codes if code in TOLD]
    if told:
        return told[0]
    failed = [(rank, code) for rank, code in enumerate(codes) if code != 0]
    # one that ended by itself explains more than one that had to be ended
    rank, code = next((entry for entry in failed if entry[1] is not None), failed[0])
    print(f"chitu: rank {rank} of {len(codes)} {how_it_ended(code)}; the other ranks were ended too", file=sys.stderr)
    return ExitCode.CHECK_FAILED


def end_with_parent(environ: Mapping[str, str]) -> None:
    """In a child of ``run``: the kernel ends this process when its parent ends, even by SIGKILL."""
    end_with(environ.get(PARENT))
