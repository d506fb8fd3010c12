"""`chitu serve` with elastic lanes of 1, 2 and 4 GPUs: who gets how many, and every picture as one process makes it.

    FAST_CP_LIBRARY=build/libfast_cp.so python tests/multigpu/elastic.py --devices 4 --output elastic.json

One request gets the widest lane, over Fast; several share the GPUs, narrower lanes over NCCL. A picture may differ from
that of float32 by twice what one GPU's in bfloat16 differs. Needs no launcher. Exit code 0 where everything is right.
"""

import argparse
import base64
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import httpx
import numpy as np
import torch
from PIL import Image
from served import Served

from chitu_diffusion.models.folder import read_folder
from chitu_diffusion.models.pipeline import load
from chitu_diffusion.models.registry import MODELS
from chitu_diffusion.models.request import Request
from tests.support import tiny_pipelines

PROMPT, HEIGHT, WIDTH, STEPS = "a fox", 496, 512, 3
# the first of a crowd gets all GPUs, and those that wait for it share them; every width's first requests are slower
AT_ONCE = (1, 3, 6, 6, 3, 1)
PORT = 18743
EIGHT_BITS = 0.5 / 255  # a PNG's rounding


def wanted(folder: Path, device: torch.device) -> tuple[list[np.ndarray], float]:
    """Every seed's picture in float32, and the largest error of one process in the server's own precision."""
    model = read_folder(folder, MODELS["zimage"])
    dtypes = (torch.float32, torch.bfloat16 if device.type == "cuda" else torch.float32)
    made = []
    for dtype in dtypes:
        pipeline = load(model, dtype, device)
        asked = [Request(PROMPT, "", HEIGHT, WIDTH, 1, STEPS, 0.0, seed) for seed in range(max(AT_ONCE))]
        made.append([pipeline.generate(request).pixels for request in asked])
    exact, own = made
    return [pixels[0] for pixels in exact], max(rms(a, b) for a, b in zip(exact, own, strict=True))


def rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)))


def stage(folder: Path, devices: int, backend: str) -> dict[str, Any]:
    """As a user writes it."""
    widths = [width for width in (1, 2, 4) if width <= devices]
    return {
        "model": {"name": "zimage", "path": str(folder)},
        "devices": devices,
        "parallelism": {"cp": {"world_size": devices, "method": "agkv", "backend": backend}},
        "scheduler": {"policy": "elastic", "widths": widths},
    }


def one_answer(server: Served, seed: int, exact: np.ndarray) -> dict[str, Any]:
    body = {"prompt": PROMPT, "size": f"{WIDTH}x{HEIGHT}", "num_inference_steps": STEPS, "seed": seed}
    answer = server.image(**body)
    if answer.status_code != 200:
        return {"seed": seed, "status": answer.status_code, "said": answer.text[:300]}
    told = answer.json()
    run = told["chitu"][0]
    with Image.open(io.BytesIO(base64.b64decode(told["data"][0]["b64_json"]))) as image:
        error = rms(np.asarray(image.convert("RGB")) / 255, exact)
    used = {"backend": run["backend"], "ranks": run["ranks"], "seconds": run["seconds"]}
    return {"seed": seed, "status": 200, "error": error, **used}


def crowds(server: Served, exact: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """So many requests at once as ``AT_ONCE`` says, one crowd after the other."""
    told = []
    for count in AT_ONCE:
        began = time.monotonic()
        with ThreadPoolExecutor(count) as threads:
            asked = [threads.submit(one_answer, server, seed, exact[seed]) for seed in range(count)]
            answers = [answer.result() for answer in asked]
        told.append({"at_once": count, "seconds": time.monotonic() - began, "answers": answers})
    return told


def checks_of(found: Sequence[dict[str, Any]], limit: float, devices: int, backend: str, code: int) -> dict[str, bool]:
    answers = [answer for crowd in found for answer in crowd["answers"]]
    if any(answer["status"] != 200 for answer in answers):
        return {"every request is answered": False}
    alone = [crowd["answers"][0] for crowd in found if crowd["at_once"] == 1]
    shared = {len(answer["ranks"]) for crowd in found if crowd["at_once"] > 1 for answer in crowd["answers"]}
    worst = max(answer["error"] for answer in answers)
    return {
        f"{len(answers)} pictures: {worst:.1e} of {limit:.1e}": worst <= limit,
        f"one request gets {devices} GPUs, over {backend}": all(
            len(answer["ranks"]) == devices and backend in answer["backend"] for answer in alone
        ),
        f"several get {sorted(shared)}": {1, devices // 2} <= shared,
        "it ends as told": code == 0,
    }


def serve(root: Path, devices: int, backend: str, device: torch.device) -> dict[str, Any]:
    """The report of one server."""
    folder = root / "zimage"
    tiny_pipelines.z_image().save_pretrained(folder)
    exact, own_error = wanted(folder, device)
    report: dict[str, Any] = {"devices": devices, "own_error": own_error}
    with Served(root, "elastic", stage(folder, devices, backend), PORT) as server:
        try:
            server.wait_ready()
            report["crowds"] = crowds(server, exact)
            code = server.stop()
        except (httpx.HTTPError, subprocess.TimeoutExpired) as error:
            return report | server.failed(error) | {"checks": {"the server answers": False}}
    limit = 2 * own_error + EIGHT_BITS
    return report | {"checks": checks_of(report["crowds"], limit, devices, backend, code)}


def main(typed: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, choices=(2, 4), help="GPUs of the server")
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    options = parser.parse_args(typed)
    if torch.cuda.device_count() < options.devices:
        print(f"not run: it needs {options.devices} GPUs and this machine has {torch.cuda.device_count()}")
        return 3
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        report = serve(Path(folder), options.devices, "fast", torch.device("cuda", 0))
    common.write(report, options.output)
    common.show(report["checks"])
    return 0 if all(report["checks"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
