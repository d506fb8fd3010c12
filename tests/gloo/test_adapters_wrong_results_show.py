"""The ways in which a wrapped model can be silently wrong, each done on purpose: the check of these tests sees all."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter, Inputs
from chitu_diffusion.parallel.cp.fast.adapters.paths import SessionPath
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall
from tests.gloo.adapter_runs import Sabotage, run_case
from tests.gloo.checks import sdpa
from tests.gloo.test_adapters_pipelines import NAMES, pictures_differ
from tests.support.pool import Worker, pool
from tests.support.tiny_models import Case

SEEN = 1e-2  # ten thousand times the limit that right results keep
Outputs = tuple[torch.Tensor, torch.Tensor | None]


def nothing(adapter: Adapter) -> None:
    """The sabotage that every case passes without."""


def own_keys_only(call: RegionCall) -> Outputs:
    """Every rank attends to its own keys, and to the text."""
    q, k, v = call.tokens.qkv()
    if call.text is None:
        return call.tokens.project_out(sdpa(q, k, v, None)), None
    q, k, v = (torch.cat(pair, 1) for pair in zip(call.text.qkv(), (q, k, v), strict=True))
    text, tokens = sdpa(q, k, v, None).split([call.text.hidden.shape[1], call.tokens.hidden.shape[1]], 1)
    return call.tokens.project_out(tokens), call.text.project_out(text)


def no_gather(adapter: Adapter) -> None:
    adapter.region = own_keys_only


def mask_dropped(adapter: Adapter) -> None:
    right = adapter.region
    adapter.region = lambda call: right(replace(call, key_mask=None))


def text_once_per_rank(adapter: Adapter) -> None:
    """The text travels with every rank's tokens, as if each rank had a text of its own."""

    def region(call: RegionCall) -> Outputs:
        assert call.text is not None
        text_len = call.text.hidden.shape[1]
        q, k, v = (torch.cat(pair, 1) for pair in zip(call.text.qkv(), call.tokens.qkv(), strict=True))
        out, _ = cp_attention(adapter.session, q, k, v)
        return call.tokens.project_out(out[:, text_len:]), call.text.project_out(out[:, :text_len])

    adapter.region = region


def rows_of_rank_0(adapter: Adapter, method: str) -> None:
    """What ``method`` slices is sliced as on rank 0: the right number of rows, from the start."""
    right_share, right_inputs = adapter.share, getattr(adapter, method)

    def first_rows(value: Any, dim: int) -> Any:
        if isinstance(value, tuple):
            return tuple(first_rows(item, dim) for item in value)
        return None if value is None else value.narrow(dim, 0, right_share(value, dim).shape[dim])

    def inputs(given: Inputs) -> Inputs:
        adapter.share = first_rows  # type: ignore[method-assign]  # that is the sabotage
        try:
            made: Inputs = right_inputs(given)
            return made
        finally:
            adapter.share = right_share  # type: ignore[method-assign]

    setattr(adapter, method, inputs)


def wrong_positions(adapter: Adapter) -> None:
    rows_of_rank_0(adapter, "block_inputs")


def wrong_timesteps(adapter: Adapter) -> None:
    rows_of_rank_0(adapter, "model_inputs")


def run(worker: Worker, method: str, case: Case, sabotage: Sabotage) -> float:
    return run_case(worker, method, case, sabotage).error


CASES = [
    (no_gather, Case("wan")),
    (no_gather, Case("qwen-image")),
    (no_gather, Case("z-image")),
    (wrong_positions, Case("wan")),
    (wrong_positions, Case("qwen-image")),
    (wrong_positions, Case("z-image")),
    (mask_dropped, Case("qwen-image", 75, (13, 6), mask=True)),
    (mask_dropped, Case("z-image", 75, (13, 40))),
    (text_once_per_rank, Case("qwen-image", 64)),
    (wrong_timesteps, Case("wan", per_token=True)),
    (wrong_positions, Case("qwen-image", 49, per_token=True)),
    (wrong_positions, Case("z-image", 49, per_token=True)),
]


@pytest.mark.parametrize(("sabotage", "case"), CASES, ids=lambda x: getattr(x, "__name__", getattr(x, "model", "")))
def test_is_seen(sabotage: Sabotage, case: Case) -> None:
    assert max(pool().run(2, run, "agkv", case, nothing)) <= 1e-6
    assert max(pool().run(2, run, "agkv", case, sabotage)) > SEEN


def picture_without_gather(worker: Worker, name: str) -> float:
    right = SessionPath.run
    SessionPath.run = lambda _, call: own_keys_only(call)  # type: ignore[method-assign]  # that is the sabotage
    try:
        return pictures_differ(worker, "agkv", name)[0]
    finally:
        SessionPath.run = right  # type: ignore[method-assign]


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_shows_that_nothing_was_gathered(name: str) -> None:
    assert max(pool().run(2, picture_without_gather, name)) > SEEN
