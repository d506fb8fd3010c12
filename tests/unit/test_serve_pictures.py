"""`response_format: url`: a picture stays under an address of the server, for a while, and not too many of them."""

import asyncio
import base64
import json
from pathlib import Path

import httpx
import pytest

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.serving.pictures import KEPT_S, Pictures
from chitu_diffusion.serving.service import Service
from chitu_diffusion.serving.stage import read_stage
from tests.unit.test_serve_app import IMAGES, PICTURE, Rank, served

URL = {**PICTURE, "response_format": "url"}


def test_an_address_gives_the_picture_as_often_as_it_is_asked_for(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        data = (await client.post(IMAGES, json={**URL, "n": 2})).json()["data"]
        assert [set(datum) for datum in data] == [{"url"}, {"url"}]
        assert all(datum["url"].startswith("http://here/v1/images/") for datum in data)
        for _ in range(2):
            answers = [await client.get(datum["url"]) for datum in data]
            assert [answer.content for answer in answers] == [b"7", b"8"]
            assert {answer.headers["content-type"] for answer in answers} == {"image/png"}
        (datum,) = (await client.post(IMAGES, json=PICTURE)).json()["data"]
        assert datum == {"b64_json": base64.b64encode(b"7").decode()}

    served(tmp_path, steps)


def test_a_stream_tells_the_address_too(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        text = (await client.post(IMAGES, json={**URL, "stream": True})).text
        done = json.loads(text.strip().split("\n\n")[-1].split("data: ")[1])
        assert "b64_json" not in done
        assert (await client.get(done["url"])).content == b"7"

    served(tmp_path, steps)


def test_the_oldest_pictures_make_room(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        urls = []
        for _ in range(3):
            urls += [datum["url"] for datum in (await client.post(IMAGES, json={**URL, "n": 5})).json()["data"]]
            await asyncio.sleep(0)
        found = [(await client.get(url)).status_code for url in urls]
        assert found == [404] * 5 + [200] * 10
        assert (await client.get(urls[0])).json()["error"]["code"] == "image_not_found"

    served(tmp_path, steps, limits={"kept_images": 10})


def test_after_a_while_a_picture_is_gone() -> None:
    now = 5.0
    pictures = Pictures(3, lambda: now)
    old = pictures.keep(b"old")
    now += KEPT_S - 1
    new = pictures.keep(b"new")
    assert (pictures.get(old), pictures.get(new)) == (b"old", b"new")
    now += 2
    assert (pictures.get(old), pictures.get(new)) == (None, b"new")


def test_the_address_is_the_secret_where_a_token_is_needed(tmp_path: Path) -> None:
    async def steps(client: httpx.AsyncClient, service: Service, rank: Rank) -> None:
        assert (await client.post(IMAGES, json=URL)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        (one,), (other,) = [(await client.post(IMAGES, json=URL, headers=headers)).json()["data"] for _ in range(2)]
        assert (await client.get(one["url"])).content == b"7"
        names = [datum["url"].split("/")[-2] for datum in (one, other)]
        assert min(map(len, names)) >= 32
        assert names[0] != names[1]
        for path in ("/v1/images/x/content", "/v1/images/x/../../metrics/content"):
            assert (await client.get(path)).status_code in (401, 404)
        assert (await client.get("/v1/images/generations")).status_code == 401

    served(tmp_path, steps, service={"token_env": "TOKEN"})


def test_there_is_room_for_all_pictures_of_one_request(tmp_path: Path) -> None:
    file = tmp_path / "stage.yaml"
    file.write_text("model: {name: zimage, path: x}\nlimits: {kept_images: 9}\n")
    with pytest.raises(ConfigError, match=r"limits\.kept_images 9 cannot be"):
        read_stage(file)
