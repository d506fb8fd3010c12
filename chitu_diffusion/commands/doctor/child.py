"""Imports torch, the kernels and the extension where it may crash or hang: in a process of its own.

``python -m chitu_diffusion.commands.doctor.child STAGE=SECONDS …`` runs the stages in the given order and prints one
JSON line per stage as soon as it ends. A stage that takes longer than its limit ends the process; so does a native
library that aborts. Whoever reads the lines sees by the first missing one which stage it was.
"""

import faulthandler
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from chitu_diffusion.commands.doctor.child_kernels import look_at_cute, look_at_kernels
from chitu_diffusion.commands.doctor.facts import (
    ExtensionFacts,
    NvshmemFacts,
    Seen,
    TorchFacts,
    Version,
)
from chitu_diffusion.commands.doctor.process import own_stdout
from chitu_diffusion.parallel.cp.errors import first_line
from chitu_diffusion.parallel.cp.fast import extension
from chitu_diffusion.parallel.cp.fast.device import MachineFacts, probe_machine


def main(arguments: list[str]) -> None:
    """Run the stages; what libraries print while they load goes to stderr, never between the lines."""
    with own_stdout() as out:
        for argument in arguments:
            name, limit_s = argument.split("=")
            faulthandler.dump_traceback_later(float(limit_s), exit=True)
            seen = look(name)
            faulthandler.cancel_dump_traceback_later()
            _say(out, name, seen)
            if name == "torch" and seen.value is None:
                break  # the later stages need it, and a second import of a broken torch may abort
        out.flush()
        os._exit(0)  # destructors of what was loaded are nobody's concern here, and may crash


def look(name: str) -> Seen[Any]:
    """Run one stage; whatever it raises becomes an answer."""
    wanted, stage = STAGES[name]
    try:
        value = stage()
    except ModuleNotFoundError as error:
        if error.name == wanted:
            return Seen(absent=f"there is no Python module {wanted}")
        return Seen(broken=first_line(error))
    except Exception as error:  # imports raise anything
        return Seen(broken=first_line(error))
    return value if isinstance(value, Seen) else Seen(value=value)


def _machine() -> MachineFacts:
    return probe_machine()


def _torch() -> TorchFacts:
    import torch

    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchFacts(
        version=str(torch.__version__),
        cuda=_version(torch.version.cuda),
        gpu_count=usable,
        gpu_uuids=tuple(f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(usable)),
        cuda_problem=None if usable or torch.version.cuda is None else _why_no_cuda(torch.cuda.init),
        nccl=_nccl_version(torch),
    )


def _nccl_version(torch: Any) -> Version | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return tuple(torch.cuda.nccl.version()[:3])


def _why_no_cuda(initialise: Callable[[], None]) -> str | None:
    try:
        initialise()
    except Exception as error:
        return first_line(error)
    return None


def _nvshmem() -> NvshmemFacts | Seen[NvshmemFacts]:
    import torch  # noqa: F401  what it maps is the question

    mapped = (line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line)
    path = next((name for name in mapped if Path(name).name.startswith("libnvshmem_host.so")), None)
    if path is None:
        return Seen(absent="importing torch maps no libnvshmem_host.so")
    return NvshmemFacts(path, _nvshmem_version(path))


def _nvshmem_version(path: str) -> Version | None:
    import ctypes

    numbers = [ctypes.c_int(), ctypes.c_int(), ctypes.c_int()]
    try:
        code = ctypes.CDLL(path).nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    except (OSError, AttributeError):
        return None
    return tuple(number.value for number in numbers) if code == 0 else None


def _extension() -> ExtensionFacts | Seen[ExtensionFacts]:
    found = extension.look()
    if found is None:
        return Seen(absent="there is no Python module fast_ulysses")
    if isinstance(found, Exception):
        return Seen(broken=first_line(found))
    missing = extension.missing_operators()
    installed = _installed(Path(str(found.__file__)))
    return ExtensionFacts(
        path=str(found.__file__),
        version=installed.version if installed else getattr(found, "__version__", None),
        missing_operators=missing,
        library="" if missing else str(found.library_path()),
        info={} if missing else found.device_info(0),
        build=json.loads(installed.read_text("fast_cp_build.json") or "{}") if installed else {},
    )


def _installed(module: Path) -> importlib.metadata.Distribution | None:
    """The wheel that ``module`` came from; None where it lies on the path by itself."""
    try:
        wheel = importlib.metadata.distribution("fast_ulysses")
    except importlib.metadata.PackageNotFoundError:
        return None
    return wheel if module.is_relative_to(str(wheel.locate_file("fast_ulysses"))) else None


# Stage: (the module whose absence is an answer and not a fault, what to do). Later ones need the earlier ones.
STAGES: dict[str, tuple[str, Callable[[], Any]]] = {
    "machine": ("pynvml", _machine),
    "torch": ("torch", _torch),
    "nvshmem": ("torch", _nvshmem),
    "kernels": ("chitu_diffusion.parallel.cp.fast.attention.table", look_at_kernels),
    "cute": ("chitu_diffusion.parallel.cp.fast.attention.cute", look_at_cute),
    "extension": ("fast_ulysses", _extension),
}


def _say(out: TextIO, name: str, seen: Seen[Any]) -> None:
    value = None if seen.value is None else asdict(seen.value)
    print(json.dumps({"stage": name, "value": value, "absent": seen.absent, "broken": seen.broken}), file=out)


def _version(text: str | None) -> Version | None:
    return None if text is None else tuple(int(part) for part in text.split(".") if part.isdigit())


if __name__ == "__main__":
    main(sys.argv[1:])
