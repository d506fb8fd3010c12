"""The checkout of upstream: whether it is the pinned commit, and its own build."""

import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.install.environment import Environment, read
from tools.install.errors import ExitCode, InstallError
from tools.install.overlay import FOLDER, LINE, PACKAGE, require_upstream, with_line
from tools.install.process import ask, run, surroundings
from tools.install.progress import Progress
from tools.install.wheel import Wheel, read_wheel


@dataclass(frozen=True)
class Pin:
    """The commit that the overlay is made for."""

    url: str
    commit: str


@dataclass(frozen=True)
class Checkout:
    """A checkout as git sees it; ``commit`` is None where it is no git repository.

    ``changed`` are tracked files that differ from the commit by more than our line, ``added`` untracked ones that are
    neither ours nor what a build leaves behind.
    """

    path: Path
    commit: str | None
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def __str__(self) -> str:
        changes = f" with changes in {', '.join(self.changed[:5])}" if self.changed else ""
        return f"{self.commit or 'no git commit'}{changes}"


def read_pin(path: Path) -> Pin:
    """The pin file: ``url`` and the full ``commit``."""
    try:
        content = tomllib.loads(path.read_text())
        pin = Pin(str(content["url"]), str(content["commit"]))
    except (OSError, KeyError, ValueError) as error:
        raise InstallError(f"{path} is no pin file with url and commit ({error}); restore it from git") from error
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", pin.commit):
        raise InstallError(f"{path} pins {pin.commit!r}, which is no full commit; write all its digits")
    return pin


def look_at(path: Path) -> Checkout:
    """What git says about the checkout; a folder inside another repository is none of its own."""
    top = _git(path, "rev-parse", "--show-toplevel")
    commit = _git(path, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top.strip()).resolve() != path.resolve():
        return Checkout(path, None)
    changed = [name for name in _names(path, "diff", "--name-only", "HEAD") if not _only_our_line(path, name)]
    untracked = _names(path, "ls-files", "--others", "--exclude-standard")
    added = [name for name in untracked if not re.match(rf"{PACKAGE}/{FOLDER}/|build/|[^/]+\.egg-info/", name)]
    return Checkout(path, commit.strip(), tuple(changed), tuple(added))


def verify(path: Path, pin: Pin, *, allow_unpinned: bool) -> tuple[Checkout, str | None]:
    """The checkout, and a note where it is not what is pinned; without ``allow_unpinned`` that is an error."""
    require_upstream(path)
    checkout = look_at(path)
    if checkout.commit == pin.commit and not checkout.changed:
        return checkout, None
    difference = f"{path} is at {checkout}, and the overlay is made for {pin.commit}"
    if allow_unpinned:
        return checkout, f"{difference}; built all the same, as --allow-unpinned says"
    remedy = (
        f"undo the changes (git -C {path} stash)"
        if checkout.commit == pin.commit
        else f"check it out (git -C {path} checkout {pin.commit})"
    )
    raise InstallError(f"{difference}; {remedy}, or go on with --allow-unpinned", ExitCode.FAILED)


def build_wheel(
    checkout: Checkout, environment: Environment, environ: Mapping[str, str], kept: Path, progress: Progress
) -> Wheel:
    """Upstream's own wheel, built in the environment that has torch.

    The wheel of a commit without changes is kept in the folder ``kept``, so that the next build need not make it.
    """
    pure = checkout.commit is not None and not checkout.changed and not checkout.added
    home = kept / (checkout.commit or "") if pure else None
    if home is not None and (found := sorted(home.glob("*.whl"))):
        progress.step(f"upstream's package is built already: {found[0]}")
        return read_wheel(found[0])
    with tempfile.TemporaryDirectory(prefix="fast-cp-upstream-") as folder:
        path = _bdist_wheel(checkout.path, environment, environ, Path(folder), progress)
        wheel = read_wheel(path)
        _require_line(wheel, checkout.path)
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, home / f".{path.name}")
            (home / f".{path.name}").replace(home / path.name)
    return wheel


def _bdist_wheel(
    checkout: Path, environment: Environment, environ: Mapping[str, str], folder: Path, progress: Progress
) -> Path:
    command = [str(environment.python), "setup.py", "bdist_wheel", "--dist-dir", str(folder)]
    progress.step(f"building upstream's package in {checkout}")
    run(command, cwd=checkout, env=environ, on_line=progress.compiler_line)
    progress.finish()
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise InstallError(f"upstream's setup.py should build one wheel, and built {len(wheels)}; see {checkout}")
    return wheels[0]


def _require_line(wheel: Wheel, checkout: Path) -> None:
    init = wheel.files.get(f"{PACKAGE}/__init__.py", b"").decode(errors="replace")
    if LINE not in init.splitlines():
        raise InstallError(
            f"upstream's wheel does not import {PACKAGE}.{FOLDER}: its {PACKAGE}/__init__.py is an old copy; "
            f"remove {checkout / 'build'} and build again"
        )


def _only_our_line(checkout: Path, name: str) -> bool:
    if name != f"{PACKAGE}/__init__.py":
        return False
    committed = _git(checkout, "show", f"HEAD:{name}")
    return committed is not None and with_line(committed.encode()).decode() == read(checkout / name)


def _names(checkout: Path, *arguments: str) -> list[str]:
    return [name for name in (_git(checkout, *arguments, "-z") or "").split("\0") if name]


def _git(checkout: Path, *arguments: str) -> str | None:
    ended = ask(["git", "-C", checkout, *arguments], env=surroundings())
    return ended.stdout if ended.code == 0 else None
