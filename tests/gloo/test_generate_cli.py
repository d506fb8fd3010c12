"""`chitu generate` as users start it: on its own with two processes, under a launcher, and where it must refuse."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chitu_diffusion.parallel.cp.errors import CPError, ExitCode
from tests.gloo.test_generate import save_models
from tests.support.pool import Worker, pool

# each command imports diffusers in its processes: seconds where nothing else runs, a minute where much else does
pytestmark = [pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LIMIT_S = 280
IMAGE = "--prompt fox --height 112 --width 80 --steps 2"
VIDEO = "--prompt fox --height 48 --width 80 --frames 5 --steps 2"
KEYS = {
    "schema", "model", "pipeline", "requests", "files", "fps", "dtype", "device", "parallel", "seconds_per_step",
    "step_seconds", "total_seconds", "load_seconds", "peak_memory_bytes", "versions",
}  # fmt: skip
PARALLEL_KEYS = {"asked", "world_size", "cfg", "cp", "split_reason", "backend", "blocks", "block_graphs", "plans"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("models")
    pool().run(1, save_models, found)
    return found


def typed(arguments: str, *launcher: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environ = {k: v for k, v in os.environ.items() if k not in launched and not k.startswith("CHITU_")}
    environ |= {"CUDA_VISIBLE_DEVICES": "", **variables}
    line = [sys.executable, *launcher, "-m", "chitu_diffusion.cli", "generate", *arguments.split()]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, env=environ, check=False)


def test_it_starts_its_processes_and_numbers_files_in_a_folder(root: Path, tmp_path: Path) -> None:
    from PIL import Image

    report = tmp_path / "r.json"
    (out := tmp_path / "out").mkdir()
    done = typed(
        f"--model zimage --model-path {root}/zimage {IMAGE} --cp-size 2 --num-images 2"
        f" --output {out} --report {report}",
        CHITU_AGKV_TRANSPORT="auto",
    )
    assert done.returncode == ExitCode.RIGHT, done.stderr
    files = [out / "zimage-0001.png", out / "zimage-0002.png"]
    assert sorted(out.iterdir()) == files
    for file in files:
        with Image.open(file) as image:
            assert image.size == (80, 112)
    assert len(done.stderr.splitlines()) == 1  # what runs, and why, once for both ranks
    assert "on 2 ranks (cpu); CFG 1 × CP 2" in done.stderr
    assert "agkv (default) over nccl (CHITU_AGKV_TRANSPORT is auto, and on rank 0 " in done.stderr
    assert done.stdout.startswith(f"{files[0]} … {files[1]} (2 files): attention by agkv over gloo")
    data = json.loads(report.read_text())
    assert set(data) == KEYS
    assert set(data["parallel"]) == PARALLEL_KEYS
    assert data["schema"] == "chitu.generate/1"
    assert [request["seed"] for request in data["requests"]] == [0, 1]
    assert [len(steps) for steps in data["step_seconds"]] == [2, 2]
    assert min(data["peak_memory_bytes"]) > 10**8
    assert len(data["peak_memory_bytes"]) == len(data["load_seconds"]) == 2


def test_it_splits_guidance_under_the_launcher_and_writes_a_video(root: Path, tmp_path: Path) -> None:
    import av

    file = tmp_path / "v.mp4"
    done = typed(f"--model wan --model-path {root}/wan {VIDEO} --fps 8 --output {file}", *TORCHRUN)
    assert done.returncode == ExitCode.RIGHT, done.stderr
    assert "CFG 2 × CP 1: guidance is split in two" in done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{file}: attention by one rank")
    with av.open(file) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.average_rate) == (80, 48, 8)
        assert len(list(container.decode(video=0))) == 5


def test_fast_where_it_cannot_run_ends_before_weights_load(root: Path, tmp_path: Path) -> None:
    done = typed(
        f"--model zimage --model-path {root}/zimage {IMAGE} --cp-size 2 --cp-backend fast --output {tmp_path}/x.png"
    )
    assert (done.returncode, done.stdout) == (ExitCode.INCOMPLETE, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("chitu: --cp-backend asks for backend fast, but on rank 0 ")
    assert list(tmp_path.iterdir()) == []


def problem_of_rank_1(worker: Worker) -> None:
    from chitu_diffusion.commands.generate.ranks import Ranks

    Ranks(torch.device("cpu"), worker.group).agree(CPError("its disk is full") if worker.rank == 1 else None)


def test_a_problem_of_one_rank_is_the_same_error_on_all() -> None:
    results = pool().results(3, problem_of_rank_1)
    assert [str(result.message) for result in results] == ["rank 1: its disk is full"] * 3


def load_broken(worker: Worker, root: Path, out: Path) -> None:
    from chitu_diffusion.models.folder import read_folder
    from chitu_diffusion.models.pipeline import load
    from chitu_diffusion.models.registry import MODELS

    folder = shutil.copytree(root / "zimage", out / "broken")
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"n_layers": 2', '"n_layers": "x"'))
    load(read_folder(folder, MODELS["zimage"]), torch.float32, torch.device("cpu"))


def test_a_model_that_does_not_load_is_one_sentence(root: Path, tmp_path: Path) -> None:
    (result,) = pool().results(1, load_broken, root, tmp_path)
    assert result.kind == "CPError"
    assert "does not load" in result.message
    assert "\n" not in result.message
