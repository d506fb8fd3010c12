"""The Python environment that the extension is built for, and torch in it, seen without importing torch."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, ...]

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Torch:
    """torch as installed; ``cuda`` is the CUDA that it was built for, None for a CPU build."""

    version: str
    cuda: str | None
    include: Path
    lib: Path

    @property
    def release(self) -> Version:
        """Its version as numbers, without the suffix of the build."""
        return numbers(self.version.split("+")[0])


@dataclass(frozen=True)
class Environment:
    """An interpreter and the folders of its packages."""

    python: Path
    version: Version
    site_packages: tuple[Path, ...]

    @property
    def programs(self) -> Path:
        """The folder that pip puts programs into, ``cmake`` and ``ninja`` among them."""
        return self.python.parent

    def torch(self) -> Torch | None:
        """What the files of torch say, or None where it is not installed."""
        for folder in self.site_packages:
            home = folder / "torch"
            text = read(home / "version.py")
            if found := re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE):
                cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
                return Torch(found[1], cuda[1] if cuda else None, home / "include", home / "lib")
        return None

    def nvidia_folders(self, pattern: str) -> list[Path]:
        """What ``pattern`` finds below the folder into which NVIDIA's wheels unpack, newest name first."""
        found: list[Path] = []
        for folder in self.site_packages:
            found += sorted((folder / "nvidia").glob(pattern), key=lambda path: natural(str(path)), reverse=True)
        return found


def choose_environment(running: Environment, own: Environment | None) -> Environment:
    """The running interpreter where it has torch, else the repository's own environment where that has it."""
    if running.torch() is None and own is not None and own.torch() is not None:
        return own
    return running


def running_environment() -> Environment:
    """The interpreter that runs this, and the package folders that it imports from."""
    folders = tuple(Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages"))
    return Environment(Path(sys.executable), tuple(sys.version_info[:3]), folders)


def environment_at(home: Path) -> Environment | None:
    """The virtual environment in ``home``, or None where there is none."""
    folders = tuple(sorted(home.glob("lib/python3.*/site-packages")))
    python = home / "bin" / "python"
    if not folders or not python.exists():
        return None
    version = re.search(r"^version(?:_info)?\s*=\s*([\d.]+)", read(home / "pyvenv.cfg"), re.MULTILINE)
    return Environment(python, numbers(version[1]) if version else (), folders)


def find_environment() -> Environment:
    """The environment to build for: the running one, or ``.venv`` of the repository."""
    return choose_environment(running_environment(), environment_at(REPOSITORY / ".venv"))


def deps_root(environ: Mapping[str, str]) -> Path:
    """Where downloads and build folders go: ``FAST_CP_DEPS_ROOT``, as fast_cp_env.sh sets it."""
    return Path(environ.get("FAST_CP_DEPS_ROOT") or REPOSITORY / ".deps" / "fast-cp").absolute()


def read(path: Path) -> str:
    """The text of a file, empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def numbers(text: str) -> Version:
    """``13.0.88`` as (13, 0, 88); what follows the first part that is no number is left out."""
    found = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(map(int, found[0].split("."))) if found else ()


def natural(text: str) -> list[tuple[int, str]]:
    """A sorting key under which cu13 follows cu9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def dotted(version: Version | None) -> str:
    """A version as people write it."""
    return ".".join(map(str, version)) if version else "unknown version"
