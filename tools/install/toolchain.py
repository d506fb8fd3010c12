"""The CUDA compiler: a toolkit that the user names, or the compiler wheels of the package index."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.install.environment import Environment, Version, dotted, numbers
from tools.install.process import ask

WHEELS = "the environment's compiler wheels"
_GET_CUDA = "run `uv sync --inexact --group cuda-build`, or name a toolkit with --cuda-home or CUDA_HOME"


@dataclass(frozen=True)
class Absent:
    """Something that is not there: one sentence with what was looked for, what was found, and what to do."""

    sentence: str


@dataclass(frozen=True)
class Tool:
    """A program that was found; ``origin`` says by which rule."""

    path: Path
    version: Version | None
    origin: str

    def __str__(self) -> str:
        return f"{dotted(self.version)}, from {self.origin}: {self.path}"


@dataclass(frozen=True)
class Toolkit:
    """What a build needs of CUDA; ``cccl`` is the folder of ``cuda/std`` where headers keep it apart (CUDA 13)."""

    home: Path
    nvcc: Path
    cccl: Path | None


def find_nvcc(asked: Path | None, environment: Environment, environ: Mapping[str, str]) -> Tool | Absent:
    """``--cuda-home``, else ``CUDA_HOME``, else the compiler wheels; what is named and wrong is not passed over."""
    named = environ.get("CUDA_HOME")
    for home, origin in ((asked, "--cuda-home"), (Path(named) if named else None, "CUDA_HOME")):
        if home is not None:
            path = home.absolute() / "bin" / "nvcc"
            if not _is_program(path):
                other = "leave it out" if origin == "--cuda-home" else "unset it"
                return Absent(
                    f"{origin} names {home}, which holds no bin/nvcc; name the folder of a CUDA toolkit, "
                    f"or {other} to use the compiler wheels (uv sync --inexact --group cuda-build)"
                )
            return look(path, origin)
    for path in environment.nvidia_folders("cu*/bin/nvcc"):
        if _is_program(path):
            return look(path, WHEELS)
    return Absent(f"nvcc is in neither --cuda-home, CUDA_HOME nor the packages of {environment.python}; {_GET_CUDA}")


def find_cuobjdump(nvcc: Tool | Absent, environment: Environment, environ: Mapping[str, str]) -> Tool | Absent:
    """The one beside nvcc, else of the wheels, else of the PATH: it only reads binaries, so any recent one will do."""
    places = [] if isinstance(nvcc, Absent) else [(nvcc.path.parent / "cuobjdump", nvcc.origin)]
    places += [(path, WHEELS) for path in environment.nvidia_folders("cu*/bin/cuobjdump")]
    if on_path := shutil.which("cuobjdump", path=environ.get("PATH")):
        places.append((Path(on_path), "PATH"))
    for path, origin in places:
        if _is_program(path):
            return look(path, origin)
    return Absent(f"cuobjdump, which reads the GPU images of the result, was not found; {_GET_CUDA}")


def look(path: Path, origin: str) -> Tool | Absent:
    """Ask a program for its version; one that does not start is absent, with what it said."""
    ended = ask([path, "--version"])
    if ended.code != 0:
        said = (ended.stderr or ended.stdout).strip().splitlines()
        return Absent(f"{path} does not start ({said[-1][:200] if said else f'code {ended.code}'}); install it anew")
    return Tool(path, parse_version(ended.stdout), origin)


def parse_version(output: str) -> Version | None:
    """The version in ``--version`` output: CUDA's ``V13.0.88``, else the last number of the first line."""
    if cuda := re.search(r"\bV(\d+(?:\.\d+)+)", output):
        return numbers(cuda[1])
    words = re.findall(r"\d+(?:\.\d+)+", output.partition("\n")[0])
    return numbers(words[-1]) if words else None


def toolkit_of(nvcc: Path, build: Path) -> Toolkit:
    """The toolkit around ``nvcc``, with a view of links in ``build`` where its libraries are not in ``lib64``.

    nvcc looks for the CUDA runtime in ``lib64`` beside its own folder, and CMake for ``libcudart.so``; the wheels
    unpack into ``lib``, with the version in every name. A folder of links has what both look for, and the packages
    stay as they are. nvcc takes the folder of the name it is called by, so ``bin`` has to be a folder of links.
    """
    real = nvcc.parent.parent
    if not (real / "lib").is_dir() or any((real / name).exists() for name in ("lib64", "targets")):
        return Toolkit(real, nvcc, _cccl(real))
    view = build / "cuda"
    shutil.rmtree(view, ignore_errors=True)
    for name in ("bin", "lib64"):
        (view / name).mkdir(parents=True)
    for program in (real / "bin").iterdir():
        (view / "bin" / program.name).symlink_to(program)
    for library in sorted((real / "lib").iterdir()):
        (view / "lib64" / library.name).symlink_to(library)
        plain = view / "lib64" / f"{library.name.partition('.so.')[0]}.so"
        if ".so." in library.name and not (real / "lib" / plain.name).exists():
            plain.unlink(missing_ok=True)  # the newest of several wins, and no name is taken twice
            plain.symlink_to(library)
    (view / "lib").symlink_to("lib64")
    for name in ("include", "nvvm"):
        (view / name).symlink_to(real / name)
    return Toolkit(view, view / "bin" / "nvcc", _cccl(view))


def _cccl(home: Path) -> Path | None:
    places = (home / "include" / "cccl", home / "targets" / "x86_64-linux" / "include" / "cccl")
    return next((place for place in places if (place / "cuda" / "std").is_dir()), None)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
