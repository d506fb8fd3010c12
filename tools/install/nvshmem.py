"""NVSHMEM as the build needs it: found, and bridged where a package lacks what CMake looks for."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.install.environment import Environment, Version, dotted, read
from tools.install.toolchain import Absent

BESIDE_TORCH = "the package beside torch"

_TARGETS = """\
# Written by tools/install: the package index's NVSHMEM has no CMake configuration.
get_filename_component(_nvshmem_home "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(NVSHMEM_INCLUDE_DIR "${_nvshmem_home}/include")
set(NVSHMEM_LIBRARY_DIR "${_nvshmem_home}/lib")
if(NOT TARGET nvshmem::nvshmem_host)
  add_library(nvshmem::nvshmem_host SHARED IMPORTED)
  set_target_properties(nvshmem::nvshmem_host PROPERTIES
    IMPORTED_LOCATION "${_nvshmem_home}/lib/libnvshmem_host.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_nvshmem_home}/include")
endif()
if(NOT TARGET nvshmem::nvshmem_device AND EXISTS "${_nvshmem_home}/lib/libnvshmem_device.a")
  add_library(nvshmem::nvshmem_device STATIC IMPORTED)
  set_target_properties(nvshmem::nvshmem_device PROPERTIES
    IMPORTED_LOCATION "${_nvshmem_home}/lib/libnvshmem_device.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_nvshmem_home}/include")
endif()
if(NOT TARGET nvshmem::nvshmem)
  add_library(nvshmem::nvshmem INTERFACE IMPORTED)
  target_link_libraries(nvshmem::nvshmem INTERFACE nvshmem::nvshmem_host)
  if(TARGET nvshmem::nvshmem_device)
    target_link_libraries(nvshmem::nvshmem INTERFACE nvshmem::nvshmem_device)
  endif()
endif()
"""
_VERSION = """\
set(PACKAGE_VERSION "{version}")
if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()
"""


@dataclass(frozen=True)
class Nvshmem:
    """An NVSHMEM to build against; ``library`` is its host library, whatever its suffix."""

    home: Path
    library: Path
    version: Version | None
    origin: str

    @property
    def include(self) -> Path:
        """The folder of ``nvshmem.h``."""
        return self.home / "include"

    def __str__(self) -> str:
        return f"{dotted(self.version)}, from {self.origin}: {self.home}"


def find_nvshmem(asked: Path | None, environment: Environment, environ: Mapping[str, str]) -> Nvshmem | Absent:
    """``--nvshmem-home``, else ``NVSHMEM_HOME``, else the package beside torch; what is named is not passed over."""
    if asked is not None:
        return nvshmem_at(asked.absolute(), "--nvshmem-home")
    if named := environ.get("NVSHMEM_HOME"):
        return nvshmem_at(Path(named).absolute(), "NVSHMEM_HOME")
    if beside := nvshmem_beside_torch(environment):
        return nvshmem_at(beside, BESIDE_TORCH)
    return Absent(
        f"NVSHMEM is in neither --nvshmem-home, NVSHMEM_HOME nor the packages of {environment.python}; "
        "install the CUDA build of torch, which brings it (uv sync)"
    )


def nvshmem_beside_torch(environment: Environment) -> Path | None:
    """The copy that torch loads, whatever NVSHMEM_HOME says."""
    return next(iter(environment.nvidia_folders("nvshmem")), None)


def nvshmem_at(home: Path, origin: str) -> Nvshmem | Absent:
    """The NVSHMEM in ``home``, or what it lacks."""
    libraries = sorted((home / "lib").glob("libnvshmem_host.so*"))
    header = (home / "include" / "nvshmem.h").is_file()
    if header and libraries:
        return Nvshmem(home, libraries[0], _version(home), origin)
    lacks = [] if header else ["include/nvshmem.h"]
    lacks += [] if libraries else ["lib/libnvshmem_host.so*"]
    remedy = "install torch anew (uv sync)" if origin == BESIDE_TORCH else f"correct {origin}, or leave it out"
    return Absent(f"NVSHMEM: {origin} names {home}, which holds no {' and no '.join(lacks)}; {remedy}")


def bridge(nvshmem: Nvshmem, build: Path) -> Path:
    """A folder that upstream's CMake finds NVSHMEM in: ``nvshmem`` itself where it is complete, else links to it.

    The links and the small configuration are written into ``build``; the package stays as it is.
    """
    if (nvshmem.home / "lib" / "cmake" / "nvshmem").is_dir() and (nvshmem.home / "lib" / "libnvshmem_host.so").exists():
        return nvshmem.home
    home = build / "nvshmem"
    shutil.rmtree(home, ignore_errors=True)
    configuration = home / "lib" / "cmake" / "nvshmem"
    configuration.mkdir(parents=True)
    (home / "include").symlink_to(nvshmem.include)
    for library in (nvshmem.home / "lib").iterdir():
        if library.is_file():
            (home / "lib" / library.name).symlink_to(library)
    if not os.path.lexists(home / "lib" / "libnvshmem_host.so"):
        (home / "lib" / "libnvshmem_host.so").symlink_to(nvshmem.library)
    version = ".".join(map(str, nvshmem.version or (0,)))
    # find_package(NVSHMEM) and find_package(nvshmem) both look for the second name, an explicit include for the first
    (configuration / "NVSHMEMConfig.cmake").write_text(_TARGETS)
    (configuration / "nvshmem-config.cmake").write_text('include("${CMAKE_CURRENT_LIST_DIR}/NVSHMEMConfig.cmake")\n')
    for name in ("NVSHMEMConfigVersion.cmake", "nvshmem-config-version.cmake"):
        (configuration / name).write_text(_VERSION.format(version=version))
    return home


def _version(home: Path) -> Version | None:
    text = read(home / "include" / "non_abi" / "nvshmem_version.h")
    parts = [re.search(rf"NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return tuple(int(part[1]) for part in parts if part) or None
