"""Where CuTe FlashAttention comes from, and whether that combination of versions was tried. It imports none of it.

``FLASH_ATTENTION_ROOT``, where that folder is there, names a checkout of FlashAttention at ``COMMIT`` and wins over the
installed package flash-attn-4 (uv extra ``cute``); fast_cp_env.sh sets it whether the folder is there or not. A folder
without git history, such as an unpacked archive, cannot say its commit: it is taken for ``COMMIT``, and said to be.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

COMMIT = "d7e4dba3e568106b0f1b6323b07c1272f53679b3"
ROOT_VARIABLE = "FLASH_ATTENTION_ROOT"
PACKAGE = "flash-attn-4"
DSL, DSL_LIBRARIES, QUACK = "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "quack-kernels"
# What FlashAttention imports: module → the package that brings it.
MODULES = {
    "cutlass": DSL,
    "quack": QUACK,
    "tvm_ffi": "apache-tvm-ffi",
    "einops": "einops",
    "typing_extensions": "typing-extensions",
    "cuda.bindings": "cuda-bindings",
}
SYNC = "uv sync --inexact --extra cute"  # inexact: the extension, which no sync knows, stays


@dataclass(frozen=True)
class Tried:
    """A combination that was tried: a commit or a version of flash-attn-4, with its compiler and kernel library.

    ``direct``: its compiled kernels were found to be callable without FlashAttention's wrapper (cute_launch.py).
    """

    revision: str
    dsl: str
    quack: str
    where: str
    direct: bool = False


TRIED = (
    Tried(COMMIT, "4.6.1", "0.6.2", "ran on SM90, compiles for SM120"),
    Tried(COMMIT, "4.6.2", "0.6.4", "compiles for SM90 and SM120, never ran"),
    Tried("4.0.0b29", "4.6.2", "0.6.4", "ran on SM90, compiles for SM120", direct=True),
)


@dataclass(frozen=True)
class CuteSource:
    """What was found without importing it: ``root`` holds ``flash_attn/cute``, None where there is none.

    ``versions`` has the packages that are installed. ``tried`` is the row of the table that fits, or None, and then
    ``problem`` is a clause that says what stands in the way, and ``next_step`` what to do.
    """

    origin: str
    root: Path | None = None
    revision: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    tried: Tried | None = None
    problem: str | None = None
    next_step: str = SYNC


def look(environ: Mapping[str, str]) -> CuteSource:
    """Where CuTe would be imported from, and what stands in the way; takes milliseconds."""
    named = environ.get(ROOT_VARIABLE)
    root = Path(named).expanduser().absolute() if named else None
    found = _checkout(root) if root is not None and root.exists() else _package(root)
    if found.problem is not None:
        return found
    names = (DSL, DSL_LIBRARIES, QUACK)
    versions = {name: text for name in names if (text := installed(name)) is not None}
    assert found.revision is not None
    problem = untried(found.revision, versions) or _missing_module()
    tried = None if problem else _rows(found.revision, versions)[0]
    return CuteSource(found.origin, found.root, found.revision, versions, tried, problem)


def untried(revision: str, versions: Mapping[str, str]) -> str | None:
    """The first version that was not tried together with ``revision``, or None."""
    rows = [row for row in TRIED if row.revision == revision]
    if not rows:
        return _wanted(PACKAGE, revision, [row.revision for row in TRIED if row.revision != COMMIT])
    dsl = versions.get(DSL)
    if dsl not in (wanted := [row.dsl for row in rows]):
        return _wanted(DSL, dsl, wanted)
    if (libraries := versions.get(DSL_LIBRARIES)) != dsl:  # without them it compiles with CUDA 12.9
        return _wanted(DSL_LIBRARIES, libraries, [str(dsl)])
    if not _rows(revision, versions):
        return _wanted(QUACK, versions.get(QUACK), [row.quack for row in rows if row.dsl == dsl])
    return None


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _rows(revision: str, versions: Mapping[str, str]) -> list[Tried]:
    found = revision, versions.get(DSL), versions.get(QUACK)
    return [row for row in TRIED if (row.revision, row.dsl, row.quack) == found]


def _wanted(name: str, found: str | None, wanted: Sequence[str]) -> str:
    return f"{name} {f'{found} found' if found else 'is not installed'}, {' or '.join(wanted)} wanted"


def _missing_module() -> str | None:
    return next((f"{name} has no module {module} here" for module, name in MODULES.items() if not _has(module)), None)


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no such parent; or something without a spec took the name
        return False


def _package(no_checkout: Path | None) -> CuteSource:
    """The installed package, also where ``no_checkout``, which was named, is not there."""
    gone = f"{ROOT_VARIABLE}={no_checkout} is not there" if no_checkout is not None else ""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return CuteSource(PACKAGE, problem=f"{PACKAGE} is not installed{gone and f', and {gone}'}")
    origin = f"{PACKAGE} {package.version}{gone and f' ({gone})'}"
    return CuteSource(origin, Path(str(package.locate_file(""))), package.version)


def _checkout(root: Path) -> CuteSource:
    origin = f"{ROOT_VARIABLE}={root}"
    if not (root / "flash_attn" / "cute" / "interface.py").is_file():
        step = f"point it to a checkout of FlashAttention, or unset {ROOT_VARIABLE}"
        return CuteSource(origin, problem=f"{origin} holds no flash_attn/cute", next_step=step)
    revision = head_commit(root)
    if revision not in (None, COMMIT):
        step = f"check {COMMIT} out there, or unset {ROOT_VARIABLE}"
        return CuteSource(origin, problem=f"{origin} is at {revision}, {COMMIT} wanted", next_step=step)
    said = f"at {COMMIT[:12]}" if revision else f"without git history, taken for {COMMIT[:12]}"
    return CuteSource(f"{origin} ({said})", root, COMMIT)


def head_commit(root: Path) -> str | None:
    """The commit that a checkout is at; None without a git history, ``an unknown commit`` where it cannot be read.

    Read from the files, since git itself refuses folders of another user, as they are in containers.
    """
    git = root / ".git"
    try:
        if git.is_file():  # a worktree or a submodule
            git = root / git.read_text().removeprefix("gitdir:").strip()
        if not git.exists():
            return None
        head = (git / "HEAD").read_text().strip()
        return next(_resolved(git, head.removeprefix("ref: ")), "an unknown commit") if head[:5] == "ref: " else head
    except OSError:
        return "an unknown commit"


def _resolved(git: Path, ref: str) -> Iterator[str]:
    shared = git / "commondir"
    common = git / shared.read_text().strip() if shared.is_file() else git
    if (common / ref).is_file():
        yield (common / ref).read_text().strip()
    elif (common / "packed-refs").is_file():
        lines = (line.split() for line in (common / "packed-refs").read_text().splitlines())
        yield from (words[0] for words in lines if words[1:] == [ref])
