"""The only module that imports the CUDA extension ``fast_ulysses``; it imports no torch until it is asked to."""

import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from chitu_diffusion.parallel.cp.errors import UnavailableError, first_line

if TYPE_CHECKING:
    import torch

NEXT_STEP = "run tools/install/setup_fast_cp.sh"
ARCHITECTURES = (90, 120)  # what the extension can be built for
LIBRARY_VARIABLE = "FAST_CP_LIBRARY"  # names another native library than the installed one
OPERATORS = (
    "fast_cp_device_info",
    "all_gather_kv_4d",
    "fast_cp_all_to_all_qkv_4d",
    "fast_cp_all_to_all_out_4d",
    "kv_projection_prepare",
    "kv_projection_send_ce_group",
    "projection_sync_prepare",
    "projection_sync",
    "fast_cp_exchange_ticket",
    "projection_ticket",
)


@dataclass(frozen=True)
class Problem:
    """Why the extension cannot be used: a clause that says what was found, what is needed, and what to do."""

    found: str
    needed: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.found} (needed: {self.needed}); {self.next_step}"


@cache
def look() -> ModuleType | Exception | None:
    """The extension's Python package, what its import raised, or None where it is not installed."""
    for name in ("fast_ulysses.fast_cp", "fast_ulysses"):  # laid over upstream's package, or on its own
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.split(".", maxsplit=1)[0]):
                return error
        except Exception as error:  # a broken library may raise anything
            return error
    return None


def load() -> ModuleType:
    """The extension's Python package. Raises UnavailableError with the reason and the next step.

    The reasons are those of the process: the package, the driver, NVSHMEM. Those of a device are ``why_not``'s.
    """
    found = _import()
    problem = found if isinstance(found, Problem) else _process_problem(found.device_info(0))
    if problem is not None:
        raise UnavailableError(str(problem))
    assert isinstance(found, ModuleType)
    return found


def why_not(device: "torch.device") -> str | None:
    """Why the extension cannot serve ``device``, or None."""
    found = _import()
    if isinstance(found, Problem):
        return str(found)
    info: dict[str, Any] = found.device_info(device.index or 0)
    if problem := _process_problem(info) or image_problem(info, info.get("sm")):
        return str(problem)
    if device.type != "cuda":
        return f"the extension moves tensors of GPUs and the session runs on {device}; use backend nccl, or a GPU"
    return str(info["problem"]) if info.get("problem") else None


def _import() -> ModuleType | Problem:
    found, needed = look(), "fast_ulysses with Fast CP's operators"
    if found is None:
        return Problem("the extension fast_ulysses is not installed", needed, NEXT_STEP)
    if isinstance(found, Exception):
        return Problem(f"the extension does not import: {first_line(found)}", needed, repair(os.environ))
    if missing := missing_operators():
        what = f"the fast_ulysses in {found.__file__} is another build, without {', '.join(missing)}"
        return Problem(what, needed, repair(os.environ))
    return found


def _process_problem(info: Mapping[str, Any]) -> Problem | None:
    return driver_problem(info) or nvshmem_problem(info)


def missing_operators() -> tuple[str, ...]:
    """Those of ``OPERATORS`` that this process has not registered."""
    import torch

    return tuple(name for name in OPERATORS if not hasattr(torch.ops.fast_ulysses, name))


def driver_problem(info: Mapping[str, Any]) -> Problem | None:
    """A wheel for a newer CUDA than the driver's, which carries its own runtime; a missing driver is none."""
    driver, runtime = _numbers(info["cuda_driver"]), _numbers(info["cuda_runtime"])
    if driver[0] == 0 or driver[0] >= runtime[0]:  # within one major version the driver may be older
        return None
    return Problem(
        f"the extension was built with CUDA {info['cuda_runtime']} and the driver runs CUDA up to "
        f"{info['cuda_driver']}",
        f"a driver for CUDA {runtime[0]}.x",
        f"update the driver, or build with an older toolkit: {NEXT_STEP} --cuda-home DIR",
    )


def nvshmem_problem(info: Mapping[str, Any]) -> Problem | None:
    """A host library that is missing, or too far from the headers that the extension was built against."""
    built, loaded, said = info["nvshmem"]["built"], info["nvshmem"]["loaded"], info["nvshmem"].get("problem")
    major = built.split(".")[0]
    if loaded is None:  # what the library says ends with its advice
        found, _, advice = (said or "the NVSHMEM host library does not load").rpartition("; ")
        return Problem(found or advice, f"NVSHMEM {major}.x, {built} or newer", advice if found else NEXT_STEP)
    if fits(_numbers(built), _numbers(loaded)):
        return None
    where = info["nvshmem"].get("path")
    return Problem(
        f"the extension was built against NVSHMEM {built} and this process loads {loaded}"
        + (f" from {where}" if where else ""),
        f"NVSHMEM {major}.x, {built} or newer",
        f"unset NVSHMEM_HOME and build it again: {NEXT_STEP}",
    )


def fits(built: tuple[int, ...], loaded: tuple[int, ...]) -> bool:
    """Whether a host library ``loaded`` serves what was ``built`` against these headers: not older, and one major."""
    return built[0] == loaded[0] and built[:2] <= loaded[:2]


def image_problem(info: Mapping[str, Any], sm: int | None) -> Problem | None:
    """No native image for a GPU of architecture ``sm`` (90 for 9.0); None where there is no GPU."""
    images = info["images"]
    if sm is None or any(_serves(image, sm) for image in images):
        return None
    found = f"the extension has images for {', '.join(images) or 'no GPU'} and the GPU is SM{sm}"
    if sm not in ARCHITECTURES:
        return Problem(found, f"a GPU of {' or '.join(f'SM{known}' for known in ARCHITECTURES)}", "use backend nccl")
    return Problem(found, f"an image for SM{sm}", f"build it for this GPU: {NEXT_STEP} --architectures {sm}")


def _serves(image: str, sm: int) -> bool:
    """``sm_90a`` serves 9.0 alone; ``sm_120`` all of 12.x that are not older."""
    number, suffix = re.fullmatch(r"sm_(\d+)([a-z]?)", image).groups()  # type: ignore[union-attr]  # written by CMake
    return int(number) == sm or (suffix != "a" and int(number) // 10 == sm // 10 and int(number) <= sm)


def repair(environ: Mapping[str, str]) -> str:
    """What to do about a library that does not serve."""
    named = environ.get(LIBRARY_VARIABLE)
    return f"unset {LIBRARY_VARIABLE} (it names {named}), or {NEXT_STEP}" if named else NEXT_STEP


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
