"""Starting the benchmark's processes without a launcher, and leaving none behind, however it ends."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from chitu_diffusion.parallel.cp.errors import ExitCode, UnavailableError
from chitu_diffusion.parallel.cp.fast import extension
from tools.benchmarks.fast_cp_frameworks.options import Options

PARENT = "CHITU_BENCHMARK_PARENT"  # tells a child who started it
CPU_RANKS = 2
GRACE_S = 10.0  # for ranks to notice that one has failed, and for rank 0 to say so
ENDING_S = 5.0
_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """SIGINT or SIGTERM reached the process that started the others."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(module: str, arguments: Sequence[str], options: Options) -> int:
    """Start one process per rank, wait for all of them, and return the job's exit code."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so

    size = _ranks(options.cp_size, torch.cuda.device_count())
    if options.request.needs_extension:
        extension.load()  # a broken one ends here with its sentence, before any rank starts
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    # the store lives here, so that it outlives every rank; the ranks join as clients, as under torch.distributed.run
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            command = [sys.executable, "-m", module, *arguments]
            variables = child_environment(os.environ, rank, size, store.port)
            # a session of its own: Ctrl-C reaches this process alone, which ends the others
            children.append(subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True))
        codes = wait(children, GRACE_S)
    except Interrupted as interruption:
        print("interrupted; all processes of the benchmark were ended", file=sys.stderr)
        return 128 + interruption.number
    finally:
        end(children)
    return conclude(codes)


def _ranks(asked: int | None, gpus: int) -> int:
    if asked is not None and gpus and asked > gpus:
        raise UnavailableError(
            f"--cp-size {asked} was asked for, but this machine has {gpus} GPUs; ask for at most {gpus}"
        )
    return asked or gpus or CPU_RANKS


def child_environment(ours: Mapping[str, str], rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of one rank, as torch.distributed.run would set them."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // size))
    return {
        # one rank must not take the cores of another; what the user has set stands
        "OMP_NUM_THREADS": threads,
        # torch's own account of a lost rank would stand around our sentence
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **ours,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
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
    """The job's exit code. Rank 0 speaks for all; where it ended without a word, say which rank ended and how."""
    if all(code == 0 for code in codes):
        return ExitCode.RIGHT
    if codes[0] in (ExitCode.CHECK_FAILED, ExitCode.WRONG_USAGE, ExitCode.INCOMPLETE):
        return codes[0]
    failed = [(rank, code) for rank, code in enumerate(codes) if code != 0]
    # one that ended by itself explains more than one that had to be ended
    rank, code = next((entry for entry in failed if entry[1] is not None), failed[0])
    print(f"error: rank {rank} of {len(codes)} {how_it_ended(code)}; the other ranks were ended too", file=sys.stderr)
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


def end_with_parent(environment: Mapping[str, str]) -> None:
    """In a child of ``run``: the kernel ends this process when its parent ends, even by SIGKILL."""
    parent = environment.get(PARENT)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before we asked
        os._exit(ExitCode.CHECK_FAILED)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)
