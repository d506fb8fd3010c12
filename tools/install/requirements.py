"""Whether the facts are enough to build; pure. Every problem is one sentence, and all are told at once."""

from collections.abc import Iterator, Sequence

from tools.install.environment import Version, dotted
from tools.install.errors import ExitCode, InstallError
from tools.install.facts import Facts
from tools.install.toolchain import Absent, Tool

# The architectures that csrc/ is written for, and the oldest nvcc that knows them.
ARCHITECTURES: dict[int, Version] = {90: (12, 0), 120: (12, 8)}
OLDEST_PYTHON: Version = (3, 12)
OLDEST_TORCH: Version = (2, 10)  # the stable ABI that the extension is compiled for
OLDEST_CMAKE: Version = (3, 22)
NEEDED_BYTES = 2 * 2**30


def require(facts: Facts, architectures: Sequence[int]) -> None:
    """Raise one InstallError that lists every problem, if there is any."""
    problems = list(find_problems(facts, architectures))
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        count = "one thing is" if len(problems) == 1 else f"{len(problems)} things are"
        raise InstallError(f"nothing was built, since {count} missing:{lines}", ExitCode.INCOMPLETE)


def choose_architectures(asked: Sequence[int], gpus: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """What to build for, and why: as asked, else for the GPUs found, else all that there are sources for."""
    if asked:
        return tuple(sorted(set(asked))), "as asked"
    known = ", ".join(map(str, ARCHITECTURES))
    if not gpus:
        return tuple(ARCHITECTURES), "no GPU found, so all"
    served = tuple(gpu for gpu in sorted(gpus) if gpu in ARCHITECTURES)
    if served:
        return served, "the GPUs found"
    found = ", ".join(f"SM{gpu}" for gpu in gpus)
    raise InstallError(
        f"the GPUs of this machine are {found}, and Fast CP is written for SM {known}; "
        "to build for another machine, name its --architectures",
        ExitCode.INCOMPLETE,
    )


def find_problems(facts: Facts, architectures: Sequence[int]) -> Iterator[str]:
    """Every reason why a build with these facts cannot succeed."""
    if (facts.system, facts.machine) != ("Linux", "x86_64"):
        yield f"Fast CP is built on Linux x86_64, and this is {facts.system} {facts.machine}; build it there"
    yield from _python_and_torch(facts)
    for found in (facts.cxx, facts.nvcc, facts.cuobjdump, facts.readelf, facts.cmake, facts.ninja, facts.nvshmem):
        if isinstance(found, Absent):
            yield found.sentence
    yield from _old_tools(facts, architectures)
    yield from _full_disks(facts)


def _python_and_torch(facts: Facts) -> Iterator[str]:
    environment = facts.environment
    if environment.version[:2] < OLDEST_PYTHON:
        yield (
            f"Python {dotted(OLDEST_PYTHON)} or newer is needed, and {environment.python} is "
            f"{dotted(environment.version)}; run this with `uv run python` or .venv/bin/python"
        )
    torch = facts.torch
    if torch is None:
        yield f"torch is not among the packages of {environment.python}; run `uv sync`, then use .venv/bin/python"
    elif torch.release[:2] < OLDEST_TORCH:
        yield f"torch {dotted(OLDEST_TORCH)} or newer is needed, and {torch.version} is installed; run `uv sync`"
    elif not (torch.include / "torch" / "csrc" / "stable").is_dir():
        yield f"torch {torch.version} has no torch/csrc/stable in {torch.include}; install it anew: uv sync --reinstall"


def _old_tools(facts: Facts, architectures: Sequence[int]) -> Iterator[str]:
    nvcc, cmake = facts.nvcc, facts.cmake
    if isinstance(nvcc, Tool) and nvcc.version is not None:
        for architecture in architectures:
            oldest = ARCHITECTURES[architecture]
            if nvcc.version < oldest:
                yield (
                    f"SM{architecture} needs nvcc {dotted(oldest)} or newer, and {nvcc.path} is "
                    f"{dotted(nvcc.version)}; name a newer toolkit with --cuda-home, or leave out {architecture}"
                )
    if isinstance(cmake, Tool) and cmake.version is not None and cmake.version < OLDEST_CMAKE:
        found = f"{cmake.path} is {dotted(cmake.version)}"
        yield f"CMake {dotted(OLDEST_CMAKE)} or newer is needed, and {found}; run `uv sync`"


def _full_disks(facts: Facts) -> Iterator[str]:
    for folder, free in facts.free_bytes.items():
        if free < NEEDED_BYTES:
            found = f"{_gib(NEEDED_BYTES)} of free disk are needed at {folder}, and {_gib(free)} are free"
            yield f"{found}; make room, or name a folder elsewhere (--build-dir, --wheel-dir)"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
