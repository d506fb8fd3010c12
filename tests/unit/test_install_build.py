"""The whole build against stand-ins for every program: no compiler, no CUDA, no torch."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.install import build_fast_cp
from tools.install.checks import OPERATORS
from tools.install.environment import Environment

NVCC = "echo 'Cuda compilation tools, release {release}, V{release}.88'"
CMAKE = """
case $1 in --version) echo 'cmake version 4.0.1'; exit 0 ;; esac
echo "$*" >> "{home}/cmake.log"
if [ "$1" = --build ]; then
    [ ! -e "{home}/breaks" ] || {{ echo 'x.cu(3): error: no such thing'; exit 2; }}
    echo '[1/2] compiling transfer/x.cu'; echo '[2/2] linking libfast_cp.so'
    cp "{home}/library" "$2/libfast_cp.so"
else
    while [ "$1" != -B ]; do shift; done
    mkdir -p "$2"
fi
"""
LINKAGE = (
    " 0x1 (NEEDED) Shared library: [libtorch_cpu.so]\n  5: 0 0 FUNC GLOBAL DEFAULT UND aoti_torch_get_device_type\n"
)
SETUP = """
import sys, zipfile
name = "fast_ulysses-0.0.1"
with zipfile.ZipFile(f"{sys.argv[sys.argv.index('--dist-dir') + 1]}/{name}-cp312-cp312-linux_x86_64.whl", "w") as wheel:
    wheel.write("fast_ulysses/__init__.py")
    wheel.writestr("fast_ulysses/_C.so", "theirs")
    wheel.writestr("fast_ulysses/fast_cp/csrc/old.cu", "their build took our sources along")
    wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\\nName: fast_ulysses\\nVersion: 0.0.1\\n")
    wheel.writestr(f"{name}.dist-info/RECORD", "stale")
"""


def write_program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@dataclass
class Machine:
    """A folder with stand-ins for the environment, the programs and the sources."""

    home: Path

    @property
    def environment(self) -> Environment:
        return Environment(self.home / "env/bin/python", (3, 12, 1), (self.home / "env/site-packages",))

    def images(self, *names: str) -> None:
        lines = [f"ELF file    {n}: x.{n}.{name}.cubin\n" for n, name in enumerate(names, 1)]
        write(self.home / "images", "".join(lines) + "PTX file    1: x.1.sm_80.ptx\n")

    def build(self, *arguments: str) -> int:
        places = ["--csrc", "csrc", "--wheel-dir", "wheels", "--build-dir", "build", "--jobs", "1"]
        words = [str(self.home / word) if not word.startswith("-") and word != "1" else word for word in places]
        return build_fast_cp.main([*arguments, *words], self.environment)

    @property
    def wheels(self) -> list[Path]:
        return sorted((self.home / "wheels").glob("*"))


def make_machine(home: Path, nvcc: str = "13.0") -> Machine:
    packages, programs = home / "env/site-packages", home / "programs"
    write(packages / "torch/__init__.py", "import types\n__version__ = '2.11.0'\nops = types.SimpleNamespace()\n")
    write(packages / "torch/version.py", "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    write(packages / "torch/include/torch/csrc/stable/library.h")
    write(packages / "nvidia/nvshmem/include/nvshmem.h")
    write(packages / "nvidia/nvshmem/lib/libnvshmem_host.so.3")
    write_program(packages / "nvidia/cu13/bin/nvcc", NVCC.format(release=nvcc))
    write(packages / "nvidia/cu13/lib/libcudart.so.13")
    write_program(packages / "nvidia/cu13/bin/cuobjdump", f"[ \"$1\" = --version ] || cat '{home}/images'")
    write_program(home / "env/bin/python", f"PYTHONPATH='{packages}' exec '{sys.executable}' -S \"$@\"")
    write_program(home / "env/bin/cmake", CMAKE.format(home=home))
    write_program(home / "env/bin/ninja", "echo 1.13")
    write_program(programs / "nvidia-smi", "exit 9")
    write_program(programs / "g++", "echo 'g++ 12.2.0'")
    write_program(programs / "readelf", f"[ \"$1\" = --version ] && echo 2.40 || cat '{home}/linkage'")
    write(home / "linkage", LINKAGE)
    write(home / "library", "machine code")
    names = ", ".join(f"{name}=1" for name in OPERATORS)
    write(home / "csrc/CMakeLists.txt", "project(fast_cp)")
    write(home / "csrc/ops/x.cpp", "// ours")
    code = f"import torch, types\n__version__ = '0.3.0'\ntorch.ops.fast_ulysses = types.SimpleNamespace({names})\n"
    write(home / "csrc/python/fast_ulysses/__init__.py", code)
    machine = Machine(home)
    machine.images("sm_90a", "sm_120")
    return machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    home = tmp_path / "a machine"
    monkeypatch.setenv("PATH", f"{home}/programs:{os.environ['PATH']}")
    for name in ("CUDA_HOME", "NVSHMEM_HOME", "CXX", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return make_machine(home)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", *identity, "-C", folder, *arguments]
    return subprocess.run(command, env=kept, capture_output=True, text=True, check=True).stdout.strip()


def make_checkout(folder: Path, pin: Path) -> Path:
    """A git repository that stands in for upstream, and its pin file."""
    write(folder / "setup.py", SETUP)
    write(folder / "fast_ulysses/__init__.py", "import torch\n")
    write(folder / "fast_ulysses/csrc/bindings.cpp", "// theirs")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "upstream")
    write(pin, f'url = "somewhere"\ncommit = "{git(folder, "rev-parse", "HEAD")}"\n')
    return folder


def test_the_wheel_holds_the_package_and_the_library(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.build("--architectures", "90", "120", "--json", str(machine.home / "out.json")) == 0
    out = json.loads((machine.home / "out.json").read_text())
    assert [wheel.name for wheel in machine.wheels] == ["fast_ulysses-0.3.0-py3-none-linux_x86_64.whl"]
    names = zipfile.ZipFile(machine.wheels[0]).namelist()
    assert {"fast_ulysses/__init__.py", "fast_ulysses/libfast_cp.so"} < set(names)
    assert (out["status"], out["wheel"], out["architectures"]) == ("complete", str(machine.wheels[0]), [90, 120])
    assert out["nvshmem_built_against"]
    assert out["torch_tried"] == "2.11.0"
    assert out["images"] == ["sm_120", "sm_90a"]
    said = capsys.readouterr()
    assert "1/2 transfer/x.cu" in said.err
    assert str(machine.wheels[0]) in said.out
    assert "-DFAST_CP_ARCHITECTURES=90;120" in said.out


def test_the_same_sources_give_the_same_bytes(machine: Machine) -> None:
    assert machine.build("--architectures", "90", "120") == 0
    first = machine.wheels[0].read_bytes()
    machine.wheels[0].unlink()
    os.utime(machine.home / "csrc/python/fast_ulysses/__init__.py", (1, 1))
    assert machine.build("--architectures", "120", "90") == 0
    assert machine.wheels[0].read_bytes() == first


@pytest.mark.parametrize("gpus", ["", "9.0\n", "9.0\n12.0\n"])
def test_without_architectures_those_of_the_gpus_are_built_else_all(machine: Machine, gpus: str) -> None:
    write_program(machine.home / "programs/nvidia-smi", f"printf '{gpus}'; [ -n '{gpus}' ]")
    machine.images("sm_90") if gpus == "9.0\n" else machine.images("sm_90a", "sm_120")
    assert machine.build() == 0
    assert (
        f"FAST_CP_ARCHITECTURES={'90 ' if gpus == '9.0\n' else '90;120 '}" in (machine.home / "cmake.log").read_text()
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"images": "PTX file 1: x.1.sm_90.ptx\n"}, "holds none (PTX is not counted)"),
        ({"images": "ELF file 1: x.1.sm_90a.cubin\n"}, "should hold native images for SM 90, 120, and holds sm_90a"),
        ({"linkage": LINKAGE + "  6: 0 0 FUNC GLOBAL DEFAULT UND _ZN3c104warnEv\n"}, "_ZN3c104warnEv"),
        ({"linkage": LINKAGE + " 0x1 (NEEDED) Shared library: [libtorch_cuda.so]\n"}, "libtorch_cuda.so"),
        ({"breaks": ""}, "x.cu(3): error: no such thing"),
        ({"csrc/python/fast_ulysses/__init__.py": "__version__ = '1'\nimport nothing"}, "No module named 'nothing'"),
        (
            {"csrc/python/fast_ulysses/__init__.py": "__version__ = '1'\nimport torch\ntorch.ops.fast_ulysses = 0"},
            "does not register fast_cp_device_info",
        ),
    ],
)
def test_a_wheel_that_fails_a_check_is_not_left_behind(
    machine: Machine, capsys: pytest.CaptureFixture[str], spoil: dict[str, str], said: str
) -> None:
    for name, text in spoil.items():
        write(machine.home / name, text)
    assert machine.build("--architectures", "90", "120", "--json", str(machine.home / "out.json")) == 1
    assert said in capsys.readouterr().err
    assert machine.wheels == []
    assert json.loads((machine.home / "out.json").read_text())["status"] == "failed"


def test_everything_that_is_missing_is_told_at_once(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    packages = machine.home / "env/site-packages"
    for name in ("nvshmem/include/nvshmem.h", "cu13/bin/nvcc"):
        (packages / "nvidia" / name).unlink()
    write(packages / "torch/version.py", "__version__ = '2.9.1'\n")
    assert machine.build() == 3
    said = capsys.readouterr().err
    assert "3 things are missing" in said
    assert said.count("\n  - ") == 3
    assert "no include/nvshmem.h" in said
    assert "2.9.1" in said
    assert "--group cuda-build" in said
    assert not (machine.home / "cmake.log").exists()


@pytest.mark.parametrize("words", [["--architectures", "75"], ["--jobs", "0"]])
def test_wrong_usage_ends_with_2(machine: Machine, words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_fast_cp.main(words, machine.environment)
    assert machine.build(str(machine.home / "nowhere")) == 2


def test_with_a_checkout_both_are_in_one_wheel(machine: Machine) -> None:
    checkout = make_checkout(machine.home / "up stream", machine.home / "csrc/upstream.toml")
    for _ in range(2):  # the second build finds upstream's wheel kept, and says the same
        assert machine.build(str(checkout), "--architectures", "90", "120") == 0
        (path,) = machine.wheels
        assert path.name == "fast_ulysses-0.0.1+fastcp.0.3.0-cp312-cp312-linux_x86_64.whl"
        names = zipfile.ZipFile(path).namelist()
        assert {"fast_ulysses/_C.so", "fast_ulysses/fast_cp/libfast_cp.so"} < set(names)
        assert not any("csrc" in name for name in names)
        path.unlink()
        (checkout / "setup.py").touch()


def test_another_commit_is_an_error_that_names_both(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = make_checkout(machine.home / "upstream", machine.home / "csrc/upstream.toml")
    pinned = git(checkout, "rev-parse", "HEAD")
    write(checkout / "fast_ulysses/csrc/bindings.cpp", "// newer")
    assert machine.build(str(checkout)) == 1
    assert "with changes in fast_ulysses/csrc/bindings.cpp" in capsys.readouterr().err
    git(checkout, "commit", "-qam", "newer")
    assert machine.build(str(checkout)) == 1
    said = capsys.readouterr().err
    assert pinned in said
    assert git(checkout, "rev-parse", "HEAD") in said
    assert "--allow-unpinned" in said
    assert git(checkout, "status", "--porcelain") == ""
    assert machine.wheels == []
    assert machine.build(str(checkout), "--allow-unpinned") == 0
    assert "note: " in capsys.readouterr().out
