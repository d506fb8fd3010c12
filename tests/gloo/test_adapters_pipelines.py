"""Whole pipelines on several ranks make the picture that one process makes."""

from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.wrapper import enable_fast_cp
from tests.gloo.adapter_runs import traces
from tests.support.pool import Worker, pool

LIMIT = 2e-6  # of numbers between 0 and 1
NAMES = ["wan", "wan-2.2", "qwen-image", "qwen-image, two prompts", "z-image", "z-image, guided"]

_made: dict[str, tuple[Any, torch.Tensor]] = {}  # in each worker: pipelines, and what one process makes with them


def pictures_differ(worker: Worker, method: str, name: str) -> tuple[float, bool]:
    """The largest difference of a pixel, and whether the same call makes the same picture after ``close``."""
    from tests.support.tiny_pipelines import PIPELINES, generate

    make, call = PIPELINES[name]
    if name not in _made:
        pipeline = make()
        _made[name] = pipeline, generate(pipeline, call)
    pipeline, wanted = _made[name]
    models = [m for m in (pipeline.transformer, getattr(pipeline, "transformer_2", None)) if m is not None]
    before = [traces(model) for model in models]
    ran: set[int] = set()
    with enable_fast_cp(pipeline, worker.group, method, "nccl"):
        assert all(traces(model) != trace for model, trace in zip(models, before, strict=True)), "not wrapped"
        watches = [model.register_forward_hook(lambda model, *_: ran.add(id(model))) for model in models]
        got = generate(pipeline, call)
    for watch in watches:
        watch.remove()
    assert ran == {id(model) for model in models}, "a transformer had nothing to do, so the case shows nothing of it"
    restored = [traces(model) for model in models] == before
    return float((got - wanted).abs().max()), restored and torch.equal(generate(pipeline, call), wanted)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", ["agkv", "ulysses"])
@pytest.mark.parametrize("name", NAMES)
def test_makes_the_same_picture(name: str, method: str, world: int) -> None:
    for off, restored in pool().run(world, pictures_differ, method, name):
        assert off <= LIMIT
        assert restored
