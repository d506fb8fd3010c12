"""One line of the doctor's answer, and the whole of it."""

from dataclasses import dataclass
from typing import Literal

from chitu_diffusion.commands.doctor.facts import Version
from chitu_diffusion.parallel.cp.errors import ExitCode
from chitu_diffusion.parallel.cp.fast import extension

State = Literal["ok", "missing", "wrong"]
SETUP = extension.NEXT_STEP

# What --require accepts; a check names those that it belongs to.
REQUIREMENTS = ("nccl", "fast", "cute")
ALL = REQUIREMENTS
BOTH = ("nccl", "fast")
FAST = ("fast",)
CUTE = ("cute",)
SELF_TEST = ("self-test",)  # not typed: whoever asks for the self-test requires it


@dataclass(frozen=True)
class Check:
    """``missing`` is not there, which matters only to who needs it; ``wrong`` is there and will not work.

    ``needed`` and ``next_step`` are None where nothing is to be done.
    """

    name: str
    state: State
    found: str
    needed: str | None = None
    next_step: str | None = None
    required_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All checks, what was asked for, how the command ends, and the sentence that says why."""

    checks: tuple[Check, ...]
    required: tuple[str, ...]
    exit_code: ExitCode
    verdict: str


def dotted(version: Version | None) -> str:
    """A version as people write it."""
    return "unknown version" if version is None else ".".join(map(str, version))
