"""Compiles ``csrc/`` into one shared library with CMake and ninja."""

import contextlib
import fcntl
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.install.environment import Torch, read
from tools.install.errors import ExitCode, InstallError
from tools.install.facts import Facts
from tools.install.nvshmem import Nvshmem
from tools.install.process import run, surroundings
from tools.install.progress import Progress
from tools.install.toolchain import Tool, Toolkit, toolkit_of

LIBRARY = "libfast_cp.so"
REPRODUCIBLE = {"SOURCE_DATE_EPOCH": "315532800", "NINJA_STATUS": "[%f/%t] "}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the compiler makes."""

    source: Path
    architectures: tuple[int, ...]
    nvcc: Tool
    cxx: Tool
    cmake: Tool
    ninja: Tool
    torch: Torch
    nvshmem: Nvshmem
    jobs: int

    @property
    def key(self) -> str:
        """A name for the build folder: another compiler, torch or NVSHMEM never meets old object files."""
        tools = [f"{tool.path} {tool.version}" for tool in (self.nvcc, self.cxx)]
        parts = [
            str(self.source),
            self.architecture_list,
            *tools,
            f"{self.torch.include} {self.torch.version}",
            f"{self.nvshmem.home} {self.nvshmem.version}",
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    @property
    def architecture_list(self) -> str:
        """As CMake writes a list."""
        return ";".join(map(str, self.architectures))

    def flags(self, toolkit: Toolkit) -> list[str]:
        """The definitions that ``csrc/CMakeLists.txt`` asks for."""
        definitions = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_CXX_COMPILER": str(self.cxx.path),
            "CMAKE_CUDA_COMPILER": str(toolkit.nvcc),
            "CMAKE_MAKE_PROGRAM": str(self.ninja.path),
            "FAST_CP_ARCHITECTURES": self.architecture_list,
            "FAST_CP_TORCH_INCLUDE": str(self.torch.include),
            "FAST_CP_TORCH_LIB": str(self.torch.lib),
            "FAST_CP_NVSHMEM_INCLUDE": str(self.nvshmem.include),
            "FAST_CP_CUDA_INCLUDE_EXTRA": str(toolkit.cccl or ""),
        }
        return [f"-D{name}={value}" for name, value in definitions.items()]


def recipe(source: Path, facts: Facts, architectures: tuple[int, ...], jobs: int) -> Recipe:
    """The recipe for facts in which nothing is missing."""
    assert facts.torch is not None
    assert isinstance(facts.nvshmem, Nvshmem)
    tools = (facts.nvcc, facts.cxx, facts.cmake, facts.ninja)
    nvcc, cxx, cmake, ninja = (tool for tool in tools if isinstance(tool, Tool))
    return Recipe(source, architectures, nvcc, cxx, cmake, ninja, facts.torch, facts.nvshmem, jobs)


def compile_library(recipe: Recipe, build: Path, toolkit: Toolkit, progress: Progress) -> Path:
    """Configure and build; return the library. Nothing is compiled again that did not change."""
    if not (recipe.source / "CMakeLists.txt").is_file():
        raise InstallError(f"{recipe.source} holds no CMakeLists.txt; name the folder of csrc", ExitCode.USAGE)
    env = surroundings(REPRODUCIBLE)
    objects = build / "objects"
    progress.step("configuring")
    configure = [recipe.cmake.path, "-S", recipe.source, "-B", objects, "-G", "Ninja", *recipe.flags(toolkit)]
    run([str(word) for word in configure], env=env)
    progress.step(f"compiling for SM {', '.join(map(str, recipe.architectures))} with {recipe.jobs} jobs")
    run(
        [str(recipe.cmake.path), "--build", str(objects), "--parallel", str(recipe.jobs)],
        env=env,
        on_line=progress.compiler_line,
    )
    progress.finish()
    found = [path for path in objects.rglob(LIBRARY) if path.is_file()]
    if len(found) != 1:
        raise InstallError(f"the build should leave one {LIBRARY} in {objects}, and left {len(found)}; see {objects}")
    return found[0]


def toolkit_for(recipe: Recipe, build: Path) -> Toolkit:
    """The toolkit of the recipe's nvcc, with its links in ``build`` where it needs them."""
    return toolkit_of(recipe.nvcc.path, build)


def package_version(source: Path) -> str:
    """The version of the extension: ``__version__`` of its Python package, else ``project(… VERSION …)`` of CMake."""
    places = (
        (source / "python" / "fast_ulysses" / "__init__.py", r"^__version__(?:: \w+)?\s*=\s*['\"]([^'\"]+)['\"]"),
        (source / "CMakeLists.txt", r"project\s*\([^)]*\bVERSION\s+([\d.]+)"),
    )
    for path, pattern in places:
        if found := re.search(pattern, read(path), re.MULTILINE):
            return found[1]
    raise InstallError(f"{source} names no version; write __version__ into {places[0][0]}")


@contextlib.contextmanager
def locked(build: Path, progress: Progress) -> Iterator[None]:
    """Hold ``build`` alone: two builds of one recipe would write the same object files."""
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.step(f"waiting for another build in {build}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
