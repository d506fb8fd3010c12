"""Schemathesis asks a server whatever its description allows, and forbids: no 5xx, and no answer that is not described.

The server is the real one, over HTTP; its rank answers by itself, so that nothing but the routes takes time.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from chitu_diffusion.serving.app import make_app
from chitu_diffusion.serving.port import address, bind
from chitu_diffusion.serving.service import Service
from chitu_diffusion.serving.stage import ServiceTable
from tests.unit.test_serve_app import IMAGES, PICTURE, VIDEO, VIDEOS, ready

LIMIT_S = 100
RUN = "--generation-deterministic --max-examples 20 --no-color"  # the same cases in every run
# no schema can say whether a size fits the model, or whether two keys go together
TOO_STRICT = "positive_data_acceptance"
QUICKLY = ("--phases", "examples,coverage")


@contextmanager
def listening(service: Service) -> Iterator[str]:
    """The address of ``service``, in a thread of its own."""
    with bind(ServiceTable(port=0)) as taken:
        server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([taken],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield address(taken)
        server.should_exit = True
        thread.join(10)


def asked(url: str, folder: Path, *more: str, without: str = TOO_STRICT) -> None:
    """Let it try all its checks but those ``without``; it leaves files in ``folder``."""
    line = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *RUN.split()]
    line += ["--exclude-checks", without, *more]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["zimage", "wan"])
def test_every_answer_is_one_that_the_description_has(name: str, tmp_path: Path) -> None:
    service, rank = ready(tmp_path, name)
    with listening(service) as url:
        asked(url, tmp_path)
    assert len(rank.runs) > 20, "hardly anything came through"


def test_so_it_is_where_a_token_is_needed(tmp_path: Path) -> None:
    service, rank = ready(tmp_path, "zimage", service={"token_env": "TOKEN"})
    with listening(service) as url:
        assert httpx.get(f"{url}/openapi.json").status_code == 401
        asked(url, tmp_path, *QUICKLY, "--header", "Authorization: Bearer secret")  # it tries without as well
    assert len(rank.runs) > 20, "hardly anything came through"


def test_so_it_is_while_the_queue_is_full(tmp_path: Path) -> None:
    service, rank = ready(tmp_path, "wan", limits={"queue": 1})
    rank.held = True
    with listening(service) as url:
        taken = [httpx.post(f"{url}{VIDEOS}", json=VIDEO).status_code for _ in range(3)]
        assert taken == [200, 200, 429]
        asked(url, tmp_path, *QUICKLY)
    assert len(rank.runs) == 1


def test_so_it_is_when_a_rank_is_lost(tmp_path: Path) -> None:
    service, rank = ready(tmp_path, "zimage")
    rank.engine.receive(0, None)
    with listening(service) as url:
        assert httpx.post(f"{url}{IMAGES}", json=PICTURE).status_code == 503
        asked(url, tmp_path, *QUICKLY, without=f"{TOO_STRICT},not_a_server_error")
    assert rank.runs == []
