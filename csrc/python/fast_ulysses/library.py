"""Finds and loads the native library, once."""

import importlib.util
import os
from functools import cache
from pathlib import Path

import torch

_NAME = "libfast_cp.so"
_VARIABLE = "FAST_CP_LIBRARY"


def library_path() -> Path:
    """The library beside these files, or the one that ``FAST_CP_LIBRARY`` names.

    Raises ImportError where there is none, or only a part of one.
    """
    named = os.environ.get(_VARIABLE)
    path = Path(named) if named else Path(__file__).parent / _NAME
    if not path.is_file():
        where = f"which {_VARIABLE} names" if named else "which belongs to this package"
        raise ImportError(f"{path}, {where}, does not exist; build it with tools/install/build_fast_cp.py")
    if (expected := _elf_bytes(path)) > (size := path.stat().st_size):  # loading it would end the process by SIGBUS
        raise _unfit(path, f"is cut off: it has {size} of {expected} bytes")
    return path


def _elf_bytes(path: Path) -> int:
    """Where the section headers of a 64-bit ELF file end, which linkers write last; 0 for any other file."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return 0
    start, size, count = (int.from_bytes(header[at : at + n], "little") for at, n in ((40, 8), (58, 2), (60, 2)))
    return start + size * count


def _unfit(path: Path, found: str) -> ImportError:
    """What is wrong with the library at ``path``, what is needed, and what to do."""
    drop = f"unset {_VARIABLE}, or " if os.environ.get(_VARIABLE) else ""
    step = f"{drop}build and install it again with tools/install/setup_fast_cp.sh"
    return ImportError(f"{path} {found} (needed: the {_NAME} of this package); {step}")


def _nvshmem_of_environment() -> str:
    """The NVSHMEM host library installed beside torch, or nothing: for a torch that has not mapped one itself."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return ""
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "lib" / "libnvshmem_host.so.3"
        if path.is_file():
            return str(path)
    return ""


@cache
def load() -> None:
    """Load the library and tell it where NVSHMEM lies. Raises ImportError with a sentence where that cannot be."""
    path = library_path()
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"{path} does not load into torch {torch.__version__} ({error}); it needs torch 2.10 or newer: "
            "rebuild it with tools/install/build_fast_cp.py"
        ) from error
    try:
        use_nvshmem = torch.ops.fast_ulysses.fast_cp_use_nvshmem
    except AttributeError as error:
        raise _unfit(path, "is another library: it loads and has no operators of Fast CP") from error
    use_nvshmem(_nvshmem_of_environment())
