"""The example runs as it is written, alone and as a launcher starts it, and the README shows it."""

import multiprocessing
import os
import runpy
import socket
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.gloo import adapter_runs  # noqa: F401  the pool's server imports diffusers for it
from tests.support.pool import pool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/wrapper_wan.py"


def run_script(environment: dict[str, str], told: Path) -> None:
    os.environ.update(environment)
    with told.open("w") as file, redirect_stdout(file):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def launched(world: int) -> list[dict[str, str]]:
    """The environment that torch.distributed.run gives to each of ``world`` ranks; to none where ``world`` is 0.

    To be called where it is used: the port is free now.
    """
    if not world:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    whole = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "test"}
    return [{**whole, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


@pytest.mark.parametrize("world", [0, 2], ids=["alone", "launched"])
def test_runs_as_written(world: int, tmp_path: Path) -> None:
    ranks = launched(world)
    assert pool().alive  # so is the server that forks these processes
    context = multiprocessing.get_context("forkserver")
    told = [tmp_path / str(rank) for rank in range(len(ranks))]
    processes = [context.Process(target=run_script, args=pair) for pair in zip(ranks, told, strict=True)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(ranks)
    first, second = told[0].read_text().splitlines()
    assert first.startswith(f"{len(ranks)} ranks over gloo (backend fast was asked for, but on rank 0")
    assert float(second.split(": ")[1].split()[0]) <= 1e-6
    assert all(not path.read_text() for path in told[1:])


def test_the_readme_shows_the_example() -> None:
    readme = (ROOT / "chitu_diffusion/parallel/cp/fast/README.md").read_text()
    assert f"```python\n{EXAMPLE.read_text()}```" in readme
