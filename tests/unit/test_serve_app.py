"""The HTTP routes in front of an engine whose only rank answers by itself: bodies, answers, errors, limits, metrics."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.serving.app import make_app
from chitu_diffusion.serving.engine import Engine
from chitu_diffusion.serving.job import Gate
from chitu_diffusion.serving.metrics import Metrics
from chitu_diffusion.serving.service import Service
from chitu_diffusion.serving.setup import prepare
from chitu_diffusion.serving.stage import Stage
from chitu_diffusion.serving.wire import Hello, Left, Ready, Run, Stepped
from tests.unit.test_generate_folder import make_folder

IMAGES, VIDEOS = "/v1/images/generations", "/v1/videos"
PICTURE: dict[str, Any] = {"prompt": "a fox", "size": "64x32", "num_inference_steps": 2, "seed": 7}
VIDEO: dict[str, Any] = {"prompt": "a fox", "size": "64x32", "num_inference_steps": 2, "num_frames": 5}


@dataclass
class Rank:
    """Answers each request with its seed, at once; where it is ``held``, after ``release``."""

    engine: Engine | None = None
    held: bool = False
    runs: list[Run] = field(default_factory=list)
    gates: dict[str, Gate] = field(default_factory=dict)

    def send(self, rank: int, message: object) -> None:
        if isinstance(message, Run):
            self.runs.append(message)
            if not self.held:
                asyncio.get_running_loop().call_soon(self.finish, message)

    def finish(self, run: Run, steps: int = 2, error: str | None = None) -> None:
        assert self.engine is not None
        for step in range(1, steps + 1):
            self.engine.receive(0, Stepped(run.job, step))
        choice = Choice("nccl", "nccl", "the default")
        media = str(run.request.seed).encode()
        self.engine.receive(0, Left(run.job, media=media, choice=choice, step_seconds=(0.1, 0.2), error=error))

    def open_gate(self, job: str, gate: Gate) -> None:
        self.gates[job] = gate

    def drop_gate(self, job: str) -> None:
        del self.gates[job]


Steps = Callable[[httpx.AsyncClient, Service, Rank], Awaitable[None]]


def ready(tmp_path: Path, name: str, **keys: Any) -> tuple[Service, Rank]:
    """What a server of ``name`` whose stage has ``keys`` consists of, when its rank is ready."""
    path = str(make_folder(tmp_path / name, name))
    stage = Stage.model_validate({"model": {"name": name, "path": path}, **keys})
    setup = prepare(stage, {"TOKEN": "secret"}, None)
    rank, metrics = Rank(), Metrics()
    engine = rank.engine = Engine(setup.plan, stage.limits, rank, metrics.ended, metrics.stepped)
    service = Service(setup, engine, metrics, 5)
    engine.receive(0, Hello(0, 1))
    engine.receive(0, Ready())
    return service, rank


def served(tmp_path: Path, steps: Steps, name: str = "zimage", **keys: Any) -> None:
    """Run ``steps`` against such a server."""
    service, rank = ready(tmp_path, name, **keys)

    async def run() -> None:
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=10) as client:
            await steps(client, service, rank)

    asyncio.run(run())


def test_pictures_come_with_their_seeds_and_what_carried_them(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        answer = (await client.post(IMAGES, json={**PICTURE, "n": 2, "model": "zimage"})).json()
        assert [base64.b64decode(datum["b64_json"]) for datum in answer["data"]] == [b"7", b"8"]
        assert answer["chitu"][0] | {"seconds": 0} == {
            "seed": 7, "backend": "nccl", "reason": "the default", "ranks": [0], "seconds": 0,
        }  # fmt: skip
        request = rank.runs[0].request
        assert (request.width, request.height, request.steps, request.guidance) == (64, 32, 2, 0.0)

    served(tmp_path, steps)


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": " "}, 400, "the prompt is empty"),
    ({"prompt": 5}, 400, "prompt cannot be: input should be a valid string"),
    ({"size": "64x30"}, 400, "height 30 is no multiple of 16, as zimage needs; the nearest is 32"),
    ({"size": "big"}, 400, "size cannot be"),
    ({"size": "16000x16000"}, 400, "256000000 pixels; this server takes at most"),
    ({"num_inference_steps": 1000}, 400, "1000 steps; this server takes at most 200"),
    ({"prompt": "x" * 5000}, 400, "5000 characters of the prompt"),
    ({"n": 11}, 400, "n cannot be"),
    ({"seed": -1}, 400, "seed cannot be"),
    ({"seed": 2**63 - 1, "n": 2}, 400, "seed 9223372036854775808 does not fit"),
    ({"guidance_scale": 1.0, "true_cfg_scale": 2.0}, 400, "two names of one thing"),
    ({"response_format": "png"}, 400, "response_format cannot be: input should be 'b64_json' or 'url'"),
    ({"promt": "x"}, 400, "the key promt is unknown; did you mean prompt?"),
    ({"model": "flux"}, 404, "the model 'flux' is not served here; ask for 'zimage'"),
    ({"prompt": "x" * 70000}, 413, "the body is larger than 65536 bytes"),
]


def test_a_request_that_cannot_be_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        for keys, status, told in BAD:
            answer = await client.post(IMAGES, json={**PICTURE, **keys})
            assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True), answer.text
        for body, told in ((b"{", "is no JSON"), (b"[]", "the body cannot be"), (b"", "the body is missing")):
            answer = await client.post(IMAGES, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, told in answer.json()["error"]["message"]) == (400, True), answer.text
        assert (await client.post(VIDEOS, json=VIDEO)).json()["error"]["message"] == (
            "zimage makes .png files; use POST /v1/images/generations"
        )
        assert (await client.put(IMAGES)).status_code == 405
        assert (await client.get("/no")).json()["error"]["code"] == "not_found"
        assert rank.runs == []

    served(tmp_path, steps)


def test_a_body_of_unknown_length_is_limited_too(tmp_path: Path) -> None:
    async def chunks() -> Any:
        for _ in range(70):
            yield b"x" * 1000

    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        for path in (IMAGES, VIDEOS):
            answer = await client.post(path, content=chunks(), headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    served(tmp_path, steps)


def test_a_stream_tells_the_steps_and_then_the_pictures(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        rank.held = True
        task = asyncio.create_task(client.post(IMAGES, json={**PICTURE, "stream": True}))
        await asyncio.sleep(0.05)  # longer than until the first word
        rank.finish(rank.runs[0])
        text = (await task).text
        events = [json.loads(event.split("data: ")[1]) for event in text.strip().split("\n\n")]
        assert (events[0]["type"], events[0]["steps"], events[0]["of"]) == ("image_generation.progress", 0, 2)
        assert (events[-1]["type"], base64.b64decode(events[-1]["b64_json"])) == ("image_generation.completed", b"7")

    served(tmp_path, steps)


def test_a_full_queue_answers_429_and_says_when_to_come_back(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        rank.held = True
        taken = [asyncio.create_task(client.post(IMAGES, json=PICTURE)) for _ in range(2)]
        while len(service.engine.queue) < 1:
            await asyncio.sleep(0)
        answer = await client.post(IMAGES, json=PICTURE)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after" in answer.headers
        rank.held = False
        rank.finish(rank.runs[0])
        assert [(await task).status_code for task in taken] == [200, 200]

    served(tmp_path, steps, limits={"queue": 1})


def test_a_failure_of_the_ranks_is_the_clients_answer(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        rank.held = True
        task = asyncio.create_task(client.post(IMAGES, json=PICTURE))
        while not rank.runs:
            await asyncio.sleep(0)
        rank.finish(rank.runs[0], error="out of memory")
        assert (await task).json()["error"]["message"] == "rank 0: out of memory"
        service.engine.receive(0, None)
        health = await client.get("/health")
        assert (health.status_code, health.json()["ranks"]) == (503, [{"rank": 0, "state": "ended"}])
        assert (await client.post(IMAGES, json=PICTURE)).status_code == 503

    served(tmp_path, steps)


def test_a_token_is_needed_where_one_is_set(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            answer = await client.post(IMAGES, json=PICTURE, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        right = {"authorization": "Bearer secret"}
        assert (await client.post(IMAGES, json=PICTURE, headers=right)).status_code == 200
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        assert 'type="password"' in (await client.get("/")).text

    served(tmp_path, steps, service={"token_env": "TOKEN"})


def test_metrics_count_what_happened(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        await client.post(IMAGES, json=PICTURE)
        await client.post(IMAGES, json={**PICTURE, "size": "1x1"})
        text = (await client.get("/metrics")).text
        for line in (
            "chitu_queue_length 0.0", "chitu_running 0.0", "chitu_steps_total 2.0", 'chitu_rank_up{rank="0"} 1.0',
            'chitu_backend_total{backend="nccl"} 1.0', 'chitu_errors_total{code="invalid_value"} 1.0',
            'chitu_requests_total{outcome="completed"} 1.0', "chitu_request_seconds_count 1.0",
            "chitu_step_seconds_count 2.0", "chitu_queue_seconds_count 1.0",
        ):  # fmt: skip
            assert line in text
        assert "chitu_steps_per_second 0.0\n" not in text

    served(tmp_path, steps)


def test_models_and_the_description_are_there(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["zimage"]
        assert (await client.get("/v1/models/flux")).status_code == 404
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {IMAGES, VIDEOS, f"{VIDEOS}/{{video_id}}/content", "/health", "/metrics"} <= set(paths)

    served(tmp_path, steps)
