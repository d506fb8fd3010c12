"""The overlay: our sources in a folder of their own inside a checkout of upstream, and one line that imports them.

    <checkout>/fast_ulysses/fast_cp/            csrc/python/fast_ulysses/, so that ours is a subpackage of theirs
    <checkout>/fast_ulysses/fast_cp/csrc/       the C++ and CUDA sources
    <checkout>/fast_ulysses/__init__.py         one added line

Upstream's own sources are not touched, and its build does not compile ours.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.install.environment import read
from tools.install.errors import ExitCode, InstallError

PACKAGE = "fast_ulysses"
FOLDER = "fast_cp"
LINE = "from .fast_cp import *  # Fast CP's overlay (tools/install/install_fast_agkv.py)"
_BUILT = (".so", ".pyc", ".o", ".a")


@dataclass(frozen=True)
class State:
    """How a checkout differs from one with the overlay in place."""

    problems: tuple[str, ...]

    @property
    def in_place(self) -> bool:
        """Whether nothing is missing."""
        return not self.problems


def require_upstream(checkout: Path) -> None:
    """Refuse a folder that is not a checkout of fast-ulysses."""
    lacks = [name for name in ("setup.py", f"{PACKAGE}/__init__.py") if not (checkout / name).is_file()]
    if not checkout.is_dir():
        raise InstallError(f"{checkout} is no folder; name a checkout of fast-ulysses", ExitCode.USAGE)
    if not lacks and PACKAGE not in read(checkout / "setup.py"):
        lacks = [f"mention of {PACKAGE} in setup.py"]
    if lacks:
        what = " and no ".join(lacks)
        raise InstallError(
            f"{checkout} is no checkout of fast-ulysses: it has no {what}; nothing was changed; "
            "clone the repository that csrc/upstream.toml names, and name that folder",
            ExitCode.USAGE,
        )


def package_files(csrc: Path) -> dict[str, bytes]:
    """Our Python package, names below it to bytes; what a build leaves behind is not part of it."""
    home = csrc / "python" / PACKAGE
    if not (home / "__init__.py").is_file():
        raise InstallError(f"{home} holds no __init__.py; name the repository's csrc folder", ExitCode.USAGE)
    return _tree(home)


def overlay_files(csrc: Path) -> dict[str, bytes]:
    """Everything below ``fast_ulysses/fast_cp/``, names to bytes."""
    files = package_files(csrc)
    for name, data in _tree(csrc).items():
        if not name.startswith("python/"):
            files[f"csrc/{name}"] = data
    return files


def look(checkout: Path, csrc: Path) -> State:
    """Compare the checkout's overlay with our sources, byte for byte."""
    require_upstream(checkout)
    wanted = overlay_files(csrc)
    home = checkout / PACKAGE / FOLDER
    found = _tree(home) if home.is_dir() else {}
    problems = []
    if not home.is_dir():
        problems.append(f"{PACKAGE}/{FOLDER} is not there")
    else:
        problems += [f"{name} is missing" for name in sorted(set(wanted) - set(found))]
        problems += [f"{name} is not ours" for name in sorted(set(found) - set(wanted))]
        problems += [f"{name} differs" for name in sorted(set(found) & set(wanted)) if found[name] != wanted[name]]
    lines = read(checkout / PACKAGE / "__init__.py").splitlines().count(LINE)
    if lines != 1:
        problems.append(f"{PACKAGE}/__init__.py has the line that imports it {lines} times")
    return State(tuple(problems))


def apply(checkout: Path, csrc: Path) -> bool:
    """Put the overlay in place, whole or not at all; return whether anything had to be changed.

    Everything is written beside its place first. Then the folder is moved, then ``__init__.py``: whoever looks in
    between sees upstream with a folder that nothing imports yet. A failure takes back what was moved.
    """
    if look(checkout, csrc).in_place:
        return False
    package = checkout / PACKAGE
    target, init = package / FOLDER, package / "__init__.py"
    staged, old = package / f".{FOLDER}.new", package / f".{FOLDER}.old"
    staged_init = package / ".__init__.py.new"
    _recover(target, old)
    try:
        _clear(staged, staged_init)
        for name, data in overlay_files(csrc).items():
            path = staged / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        staged_init.write_bytes(with_line(init.read_bytes()))
        shutil.copymode(init, staged_init)
        _swap(staged, target, old, staged_init, init)
    except OSError as error:
        raise InstallError(f"the overlay could not be written, and {checkout} is as it was: {error}") from error
    finally:
        _clear(staged, staged_init)
    _clear(old)
    return True


def with_line(text: bytes) -> bytes:
    """``__init__.py`` with our line at its end, once, in the file's own line ending."""
    ending = b"\r\n" if b"\r\n" in text else b"\n"
    lines = [line for line in text.splitlines(keepends=True) if line.strip() != LINE.encode()]
    body = b"".join(lines)
    if body and not body.endswith(b"\n"):
        body += ending
    return body + LINE.encode() + ending


def _swap(staged: Path, target: Path, old: Path, staged_init: Path, init: Path) -> None:
    had_one = target.exists()
    if had_one:
        target.rename(old)
    try:
        staged.rename(target)
        staged_init.replace(init)
    except OSError:
        if target.exists():
            shutil.rmtree(target)
        if had_one:
            old.rename(target)
        raise


def _recover(target: Path, old: Path) -> None:
    """After a process that was killed between two moves: the old folder returns, or goes."""
    if old.exists() and not target.exists():
        old.rename(target)
    _clear(old)


def _clear(*paths: Path) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()


def _tree(home: Path) -> dict[str, bytes]:
    files = {}
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home)
        hidden = any(part.startswith(".") or part in ("__pycache__", "build") for part in name.parts)
        if path.is_file() and not hidden and path.suffix not in _BUILT:
            files[name.as_posix()] = path.read_bytes()
    return files
