"""One denoising step of whole transformers with random weights, on one rank and on several, over NCCL and Fast.

    python -m tools.benchmarks.fast_cp_frameworks.models --output FILE.json [--cp 2] [--model NAME ...] [--layers N]

No checkpoint is needed. A step is one forward of the transformer; guidance takes two of them with Wan and Qwen-Image.
With ``--layers`` fewer blocks run, and the result says so: its times are those of that many blocks, and nothing is
extrapolated. Every model runs in processes of its own. Imports no torch.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chitu_diffusion.commands.children import Interrupted, end, interrupt
from chitu_diffusion.parallel.cp.errors import ConfigError, CPError, ExitCode
from chitu_diffusion.parallel.cp.fast.test.launch import NO_MULTICAST
from chitu_diffusion.parallel.cp.fast.test.rows import METHODS, ROWS

SCHEMA = "chitu.fast_cp.models/1"
WORKER = "tools.benchmarks.fast_cp_frameworks.models_worker"
# blocks of the whole model
LAYERS = {"wan-1.3b": 30, "wan-14b": 40, "qwen-image": 60, "z-image": 30}
NAMES = tuple(name for name in ROWS if name != "qwen-image-1024")
LIMIT_S = 600.0
SIDES = ("one_gpu", "nccl", "fast")


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    output: Path
    cp: int
    names: tuple[str, ...]
    layers: int | None
    method: str
    device: str
    iterations: int


def parse(arguments: Sequence[str]) -> Options:
    """Raises ConfigError for what cannot be meant."""
    parser = argparse.ArgumentParser(prog="models", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence (2)")
    parser.add_argument("--model", nargs="+", choices=NAMES, default=NAMES, help="what to run (all)")
    parser.add_argument("--layers", type=int, default=None, help="fewer blocks than the model has")
    parser.add_argument("--method", choices=METHODS, default="agkv", help="(agkv)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small shapes over gloo")
    parser.add_argument("--iterations", type=int, default=3, help="steps that are timed, behind one that warms up (3)")
    given = parser.parse_args(arguments)
    for name in ("cp", "layers", "iterations"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value} is nothing; give 1 or more")
    return Options(
        given.output, given.cp, tuple(given.model), given.layers, given.method, given.device, given.iterations
    )


def layers_of(name: str) -> int:
    """How many blocks the whole model has."""
    return next(count for prefix, count in LAYERS.items() if name.startswith(prefix))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        options = parse(arguments)
    except CPError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    results: list[dict[str, Any]] = []
    for name in options.names:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        try:
            results.append(run_model(name, options))
        except Interrupted as ended:
            return 128 + ended.number
        print(line(results[-1]), flush=True)
        command = shlex.join(["models", *arguments]).replace(str(options.output), options.output.name)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(
            json.dumps({"schema": SCHEMA, "command": command, "results": results}, indent=1) + "\n"
        )
    codes = [result["exit_code"] for result in results]
    return ExitCode.RIGHT if not any(codes) else min(code for code in codes if code)


def run_model(name: str, options: Options) -> dict[str, Any]:
    """One model's result; where its processes fail, the reason."""
    whole = layers_of(name)
    layers = min(options.layers or whole, whole)
    job = {"name": name, "layers": layers, "method": options.method, "device": options.device}
    told: dict[str, Any] = {
        "model": name,
        "method": options.method,
        "cp": options.cp,
        "layers": layers,
        "layers_of_the_model": whole,
        "note": None if layers == whole else f"{layers} of {whole} blocks ran: these are not the whole model's times",
    }
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        job |= {"iterations": options.iterations, "answer": str(answer)}
        ranks = ["--standalone", f"--nproc-per-node={options.cp}", "-m", WORKER, json.dumps(job)]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks]
        launcher = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **NO_MULTICAST, **os.environ})
        try:
            code = launcher.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return {**told, "exit_code": 1, "reason": f"it did not end within {LIMIT_S:g} s"}
        finally:
            end([launcher])  # which ends its ranks
        if code or not answer.exists():
            return {**told, "exit_code": 1, "reason": f"its processes ended with code {code}"}
        found: dict[str, Any] = json.loads(answer.read_text())
        return told | found


def line(result: dict[str, Any]) -> str:
    """One line of the table."""
    if "one_gpu" not in result:
        return f"{result['model']:18} {result['reason']}"
    cells = []
    for name in SIDES:
        side = result[name]
        told = f"{side['step_ms']:9.1f} ms" if side else f"{'not run':>12}"
        if name != "one_gpu" and side:
            told += f" ({result['one_gpu']['step_ms'] / side['step_ms']:.2f}x, error {side['error']:.1e})"
        cells.append(f"{name} {told}")
    notes = [text for text in (result["note"], result["reason"]) if text]
    return "\n    ".join([f"{result['model']:18} {'  '.join(cells)}", *notes])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
