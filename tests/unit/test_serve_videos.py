"""The routes of videos, in front of the engine of test_serve_app: jobs, forms, lists, deleting."""

import asyncio
from pathlib import Path

import httpx

from chitu_diffusion.serving.service import Service
from tests.unit.test_serve_app import VIDEO, VIDEOS, Rank, served


def test_a_video_is_a_job_until_it_is_deleted(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        rank.held = True
        job = (await client.post(VIDEOS, json={**VIDEO, "fps": 10})).json()
        url = f"{VIDEOS}/{job['id']}"
        assert (job["status"], job["size"], job["seconds"], job["progress"]) == ("in_progress", "64x32", "0.5", 0)
        assert (await client.get(f"{url}/content")).status_code == 409
        rank.finish(rank.runs[0])
        assert (await client.get(url)).json()["progress"] == 100
        content = await client.get(f"{url}/content")
        assert content.content == str(rank.runs[0].request.seed).encode()
        assert content.headers["content-type"] == "video/mp4"
        assert (await client.delete(url)).json() == {"id": job["id"], "object": "video.deleted", "deleted": True}
        assert [(await client.get(path)).status_code for path in (url, f"{url}/content")] == [404, 404]

    served(tmp_path, steps, "wan")


def test_deleting_a_video_that_runs_stops_it(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        rank.held = True
        job = (await client.post(VIDEOS, data={"prompt": "a fox", "size": "64x32", "seconds": "1"})).json()
        assert rank.runs[0].request.frames == 17
        await client.delete(f"{VIDEOS}/{job['id']}")
        assert not rank.gates[job["id"]].ask(1)

    served(tmp_path, steps, "wan")


def test_the_newest_videos_are_kept_and_listed(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        made = []
        for _ in range(4):
            made.append((await client.post(VIDEOS, json=VIDEO)).json()["id"])
            await asyncio.sleep(0.01)
        listed = (await client.get(VIDEOS, params={"limit": 2})).json()
        assert ([video["id"] for video in listed["data"]], listed["has_more"]) == ([made[3], made[2]], True)
        after = (await client.get(VIDEOS, params={"after": made[2]})).json()["data"]
        assert [video["id"] for video in after] == [made[1]]
        assert (await client.get(f"{VIDEOS}/{made[0]}")).status_code == 404

    served(tmp_path, steps, "wan", limits={"kept_videos": 2})


def test_a_method_that_is_not_there_is_told_which_are(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        allowed = {"/v1/videos": "GET, POST", "/v1/videos/x": "DELETE, GET", "/health": "GET"}
        for path, methods in allowed.items():
            answer = await client.put(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, methods)

    served(tmp_path, steps, "wan")


def test_a_form_may_hold_no_file(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        answer = await client.post(VIDEOS, data={"prompt": "a fox"}, files={"input_reference": ("a.png", b"x")})
        assert (answer.status_code, "send no file" in answer.json()["error"]["message"]) == (400, True)
        answer = await client.post(VIDEOS, data={"prompt": "a fox", "fps": "many"})
        assert answer.json()["error"]["message"].startswith("fps cannot be: input should be a valid integer")
        assert rank.runs == []

    served(tmp_path, steps, "wan")
