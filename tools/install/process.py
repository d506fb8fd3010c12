"""The one door through which the installer starts other programs."""

import collections
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.install.errors import InstallError

_TAIL_LINES = 60


@dataclass(frozen=True)
class Ended:
    """How a program ended; ``code`` is 127 where it could not start, None where it was stopped at the time limit."""

    code: int | None
    stdout: str = ""
    stderr: str = ""


def ask(
    command: Sequence[str | Path],
    *,
    limit_s: float = 30.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    text: str = "",
) -> Ended:
    """Run ``command`` with ``text`` as its input to its end or the limit, and return what it said; raises nothing."""
    try:
        ended = subprocess.run(
            [str(part) for part in command],
            input=text,
            env=env,
            cwd=cwd,
            timeout=limit_s,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(None, stderr=f"stopped after {limit_s:g} s")
    except (OSError, ValueError) as error:
        return Ended(127, stderr=str(error))
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], bool] | None = None,
) -> None:
    """Run ``command`` and give each line of its output to ``on_line``, which returns whether it was mere progress.

    A failure raises one InstallError with the command, its code, and the last lines that were more than progress.
    """
    words = [str(part) for part in command]
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
    try:
        child = subprocess.Popen(
            words,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise InstallError(failure(words, 127, str(error), cwd)) from error
    with child:
        assert child.stdout is not None
        for line in child.stdout:
            line = line.rstrip("\n")
            if on_line is None or not on_line(line):
                tail.append(line)
    if child.returncode != 0:
        raise InstallError(failure(words, child.returncode, "\n".join(tail), cwd))


def failure(command: Sequence[str], code: int | None, output: str, cwd: Path | None = None) -> str:
    """One message about a program that failed: the command, its code, and the end of its output."""
    how = "did not end in time" if code is None else f"ended with code {code}"
    where = f" in {cwd}" if cwd else ""
    return f"a command{where} {how}:\n  {shlex.join(command)}\n{output.rstrip() or '(it printed nothing)'}"


def environ() -> Mapping[str, str]:
    """The environment of this process, for those who only read it."""
    return os.environ


def surroundings(
    changes: Mapping[str, str] | None = None, *, prepend: Mapping[str, Sequence[Path]] | None = None
) -> dict[str, str]:
    """The environment for a child: our own with ``changes``, and with folders put before those of a search path.

    The variables that git sets for its hooks are left out: they would point our git commands at another repository.
    """
    made = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | dict(changes or {})
    for name, folders in (prepend or {}).items():
        made[name] = os.pathsep.join([*map(str, folders), *([made[name]] if made.get(name) else [])])
    return made
