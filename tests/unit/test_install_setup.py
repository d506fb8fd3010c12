"""setup_fast_cp.sh with stand-ins for uv, the environment's Python and doctor; and the scripts' own form."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_install_build import write, write_program

ROOT = Path(__file__).resolve().parents[2]
UV = """
echo "uv $*" >> "{home}/log"
case $1 in
    --version) [ ! -e "{home}/no-uv" ] ;;
    sync) mkdir -p "{root}/.venv/bin"; cp "{home}/python" "{root}/.venv/bin/python" ;;
    pip) [ ! -e "{home}/pip-fails" ] ;;
esac
"""
PYTHON = """
case $* in
    *build_fast_cp.py*) echo "build $*" >> "{home}/log"
        while [ "$1" != --json ]; do shift; done
        echo '{{"wheel": "/wheels/fast.whl"}}' > "$2"; exit $(cat "{home}/build-code" 2> /dev/null || echo 0) ;;
    *doctor*) echo "doctor $*" >> "{home}/log"; exit $(cat "{home}/doctor-code") ;;
    *) exec "{python}" "$@" ;;
esac
"""


class Repository:
    """A repository that has the scripts only, and stand-ins that write what they are asked into a log."""

    def __init__(self, home: Path) -> None:
        self.home, self.root = home, home / "a repository"
        (self.root / "tools/install").mkdir(parents=True)
        for name in ("tools/uv.sh", "tools/install/setup_fast_cp.sh", "tools/install/fast_cp_env.sh"):
            shutil.copy(ROOT / name, self.root / name)
        write(self.root / "tools/install/build_fast_cp.py")  # run by the environment's Python, which is a stand-in
        write(self.root / "pyproject.toml", '    "nvidia-nvshmem-cu13==3.4.5",\n')
        write(self.packages / "torch/x")
        write(self.packages / "nvidia/nvshmem/include/nvshmem.h")
        write_program(home / "bin/uv", UV.format(home=home, root=self.root))
        write_program(home / "python", PYTHON.format(home=home, python=sys.executable))
        write(home / "doctor-code", "3")

    @property
    def packages(self) -> Path:
        return self.root / ".venv/lib/python3.12/site-packages"

    def setup(self, *arguments: str, **environ: str) -> tuple[int, str]:
        ended = subprocess.run(
            ["bash", self.root / "tools/install/setup_fast_cp.sh", *arguments],
            env={"PATH": f"{self.home}/bin:/usr/bin:/bin", "HOME": str(self.home), **environ},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return ended.returncode, ended.stderr

    @property
    def log(self) -> list[str]:
        lines = (self.home / "log").read_text().replace(str(self.root), "ROOT").splitlines()
        return [line for line in lines if line != "uv --version"]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_it_goes_from_the_environment_to_doctor(repository: Repository) -> None:
    code, said = repository.setup()
    assert code == 3
    assert said.splitlines()[-1].startswith("setup_fast_cp: Fast CP is built and installed, and cannot run here")
    lock, sync, build, install, doctor = repository.log
    assert (lock, sync) == ("uv lock --quiet", "uv sync --inexact --group cuda-build")
    assert build.startswith("build ROOT/tools/install/build_fast_cp.py --json ")
    assert install == "uv pip install --python ROOT/.venv/bin/python --no-deps --reinstall /wheels/fast.whl"
    assert doctor == "doctor -m chitu_diffusion.cli doctor --require fast"
    noted = repository.root / ".deps/fast-cp/installed"
    assert noted.read_text() == f"{repository.root}/.venv\n/wheels/fast.whl\n"


@pytest.mark.parametrize("code", [0, 1])
def test_doctors_code_is_the_last_word(repository: Repository, code: int) -> None:
    write(repository.home / "doctor-code", str(code))
    assert repository.setup()[0] == code


def test_options_go_to_the_build_and_a_named_toolkit_needs_no_compiler_wheels(repository: Repository) -> None:
    repository.setup("my checkout", "--architectures", "90", "--cuda-home", "/cuda")
    assert "uv sync --inexact" in repository.log
    assert "build_fast_cp.py my checkout --architectures 90 --cuda-home /cuda --json" in repository.log[2]
    (repository.home / "log").unlink()
    repository.setup(CUDA_HOME="/cuda")
    assert "uv sync --inexact" in repository.log


def test_wrong_usage_is_told_before_anything_is_fetched(repository: Repository) -> None:
    shutil.copytree(ROOT / "tools/install", repository.root / "tools/install", dirs_exist_ok=True)
    shutil.copy(ROOT / "tools/__init__.py", repository.root / "tools/__init__.py")
    code, said = repository.setup("--architectures", "80")
    assert code == 2
    assert "invalid choice: 80 (choose from 90, 120)" in said
    assert not (repository.home / "log").exists()


@pytest.mark.parametrize("code", [1, 2, 3])
def test_a_build_that_fails_ends_it_with_the_same_code(repository: Repository, code: int) -> None:
    write(repository.home / "build-code", str(code))
    ended, said = repository.setup()
    assert ended == code
    assert 'stopped at "building the extension"' in said
    assert not any("pip" in line or "doctor" in line for line in repository.log)


def test_an_install_that_fails_ends_it(repository: Repository) -> None:
    write(repository.home / "pip-fails")
    code, said = repository.setup()
    assert code == 1
    assert 'stopped at "installing' in said
    assert not (repository.root / ".deps/fast-cp/installed").exists()


def test_headers_are_installed_apart_where_torch_brings_none(repository: Repository) -> None:
    shutil.rmtree(repository.packages / "nvidia")
    _, said = repository.setup()
    pinned = "--target ROOT/.deps/fast-cp/python --no-deps nvidia-nvshmem-cu13==3.4.5"
    assert repository.log[2] == f"uv pip install --python ROOT/.venv/bin/python {pinned}"
    assert f"building against {repository.root}/.deps/fast-cp/python/nvidia/nvshmem" in said


@pytest.mark.parametrize("typed", [["--nvshmem-home", "/opt/nvshmem"], ["--nvshmem-home=/opt/nvshmem"]])
def test_the_nvshmem_that_is_named_is_what_it_says_to_build_against(repository: Repository, typed: list[str]) -> None:
    assert "building against /opt/nvshmem\n" in repository.setup(*typed)[1]


def test_without_uv_on_the_path_one_is_installed(repository: Repository) -> None:
    (repository.home / "bin/uv").rename(repository.home / "uv")
    body = f'[ "$1 $2" != "-m venv" ] || {{ mkdir -p "$3/bin"; cp "{repository.home}/uv" "$3/bin/"; '
    body += f'cp "{repository.home}/pip" "$3/bin/python"; }}'
    write_program(repository.home / "bin/python3", body)
    write_program(repository.home / "pip", "exit 0")
    code, _ = repository.setup()
    assert code == 3
    assert repository.log[1] == "uv sync --inexact --group cuda-build"


def test_help_says_what_it_does_and_does_nothing(repository: Repository) -> None:
    assert repository.setup("--help") == (0, "")
    assert not (repository.home / "log").exists()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    scripts = sorted((ROOT / "tools/install").glob("*.sh"))
    ended = subprocess.run(["shellcheck", "-x", *scripts], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("script", ["build_fast_cp.py", "install_fast_agkv.py"])
def test_the_scripts_run_from_any_folder_without_site_packages(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", ROOT / "tools/install" / script, "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert "CHECKOUT" in ended.stdout
