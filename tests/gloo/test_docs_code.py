"""The Python code of the documentation runs as it is written, on one process and on two, and gives the right result."""

import multiprocessing
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import adapter_runs  # noqa: F401  the pool's server imports diffusers for it
from tests.gloo.test_adapters_example import launched
from tests.support.pool import pool
from tests.support.reference import reference_attention

ROOT = Path(__file__).resolve().parents[2]
README, ADDING = ROOT / "README.md", ROOT / "docs/adding_a_model.md"
TOKENS, TEXT, HEADS, HEAD_DIM = 6889, 77, 2, 16  # the first two are the README's


def code(page: Path) -> str:
    """The one block of Python of a page."""
    (found,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def started(ranks: list[dict[str, str]], target: Callable[..., None], *args: Any) -> list[int | None]:
    """The exit codes of one process per rank."""
    assert pool().alive  # so is the server that forks these processes
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=target, args=(environment, *args)) for environment in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def inputs() -> dict[str, torch.Tensor]:
    """Of all ranks together; a few keys are masked, of the text and of the tokens."""
    generator = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(1, TEXT if name.startswith("text") else TOKENS, HEADS, HEAD_DIM, generator=generator)
        for name in ("q", "k", "v", "text_q", "text_k", "text_v")
    }
    made["mask"] = torch.rand(1, TEXT + TOKENS, generator=generator) > 0.1
    return made


def run_readme(environment: dict[str, str], written: str, folder: str) -> None:
    """The README's block on one rank, with the tensors that it speaks of."""
    import os

    os.environ.update(environment)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    held: dict[str, Any] = dict(inputs())
    for name in "qkv":
        held[name] = held[name].tensor_split(world, 1)[rank]
    exec(compile(written, "README.md", "exec"), held)
    torch.save((held["out"], held["text_out"]), Path(folder, str(rank)))


def test_the_readmes_attention_is_that_of_one_process(tmp_path: Path) -> None:
    written = code(README)
    assert 'init_process_group("nccl")' in written
    (of_gpus,) = (line for line in written.splitlines() if line.startswith("torch.cuda.set_device("))
    over_gloo = written.replace('"nccl"', '"gloo"').replace(of_gpus, "")
    assert started(launched(2), run_readme, over_gloo, str(tmp_path)) == [0, 0]
    parts = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    made = inputs()
    q, k, v = (torch.cat([made[f"text_{name}"], made[name]], 1) for name in "qkv")
    whole = reference_attention(q, k, v, key_mask=made["mask"], dtype=torch.float32)[0]
    text, out = whole[:, :TEXT], whole[:, TEXT:]
    torch.testing.assert_close(torch.cat([part for part, _ in parts], 1), out, atol=1e-6, rtol=0)
    for _, text_out in parts:
        torch.testing.assert_close(text_out, text, atol=1e-6, rtol=0)


def run_file(environment: dict[str, str], path: str, folder: str) -> None:
    import os
    import runpy

    os.environ.update(environment)
    with Path(folder, environment.get("RANK", "0")).open("w") as told, redirect_stdout(told):
        runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("world", [0, 2, 3], ids=["alone", "two", "three"])
def test_the_new_models_adapter_gives_what_one_process_gives(world: int, tmp_path: Path) -> None:
    ranks = launched(world)
    path = tmp_path / "adding_a_model.py"
    path.write_text(code(ADDING))
    assert started(ranks, run_file, str(path), str(tmp_path)) == [0] * len(ranks)
    for rank in range(len(ranks)):
        told = (tmp_path / str(rank)).read_text()
        assert told.startswith(f"rank {rank} over gloo: off by ")
        assert float(told.split()[-1]) <= 1e-6


def test_the_new_models_adapter_would_show_what_it_forgets(tmp_path: Path) -> None:
    forgets = code(ADDING).replace('self.share(given["freqs"], 0)', 'given["freqs"][: -(-101 // 2)]')
    path = tmp_path / "forgets.py"
    path.write_text(forgets.replace("torch.randn(1, 101, 16)", "torch.randn(1, 102, 16)"))
    assert started(launched(2), run_file, str(path), str(tmp_path)) == [0, 0]
    assert float((tmp_path / "0").read_text().split()[-1]) > 1e-3
