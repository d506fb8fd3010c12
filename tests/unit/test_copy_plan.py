"""The C++ that needs no GPU, built with g++ alone: the copy plan, the window plan, and exchanges on a fake device."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
EXCHANGE_SOURCES = ("runtime/exchange.cpp", "runtime/copies.cpp", "runtime/ticket.cpp", "runtime/runtime.cpp",
                    "runtime/heap.cpp", "runtime/streams.cpp", "transfer/copy_engine.cpp")  # fmt: skip


def build_and_run(folder: Path, sources: list[str], *options: str, timeout: int = 110) -> str:
    """Compile with warnings as errors, run, and return what it printed; a failure shows all that was said."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ on this machine")
    program = folder / "program"
    command = [compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *options]
    command += ["-I", str(CSRC / "include"), "-I", str(CSRC), *(str(CSRC / s) for s in sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    ran = subprocess.run([program], capture_output=True, text=True, check=False, timeout=timeout, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("options", [(), SANITIZERS], ids=["plain", "sanitized"])
def test_copy_plan_writes_every_byte_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert "every byte once" in build_and_run(tmp_path, ["tests/copy_plan_test.cpp"], *options)


@pytest.mark.parametrize("options", [(), SANITIZERS], ids=["plain", "sanitized"])
def test_windows_stay_apart_and_agree_on_every_rank(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert "alike on every rank" in build_and_run(tmp_path, ["tests/window_plan_test.cpp"], *options)


def toolkit_of_nvcc() -> str | None:
    """The folder of the toolkit that the nvcc on PATH belongs to, which may be behind a wrapper: it says so itself."""
    if shutil.which("nvcc") is None:
        return None
    told = subprocess.run(["nvcc", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    tops = [line.split("TOP=")[1].strip() for line in told.stderr.splitlines() if "TOP=" in line]
    return tops[0] if tops else None


def cuda_include() -> Path | None:
    """A folder with cuda_runtime.h and what it includes: of a toolkit, or of the compiler wheels."""
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
    homes = [os.environ.get("CUDA_HOME"), toolkit_of_nvcc(), str(wheels)]
    folders = [Path(home) / "include" for home in homes if home]
    return next((f for f in folders if (f / "cuda_runtime.h").is_file() and (f / "crt").is_dir()), None)


def run_exchanges(folder: Path, test: str) -> str:
    headers = cuda_include()
    if headers is None:
        pytest.skip("there are no CUDA headers here: set CUDA_HOME or install the group cuda-build")
    return build_and_run(folder, [f"tests/{test}", *EXCHANGE_SOURCES], "-isystem", str(headers), timeout=120)


@pytest.mark.timeout(180)
def test_exchanges_between_processes_on_a_fake_device(tmp_path: Path) -> None:
    assert "missing ranks included" in run_exchanges(tmp_path, "exchange_test.cpp")


@pytest.mark.timeout(180)
def test_rules_of_an_exchange_on_a_fake_device(tmp_path: Path) -> None:
    assert "all kept" in run_exchanges(tmp_path, "exchange_rules_test.cpp")


@pytest.mark.timeout(180)
def test_tickets_of_readers_that_wait_by_themselves(tmp_path: Path) -> None:
    assert "all rules kept" in run_exchanges(tmp_path, "exchange_ticket_test.cpp")


@pytest.mark.timeout(180)
def test_starts_meet_where_a_reader_waits_by_itself(tmp_path: Path) -> None:
    assert "all rules kept" in run_exchanges(tmp_path, "exchange_meeting_test.cpp")
