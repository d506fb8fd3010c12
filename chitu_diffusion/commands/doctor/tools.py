"""Finds the programs and headers that building the extension needs, and the wheel that was built; never raises."""

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from chitu_diffusion.commands.doctor.facts import HomeFacts, Seen, ToolFacts, Version, WheelFacts
from chitu_diffusion.commands.doctor.process import run

_CUDA_TOOLS = ("nvcc", "cuobjdump")
_VERSION_LIMIT_S = 5.0
_INSTALLED = "installed"  # two lines by setup_fast_cp.sh: the environment, and the wheel that it installed there
_REPOSITORY = Path(__file__).resolve().parents[3]


def find_tools(environ: Mapping[str, str]) -> dict[str, Seen[ToolFacts]]:
    """The CUDA tools as the build looks for them (``CUDA_HOME``, the package index's wheels, ``PATH``), and g++."""
    found = {name: _find_cuda_tool(name, environ) for name in _CUDA_TOOLS}
    found["g++"] = _look("g++", "PATH", shutil.which("g++", path=environ.get("PATH")))
    return found


def _find_cuda_tool(name: str, environ: Mapping[str, str]) -> Seen[ToolFacts]:
    home = environ.get("CUDA_HOME")
    if home and name == "nvcc" and not _is_program(Path(home, "bin", name)):
        return Seen(broken=f"CUDA_HOME names {home}, which holds no bin/nvcc")
    for origin, path in _cuda_candidates(name, environ):
        if _is_program(path):
            return _look(name, origin, str(path))
    return Seen(absent=f"no {name} in CUDA_HOME, the environment's wheels or PATH")


def _cuda_candidates(name: str, environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environ.get("CUDA_HOME"):
        yield "CUDA_HOME", Path(home, "bin", name)
    for root in _wheel_roots():
        for path in sorted(root.glob(f"*/bin/{name}"), reverse=True):
            yield "package index", path
    if on_path := shutil.which(name, path=environ.get("PATH")):
        yield "PATH", Path(on_path)


def _wheel_roots() -> list[Path]:
    """The folders into which NVIDIA's wheels unpack: the namespace package ``nvidia``, found without importing it."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _is_program(path: Path) -> bool:
    return shutil.which(path) is not None


def _look(name: str, origin: str, path: str | None) -> Seen[ToolFacts]:
    if path is None:
        return Seen(absent=f"no {name} in {origin}")
    ended = run([path, "--version"], limit_s=_VERSION_LIMIT_S)
    if ended.code != 0:
        return Seen(broken=f"{path} --version: {ended.how}")
    return Seen(value=ToolFacts(path, origin, parse_version(ended.stdout)))


def parse_version(output: str) -> Version | None:
    """The version in ``--version`` output: CUDA's ``V13.0.88``, else the last number of the first line."""
    if cuda := re.search(r"\bV(\d+(?:\.\d+)+)", output):
        return _numbers(cuda[1])
    dotted = re.findall(r"\d+(?:\.\d+)+", output.partition("\n")[0])
    return _numbers(dotted[-1]) if dotted else None


def find_nvshmem_home(environ: Mapping[str, str]) -> HomeFacts | None:
    """What ``NVSHMEM_HOME`` names, or None where it is not set."""
    home = environ.get("NVSHMEM_HOME")
    if not home:
        return None
    libraries = sorted(Path(home, "lib").glob("libnvshmem_host.so*"))
    return HomeFacts(home, str(libraries[0].resolve()) if libraries else None, _header_version(Path(home)))


def find_wheel(environ: Mapping[str, str], repository: Path = _REPOSITORY) -> WheelFacts | None:
    """The wheel of the extension that was installed into this environment, else the newest that was built, or None."""
    root = Path(environ.get("FAST_CP_DEPS_ROOT") or repository / ".deps" / "fast-cp").absolute()
    installed = _installed_wheel(root / _INSTALLED)
    try:
        built = sorted(root.glob("wheels/fast_ulysses-*.whl"), key=lambda path: path.stat().st_mtime)
    except OSError:
        built = []
    there = [path for path in (installed, *reversed(built)) if path is not None and path.is_file()]
    if not there:
        return None
    command = ["uv", "pip", "install", "--python", sys.executable, "--no-deps", "--reinstall", str(there[0])]
    return WheelFacts(str(there[0]), shlex.join(command), installed is not None)


def _installed_wheel(marker: Path) -> Path | None:
    """The wheel that setup_fast_cp.sh noted to have installed, if it was into the environment that runs this."""
    try:
        environment, wheel = marker.read_text().splitlines()
    except (OSError, ValueError):
        return None
    return Path(wheel) if Path(environment).resolve() == Path(sys.prefix).resolve() else None


def _header_version(home: Path) -> Version | None:
    try:
        text = (home / "include" / "non_abi" / "nvshmem_version.h").read_text(errors="replace")
    except OSError:
        return None
    parts = [re.search(rf"NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return tuple(int(part[1]) for part in parts if part) or None


def _numbers(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))
