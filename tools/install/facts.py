"""What this machine has for building the extension. Probing raises nothing: what is not there is an `Absent`."""

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.install.environment import Environment, Torch
from tools.install.nvshmem import Nvshmem, find_nvshmem
from tools.install.process import ask
from tools.install.toolchain import Absent, Tool, find_cuobjdump, find_nvcc, look

_CXX17 = "#include <optional>\n#if __cplusplus < 201703L\n#error C++17 is missing\n#endif\nstd::optional<int> x;\n"


@dataclass(frozen=True)
class Asked:
    """What the user named, and the folders that will be written to."""

    cuda_home: Path | None = None
    nvshmem_home: Path | None = None
    written_folders: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything that is known before compiling starts.

    ``free_bytes`` is the space at each folder that will be written to; ``gpus`` are the compute capabilities that
    the driver reports (90 for 9.0), empty without a GPU.
    """

    system: str
    machine: str
    environment: Environment
    torch: Torch | None
    cxx: Tool | Absent
    nvcc: Tool | Absent
    cuobjdump: Tool | Absent
    readelf: Tool | Absent
    cmake: Tool | Absent
    ninja: Tool | Absent
    nvshmem: Nvshmem | Absent
    free_bytes: dict[Path, int]
    gpus: tuple[int, ...]


def probe(asked: Asked, environment: Environment, environ: Mapping[str, str]) -> Facts:
    """Look at everything."""
    nvcc = find_nvcc(asked.cuda_home, environment, environ)
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        environment=environment,
        torch=environment.torch(),
        cxx=find_cxx(environ),
        nvcc=nvcc,
        cuobjdump=find_cuobjdump(nvcc, environment, environ),
        readelf=_program("readelf", environ, "install binutils with the system's package manager"),
        cmake=_program("cmake", environ, "install it: uv sync", first=environment.programs),
        ninja=_program("ninja", environ, "install it: uv sync", first=environment.programs),
        nvshmem=find_nvshmem(asked.nvshmem_home, environment, environ),
        free_bytes={folder: free_bytes(folder) for folder in asked.written_folders},
        gpus=find_gpus(environ),
    )


def find_cxx(environ: Mapping[str, str]) -> Tool | Absent:
    """The host's C++ compiler, ``CXX`` or g++, if it compiles C++17."""
    name = environ.get("CXX") or "g++"
    found = _program(name, environ, "install g++ with the system's package manager")
    if isinstance(found, Absent):
        return found
    tried = ask([found.path, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], text=_CXX17)
    if tried.code != 0:
        said = next((line for line in tried.stderr.splitlines() if "error" in line), tried.stderr.strip()[:200])
        return Absent(f"{found.path} does not compile C++17 ({said}); install g++ 9 or newer, or set CXX to one")
    return found


def find_gpus(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The different compute capabilities of this machine's GPUs, as the driver reports them."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return ()
    ended = ask([program, "--query-gpu=compute_cap", "--format=csv,noheader"])
    return parse_capabilities(ended.stdout) if ended.code == 0 else ()


def parse_capabilities(output: str) -> tuple[int, ...]:
    """``9.0`` and ``12.0``, one a line, as (90, 120)."""
    found = re.findall(r"^\s*(\d+)\.(\d)\s*$", output, re.MULTILINE)
    return tuple(sorted({10 * int(major) + int(minor) for major, minor in found}))


def free_bytes(folder: Path) -> int:
    """The free space where ``folder`` is or will be, 0 where that cannot be known."""
    existing = next((place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir()), None)
    try:
        return shutil.disk_usage(existing).free if existing else 0
    except OSError:
        return 0


def _program(name: str, environ: Mapping[str, str], remedy: str, first: Path | None = None) -> Tool | Absent:
    path = os.pathsep.join([*([str(first)] if first else []), environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    if found is None:
        return Absent(f"{name} is not on the PATH; {remedy}")
    return look(Path(found), "the environment" if first and Path(found).parent == first else "PATH")
