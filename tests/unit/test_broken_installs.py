"""Broken installations end in one message with found, needed and next step, from the import, doctor and benchmark.

With a built library (FAST_CP_LIBRARY, else the installed package) broken copies of it are used; states that this
machine cannot have are told by a stand-in for the extension.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from chitu_diffusion.commands.doctor.child import look as doctor_looks
from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast import extension
from tests.unit.test_doctor import INFO
from tests.unit.test_doctor_extension import BROKEN, HOST_MISSING, nvshmem

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "python"
LIMIT_S = 10.0  # on a machine with nothing else to do; what the clock shows here includes others' work
SLACK = 4
IMPORT = ("-c", "from chitu_diffusion.parallel.cp.fast import extension; extension.load()")
DOCTOR = ("-m", "chitu_diffusion.cli", "doctor", "--json")
BENCHMARK = ("-m", "tools.benchmarks.fast_cp_frameworks.chitu", "--method", "fast_agkv", "--sequence", "128",
             "--heads", "2", "--head-dim", "64", "--warmup", "0", "--iterations", "1", "--repeats", "1")  # fmt: skip
FAKE_TORCH = f"""
from types import SimpleNamespace as N
__version__ = "2.11.0+cu130"
version = N(cuda="13.0")
cuda = N(is_available=lambda: False, init=lambda: None)
distributed = N(is_available=lambda: False)
ops = N(fast_ulysses=N(**dict.fromkeys({extension.OPERATORS!r})))
"""
REGISTER = f"""
import torch
library = torch.library.Library("fast_ulysses", "DEF")
for name in {extension.OPERATORS!r}:
    library.define(name + "() -> ()")
"""


@pytest.fixture(scope="module")
def library() -> Path:
    named = os.environ.get("FAST_CP_LIBRARY")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("fast_ulysses")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in (Path(folder, "fast_cp", "libfast_cp.so"), Path(folder, "libfast_cp.so")):
            if path.is_file():
                return path
    pytest.skip("no built extension: set FAST_CP_LIBRARY, or install the wheel (tools/install/build_fast_cp.py)")


def absent(library: Path, folder: Path) -> Path:
    return folder / "absent.so"


def corrupt(library: Path, folder: Path) -> Path:
    path = folder / "corrupt.so"
    path.write_bytes(b"not a library" * 1000)
    return path


def cut_off(library: Path, folder: Path) -> Path:
    path = folder / "cut.so"
    path.write_bytes(library.read_bytes()[:5000])
    return path


def another(library: Path, folder: Path) -> Path:
    """A library that loads and has nothing of ours."""
    path = folder / "another.so"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(path)], check=True)
    return path


def run(command: tuple[str, ...], **environ: str) -> "subprocess.CompletedProcess[str]":
    start = time.perf_counter()
    unset = ("NVSHMEM_HOME", "RANK", "WORLD_SIZE", "FAST_CP_LIBRARY")
    kept = {name: value for name, value in os.environ.items() if name not in unset} | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, cwd=ROOT, env={**kept, **environ}
    )
    assert time.perf_counter() - start < LIMIT_S * SLACK
    return ended


def benchmark(folder: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    """The command with one rank."""
    return run((*BENCHMARK, "--cp-size", "1", "--output", str(folder / "result.json")), **environ)


def doctor(**environ: str) -> tuple[int, dict[str, Any]]:
    ended = run(DOCTOR, **environ)
    assert "Traceback" not in ended.stderr
    return ended.returncode, {check["name"]: check for check in json.loads(ended.stdout)["checks"]}


@pytest.mark.parametrize(
    ("broken", "found"),
    [(absent, "does not exist"), (corrupt, "does not load"), (cut_off, "is cut off"), (another, "another library")],
)
def test_a_broken_library_is_one_message_of_the_import(
    library: Path, tmp_path: Path, broken: Callable[[Path, Path], Path], found: str
) -> None:
    path = broken(library, tmp_path)
    ended = run(IMPORT, PYTHONPATH=str(SOURCES), FAST_CP_LIBRARY=str(path))
    message = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1
    assert found in message
    assert "needed: fast_ulysses with Fast CP's operators" in message
    assert message.endswith(f"unset FAST_CP_LIBRARY (it names {path}), or run tools/install/setup_fast_cp.sh")


@pytest.mark.parametrize(
    ("size", "found"),
    [(None, "is another library: it loads and has no operators"), (5000, "is cut off: it has 5000 of")],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_bare_import_of_a_foreign_or_cut_library_says_what_to_do(
    tmp_path: Path, size: int | None, found: str, named: bool
) -> None:
    shutil.copytree(SOURCES / "fast_ulysses", tmp_path / "fast_ulysses")
    path = tmp_path / ("x.so" if named else "fast_ulysses/libfast_cp.so")
    path.write_bytes(another(path, tmp_path).read_bytes()[:size])
    environ = {"FAST_CP_LIBRARY": str(path)} if named else {}
    ended = run(("-c", "import fast_ulysses"), PYTHONPATH=str(tmp_path), **environ)
    message = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1
    assert message.startswith(f"ImportError: {path} {found}")
    assert " (needed: the libfast_cp.so of this package); " in message
    drop = "unset FAST_CP_LIBRARY, or " if named else ""
    assert message.endswith(f"; {drop}build and install it again with tools/install/setup_fast_cp.sh")


@pytest.mark.parametrize("broken", [absent, cut_off])
def test_a_broken_library_is_one_line_of_doctor_and_one_of_the_benchmark(
    library: Path, tmp_path: Path, broken: Callable[[Path, Path], Path]
) -> None:
    path = broken(library, tmp_path)
    environ = {"PYTHONPATH": str(SOURCES), "FAST_CP_LIBRARY": str(path)}
    code, checks = doctor(**environ)
    assert (code, checks["extension"]["state"]) == (1, "wrong")
    assert str(path) in checks["extension"]["found"]
    assert str(path) in checks["extension"]["next_step"]
    ended = benchmark(tmp_path, **environ)
    assert ended.returncode == 3
    (message,) = [line for line in ended.stderr.splitlines() if line]
    assert str(path) in message
    assert message.endswith("or run tools/install/setup_fast_cp.sh")


def test_the_real_library_is_examined_and_an_empty_nvshmem_home_is_wrong(library: Path, tmp_path: Path) -> None:
    named = {"PYTHONPATH": str(SOURCES), "FAST_CP_LIBRARY": str(library)}
    environ = named if os.environ.get("FAST_CP_LIBRARY") else {}
    code, checks = doctor(**environ, NVSHMEM_HOME=str(tmp_path))
    states = {name: check["state"] for name, check in checks.items() if name.startswith("extension")}
    assert states == dict.fromkeys(("extension", "extension nvshmem", "extension images", "extension cuda"), "ok")
    assert checks["extension nvshmem"]["found"].startswith("built against 3.")
    assert (code, checks["nvshmem"]["state"]) == (1, "wrong")
    assert "holds neither headers nor library" in checks["nvshmem"]["found"]


def stand_in(folder: Path, info: dict[str, Any], before: str = "") -> None:
    """A package fast_ulysses that says ``info`` of itself."""
    (folder / "fast_ulysses").mkdir(parents=True)
    says = f"{before}\nimport json\ndef device_info(device=0): return json.loads({json.dumps(info)!r})\n"
    (folder / "fast_ulysses/__init__.py").write_text(f"{says}def library_path(): return __file__\n")


@pytest.mark.parametrize("state", [state for state in BROKEN if BROKEN[state][0] != "images"])  # those need a GPU
def test_doctor_hears_each_state_from_the_extension_itself(tmp_path: Path, state: str) -> None:
    name, changes, found, _, step = BROKEN[state]
    stand_in(tmp_path, {**INFO, **changes})
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(FAKE_TORCH)
    code, checks = doctor(PYTHONPATH=str(tmp_path))
    line = checks[f"extension {name}"]
    assert (code, line["state"]) == (1, "wrong")
    assert found in line["found"]
    assert step in line["next_step"]


@pytest.fixture
def extension_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """In this process, the extension is one that says these facts."""

    def says(info: dict[str, Any]) -> None:
        module = ModuleType("fast_ulysses")
        module.device_info = lambda device: info  # type: ignore[attr-defined]
        monkeypatch.setattr(extension, "look", lambda: module)
        monkeypatch.setattr(extension, "missing_operators", lambda: ())

    return says


@pytest.mark.parametrize("state", BROKEN)
def test_a_session_hears_each_state_as_one_message(
    extension_says: Callable[[dict[str, Any]], None], state: str
) -> None:
    name, changes, found, needed, step = BROKEN[state]
    extension_says({**INFO, "sm": 90, **changes})
    message = extension.why_not(torch.device("cuda", 0)) or ""
    for words in (found, "needed: ", needed, step):
        assert words in message
    if name == "images":  # a GPU's fault, not the process's
        extension.load()
        return
    with pytest.raises(UnavailableError) as raised:
        extension.load()
    assert str(raised.value) == message
    assert extension.why_not(torch.device("cpu")) == message


def test_a_right_extension_serves_a_gpu_and_no_cpu(extension_says: Callable[[dict[str, Any]], None]) -> None:
    extension_says({**INFO, "sm": 90})
    assert extension.why_not(torch.device("cuda", 0)) is None
    assert "the session runs on cpu" in (extension.why_not(torch.device("cpu")) or "")
    extension_says({**INFO, "problem": "counting the GPUs failed: x"})
    assert extension.why_not(torch.device("cuda", 0)) == "counting the GPUs failed: x"


def test_another_package_of_the_same_name_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("fast_ulysses")
    other.__file__ = "/env/fast_ulysses/__init__.py"
    monkeypatch.setattr(extension, "look", lambda: other)
    monkeypatch.setattr(extension, "missing_operators", lambda: ("all_gather_kv_4d",))
    with pytest.raises(UnavailableError, match=r"another build, without all_gather_kv_4d \(needed: .*setup_fast_cp.sh"):
        extension.load()
    facts = doctor_looks("extension").value
    assert facts is not None
    assert facts.missing_operators == ("all_gather_kv_4d",)
    assert facts.info == {}


def test_the_benchmark_stops_at_a_missing_host_library_with_one_message(tmp_path: Path) -> None:
    """Both ranks, as users start it: a rank that fails alone would leave the other one waiting."""
    stand_in(tmp_path / "path", {**INFO, **nvshmem(loaded=None, problem=HOST_MISSING)}, REGISTER)
    command = (*BENCHMARK, "--cp-size", "2", "--output", str(tmp_path / "result.json"))
    ended = run(command, PYTHONPATH=str(tmp_path / "path"))
    assert ended.returncode == 3
    (message,) = [line for line in ended.stderr.splitlines() if line]
    assert "not found" in message
    assert "(needed: NVSHMEM 3.x, 3.4.5 or newer); install nvidia-nvshmem-cu13 or set NVSHMEM_HOME" in message
