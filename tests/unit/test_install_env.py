"""fast_cp_env.sh in bash and zsh; needs zsh for half of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/install/fast_cp_env.sh"
NAMES = ("FAST_CP_DEPS_ROOT", "FAST_CP_BUILD_ROOT", "FLASH_ATTENTION_ROOT", "NVSHMEM_HOME", "CHITU_EXTRA_PYTHONPATH")
SHELLS = [
    "bash",
    pytest.param("zsh", marks=pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")),
]
LOCKED = ".venv/lib/python3.12/site-packages/nvidia/nvshmem"

pytestmark = pytest.mark.parametrize("shell", SHELLS)


@pytest.fixture(params=["repository", "a repository"])
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A repository without environment or dependencies, its path with and without a space."""
    home = tmp_path.resolve() / str(request.param)
    (home / "tools/install").mkdir(parents=True)
    shutil.copy(SCRIPT, home / "tools/install")
    return home


def source(
    shell: str, root: Path, *, cwd: Path | None = None, times: int = 1, before: str = "", **preset: str
) -> tuple[dict[str, str], str]:
    """The environment after sourcing in a strict shell, and what was written to stderr."""
    lines = [
        "set -eu",
        before,
        *[f". '{root}/tools/install/fast_cp_env.sh'"] * times,
        "set +eu",
        "env -0",
        # what must not be left behind
        "if typeset -f | grep -q _fast_cp; then printf 'LEFT=function\\0'; fi",
    ]
    child = {"PATH": "/usr/bin:/bin", "HOME": str(root), "CDPATH": "/usr", **preset}
    ended = subprocess.run(
        [shell, "-c", "\n".join(lines)],
        env=child,
        cwd=cwd or root,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    found = dict(entry.split("=", 1) for entry in ended.stdout.split("\0") if "=" in entry)
    assert "LEFT" not in found
    return {name: value for name, value in found.items() if name in NAMES or name.startswith("FAST_CP")}, ended.stderr


def defaults(root: Path) -> dict[str, str]:
    deps = root / ".deps/fast-cp"
    places = (deps, deps / "src/fast-ulysses", deps / "src/flash-attention", root / LOCKED, deps / "python")
    return dict(zip(NAMES, map(str, places), strict=True))


def install_torch(venv: Path) -> Path:
    """An environment with torch and the NVSHMEM that comes with it; returns the latter."""
    packages = venv / "lib/python3.12/site-packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "nvidia/nvshmem").mkdir(parents=True)
    return packages / "nvidia/nvshmem"


def test_the_defaults_are_below_the_repository_from_any_folder(shell: str, root: Path, tmp_path: Path) -> None:
    assert source(shell, root, cwd=tmp_path) == (defaults(root), "")


def test_a_relative_name_of_the_script_will_do(shell: str, root: Path) -> None:
    relative = f"cd '{root}/tools'; . ./install/fast_cp_env.sh; unset NVSHMEM_HOME"
    assert source(shell, root, before=relative)[0] == defaults(root)


def test_sourcing_twice_changes_nothing_the_second_time(shell: str, root: Path) -> None:
    install_torch(root / ".venv")
    (root / ".deps/fast-cp/python/nvidia/nvshmem").mkdir(parents=True)
    once, twice = source(shell, root), source(shell, root, times=2)
    assert twice == once
    assert once[1].count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_what_is_set_before_stays(shell: str, root: Path, tmp_path: Path, name: str) -> None:
    mine = str(tmp_path / "of my own")
    found, _ = source(shell, root, times=2, **{name: mine})
    assert found[name] == mine
    expected = defaults(root) | {name: mine}
    if name == "FAST_CP_DEPS_ROOT":  # the others follow it
        expected |= {key: value.replace(f"{root}/.deps/fast-cp", mine) for key, value in expected.items()}
    assert found == expected


def test_a_shell_that_says_where_it_goes_does_not_disturb(shell: str, root: Path) -> None:
    talking = 'chpwd() { echo moved; }; cd() { echo moved; builtin cd "$@"; }'
    assert source(shell, root, before=talking) == (defaults(root), "")


def test_what_is_set_and_not_exported_counts_too_and_a_relative_path_is_made_absolute(shell: str, root: Path) -> None:
    found, _ = source(shell, root, before="FAST_CP_DEPS_ROOT=./deps")
    assert found["FAST_CP_DEPS_ROOT"] == f"{root}/deps"
    assert found["CHITU_EXTRA_PYTHONPATH"] == f"{root}/deps/python"


def test_the_isolated_nvshmem_is_active_only_where_torch_brings_none(shell: str, root: Path) -> None:
    isolated = root / ".deps/fast-cp/python/nvidia/nvshmem"
    isolated.mkdir(parents=True)
    found, said = source(shell, root)
    assert (found["NVSHMEM_HOME"], said) == (str(isolated), "")
    own = install_torch(root / ".venv")
    found, said = source(shell, root, times=2)
    assert found["NVSHMEM_HOME"] == str(own)
    assert said == f"fast_cp_env: the NVSHMEM in {isolated} is not used: torch loads its own copy, {own}\n"


def test_a_preset_nvshmem_that_torch_will_not_load_is_kept_and_said_once(shell: str, root: Path) -> None:
    own = install_torch(root / ".venv")
    isolated = str(root / ".deps/fast-cp/python/nvidia/nvshmem")
    found, said = source(shell, root, times=2, NVSHMEM_HOME=isolated)
    assert found["NVSHMEM_HOME"] == isolated
    assert said == f"fast_cp_env: NVSHMEM_HOME, {isolated}, is only built against: torch loads its own copy, {own}\n"
    assert source(shell, root, NVSHMEM_HOME=str(own))[1] == ""


def test_the_active_environment_comes_before_the_repositorys(shell: str, root: Path, tmp_path: Path) -> None:
    install_torch(root / ".venv")
    active = install_torch(tmp_path / "active")
    assert source(shell, root, VIRTUAL_ENV=str(tmp_path / "active"))[0]["NVSHMEM_HOME"] == str(active)


def test_running_it_is_refused_since_it_would_change_nothing(shell: str, root: Path) -> None:
    ended = subprocess.run(
        [shell, root / "tools/install/fast_cp_env.sh"], capture_output=True, text=True, timeout=20, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "run: source" in ended.stderr
