"""Errors and exit codes: what a user reads is one sentence saying what was asked, what was found, what to do."""

import re
from enum import IntEnum

_LONGEST = 300  # characters of a message within another sentence


class ExitCode(IntEnum):
    """How every command of this project ends."""

    RIGHT = 0
    CHECK_FAILED = 1
    WRONG_USAGE = 2
    INCOMPLETE = 3  # the hardware or software that was asked for is not there


class CPError(Exception):
    """Base of every error that this project raises on purpose; ``exit_code`` is what a command ends with."""

    exit_code = ExitCode.CHECK_FAILED


class ConfigError(CPError, ValueError):
    """A name, number or combination of settings that cannot be meant."""

    exit_code = ExitCode.WRONG_USAGE


class InputError(CPError, ValueError):
    """Tensors whose shape, dtype, layout or device does not fit the call."""

    exit_code = ExitCode.WRONG_USAGE


class UnavailableError(CPError, RuntimeError):
    """What was asked for by name is not there: a kernel, a backend, a GPU, a library."""

    exit_code = ExitCode.INCOMPLETE


class DisagreementError(CPError, RuntimeError):
    """Ranks of one group call with different shapes, dtypes or settings, or one of them does not answer."""


def first_line(error: Exception) -> str:
    """Type and first line of an error, short enough for a clause and without the colours that compilers add."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:_LONGEST]}" if lines else type(error).__name__
