"""Starting the ranks without a launcher, and leaving none behind, however it ends. Imports no torch."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from chitu_diffusion.parallel.cp.errors import ExitCode

PARENT = "CHITU_GENERATE_PARENT"  # tells a child who started it
STORE = "CHITU_GENERATE_STORE"  # and where the ranks meet
GRACE_S = 10.0  # for ranks to notice that one has failed
ENDING_S = 5.0
TOLD = (ExitCode.CHECK_FAILED, ExitCode.WRONG_USAGE, ExitCode.INCOMPLETE)  # codes of ranks whose job has said why
_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """SIGINT or SIGTERM reached the process that started the others."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
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


def wait(children: Sequence[subprocess.Popen[bytes]], grace_s: float) -> list[int | None]:
    """Exit codes of all ``children``: None for one that did not end within ``grace_s`` of the first failure."""
    deadline: float | None = None
    while True:
        codes = [child.poll() for child in children]
        if None not in codes or (deadline is not None and time.monotonic() > deadline):
            return codes
        if deadline is None and any(codes):
            deadline = time.monotonic() + grace_s
        time.sleep(0.02)


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


def how_it_ended(code: int | None) -> str:
    """An exit code of subprocess in words."""
    if code is None:
        return "did not end although another one had failed"
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"was ended by signal {-code} ({name})"


def end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end, then make them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave one behind
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.terminate()
    deadline = time.monotonic() + ENDING_S
    for child in running:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def end_with_parent(environ: Mapping[str, str]) -> None:
    """In a child of ``run``: the kernel ends this process when its parent ends, even by SIGKILL."""
    parent = environ.get(PARENT)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before we asked
        os._exit(ExitCode.CHECK_FAILED)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)
