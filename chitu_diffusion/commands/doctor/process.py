"""The one door through which the doctor starts other programs."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
    try:
        child = subprocess.Popen(
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
    try:
        stdout, stderr = child.communicate(timeout=limit_s)
        return Ended(child.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        return Ended(None, *_kill(child))
    except BaseException:  # an interrupted doctor leaves no process behind
        _kill(child)
        raise


def _kill(child: subprocess.Popen[str]) -> tuple[str, str]:
    os.killpg(child.pid, signal.SIGKILL)
    return child.communicate()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
