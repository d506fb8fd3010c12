"""Finds and loads the native library, once."""

import importlib.util
import os
from functools import cache
from pathlib import Path

import torch

_NAME = "libfast_cp.so"


def library_path() -> Path:
    """The library beside these files, or the one that ``FAST_CP_LIBRARY`` names.

    Raises ImportError where there is none.
    """
    named = os.environ.get("FAST_CP_LIBRARY")
    path = Path(named) if named else Path(__file__).parent / _NAME
    if not path.is_file():
        where = "which FAST_CP_LIBRARY names" if named else "which belongs to this package"
        raise ImportError(f"{path}, {where}, does not exist; build it with tools/install/build_fast_cp.py")
    return path


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
    torch.ops.fast_ulysses.fast_cp_use_nvshmem(_nvshmem_of_environment())
