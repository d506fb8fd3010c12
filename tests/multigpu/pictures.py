"""Pictures and videos of tiny pipelines: one rank, NCCL and Fast make the same; then the commands, on two GPUs.

    FAST_CP_LIBRARY=build/libfast_cp.so python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        tests/multigpu/pictures.py --output pictures.json

In bfloat16 a picture of two ranks may differ from that of one by as much as one rank's differs from float32's, twice.
With one kernel and one exact schedule NCCL and Fast agree in every bit.
"""

import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import common
import httpx
import numpy as np
import torch
import torch.distributed as dist
from common import Place
from PIL import Image
from served import Served, command, environment

from chitu_diffusion.models.folder import read_folder
from chitu_diffusion.models.pipeline import Pipeline, load
from chitu_diffusion.models.registry import MODELS
from chitu_diffusion.models.request import Request
from chitu_diffusion.models.sharing import share
from chitu_diffusion.parallel.cp.config import Choice, CPConfig
from chitu_diffusion.parallel.cp.fast import backend as backends
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.groups import Lane, LaneGroups
from tests.support import tiny_pipelines

MAKERS = {"wan": tiny_pipelines.wan, "qwen-image": tiny_pipelines.qwen_image, "zimage": tiny_pipelines.z_image}
SIZES = {"wan": (256, 272, 9), "qwen-image": (496, 512, 1), "zimage": (496, 512, 1)}  # odd numbers of tokens
# what makes a call of NCCL and one of Fast the same arithmetic
EXACT = {"kernel": "cudnn", "plan": "one_shot"}
BACKENDS = ("nccl", "fast")
COMMAND_S = 120.0


def request_of(name: str) -> Request:
    height, width, frames = SIZES[name]
    guidance = 0.0 if name == "zimage" else 3.0
    return Request("a red fox in the snow", "blur, noise", height, width, frames, 4, guidance, 7)


def pixels(pipeline: Pipeline, name: str) -> np.ndarray:
    made = pipeline.generate(request_of(name)).pixels
    assert made is not None
    return made


def shared(pipeline: Pipeline, name: str, method: str, backend: str, config: dict[str, str]) -> tuple[np.ndarray, Any]:
    """The picture of both ranks, twice: blocks may run as graphs the second time; and what carried it."""
    groups = LaneGroups(Lane(0, 1, 2), 0, dist.get_rank(), dist.group.WORLD, None)
    with ExitStack() as ends:
        ends.enter_context(mock.patch.object(backends, "CPSession", partial(session_with, config)))
        sharing = ends.enter_context(share(pipeline, groups, method, Choice(backend, backend, "asked for")))
        first, second = pixels(pipeline, name), pixels(pipeline, name)
        told = {
            "used": sharing.choice.used,
            "blocks": sorted({choice.used for choice in sharing.block_choices}),
            "graphs": list(sharing.block_graphs),
            "again": float(np.abs(first - second).max()),
        }
    return second, told


def session_with(config: dict[str, str], asked: CPConfig, *given: Any) -> CPSession:
    """A session that computes as ``config`` says; plans belong to fast."""
    fits = {name: text for name, text in config.items() if name != "plan" or asked.backend == "fast"}
    return CPSession(replace(asked, **fits), *given)


def rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)))


def one_model(place: Place, root: Path, name: str) -> dict[str, Any]:
    folder = read_folder(root / name, MODELS[name])
    exact = pixels(load(folder, torch.float32, place.device), name)
    pipeline = load(folder, torch.bfloat16, place.device)
    alone = pixels(pipeline, name)
    report: dict[str, Any] = {"own_error": rms(alone, exact)}
    for method in ("agkv", "ulysses"):
        for backend in BACKENDS:
            made, told = shared(pipeline, name, method, backend, {})
            report[f"{method} over {backend}"] = {"error": common.largest(rms(made, exact)), **told}
        one, other = (shared(pipeline, name, method, backend, EXACT)[0] for backend in BACKENDS)
        report[f"{method}, bits apart"] = common.summed(int((one != other).sum()))
    return report


def checks_of(report: dict[str, Any]) -> dict[str, bool]:
    checks = {}
    for name in MAKERS:
        for way, told in report[name].items():
            if way.endswith("bits apart"):
                checks[f"{name}: {way}: {told}"] = told == 0
            elif isinstance(told, dict):
                limit = 2 * report[name]["own_error"]
                checks[f"{name}: {way} ({told['used']}): {told['error']:.1e} of {limit:.1e}"] = (
                    told["error"] <= limit and told["used"] == way.split()[-1] and told["again"] <= limit
                )
    return checks


def generates(root: Path, name: str, backend: str) -> dict[str, Any]:
    """`chitu generate` on both GPUs."""
    height, width, frames = SIZES[name]
    file = root / f"{name}-{backend}{MODELS[name].suffix}"
    asked = f"--model {name} --model-path {root / name} --prompt fox --height {height} --width {width} --steps 3"
    asked += f" --cp-size 2 --cp-backend {backend} --output {file}" + (f" --frames {frames}" if frames > 1 else "")
    began = time.monotonic()
    done = subprocess.run(
        command("generate", *asked.split()), env=environment(), capture_output=True, text=True, timeout=COMMAND_S,
        check=False,
    )  # fmt: skip
    told = (done.stdout + done.stderr).strip().splitlines()
    good = done.returncode == 0 and f"over {backend}" in done.stdout and file.stat().st_size > 0
    if good and frames == 1:
        with Image.open(file) as image:
            good = image.size == (width, height)
    return {"good": good, "code": done.returncode, "seconds": time.monotonic() - began, "said": told[-6:]}


def serves(root: Path, backend: str) -> dict[str, Any]:
    """`chitu serve` on both GPUs: some requests, a bad one, the end. What it says is in the report if it fails."""
    parallelism = {"cp": {"world_size": 2, "method": "agkv", "backend": backend}, "cfg": False}
    keys = {"model": {"name": "zimage", "path": str(root / "zimage")}, "devices": 2, "parallelism": parallelism}
    with Served(root, backend, keys, {"fast": 18741, "nccl": 18742}[backend]) as server:
        try:
            return asked_of(server, backend)
        except (httpx.HTTPError, subprocess.TimeoutExpired) as error:
            return server.failed(error)


def asked_of(server: Served, backend: str) -> dict[str, Any]:
    server.wait_ready()
    body = {"prompt": "a fox", "size": "512x496", "num_inference_steps": 3, "seed": 1}
    answers = [server.image(**body) for _ in range(4)]  # the last ones by graphs
    used = [answer.json()["chitu"][0]["backend"] for answer in answers if answer.status_code == 200]
    same = len({answer.json()["data"][0]["b64_json"] for answer in answers if answer.status_code == 200})
    bad = server.image(**{**body, "size": "500x500"}).status_code
    metrics = server.client.get("/metrics").text
    began = time.monotonic()
    code = server.stop()
    good = [answer.status_code for answer in answers] == [200] * 4 and bad == 400 and code == 0
    return {
        "good": good and all(backend in str(one) for one in used) and "chitu_requests_total" in metrics,
        "statuses": [answer.status_code for answer in answers] + [bad], "used": used, "different_pictures": same,
        "code": code, "seconds_to_end": time.monotonic() - began,
    }  # fmt: skip


def commands(root: Path) -> dict[str, Any]:
    """What users type; several at once, since most of their time goes into starting."""
    jobs = {f"generate {name} over {b}": partial(generates, root, name, b) for name in MAKERS for b in BACKENDS}
    jobs |= {f"serve zimage over {backend}": partial(serves, root, backend) for backend in BACKENDS}
    with ThreadPoolExecutor(len(jobs)) as threads:
        running = {name: threads.submit(job) for name, job in jobs.items()}
        return {name: job.result() for name, job in running.items()}


def main() -> int:
    options = common.parser(__doc__, 280).parse_args()
    place = common.start(options)
    root = [Path(tempfile.mkdtemp(prefix="pictures-"))]
    dist.broadcast_object_list(root)
    if place.rank == 0:
        for name, make in MAKERS.items():
            make().save_pretrained(root[0] / name)
    common.together()
    report: dict[str, Any] = {}
    for name in MAKERS:
        common.step(name, report, partial(one_model, place, root[0], name), options.output)
    checks = checks_of(report)
    code = common.finish(report, checks, options.output)
    if place.rank == 0:
        report["commands"] = commands(root[0])
        told = {name: found["good"] for name, found in report["commands"].items()}
        common.show(told)
        common.write(report | {"checks": report["checks"] | told}, options.output)
        code = code or int(not all(told.values()))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
