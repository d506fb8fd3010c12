"""Put Fast CP's overlay into a checkout of fast-ulysses, or look whether it is there.

The overlay is a folder of its own, fast_ulysses/fast_cp/, and one added line in fast_ulysses/__init__.py. --check
compares sources only: it does not look at binaries. To build them: tools/install/build_fast_cp.py CHECKOUT.

Exit code: 0 the overlay is in place, 1 it is not, 2 wrong usage (CHECKOUT is no checkout of fast-ulysses, too).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the folder above tools/ is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.install import overlay, upstream
from tools.install.environment import REPOSITORY
from tools.install.errors import ExitCode, InstallError, fail

PROGRAM = "install_fast_agkv"
NO_BINARIES = "sources only: binaries were not looked at"


def main(arguments: Sequence[str] | None = None) -> int:
    """Apply, or check."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM}.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="clone of fast-ulysses")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where it is not in place")
    parser.add_argument("--csrc", type=Path, default=REPOSITORY / "csrc", metavar="DIR", help="sources of the overlay")
    parser.add_argument("--pin", type=Path, metavar="FILE", help="default: upstream.toml of the sources")
    asked = parser.parse_args(arguments)
    try:
        if asked.check:
            return _check(asked.checkout, asked.csrc)
        return _apply(asked.checkout, asked.csrc, asked.pin or asked.csrc / "upstream.toml")
    except InstallError as error:
        return fail(PROGRAM, error)


def _check(checkout: Path, csrc: Path) -> ExitCode:
    state = overlay.look(checkout, csrc)
    if state.in_place:
        print(f"the overlay is in place in {checkout} ({NO_BINARIES})")
        return ExitCode.RIGHT
    shown = "; ".join(state.problems[:5])
    more = f"; and {len(state.problems) - 5} more" if len(state.problems) > 5 else ""
    print(f"the overlay is not in place in {checkout}: {shown}{more} ({NO_BINARIES}); run this without --check")
    return ExitCode.FAILED


def _apply(checkout: Path, csrc: Path, pin_file: Path) -> ExitCode:
    overlay.require_upstream(checkout)
    _, note = upstream.verify(checkout, upstream.read_pin(pin_file), allow_unpinned=True)
    changed = overlay.apply(checkout, csrc)
    print(f"the overlay {'was put' if changed else 'was already'} in place in {checkout} ({NO_BINARIES})")
    if note:
        print(f"note: {note.split(';')[0]}; building it needs --allow-unpinned", file=sys.stderr)
    return ExitCode.RIGHT


if __name__ == "__main__":
    raise SystemExit(main())
