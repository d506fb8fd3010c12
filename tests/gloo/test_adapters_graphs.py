"""Wrapped transformers whose blocks are replayed compute what one process computes, forward after forward."""

from dataclasses import replace

import pytest
import torch

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.fast.adapters.block_graphs import GRAPHS, BlockGraphs
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from tests.gloo.adapter_runs import traces
from tests.gloo.checks import error
from tests.gloo.overlapped_runs import PLANS, only, use_overlapped
from tests.gloo.region_fake import FakeSlots
from tests.support.fake_recorder import FakeRecorder
from tests.support.pool import Worker, pool
from tests.support.tiny_models import Case, inputs_for, model_for, output

LIMIT = 1e-6
CASES = [
    Case("wan", 75, heads=5),
    Case("wan", 49, (6, 6)),
    Case("wan", 49, per_token=True),
    Case("qwen-image", 75, (13,)),
    Case("qwen-image", 49, (13, 6), heads=5, mask=True),
    Case("z-image", 75, (13,), heads=5),
    Case("z-image", 49, (33, 1)),
]


def replayed(worker: Worker, case: Case) -> tuple[list[float], list[str], tuple[str, ...], bool]:
    """Forwards on other inputs each time, in turn with those of another prompt's length."""
    model, recorder = model_for(case), FakeRecorder()
    other = replace(case, text_lens=tuple(length + 2 for length in case.text_lens))
    before = traces(model)
    wanted = [(which, seed, output(model, inputs_for(which, seed))) for seed in range(1, 6) for which in (case, other)]
    adapter = adapter_class(model)(model, worker.session(CPConfig("agkv", timeout_s=30)))
    use_overlapped(adapter, FakeSlots(worker.group))
    adapter.graphs = BlockGraphs(list(getattr(model, adapter.blocks)), recorder, lambda: None)
    with only(PLANS["by_group(2)/head_pipeline(2)/sdpa"]):
        adapter.attach()
        try:
            errors = [error(output(model, inputs_for(which, seed)), want) for which, seed, want in wanted]
        finally:
            told = adapter.graphs.told
            adapter.detach()
    which, seed, want = wanted[0]
    restored = traces(model) == before and torch.equal(output(model, inputs_for(which, seed)), want)
    return errors, recorder.log, told, restored


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replayed_blocks_equal_one_process(case: Case, world: int) -> None:
    for errors, log, told, restored in pool().run(world, replayed, case, timeout=110):
        assert max(errors) <= LIMIT
        assert set(told) == {GRAPHS}
        assert log.count("replay") > 2 * log.count("record") > 0
        assert restored
