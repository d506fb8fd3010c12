"""What the doctor says about the extension, on machines that are not here."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chitu_diffusion.commands.doctor.facts import DoctorFacts, ExtensionFacts, Seen, WheelFacts
from chitu_diffusion.commands.doctor.judge import judge
from chitu_diffusion.commands.doctor.tools import find_wheel
from chitu_diffusion.parallel.cp.fast import extension
from tests.unit.test_doctor import EXTENSION, INFO, check, facts, machine, states, torch

WHEEL = WheelFacts("/deps/wheels/fast_ulysses-0.1.0-py3-none-linux_x86_64.whl", "uv pip install --no-deps WHEEL")
INSTALLED = replace(WHEEL, installed=True)
NOT_THERE: Seen[ExtensionFacts] = Seen(absent="there is no Python module fast_ulysses")
HOST_MISSING = (
    "NVSHMEM's host library libnvshmem_host.so.3 was looked for in this process, NVSHMEM_HOME and torch's environment, "
    "and not found; /x/lib/libnvshmem_host.so.3: cannot open shared object file; install nvidia-nvshmem-cu13 or set "
    "NVSHMEM_HOME to a folder with lib/libnvshmem_host.so.3"
)
MAJOR_DIFFERS = (
    "this library was built against NVSHMEM 3.4.5 and the process has 2.11.0 from /x; rebuild against its headers, or "
    "install NVSHMEM 3.x"
)


def nvshmem(**changes: Any) -> dict[str, Any]:
    return {"nvshmem": {**INFO["nvshmem"], **changes}}


def with_info(**changes: Any) -> DoctorFacts:
    return facts(extension=Seen(value=replace(EXTENSION, info={**INFO, **changes})))


# Each state: the check, what is different, words of what was found, of what is needed, and of the next step.
BROKEN: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "host library missing": (
        "nvshmem", nvshmem(loaded=None, problem=HOST_MISSING), "not found", "NVSHMEM 3.x, 3.4.5 or newer",
        "install nvidia-nvshmem-cu13 or set NVSHMEM_HOME to a folder with lib/",
    ),
    "another major version": (
        "nvshmem", nvshmem(loaded=None, problem=MAJOR_DIFFERS), "has 2.11.0 from /x", "3.4.5 or newer",
        "rebuild against its headers",
    ),
    "headers newer than the library": (
        "nvshmem", nvshmem(built="3.7.2"), "built against NVSHMEM 3.7.2 and this process loads 3.4.5", "3.7.2 or newer",
        "unset NVSHMEM_HOME and build it again: run tools/install/setup_fast_cp.sh",
    ),
    "no image for the GPU": (
        "images", {"images": ["sm_120"], "sm": 90}, "images for sm_120 and the GPU is SM90", "an image for SM90",
        "setup_fast_cp.sh --architectures 90",
    ),
    "driver older than the wheel's CUDA": (
        "cuda", {"cuda_driver": "12.8"}, "built with CUDA 13.0 and the driver runs CUDA up to 12.8",
        "a driver for CUDA 13.x", "update the driver",
    ),
}  # fmt: skip


@pytest.mark.parametrize("state", BROKEN)
def test_each_broken_state_is_one_line_with_found_needed_and_next_step(state: str) -> None:
    name, changes, found, needed, step = BROKEN[state]
    what = with_info(**changes)
    assert states(what) == {f"extension {name}": "wrong"}
    line = check(judge(what), f"extension {name}")
    assert found in line.found
    assert needed in (line.needed or "")
    assert step in (line.next_step or "")
    assert "\n" not in f"{line.found}{line.needed}{line.next_step}"
    assert judge(what).exit_code == judge(what, ("fast",)).exit_code == 1
    assert judge(what, ("nccl",)).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "device_sm"),
    [
        (nvshmem(loaded="3.4.9"), 90),
        (nvshmem(loaded="3.7.2"), 90),
        ({"cuda_driver": "12.8", "cuda_runtime": "12.9"}, 90),
        ({"cuda_driver": "14.1"}, 90),
        ({"cuda_driver": "0.0"}, None),
        ({}, 120),
        ({}, 121),
    ],
)
def test_what_fits_is_no_problem(changes: dict[str, Any], device_sm: int | None) -> None:
    info = {**INFO, **changes}
    assert extension.driver_problem(info) is None
    assert extension.nvshmem_problem(info) is None
    assert extension.image_problem(info, device_sm) is None


def test_an_architecture_specific_image_serves_its_own_architecture_alone() -> None:
    assert extension.image_problem({"images": ["sm_120a"]}, 121) is not None
    problem = extension.image_problem(INFO, 80)
    assert problem is not None
    assert problem.next_step == "use backend nccl"


def test_gpus_that_torch_does_not_see_need_no_image() -> None:
    value = machine().value
    assert value is not None
    other = machine(gpus=(value.gpus[0], replace(value.gpus[1], capability=(12, 0))))
    only_90 = Seen(value=replace(EXTENSION, info={**INFO, "images": ["sm_90a"]}))
    assert states(facts(machine=other, extension=only_90)) == {"extension images": "wrong"}
    assert states(facts(machine=other, extension=only_90, torch=torch(1))) == {"gpus": "missing"}


def test_what_is_right_is_told() -> None:
    built = facts(extension=Seen(value=replace(EXTENSION, build={"nvcc": "13.0.88"})))
    told = {line.name: line.found for line in judge(built).checks}
    assert told["extension"] == "0.1.0, /env/fast_ulysses/__init__.py, all 10 operators, built with nvcc 13.0.88"
    assert told["extension nvshmem"].startswith("built against 3.4.5, loads 3.4.5 (/env/")
    assert told["extension images"] == "sm_90a, sm_120; the GPUs are SM90"
    assert told["extension cuda"] == "carries the runtime of CUDA 13.0; the driver runs CUDA up to 13.0"


def test_an_installed_wheel_without_the_module_was_removed_by_a_sync() -> None:
    line = check(judge(facts(extension=NOT_THERE, wheel=INSTALLED)), "extension")
    assert line.state == "missing"
    assert f"{WHEEL.path} was installed: the extension was removed by a sync" in line.found
    assert line.next_step == "run uv pip install --no-deps WHEEL"
    assert judge(facts(extension=NOT_THERE, wheel=INSTALLED), ("fast",)).exit_code == 3
    assert "sync" not in check(judge(facts(extension=NOT_THERE)), "extension").found


def test_a_wheel_that_was_built_and_never_installed_was_removed_by_nobody() -> None:
    line = check(judge(facts(extension=NOT_THERE, wheel=WHEEL)), "extension")
    assert line.found.endswith(f"but {WHEEL.path} was built and is not installed")
    assert line.next_step == "run uv pip install --no-deps WHEEL"


def test_an_extension_that_was_replaced_is_put_back_from_the_wheel() -> None:
    other = Seen(value=replace(EXTENSION, missing_operators=("all_gather_kv_4d",), info={}))
    line = check(judge(facts(extension=other, wheel=INSTALLED)), "extension")
    assert line.state == "wrong"
    assert line.found.endswith(f"it has replaced {WHEEL.path}, which was installed here")
    assert "run uv pip install --no-deps WHEEL" in (line.next_step or "")
    assert "replaced" not in check(judge(facts(extension=other, wheel=WHEEL)), "extension").found


def test_a_library_that_the_environment_names_is_named_in_the_next_step() -> None:
    line = check(judge(facts(extension=Seen(broken="ImportError: x"), named_library="/x.so")), "extension")
    assert (line.next_step or "").startswith("unset FAST_CP_LIBRARY (it names /x.so), or run tools/install/setup")


def test_the_newest_wheel_is_found_with_the_command_that_installs_it(tmp_path: Path) -> None:
    assert find_wheel({}, tmp_path) is None
    folder = tmp_path / ".deps/fast-cp/wheels"
    folder.mkdir(parents=True)
    for age, version in enumerate(("0.2.0", "0.1.0")):
        path = folder / f"fast_ulysses-{version}-py3-none-linux_x86_64.whl"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    found = find_wheel({}, tmp_path)
    assert found is not None
    assert found.path == str(folder / "fast_ulysses-0.2.0-py3-none-linux_x86_64.whl")
    assert shlex.split(found.install) == [
        *("uv", "pip", "install", "--python", sys.executable, "--no-deps", "--reinstall", found.path)
    ]
    assert not found.installed
    assert find_wheel({"FAST_CP_DEPS_ROOT": str(tmp_path / "other")}, tmp_path) is None


def test_the_wheel_that_was_installed_here_comes_before_a_newer_one(tmp_path: Path) -> None:
    root = tmp_path / ".deps/fast-cp"
    (root / "wheels").mkdir(parents=True)
    newest, mine = root / "wheels/fast_ulysses-0.2.0-x.whl", tmp_path / "of my own.whl"
    newest.touch()
    mine.touch()
    for environment, wheel, path, installed in (
        (sys.prefix, mine, mine, True),
        (sys.prefix, tmp_path / "gone.whl", newest, True),
        ("/another/.venv", mine, newest, False),
    ):
        (root / "installed").write_text(f"{environment}\n{wheel}\n")
        found = find_wheel({}, tmp_path)
        assert found is not None
        assert (found.path, found.installed) == (str(path), installed)
    (root / "installed").write_bytes(b"\xff")
    assert find_wheel({}, tmp_path) == replace(found, installed=False)
