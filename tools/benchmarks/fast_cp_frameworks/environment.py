"""Facts about a run for its result file: machine, driver, versions, commit, command; no folder of this machine."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from chitu_diffusion.parallel.cp.fast.device import describe_link, probe_machine
from tools.benchmarks.fast_cp_frameworks.result import Hardware, Run

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tools.benchmarks.fast_cp_frameworks.chitu"


def describe_run() -> Run:
    """Everything that belongs to the whole run."""
    machine = probe_machine()
    commit, dirty = _commit()
    return Run(
        hardware=Hardware(
            gpus=tuple(gpu.name for gpu in machine.gpus),
            links=tuple(f"GPU {link.a} and {link.b}: {describe_link(link)}" for link in machine.links),
            cpu=_cpu_name(),
            cpu_cores=_cores(),
            threads_per_rank=torch.get_num_threads(),
        ),
        driver=machine.driver,
        versions=_versions(),
        commit=commit,
        dirty=dirty,
        command=shorten(_typed()),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def shorten(words: Sequence[str]) -> str:
    """A command line with every absolute path cut to its last part."""
    short = [re.sub(r"(^|=)/.*?([^/]+)/?$", r"\1\2", word) for word in words]
    return shlex.join(short)


def _typed() -> list[str]:
    """The launcher's command line where one started this process, else our own."""
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        parent = []
    return parent if any(MODULE in word for word in parent) else list(sys.orig_argv)


def _commit() -> tuple[str | None, bool | None]:
    """(commit, whether the tree differs from it), (None, None) where it is not known.

    A copy without its repository, on another machine, is told its commit by CHITU_COMMIT: "abc" or "abc-dirty".
    """
    told = os.environ.get("CHITU_COMMIT")
    if told:
        return told.removesuffix("-dirty"), told.endswith("-dirty")
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return (head, bool(changes)) if head else (None, None)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _versions() -> dict[str, str | None]:
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if cuda else None,  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "triton": _package("triton"),
        "flash-attn-4": _package("flash-attn-4"),
        "nvidia-cutlass-dsl": _package("nvidia-cutlass-dsl"),
        "chitu-diffusion": _package("chitu-diffusion"),
    }


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
