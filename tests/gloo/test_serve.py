"""Servers of one and two ranks, asked over HTTP: right pictures, bad requests, stopping, and ranks that end or hang."""

import base64
import io
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.gloo.test_serve_support import Server, alive, kept

SHAPES = ["112x80", "64x48", "48x48", "80x112"]
LONG = 190  # steps


def pixels(answer: httpx.Response) -> "np.ndarray[Any, Any]":
    assert answer.status_code == 200, answer.text
    with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as image:
        return np.asarray(image).astype(int)


def same(mine: "np.ndarray[Any, Any]", wanted: "np.ndarray[Any, Any]") -> bool:
    """Within the rounding of 8 bits."""
    return mine.shape == wanted.shape and mine.std() > 1 and bool(np.abs(mine - wanted).max() <= 1)


def test_eight_requests_at_once_are_answered_as_if_each_had_come_alone() -> None:
    one, two = kept("zimage", 1), kept("zimage", 2)
    good: list[dict[str, Any]] = [{"size": size, "seed": seed} for seed, size in enumerate([*SHAPES, SHAPES[0]])]
    bad: list[dict[str, Any]] = [{"size": "100x80"}, {"prompt": ""}]
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(two.image, **body) for body in [*good, *bad]]
        left = threads.submit(leave_early, two)
        answers = [each.result() for each in asked]
        assert left.result() < LONG
    assert [answer.status_code for answer in answers[len(good) :]] == [400, 400]
    for body, answer in zip(good, answers, strict=False):
        assert same(pixels(answer), pixels(one.image(**body)))
        assert answer.json()["chitu"][0]["ranks"] == [0, 1]
        assert answer.json()["chitu"][0]["backend"] == "gloo"


def leave_early(server: Server) -> int:
    """Leave a long request after its first step; returns the steps that it had done."""
    body = {"prompt": "a cat", "size": "64x48", "num_inference_steps": LONG, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/images/generations", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if '"steps": ' in line and '"steps": 0' not in line:
                return int(line.split('"steps": ')[1].split(",")[0])
    raise AssertionError("the stream ended without a step")


def test_a_client_that_leaves_stops_its_request() -> None:
    two = kept("zimage", 2)
    start = time.monotonic()
    done = leave_early(two)
    two.until({"running": 0}, limit_s=5)
    assert done < LONG
    steps = [line for line in two.client.get("/metrics").text.splitlines() if 'outcome="cancelled"} ' in line]
    assert float(steps[0].split()[-1]) >= 1
    assert time.monotonic() - start < 10
    assert two.image().status_code == 200


def test_a_request_that_is_too_slow_is_answered_and_its_ranks_go_on() -> None:
    server = Server("qwen-image", 1, limits={"request_s": 1.0})
    slow = server.image(num_inference_steps=LONG, size="256x256")
    assert (slow.status_code, slow.json()["error"]["code"]) == (504, "time_limit")
    server.until({"running": 0}, limit_s=10)
    assert server.client.get("/health").status_code == 200
    assert server.stop() == [0]


def test_a_signal_lets_the_running_request_finish_and_leaves_nothing() -> None:
    server = Server("wan", 2)  # its guidance is split between the two
    body = {"prompt": "a fox", "size": "80x48", "num_frames": 5, "num_inference_steps": 3}
    job = server.client.post("/v1/videos", json=body).json()
    while (job := server.client.get(f"/v1/videos/{job['id']}").json())["status"] != "completed":
        assert job["error"] is None
        time.sleep(0.02)
    assert job["chitu"]["ranks"] == [0, 1]
    assert server.client.get(f"/v1/videos/{job['id']}/content").content[4:8] == b"ftyp"
    plain = server.client.post("/v1/videos", json={**body, "guidance_scale": 1.0, "num_inference_steps": 20}).json()
    while server.client.get(f"/v1/videos/{plain['id']}").json()["status"] != "in_progress":
        time.sleep(0.02)
    pids, port = list(server.pids), int(server.url.rsplit(":", 1)[1])
    start = time.monotonic()
    assert server.stop() == [0, 0]
    assert time.monotonic() - start < 20
    assert not any(map(alive, pids))
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def killed(server: Server) -> None:
    os.kill(server.pids[1], signal.SIGKILL)


def stopped(server: Server) -> None:
    os.kill(server.pids[1], signal.SIGSTOP)


@pytest.mark.parametrize(("harm", "limit_s"), [(killed, 5), (stopped, 15)])
def test_with_a_rank_that_ends_or_hangs_requests_fail_and_health_says_so(harm: Any, limit_s: float) -> None:
    quick = {"chitu_diffusion.serving.watch.SILENCE_S": 3.0} if harm is stopped else {}
    server = Server("zimage", 2, quick)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(server.image, num_inference_steps=LONG, size="256x256")
        server.until({"running": 1})
        start = time.monotonic()
        harm(server)
        answer = running.result()
    assert answer.status_code in (500, 503)
    health = server.until({"status": "rank_lost"}, limit_s=limit_s)
    assert time.monotonic() - start < limit_s
    assert "rank 1" in health["reason"]
    assert health["ranks"][1]["state"] != "ready"
    assert server.client.get("/health").status_code == 503
    assert server.image().status_code == 503
    pids = list(server.pids)
    os.kill(pids[1], signal.SIGCONT) if harm is stopped else None
    codes = server.stop()
    assert codes[0] == 1
    assert not any(map(alive, pids))
