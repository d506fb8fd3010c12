"""``python -m tools.benchmarks.fast_cp_frameworks.compare --preset dit --output DIR``: every peer beside us.

Runs every peer and our methods in turn, and writes compare.json, compare.md and plots; ``--from DIR…`` draws earlier
results. README.md beside this folder says what is compared, and how.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from chitu_diffusion.parallel.cp.errors import ConfigError, CPError, ExitCode
from tools.benchmarks.fast_cp_frameworks.compare import merge, plots, report
from tools.benchmarks.fast_cp_frameworks.result_file import write

JSON, TABLE, LOG = "compare.json", "compare.md", "compare.log"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    typed = _parser().parse_args(arguments)
    try:
        _check(typed)
        typed.output.mkdir(parents=True, exist_ok=True)
        earlier, code = merge.load(typed.earlier), ExitCode.RIGHT
        if typed.preset or typed.shape:
            code = _measure(typed)
            earlier += merge.load([typed.output])
        _draw(earlier, typed.output)
    except CPError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return code


def _measure(typed: argparse.Namespace) -> ExitCode:
    from tools.benchmarks.fast_cp_frameworks.compare import run  # takes torch, which drawing does not need

    asked = run.Asked(typed.preset, typed.shape, typed.only, typed.cp_size, typed.timeout, typed.limit, typed.seed)
    measured = run.measure(asked, typed.output / LOG, lambda text: print(text, flush=True))
    write(typed.output / JSON, measured)
    for fault in run.faults(measured.results):
        told = f"{fault.case.method} at S={fault.case.sequence}: {fault.reason}"
        print(f"error: {told}", file=sys.stderr)
    return run.exit_code(measured.results)


def _draw(reports: list[tuple[str, merge.AnyReport]], output: Path) -> None:
    (output / TABLE).write_text(report.markdown(reports))
    rows = merge.rows(told for _, told in reports)
    try:
        pictures = [path.name for path in plots.draw(rows, output)]
        without = "" if pictures else "; no plots, since nothing was timed on several GPUs"
    except ImportError:
        # a machine that measures need not draw: --from does it elsewhere
        pictures, without = [], "; no plots, since matplotlib is not installed (uv sync --inexact --group plots)"
    print(f"written to {output}: {', '.join([TABLE, *pictures])}{without}", flush=True)


def _check(typed: argparse.Namespace) -> None:
    if not (typed.preset or typed.shape or typed.earlier):
        raise ConfigError("there is nothing to do; give --preset dit, --shape HEADS:TOKENS, or --from DIR")
    for name, seconds in (("timeout", typed.timeout), ("limit", typed.limit)):
        if not seconds > 0:
            raise ConfigError(f"--{name} {seconds:g} is not a time limit; give a positive number of seconds")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.fast_cp_frameworks.compare", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--preset", help="the shapes to run: dit; on CPUs small ones, for correctness")
    parser.add_argument("--shape", type=_shapes, help="list of HEADS:TOKENS in place of a preset's: 40:4096,24:6889")
    parser.add_argument("--only", type=_names, help="list of parts of methods' names; one GPU alone always runs")
    parser.add_argument(
        "--from", dest="earlier", nargs="+", type=Path, default=[], metavar="DIR", help="folders of earlier results"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for what is written")
    parser.add_argument("--cp-size", type=int, help="ranks (default: one per GPU; on CPUs 2, then 4)")
    parser.add_argument("--timeout", type=float, default=40, help="seconds that one step may take (default 40)")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all jobs together (default 540)")
    parser.add_argument("--seed", type=int, help="repeat the input of an earlier run (default: a new one)")
    return parser


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [tuple(int(number) for number in part.split(":")) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of HEADS:TOKENS") from error
    if any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of HEADS:TOKENS")
    return tuple((heads, tokens) for heads, tokens in pairs)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
