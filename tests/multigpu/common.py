"""What the programs of this folder share: arguments, start on one GPU or several, steps, the verdict and its table.

Importing it lets the extension's Python package and the tests' own modules be found.
"""

import argparse
import faulthandler
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("fast_ulysses") is None:
    sys.path.insert(0, str(ROOT / "csrc" / "python"))


@dataclass(frozen=True)
class Place:
    """Where this process stands; ``one_gpu``: all ranks share GPU 0 and talk over gloo."""

    rank: int
    world: int
    device: torch.device
    one_gpu: bool


def parser(about: str | None, limit: int) -> argparse.ArgumentParser:
    """The arguments that every program takes; ``limit`` is its default, in seconds."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    made.add_argument("--one-gpu", action="store_true", help="all ranks on GPU 0, over gloo: correctness only")
    made.add_argument("--limit", type=int, default=limit, help="seconds after which every rank gives up")
    return made


def join_group(rank: int, world: int, one_gpu: bool, init_method: str | None = None) -> Place:
    """Take this rank's GPU and start the process group: NCCL, or gloo where ranks share a GPU."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", 0 if one_gpu else int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    if one_gpu:
        dist.init_process_group("gloo", init_method, rank=rank, world_size=world)
    else:
        dist.init_process_group("nccl", init_method, rank=rank, world_size=world, device_id=device)
    return Place(rank, world, device, one_gpu)


def start(options: argparse.Namespace) -> Place:
    """Begin under ``torch.distributed.run``, with a hard limit on the whole run."""
    faulthandler.dump_traceback_later(options.limit, exit=True)
    return join_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.one_gpu)


def together() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def total(wrong: list[str]) -> int:
    """How many faults all ranks found together; they are printed where they were found."""
    for line in wrong[:3]:
        print(f"[rank {dist.get_rank()}] wrong: {line}", flush=True)
    return int(summed(len(wrong)))


def summed(value: int) -> int:
    count = torch.tensor([value], device="cuda")
    dist.all_reduce(count)
    return int(count.item())


def largest(value: float) -> float:
    """The largest value of any rank."""
    tensor = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())


def step(name: str, report: dict[str, Any], call: Callable[[], Any], output: Path | None = None) -> None:
    """Run one part and note its result and time; the JSON so far is written, in case the next part never ends."""
    began = time.monotonic()
    report[name] = call()
    together()
    report.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)
    if dist.get_rank() == 0:
        print(f"{name}: {report['seconds'][name]} s", flush=True)
        write(report, output)


def agreed(checks: dict[str, bool]) -> dict[str, bool]:
    """What holds on every rank."""
    good = torch.tensor([int(value) for value in checks.values()], device="cuda")
    dist.all_reduce(good, op=dist.ReduceOp.MIN)
    return dict(zip(checks, (bool(value) for value in good.tolist()), strict=True))


def write(report: dict[str, Any], output: Path | None) -> None:
    if output:
        output.write_text(json.dumps(report, indent=1) + "\n")


def show(checks: dict[str, bool]) -> None:
    for name, good in checks.items():
        print(f"{'ok  ' if good else 'FAIL'} {name}", flush=True)


def finish(report: dict[str, Any], checks: dict[str, bool], output: Path | None) -> int:
    """End the process group; the first rank writes and prints. Returns the exit code."""
    report["checks"] = checks = agreed(checks)
    together()
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    if first:
        write(report, output)
        show(checks)
    return 0 if all(checks.values()) else 1
