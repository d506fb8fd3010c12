"""How the installer ends, and the error that is one message for the user."""

import sys
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of everything here."""

    RIGHT = 0
    FAILED = 1  # a check failed
    USAGE = 2
    INCOMPLETE = 3  # hardware or software is absent


class InstallError(Exception):
    """One message for the user: what was asked, what was found, what to do."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def fail(program: str, error: InstallError) -> ExitCode:
    """Write ``error`` to stderr as the last word of ``program``, and return how it ends."""
    print(f"{program}: {error}", file=sys.stderr)
    return error.exit_code
