"""The one door through which the doctor starts other programs."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from chitu_diffusion.parallel.cp.interrupts import uninterrupted


@dataclass(frozen=True)
class Ended:
    """How a program ended; ``code`` is None where it was killed at the time limit, negative for a signal."""

    code: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def how(self) -> str:
        """The end in words, with the last line of its error output."""
        said = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        last = f": {said[-1][:300]}" if said else ""
        if self.code is None:
            return "it was stopped at the time limit"
        if self.code < 0:
            return f"the process died of {_signal_name(-self.code)}{last}"
        return f"the process ended with code {self.code}{last}"


def run(command: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run ``command`` to its end or the limit. A program that cannot start ends with code 127; nothing is raised.

    The program leads a process group of its own, which is killed as a whole: none of its children is left behind.
    """
    return run_together([command], limit_s=limit_s, env=env)[0]


def run_together(
    commands: Sequence[Sequence[str]], *, limit_s: float, env: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run all ``commands`` at once, as ``run`` runs one."""
    children: list[subprocess.Popen[str] | Ended] = []
    with ThreadPoolExecutor(len(commands)) as threads:
        try:
            with uninterrupted():
                children += [_start(command, env) for command in commands]
            return list(threads.map(lambda child: _finish(child, limit_s), children))
        except BaseException:  # an interrupted doctor leaves no process behind
            for child in children:
                if not isinstance(child, Ended):
                    _kill(child)
            raise


def _start(command: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[str] | Ended:
    try:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return Ended(127, stderr=str(error))


def _finish(child: subprocess.Popen[str] | Ended, limit_s: float) -> Ended:
    if isinstance(child, Ended):
        return child
    try:
        stdout, stderr = child.communicate(timeout=limit_s)
        return Ended(child.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        _kill(child)
        return Ended(None, *child.communicate())


def own_stdout() -> TextIO:
    """In a child: stdout for its answers alone; whatever libraries print from now on goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def _kill(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
