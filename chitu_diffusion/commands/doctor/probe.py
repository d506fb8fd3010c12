"""Gathers the doctor's facts; never raises, whatever is broken on the machine."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chitu_diffusion.commands.doctor.facts import (
    CuteFacts,
    DoctorFacts,
    ExtensionFacts,
    KernelFacts,
    NvshmemFacts,
    Seen,
    SelfTestFacts,
    TorchFacts,
)
from chitu_diffusion.commands.doctor.process import Ended, run
from chitu_diffusion.commands.doctor.self_test import run_ranks
from chitu_diffusion.commands.doctor.tools import find_nvshmem_home, find_tools, find_wheel
from chitu_diffusion.parallel.cp.fast.device import MachineFacts
from chitu_diffusion.parallel.cp.fast.extension import LIBRARY_VARIABLE

# Seconds that each stage of the child may take. torch from a cold network disk is slow, and that is not a fault.
LIMITS_S: Mapping[str, float] = {"machine": 20, "torch": 60, "nvshmem": 10, "kernels": 30, "cute": 120, "extension": 20}
NEED_TORCH = ("nvshmem", "kernels", "cute", "extension")


def probe(environ: Mapping[str, str] | None = None, *, self_test: bool = False) -> DoctorFacts:
    """Everything that is judged, as it is now on this machine; the self-test only where it is asked for."""
    environ = os.environ if environ is None else environ
    seen = ask_child(environ)
    return DoctorFacts(
        python=sys.version_info[:3],
        machine=seen["machine"],
        torch=seen["torch"],
        nvshmem=seen["nvshmem"],
        kernels=seen["kernels"],
        cute=seen["cute"],
        extension=seen["extension"],
        tools=find_tools(environ),
        nvshmem_home=find_nvshmem_home(environ),
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        wheel=find_wheel(environ),
        named_library=environ.get(LIBRARY_VARIABLE),
        self_test=_self_test(environ, seen) if self_test else None,
    )


def _self_test(environ: Mapping[str, str], seen: Mapping[str, Seen[Any]]) -> Seen[SelfTestFacts]:
    torch = seen["torch"].value
    if torch is None or torch.gpu_count == 0:
        return Seen(absent="torch can use no GPU here")
    if seen["extension"].value is None:
        return Seen(absent="the extension is not there to be tested")
    return run_ranks(child_environment(environ), (0, min(1, torch.gpu_count - 1)))


def ask_child(environ: Mapping[str, str], limits_s: Mapping[str, float] = LIMITS_S) -> dict[str, Seen[Any]]:
    """One answer per stage. A stage that ends its process is broken, and a new process goes on with the next."""
    seen: dict[str, Seen[Any]] = {}
    while pending := [name for name in limits_s if name not in seen]:
        ended = _run_child(environ, {name: limits_s[name] for name in pending})
        seen.update(_answers(ended.stdout))
        _skip_what_needs_torch(seen)
        died = next((name for name in pending if name not in seen), None)
        if died is not None:
            seen[died] = Seen(broken=_how_stage_ended(ended, limits_s[died]))
            _skip_what_needs_torch(seen)
    return seen


def _run_child(environ: Mapping[str, str], limits_s: Mapping[str, float]) -> Ended:
    command = [sys.executable, "-P", "-m", "chitu_diffusion.commands.doctor.child"]
    stages = [f"{name}={limit}" for name, limit in limits_s.items()]
    return run([*command, *stages], limit_s=sum(limits_s.values()) + 10, env=child_environment(environ))


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """A child sees the modules that this process sees: its path is ours, entry by entry ("" is this folder)."""
    return {**environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)}


def _answers(stdout: str) -> dict[str, Seen[Any]]:
    answers = {}
    for line in stdout.splitlines():
        try:
            answer = json.loads(line)
            value = None if answer["value"] is None else _READ[answer["stage"]](answer["value"])
            answers[answer["stage"]] = Seen(value, answer["absent"], answer["broken"])
        except (ValueError, KeyError, TypeError):
            break  # a line cut off by the end of the process
    return answers


_READ: dict[str, Callable[[dict[str, Any]], Any]] = {
    "machine": MachineFacts.from_json,
    "torch": lambda data: TorchFacts(**_with_tuples(data)),
    "nvshmem": lambda data: NvshmemFacts(**_with_tuples(data)),
    "kernels": lambda data: KernelFacts(**data),
    "cute": lambda data: CuteFacts(**data),
    "extension": lambda data: ExtensionFacts(**_with_tuples(data)),
}


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def _skip_what_needs_torch(seen: dict[str, Seen[Any]]) -> None:
    if "torch" in seen and seen["torch"].value is None:
        for name in NEED_TORCH:
            seen.setdefault(name, Seen(absent="it needs torch, which does not import"))


def _how_stage_ended(ended: Ended, limit_s: float) -> str:
    if ended.code is None or "Timeout (" in ended.stderr:  # what faulthandler's watchdog writes before it exits
        return f"it did not finish within {limit_s:g} s"
    return ended.how
