"""Starting the benchmark's processes without a launcher, and leaving none behind, however it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from chitu_diffusion.commands.children import Interrupted, end, end_with, how_it_ended, interrupt, wait
from chitu_diffusion.parallel.cp.errors import ExitCode, UnavailableError
from chitu_diffusion.parallel.cp.fast import extension
from tools.benchmarks.fast_cp_frameworks.options import Options

PARENT = "CHITU_BENCHMARK_PARENT"  # tells a child who started it
CPU_RANKS = 2
GRACE_S = 10.0  # for ranks to notice that one has failed, and for rank 0 to say so


def run(module: str, arguments: Sequence[str], options: Options) -> int:
    """Start one process per rank, wait for all of them, and return the job's exit code."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so

    size = _ranks(options.cp_size, torch.cuda.device_count())
    if options.request.needs_extension:
        extension.load()  # a broken one ends here with its sentence, before any rank starts
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
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


def end_with_parent(environment: Mapping[str, str]) -> None:
    """In a child of ``run``: the kernel ends this process when its parent ends, even by SIGKILL."""
    end_with(environment.get(PARENT))
