"""The doctor's probe against environments that are broken: torch blocked, libraries that abort or hang, odd tools."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chitu_diffusion.commands.doctor import tools as doctor_tools
from chitu_diffusion.commands.doctor.probe import ask_child
from chitu_diffusion.commands.doctor.process import run
from chitu_diffusion.commands.doctor.tools import find_nvshmem_home, find_tools, parse_version

FAKE_TORCH = """
from types import SimpleNamespace as N
__version__ = "2.11.0+cu130"
version = N(cuda="13.0")
cuda = N(is_available=lambda: False, init=lambda: None)
distributed = N(is_available=lambda: False)
ops = N(fast_ulysses=N())
"""
BLOCK_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Block())
"""
LIMITS_S = {"torch": 20.0, "extension": 2.0}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of every other on the path, which holds a light torch."""
    write_module(tmp_path, "torch", FAKE_TORCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_module(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chitu_diffusion.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env={**os.environ, **env})


def test_this_machine_is_examined_in_time_and_says_what_it_lacks() -> None:
    start = time.perf_counter()
    ended = doctor("--json")
    assert time.perf_counter() - start < 20  # 4 s on an idle machine; others use this one too
    checks = {check["name"]: check for check in json.loads(ended.stdout)["checks"]}
    assert ended.returncode == json.loads(ended.stdout)["exit_code"]
    assert {"python", "torch", "driver", "gpus", "nccl", "nvshmem", "kernels", "cute", "extension", "nvcc"} <= set(
        checks
    )
    assert checks["torch"]["state"] == checks["kernels"]["state"] == "ok"


def test_without_torch_the_doctor_works_and_names_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK_TORCH)
    ended = doctor("--json", "--require", "nccl", PYTHONPATH=str(tmp_path))
    checks = {check["name"]: check for check in json.loads(ended.stdout)["checks"]}
    assert ended.returncode == 3
    assert (checks["torch"]["state"], checks["torch"]["next_step"]) == ("missing", "install it: uv sync")
    assert {checks[name]["state"] for name in ("nccl", "nvshmem", "kernels", "cute", "extension")} == {"missing"}
    assert "Traceback" not in ended.stderr


def test_an_extension_that_aborts_is_a_line_and_the_lines_before_it_stay(modules: Path) -> None:
    write_module(modules, "fast_ulysses", "import os, sys; sys.stderr.write('undefined symbol: x\\n'); os.abort()")
    seen = ask_child(os.environ, LIMITS_S)
    assert getattr(seen["torch"].value, "version", None) == "2.11.0+cu130"
    assert seen["extension"].broken == "the process died of SIGABRT: undefined symbol: x"


def test_an_extension_that_hangs_is_a_line_at_its_limit(modules: Path) -> None:
    write_module(modules, "fast_ulysses", "import time; time.sleep(60)")
    start = time.perf_counter()
    seen = ask_child(os.environ, LIMITS_S)
    assert time.perf_counter() - start < 10
    assert seen["extension"].broken == "it did not finish within 2 s"


def test_a_stage_that_dies_does_not_take_the_next_with_it(modules: Path) -> None:
    write_module(modules, "pynvml", "import os; os.abort()")
    seen = ask_child(os.environ, {"machine": 10, **LIMITS_S})
    assert "SIGABRT" in (seen["machine"].broken or "")
    assert seen["torch"].value is not None
    assert seen["extension"].absent == "there is no Python module fast_ulysses"


def test_a_torch_that_aborts_is_broken_and_what_needs_it_is_not_tried(modules: Path) -> None:
    (modules / "torch" / "__init__.py").write_text("import os; os.abort()")
    seen = ask_child(os.environ, {**LIMITS_S, "kernels": 10})
    assert "SIGABRT" in (seen["torch"].broken or "")
    assert seen["kernels"].absent == seen["extension"].absent == "it needs torch, which does not import"


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("raise OSError('libcudart.so.13: cannot open\\nlong story')", "OSError: libcudart.so.13: cannot open"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(4)", "the process ended with code 4"),
    ],
)
def test_a_failing_import_is_broken_and_not_absent(modules: Path, text: str, broken: str) -> None:
    write_module(modules, "fast_ulysses", text)
    seen = ask_child(os.environ, LIMITS_S)["extension"]
    assert (seen.absent, seen.broken) == (None, broken)


def test_what_libraries_print_while_they_load_does_not_disturb_the_answers(modules: Path) -> None:
    write_module(modules, "fast_ulysses", "import os; os.write(1, b'{banner\\n'); print('hello'); __version__ = '9'")
    seen = ask_child(os.environ, LIMITS_S)["extension"]
    assert seen.value is not None
    assert seen.value.version == "9"
    assert "all_gather_kv_4d" in seen.value.missing_operators


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return path


def test_nvcc_comes_from_cuda_home_then_wheels_then_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "echo 'Cuda compilation tools, release {0}, V{0}.88'"
    program(tmp_path / "home/bin/nvcc", says.format("13.2"))
    wheel = program(tmp_path / "site/nvidia/cu99/bin/nvcc", says.format("13.1"))
    program(tmp_path / "path/nvcc", says.format("12.4"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    environ = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}

    def found() -> tuple[object, object]:
        tool = find_tools(environ)["nvcc"].value
        assert tool is not None
        return tool.origin, tool.version

    assert found() == ("CUDA_HOME", (13, 2, 88))
    del environ["CUDA_HOME"]
    assert found() == ("package index", (13, 1, 88))
    wheel.unlink()
    # the environment that runs this may have the compiler's wheels, too
    monkeypatch.setattr(doctor_tools, "_wheel_roots", lambda: [tmp_path / "site/nvidia"])
    assert found() == ("PATH", (12, 4, 88))


def test_a_cuda_home_without_nvcc_and_an_nvcc_that_fails_are_broken(tmp_path: Path) -> None:
    assert "holds no bin/nvcc" in (find_tools({"CUDA_HOME": str(tmp_path), "PATH": ""})["nvcc"].broken or "")
    program(tmp_path / "bin/nvcc", "echo cannot find libdevice >&2; exit 3")
    broken = find_tools({"CUDA_HOME": str(tmp_path), "PATH": ""})["nvcc"].broken or ""
    assert broken.endswith("the process ended with code 3: cannot find libdevice")


def test_versions_are_read_from_what_compilers_print() -> None:
    assert parse_version("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright") == (12, 2, 0)
    assert parse_version("nvcc: NVIDIA (R)\nCuda compilation tools, release 13.0, V13.0.88") == (13, 0, 88)
    assert parse_version("no version") is None


def test_nvshmem_home_is_read_with_its_headers(tmp_path: Path) -> None:
    assert find_nvshmem_home({}) is None
    header = tmp_path / "include/non_abi/nvshmem_version.h"
    header.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), (3, 7, 2), strict=True)
    header.write_text("".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in parts))
    home = find_nvshmem_home({"NVSHMEM_HOME": str(tmp_path)})
    assert home is not None
    assert (home.library, home.version) == (None, (3, 7, 2))


def test_a_program_at_its_limit_leaves_no_child_behind(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    ended = run(["sh", "-c", f"(sleep 1.5; touch {mark}) & wait"], limit_s=0.3)
    time.sleep(1.6)
    assert ended.code is None
    assert not mark.exists()
