"""The processes of a job that has no launcher: waiting for them, and leaving none behind. Imports no torch."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

from chitu_diffusion.parallel.cp.errors import ExitCode
from chitu_diffusion.parallel.cp.interrupts import STOPPING

ENDING_S = 5.0
_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """SIGINT or SIGTERM reached the process that started the others."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


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
    for number in STOPPING:
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


def end_with(parent: str | None) -> None:
    """The kernel ends this process when the process ``parent`` that started it ends, even by SIGKILL; None: nobody."""
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before we asked
        os._exit(ExitCode.CHECK_FAILED)


def interrupt(number: int, _frame: FrameType | None) -> None:
    """A signal handler."""
    raise Interrupted(number)
