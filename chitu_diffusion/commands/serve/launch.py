"""Starting the ranks of a server without a launcher, and leaving none behind. Imports no torch.

Once the server takes requests, the end of a rank is rank 0's to tell: it stays, so that /health can say what happened.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from chitu_diffusion.commands.children import Interrupted, end, interrupt
from chitu_diffusion.commands.generate.launch import (
    GRACE_S,
    PARENT,
    STORE,
    child_environment,
    conclude,
)
from chitu_diffusion.parallel.cp.interrupts import STOPPING

STOP_S = 22.0  # for rank 0 to finish what runs (limits.shutdown_s is at most 15) and to let the others go
Child = subprocess.Popen[bytes]


def is_child(environ: Mapping[str, str]) -> bool:
    """Whether ``run`` has started this process."""
    return PARENT in environ


def ready_file(environ: Mapping[str, str]) -> Path | None:
    """The file that tells ``run`` that all ranks are connected; None in a process that it has not started."""
    return Path(environ[STORE]).with_name("ready") if STORE in environ else None


def run(command: Sequence[str], size: int) -> int:
    """Start ``size`` ranks of ``command``, wait for rank 0, and return the server's exit code."""
    for number in STOPPING:
        signal.signal(number, interrupt)
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="chitu-serve-") as folder:
        store = Path(folder) / "store"
        try:
            for rank in range(size):
                environ = child_environment(os.environ, rank, size, store)
                # a session of its own: Ctrl-C reaches this process alone, which ends the others
                children.append(
                    subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
                )
            return _wait(children, store.with_name("ready"))
        except Interrupted as interruption:
            return _stop(children, interruption.number)
        finally:
            end(children)


def _wait(children: Sequence[Child], ready: Path) -> int:
    """The exit code, when rank 0 has ended, or when one has before the server was ready."""
    deadline: float | None = None
    while True:
        codes = [child.poll() for child in children]
        if codes[0] is not None or (deadline is not None and time.monotonic() > deadline):
            end(children)  # those that still run are told apart from those that have ended by themselves
            return _code(codes, ready)
        if deadline is None and any(codes) and not ready.exists():
            deadline = time.monotonic() + GRACE_S
        time.sleep(0.05)


def _code(codes: Sequence[int | None], ready: Path) -> int:
    first, *others = codes
    if first is not None and (ready.exists() or first < 0):
        return first if first >= 0 else conclude([first, *(0 for _ in others)])  # they end because it has
    return conclude([0 if code is None and first is not None else code for code in codes])


def _stop(children: Sequence[Child], number: int) -> int:
    """Pass a signal on to rank 0, which ends the others; 128 + number where it could not do so in time."""
    if children:
        children[0].send_signal(number)
    deadline = time.monotonic() + STOP_S
    try:
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
    except Interrupted:
        print("chitu: interrupted twice; all processes were ended", file=sys.stderr)
    code = children[0].poll() if children else None
    return 128 + number if code is None or code < 0 else code
