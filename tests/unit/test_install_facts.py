"""What the installer finds, in which order it looks, and what it says where something is missing."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_install_build import Machine, make_machine, write, write_program
from tools.install.environment import Environment, choose_environment, environment_at, numbers
from tools.install.errors import InstallError
from tools.install.facts import Asked, Facts, find_cxx, find_gpus, free_bytes, parse_capabilities, probe
from tools.install.nvshmem import Nvshmem, bridge, find_nvshmem
from tools.install.requirements import NEEDED_BYTES, choose_architectures, find_problems, require
from tools.install.toolchain import WHEELS, Absent, Tool, find_cuobjdump, find_nvcc, parse_version, toolkit_of

NOWHERE = Environment(Path("python"), (3, 12, 1), ())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return make_machine(tmp_path / "machine")


@pytest.fixture
def facts(machine: Machine) -> Facts:
    seen = probe(Asked(written_folders=(machine.home,)), machine.environment, {"PATH": f"{machine.home}/programs"})
    return replace(seen, system="Linux", machine="x86_64", free_bytes={machine.home: NEEDED_BYTES})


def test_a_complete_machine_has_no_problem(facts: Facts) -> None:
    assert list(find_problems(facts, (90, 120))) == []
    require(facts, (90, 120))
    assert facts.torch is not None
    assert (facts.torch.version, facts.torch.cuda) == ("2.11.0+cu130", "13.0")


def test_an_empty_machine_is_probed_without_an_error_and_told_all_at_once(tmp_path: Path) -> None:
    seen = probe(Asked(written_folders=(tmp_path / "not/yet",)), NOWHERE, {"PATH": str(tmp_path)})
    assert seen.gpus == ()
    assert free_bytes(tmp_path / "not/yet") > 0
    with pytest.raises(InstallError) as told:
        require(replace(seen, system="Darwin", machine="arm64", free_bytes={tmp_path: 5 * 2**20}), (90,))
    assert told.value.exit_code == 3
    said = str(told.value)
    for word in ("Linux", "torch", "g++", "nvcc", "cuobjdump", "readelf", "cmake", "ninja", "NVSHMEM", "free disk"):
        assert word in said, word
    assert all(";" in line for line in said.splitlines()[1:]), "every problem says what to do"


@pytest.mark.parametrize(
    ("change", "architectures", "said"),
    [
        ({"environment": replace(NOWHERE, version=(3, 11, 4))}, (90,), "Python 3.12 or newer is needed"),
        ({"nvcc": Tool(Path("nvcc"), (12, 6, 1), "--cuda-home")}, (90, 120), "SM120 needs nvcc 12.8 or newer"),
        ({"cmake": Tool(Path("cmake"), (3, 16), "PATH")}, (90,), "CMake 3.22 or newer is needed"),
        ({"free_bytes": {Path("x"): 2**30}}, (90,), "2.0 GiB of free disk are needed at x, and 1.0 GiB are free"),
        ({"machine": "aarch64"}, (90,), "this is Linux aarch64"),
    ],
)
def test_each_problem_is_one_sentence(
    facts: Facts, change: dict[str, object], architectures: tuple[int, ...], said: str
) -> None:
    (problem,) = find_problems(replace(facts, **change), architectures)  # type: ignore[arg-type]
    assert said in problem
    assert ";" in problem


def test_an_nvcc_too_old_for_sm120_builds_sm90(facts: Facts) -> None:
    old = replace(facts, nvcc=Tool(Path("nvcc"), (12, 6, 1), "--cuda-home"))
    assert list(find_problems(old, (90,))) == []


def test_the_compiler_is_the_named_one_else_cuda_homes_else_the_wheels(machine: Machine, tmp_path: Path) -> None:
    named, home = tmp_path / "named", tmp_path / "home"
    for folder in (named, home):
        write_program(folder / "bin/nvcc", "echo V12.9.1")
    environ = {"CUDA_HOME": str(home), "PATH": ""}
    origins = [
        find_nvcc(named, machine.environment, environ),
        find_nvcc(None, machine.environment, environ),
        find_nvcc(None, machine.environment, {"PATH": ""}),
    ]
    assert [found.origin for found in origins if isinstance(found, Tool)] == ["--cuda-home", "CUDA_HOME", WHEELS]
    assert isinstance(origins[0], Tool)
    assert (origins[0].path, origins[0].version) == (named / "bin/nvcc", (12, 9, 1))
    beside_no_other = find_cuobjdump(origins[0], machine.environment, environ)
    assert isinstance(beside_no_other, Tool)
    assert beside_no_other.origin == WHEELS


def test_a_named_folder_that_is_wrong_is_not_passed_over(machine: Machine, tmp_path: Path) -> None:
    for found in (
        find_nvcc(tmp_path, machine.environment, {}),
        find_nvcc(None, machine.environment, {"CUDA_HOME": str(tmp_path)}),
        find_nvshmem(tmp_path, machine.environment, {}),
        find_nvshmem(None, machine.environment, {"NVSHMEM_HOME": str(tmp_path)}),
    ):
        assert isinstance(found, Absent)
        assert str(tmp_path) in found.sentence


def test_a_program_that_does_not_start_is_absent(machine: Machine) -> None:
    write_program(machine.home / "env/site-packages/nvidia/cu13/bin/nvcc", "echo 'wrong glibc' >&2; exit 1")
    found = find_nvcc(None, machine.environment, {})
    assert isinstance(found, Absent)
    assert "does not start (wrong glibc)" in found.sentence


def test_a_compiler_without_cpp17_is_absent(tmp_path: Path) -> None:
    body = 'case $1 in --version) echo "g++ 4.8.5" ;; *) echo "error: C++17 is missing" >&2; exit 1 ;; esac'
    found = find_cxx({"PATH": "", "CXX": str(write_program(tmp_path / "old", body))})
    assert isinstance(found, Absent)
    assert "does not compile C++17 (error: C++17 is missing)" in found.sentence


def test_versions_are_read_from_what_programs_say() -> None:
    assert parse_version("Cuda compilation tools, release 13.0, V13.0.88\nBuild x") == (13, 0, 88)
    assert parse_version("g++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022") == (12, 2, 0)
    assert parse_version("no number") is None
    assert numbers("2.11.0a1") == (2, 11, 0)


def test_the_newest_compiler_wheels_come_first(machine: Machine) -> None:
    packages = machine.home / "env/site-packages/nvidia"
    write(packages / "cu9/bin/nvcc")
    assert machine.environment.nvidia_folders("cu*/bin/nvcc") == [packages / f"cu{n}/bin/nvcc" for n in (13, 9)]
    assert machine.environment.nvidia_folders("cu*/bin/gcc") == []


def test_gpus_are_what_the_driver_reports_and_none_where_it_fails(tmp_path: Path) -> None:
    assert parse_capabilities("9.0\n9.0\n12.0\n") == (90, 120)
    assert parse_capabilities("[N/A]\n") == ()
    write_program(tmp_path / "nvidia-smi", "echo 9.0; exit 9")
    assert find_gpus({"PATH": str(tmp_path)}) == ()


def test_architectures_are_as_asked_else_the_gpus_else_all() -> None:
    assert choose_architectures((120, 90, 90), (90,)) == ((90, 120), "as asked")
    assert choose_architectures((), (80, 90)) == ((90,), "the GPUs found")
    assert choose_architectures((), ())[0] == (90, 120)
    with pytest.raises(InstallError, match="SM80") as told:
        choose_architectures((), (80,))
    assert told.value.exit_code == 3


def test_the_repositorys_environment_is_used_where_the_running_one_has_no_torch(machine: Machine) -> None:
    own, other = machine.environment, replace(NOWHERE, version=(3, 13))
    assert choose_environment(other, own) == own
    assert choose_environment(own, other) == own
    assert choose_environment(other, None) == other
    write(machine.home / ".venv/pyvenv.cfg", "home = x\nversion_info = 3.12.4\n")
    write(machine.home / ".venv/lib/python3.12/site-packages/x")
    assert environment_at(machine.home / ".venv") is None
    write(machine.home / ".venv/bin/python")
    found = environment_at(machine.home / ".venv")
    assert found is not None
    assert found.version == (3, 12, 4)


def test_wheels_get_a_view_that_nvcc_and_cmake_find_libraries_in(machine: Machine, tmp_path: Path) -> None:
    packages = machine.home / "env/site-packages/nvidia/cu13"
    write(packages / "include/cccl/cuda/std/tuple")
    before = sorted(packages.rglob("*"))
    for _ in range(2):
        toolkit = toolkit_of(packages / "bin/nvcc", tmp_path)
        assert toolkit.nvcc == tmp_path / "cuda/bin/nvcc"
        assert not (tmp_path / "cuda/bin").is_symlink()
        for name in ("lib64/libcudart.so", "lib/libcudart.so.13", "include/cccl/cuda/std/tuple", "bin/nvcc"):
            assert (toolkit.home / name).is_file(), name
        assert toolkit.cccl == toolkit.home / "include/cccl"
    assert sorted(packages.rglob("*")) == before


def test_a_system_toolkit_is_used_as_it_is(tmp_path: Path) -> None:
    nvcc = write_program(tmp_path / "cuda/bin/nvcc", "")
    write(tmp_path / "cuda/lib64/libcudart.so")
    write(tmp_path / "cuda/lib/x")
    assert toolkit_of(nvcc, tmp_path / "build").nvcc == nvcc
    assert not (tmp_path / "build").exists()


def test_the_package_indexs_nvshmem_is_bridged_in_the_build_folder_and_not_written_to(
    machine: Machine, tmp_path: Path
) -> None:
    found = find_nvshmem(None, machine.environment, {})
    assert isinstance(found, Nvshmem)
    version = "".join(f"#define NVSHMEM_VENDOR_{part} {n}\n" for part, n in _parts(3, 4, 5))
    write(found.home / "include/non_abi/nvshmem_version.h", version)
    found = find_nvshmem(None, machine.environment, {})
    assert isinstance(found, Nvshmem)
    before = sorted(found.home.rglob("*"))
    for _ in range(2):
        home = bridge(found, tmp_path / "build")
    assert (home / "include/nvshmem.h").is_file()
    assert (home / "lib/libnvshmem_host.so").resolve() == (found.home / "lib/libnvshmem_host.so.3").resolve()
    assert "nvshmem::nvshmem_host" in (home / "lib/cmake/nvshmem/NVSHMEMConfig.cmake").read_text()
    assert '"3.4.5"' in (home / "lib/cmake/nvshmem/nvshmem-config-version.cmake").read_text()
    assert sorted(found.home.rglob("*")) == before


def test_a_complete_nvshmem_needs_no_bridge(tmp_path: Path) -> None:
    for name in ("include/nvshmem.h", "lib/libnvshmem_host.so", "lib/cmake/nvshmem/NVSHMEMConfig.cmake"):
        write(tmp_path / "nvshmem" / name)
    found = find_nvshmem(tmp_path / "nvshmem", NOWHERE, {})
    assert isinstance(found, Nvshmem)
    assert bridge(found, tmp_path / "build") == tmp_path / "nvshmem"


def _parts(*version: int) -> list[tuple[str, int]]:
    return list(zip(("MAJOR_VERSION", "MINOR_VERSION", "PATCH_VERSION"), version, strict=True))
