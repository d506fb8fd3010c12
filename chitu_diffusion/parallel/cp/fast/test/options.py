"""The command line of the acceptance test. Imports no torch."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.fast.test.rows import DEGREES, ROWS, Case, matrix

ABOUT = """Check and time the fast wrapper on real layer shapes with random weights; no checkpoint is needed.

Exit code: 0 all right, 1 something is wrong, 2 wrong usage, 3 nothing is wrong and something was not run."""
CPU_DEGREES = (2,)


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    outdir: Path
    degrees: tuple[int, ...]
    rows: tuple[str, ...]
    device: str
    limit_s: float

    @property
    def cases(self) -> list[Case]:
        """The matrix."""
        return matrix(self.rows, self.degrees)


def parse(arguments: Sequence[str]) -> Options:
    """Options from a command line. Raises ConfigError for what cannot be meant; ``--help`` ends the process."""
    parser = _parser()
    given = parser.parse_args(arguments)
    degrees = tuple(dict.fromkeys(given.cp or (CPU_DEGREES if given.device == "cpu" else DEGREES)))
    rows = tuple(ROWS) if not given.model else tuple(name for name in ROWS if name.startswith(tuple(given.model)))
    for asked in given.model:
        if not any(name.startswith(asked) for name in ROWS):
            raise ConfigError(f"--model {asked} is unknown; choose among {', '.join(ROWS)}, or the start of one")
    if min(degrees) < 2:
        raise ConfigError(f"--cp {min(degrees)} splits nothing; give 2 or more")
    if given.limit <= 0:
        raise ConfigError(f"--limit {given.limit:g} is no time limit; give a positive number of seconds")
    return Options(Path(given.outdir), degrees, rows, given.device, given.limit)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # ours says it in the project's way
        raise ConfigError(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("run_wrapper.sh", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outdir", metavar="OUTDIR", help="where one JSON per case and summary.md go")
    parser.add_argument("--cp", type=int, nargs="+", metavar="N", help="degrees to run (2 4 8; on CPUs 2)")
    parser.add_argument("--model", nargs="+", default=[], help="rows to run, by name or its start (all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a reduced matrix over gloo")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which a case has failed (180)")
    return parser
