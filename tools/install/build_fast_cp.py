"""Build the Fast CP extension as one wheel.

Without CHECKOUT the wheel holds Fast CP alone. With CHECKOUT, a clone of the upstream that csrc/upstream.toml pins,
it holds upstream's package with Fast CP beside it. The compiler is the one of --cuda-home, else CUDA_HOME, else the
compiler wheels of the environment (uv sync --inexact --group cuda-build); no system toolkit is needed then.

Exit code: 0 built, 1 a check failed, 2 wrong usage, 3 something that is needed is absent.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the folder above tools/ is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.install.build import Request, build
from tools.install.environment import REPOSITORY, Environment, deps_root, find_environment
from tools.install.errors import ExitCode, InstallError, fail
from tools.install.process import environ
from tools.install.requirements import ARCHITECTURES
from tools.install.summary import write_failure, write_json

PROGRAM = "build_fast_cp"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = " ".join(map(str, ARCHITECTURES))
    made = argparse.ArgumentParser(
        prog=f"{PROGRAM}.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("checkout", nargs="?", type=Path, metavar="CHECKOUT", help="clone of the pinned upstream")
    made.add_argument(
        "--architectures",
        nargs="+",
        type=int,
        choices=sorted(ARCHITECTURES),
        default=[],
        metavar="SM",
        help=f"of {known}; default: the GPUs found, else all",
    )
    made.add_argument("--cuda-home", type=Path, metavar="DIR", help="a CUDA toolkit (default: CUDA_HOME, else wheels)")
    made.add_argument(
        "--nvshmem-home", type=Path, metavar="DIR", help="default: NVSHMEM_HOME, else the package beside torch"
    )
    made.add_argument("--wheel-dir", type=Path, metavar="DIR", help="default: $FAST_CP_DEPS_ROOT/wheels")
    made.add_argument("--build-dir", type=Path, metavar="DIR", help="default: $FAST_CP_DEPS_ROOT/build")
    made.add_argument("--jobs", type=_positive, metavar="N", help="compilers at once (default: one per core)")
    made.add_argument("--allow-unpinned", action="store_true", help="build a CHECKOUT at another commit, too")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the summary as JSON")
    made.add_argument("--csrc", type=Path, default=REPOSITORY / "csrc", metavar="DIR", help="sources of the extension")
    made.add_argument("--pin", type=Path, metavar="FILE", help="default: upstream.toml of the sources")
    return made


def main(arguments: Sequence[str] | None = None, environment: Environment | None = None) -> int:
    """Parse, build, and say what was built."""
    asked = parser().parse_args(arguments)
    root = deps_root(environ())
    request = Request(
        checkout=asked.checkout.absolute() if asked.checkout else None,
        architectures=tuple(asked.architectures),
        cuda_home=asked.cuda_home,
        nvshmem_home=asked.nvshmem_home,
        wheel_dir=(asked.wheel_dir or root / "wheels").absolute(),
        build_dir=(asked.build_dir or root / "build").absolute(),
        jobs=asked.jobs or len(os.sched_getaffinity(0)),
        allow_unpinned=asked.allow_unpinned,
        csrc=asked.csrc.absolute(),
        pin=asked.pin or asked.csrc / "upstream.toml",
    )
    try:
        try:
            summary = build(request, environment or find_environment())
        except OSError as error:
            raise InstallError(f"a file could not be read or written: {error}") from error
        if asked.json:
            write_json(asked.json, summary)
    except InstallError as error:
        if asked.json and error.exit_code is not ExitCode.USAGE:
            write_failure(asked.json, error)
        return fail(PROGRAM, error)
    print("\n".join(summary.lines()))
    return ExitCode.RIGHT


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of compilers; give 1 or more")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
