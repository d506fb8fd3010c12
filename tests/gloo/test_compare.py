"""compare on CPU processes: what libraries really do with the shapes that they are known to get wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chitu_diffusion.parallel.cp.errors import ExitCode
from tools.benchmarks.fast_cp_frameworks.compare import jobs, wanted
from tools.benchmarks.fast_cp_frameworks.compare.wanted import Point
from tools.benchmarks.fast_cp_frameworks.result import Result

pytestmark = pytest.mark.xdist_group("gloo")


def measure(point: Point, only: str, world: int, tmp_path: Path) -> dict[tuple[str, str], Result]:
    cases = wanted.cases([point], wanted.rows(tuple(only.split(",")), "cpu"), "cpu")
    settings = jobs.Settings(world, 30.0, time.monotonic() + 90, 5, tmp_path / "log")
    told: list[str] = []
    results = jobs.measure(cases, settings, told.append)
    assert told == []
    return {(r.case.method, r.case.kernel): r for r in results}


def test_the_command_compares_libraries_with_our_methods(tmp_path: Path) -> None:
    line = "--shape 8:64,8:73 --only torch_cp,diffusers,nccl,flashinfer --cp-size 2 --seed 5"
    command = [sys.executable, "-m", "tools.benchmarks.fast_cp_frameworks.compare", *line.split()]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=110, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (ExitCode.RIGHT, ""), done.stderr
    data = json.loads((tmp_path / "compare.json").read_text())
    assert (data["schema"], data["status"]) == ("chitu.fast_cp.benchmark-set/1", "complete")
    equal, unequal = ([r for r in data["results"] if r["case"]["sequence"] == s] for s in (64, 73))
    by_name = {(r["case"]["method"], r["case"]["kernel"]): r for r in equal}
    for name in ("nccl_agkv", "nccl_ulysses", "single"):
        assert by_name[name, "auto"]["status"] == "complete"
    for name in ("torch_cp_allgather", "torch_cp_alltoall", "diffusers_ulysses", "diffusers_ring"):
        row = by_name[name, "cudnn"]
        assert row["status"] == "complete", row["reason"]
        assert row["accuracy"]["error"] <= row["accuracy"]["limit"]
        assert row["timing"]["median_ms"] > 0
        assert row["attention_ms"] > 0
    assert by_name["diffusers_ulysses", "ours"]["transfer_ms"] > 0
    assert by_name["diffusers_ring", "cudnn"]["transfer_ms"] is None  # it cannot be called without its kernel
    assert by_name["diffusers_unified", "cudnn"]["failure"] == "refused"
    assert by_name["flashinfer_ulysses", "ours"]["failure"] == "missing"
    assert data["versions"]["diffusers"]
    by_name = {(r["case"]["method"], r["case"]["kernel"]): r for r in unequal}
    assert by_name["diffusers_ulysses_anything", "cudnn"]["status"] == "complete"
    for name in ("torch_cp_allgather", "diffusers_ulysses"):
        assert by_name[name, "cudnn"]["failure"] == "refused"
        assert "takes equal parts of the sequence only" in by_name[name, "cudnn"]["reason"]
    table = (tmp_path / "compare.md").read_text()
    assert "| diffusers_ring (cudnn) | right | refused |" in table


def test_a_mask_that_a_library_loses_is_told_as_wrong_and_not_timed(tmp_path: Path) -> None:
    rows = measure(Point(8, 73, 16, masked=True), "nccl,diffusers_ulysses_anything", 4, tmp_path)
    assert rows["nccl_agkv", "auto"].status == rows["nccl_ulysses", "auto"].status == "complete"
    for kernel in ("cudnn", "ours"):
        row = rows["diffusers_ulysses_anything", kernel]
        assert (row.status, row.failure, row.timing) == ("failed", "wrong", None)
        assert row.accuracy is not None
        assert row.accuracy.error > 0.05
