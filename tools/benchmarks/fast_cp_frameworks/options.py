"""The command line: what is typed becomes an Options, or a ConfigError of one sentence. Imports no torch."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from chitu_diffusion.parallel.cp.config import TRANSFERS
from chitu_diffusion.parallel.cp.environment import FAST_TRANSFER, default_transfer
from chitu_diffusion.parallel.cp.errors import ConfigError
from tools.benchmarks.fast_cp_frameworks import cases, result_file
from tools.benchmarks.fast_cp_frameworks.request import Request

# git ignores it, so a fresh clone lacks it: this one is created, any other folder must exist
DEFAULT_FOLDER = Path("outputs")
EPILOG = """\
Lists (--method, --sequence, --kernel, --transfer, --plan) are separated by commas; all their combinations run in one
job, in turn within each repeat. Without a launcher the command starts one process per GPU, or two on the CPU where
there is no GPU.
A plan is a name as `chitu plan` lists them, or any part of it: agkv/ce/head_pipeline(4)/cute/graph, or one_shot/eager.
Exit codes: 0 right, 1 a check failed, 2 wrong usage, 3 what was asked for is not there.
"""


@dataclass(frozen=True)
class Options:
    """Everything that was typed."""

    request: Request
    warmup: int
    iterations: int
    repeats: int
    output: Path
    cp_size: int | None
    seed: int | None
    timeout_s: float
    debug: bool

    def check(self) -> None:
        """Raises ConfigError or UnavailableError for everything that can be known before a process starts."""
        self.request.check()
        counts = [("iterations", self.iterations), ("repeats", self.repeats)]
        counts += [("cp-size", self.cp_size)] if self.cp_size is not None else []
        for name, count in counts:
            if count < 1:
                raise ConfigError(f"--{name} {count} cannot run; give a number of at least 1")
        if self.warmup < 0:
            raise ConfigError(f"--warmup {self.warmup} cannot run; give 0 or more")
        if not self.timeout_s > 0:
            raise ConfigError(f"--timeout {self.timeout_s:g} is not a time limit; give a positive number of seconds")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed} does not fit; give a number from 0 to 2^63 - 1")
        if self.output.parent == DEFAULT_FOLDER:
            DEFAULT_FOLDER.mkdir(exist_ok=True)
        result_file.check_output(self.output)


class _Parser(argparse.ArgumentParser):
    """argparse that raises its sentence instead of printing the usage of every option."""

    def error(self, message: str) -> NoReturn:
        """What is wrong with the line that was typed."""
        raise ConfigError(f"{message}; --help lists the options")


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """``arguments`` as Options. Raises ConfigError where they cannot be read; their meaning is not checked yet.

    ``environment`` gives what moves the data of the fast methods where --transfer does not.
    """
    typed = _parser().parse_args(arguments)
    request = Request(
        methods=typed.method,
        kernels=typed.kernel,
        transfers=typed.transfer,
        plans=typed.plan,
        compare=tuple(typed.compare) if typed.compare else None,
        default_transfer=default_transfer(environment),
        sequences=typed.sequence,
        heads=typed.heads,
        kv_heads=typed.kv_heads,
        head_dim=typed.head_dim,
        model=typed.model,
        preset=typed.preset,
        batch=typed.batch,
        dtype=typed.dtype,
        component=typed.component,
    )
    return Options(
        request=request,
        warmup=typed.warmup,
        iterations=typed.iterations,
        repeats=typed.repeats,
        output=typed.output,
        cp_size=typed.cp_size,
        seed=typed.seed,
        timeout_s=typed.timeout,
        debug=typed.debug,
    )


def _parser() -> argparse.ArgumentParser:
    """Choices are checked by Request, in sentences, not by argparse."""
    parser = _Parser(
        prog="python -m tools.benchmarks.fast_cp_frameworks.chitu",
        description="Check and time context-parallel attention.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--method", type=_names, help=f"list of {', '.join(cases.METHODS)}")
    what.add_argument("--kernel", type=_names, default=("auto",), help=f"list of {', '.join(cases.KERNEL_NAMES)}")
    what.add_argument(
        "--transfer", type=_names, help=f"list of {', '.join(TRANSFERS)} (default: {FAST_TRANSFER}, else auto)"
    )
    what.add_argument(
        "--plan", type=_names, help="list of plans for the fast methods, or parts of them: ce/one_shot/eager"
    )
    what.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two methods, plans or METHOD:PLAN, in turn A B B A"
    )
    what.add_argument("--component", default="e2e", help=f"what is timed: {', '.join(cases.COMPONENTS)} (default e2e)")
    what.add_argument("--preset", help=f"a set of shapes: {', '.join(cases.PRESETS)}")
    what.add_argument("--model", help=f"the shapes of a model: {', '.join(cases.MODELS)}")
    what.add_argument("--sequence", type=_numbers, help="list of tokens of the whole job")
    what.add_argument("--heads", type=int, help="query heads (default 40)")
    what.add_argument("--kv-heads", type=int, help="key and value heads (default: as many as query heads)")
    what.add_argument("--head-dim", type=int, help="dimension of a head (default 128)")
    what.add_argument("--batch", type=int, default=1, help="batch size (default 1)")
    what.add_argument("--dtype", help=f"{', '.join(cases.DTYPES)} (default: bfloat16 on GPUs, float32 on CPUs)")
    how = parser.add_argument_group("how to run it")
    how.add_argument("--cp-size", type=int, help="ranks (default: one per GPU, or 2 on the CPU)")
    how.add_argument("--warmup", type=int, default=3, help="calls before the first that counts (default 3)")
    how.add_argument("--iterations", type=int, default=10, help="calls per repeat (default 10)")
    how.add_argument("--repeats", type=int, default=3, help="repeats (default 3)")
    how.add_argument("--seed", type=int, help="repeat the input of an earlier run (default: a new one)")
    how.add_argument("--timeout", type=float, default=60, help="seconds to wait for another rank (default 60)")
    how.add_argument("--debug", action="store_true", help="print the tracebacks of failures")
    default = DEFAULT_FOLDER / "benchmark.json"
    how.add_argument("--output", type=Path, default=default, help=f"JSON file (default {default})")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers") from error


def world_size(cp_size: int | None, environment: Mapping[str, str]) -> int | None:
    """The size of the job that a launcher started, None where there is no launcher.

    Raises ConfigError where ``cp_size`` says otherwise.
    """
    if "RANK" not in environment:
        return None
    launched = int(environment.get("WORLD_SIZE", "1"))
    if cp_size not in (None, launched):
        raise ConfigError(
            f"--cp-size {cp_size} was asked for, but the launcher started {launched} processes (WORLD_SIZE); "
            "leave --cp-size out or start as many"
        )
    return launched
