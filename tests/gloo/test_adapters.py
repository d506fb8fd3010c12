"""A wrapped transformer computes what one process computes, and is itself again afterwards."""

import copy
import dataclasses
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from tests.gloo.adapter_runs import run_cases
from tests.gloo.checks import error
from tests.support.pool import Worker, pool
from tests.support.tiny_models import Case, inputs_for, model_for, output, z_image_controlnet

LIMIT = 1e-6
METHODS = ["agkv", "ulysses"]
SIZES = [(75, 13, 4), (49, 1, 3), (75, 6, 5), (49, 13, 30)]  # tokens, text, heads
MORE = {
    "wan": [
        Case("wan", text_lens=(6, 6)),
        Case("wan", 49, per_token=True, heads=3),
        Case("wan", 75, (13, 13), heads=5, per_token=True),
        Case("wan", 49, image_text=True),
        Case("wan", 2),
    ],
    "qwen-image": [
        Case("qwen-image", 75, (13, 6), mask=True),
        Case("qwen-image", 49, (6, 1), heads=5, mask=True),
        Case("qwen-image", 49, (6,), heads=3, per_token=True),
        Case("qwen-image", 49, controlnet=True),
        Case("qwen-image", 2, (1,)),
    ],
    "z-image": [
        Case("z-image", 75, (13, 40), heads=5),
        Case("z-image", 49, (33, 1)),
        Case("z-image", 49, (6,), heads=3, per_token=True),
        Case("z-image", 49, controlnet=True),
    ],
}
ON_MANY = {
    "wan": [Case("wan", 49, heads=30)],
    "qwen-image": [Case("qwen-image", 75, (13, 6), mask=True), Case("qwen-image", 49, (1,), heads=30)],
    "z-image": [Case("z-image", 75, (13, 40), heads=5)],
}


def check(world: int, method: str, cases: list[Case]) -> None:
    for rank, runs in enumerate(pool().run(world, run_cases, method, cases, timeout=110)):
        for case, run in zip(cases, runs, strict=True):
            assert run.error <= LIMIT, f"rank {rank} is off by {run.error:.1e} in {case}"
            assert run.restored, f"detach left something behind on rank {rank} in {case}"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MORE)
def test_equals_one_process(model: str, method: str, world: int) -> None:
    usual = [Case(model, seq_len, (text_len,), heads) for seq_len, text_len, heads in SIZES]
    check(world, method, usual + MORE[model])


@pytest.mark.parametrize("world", [5, 6, 7, 8])
@pytest.mark.parametrize("method", METHODS)
def test_equals_one_process_on_many_ranks(method: str, world: int) -> None:
    check(world, method, [case for cases in ON_MANY.values() for case in cases])


def in_turn(worker: Worker, method: str, cases: list[Case]) -> list[float]:
    """One wrapped model, called with one case after another."""
    model = model_for(cases[0])
    wanted = [output(model, inputs_for(case)) for case in cases]
    adapter = adapter_class(model)(model, worker.session(CPConfig(method, timeout_s=30)))
    adapter.attach()
    try:
        return [error(output(model, inputs_for(case)), want) for case, want in zip(cases, wanted, strict=True)]
    finally:
        adapter.detach()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MORE)
def test_lengths_batch_and_mask_may_change_from_call_to_call(model: str, method: str) -> None:
    first = Case(model, 75, (13,))
    other_text, other_size, batch = (
        dataclasses.replace(first, text_lens=(6,)),
        dataclasses.replace(first, seq_len=49),
        dataclasses.replace(first, text_lens=(40, 13), mask=True),
    )
    cases = [first, other_text, first, other_size, batch, first]
    for errors in pool().run(3, in_turn, method, cases):
        assert max(errors) <= LIMIT, errors


def in_half_precision(worker: Worker, case: Case) -> tuple[float, float]:
    """The errors, against float32, of one process and of the wrapped model."""
    inputs = {name: rounded(value) for name, value in inputs_for(case).items()}
    exact = output(model_for(case), inputs)
    model = copy.deepcopy(model_for(case)).bfloat16()
    half = {name: rounded(value, torch.bfloat16) for name, value in inputs.items()}
    alone = output(model, half)
    adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
    adapter.attach()
    try:
        wrapped = output(model, half)
    finally:
        adapter.detach()
    assert wrapped.dtype == alone.dtype == torch.bfloat16
    return error(alone, exact), error(wrapped, exact)


def rounded(value: object, dtype: torch.dtype = torch.float32) -> object:
    """Floating-point values that bfloat16 can hold, as ``dtype``; timesteps and everything else as they are."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1:
        return value.bfloat16().to(dtype)
    return [rounded(item, dtype) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("model", MORE)
def test_half_precision_stays_within_twice_the_error_of_one_process(model: str) -> None:
    for alone, wrapped in pool().run(3, in_half_precision, Case(model, 49, (13,))):
        assert 0 < wrapped <= 2 * alone


def unnamed_inputs(worker: Worker) -> dict[str, set[str]]:
    """For each model, what diffusers' processor names in its signature and ours does not."""
    lacking = {}
    for name in MORE:
        model = model_for(Case(name))
        adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
        attention = getattr(getattr(model, adapter.blocks)[0], adapter.attention)
        theirs, ours = (inspect.signature(p.__call__) for p in (attention.processor, adapter.processor()))
        lacking[name] = set(theirs.parameters) - set(ours.parameters)
    return lacking


def test_processors_name_every_input_that_diffusers_filters_by() -> None:
    assert pool().run(1, unnamed_inputs) == [{name: set() for name in MORE}]


def rows_of_refiners(worker: Worker, case: Case) -> dict[str, list[int]]:
    """How many rows the blocks of each stage of Z-Image work on."""
    model, rows = model_for(case), dict[str, list[int]]()
    adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
    adapter.attach()
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, stage=stage: rows.setdefault(stage, []).append(args[0].shape[1])
        )
        for stage in ("noise_refiner", "context_refiner", "layers")
        for block in getattr(model, stage)
    ]
    try:
        output(model, inputs_for(case))
    finally:
        for hook in hooks:
            hook.remove()
        adapter.detach()
    return rows


def test_the_images_refiner_of_z_image_is_split_too() -> None:
    alone, *others = (pool().run(world, rows_of_refiners, Case("z-image")) for world in (1, 2, 3))
    (whole,) = alone
    for ranks in others:
        for stage in ("noise_refiner", "layers"):
            per_block = [[rows[stage][block] for rows in ranks] for block in range(len(whole[stage]))]
            assert [sum(parts) for parts in per_block] == whole[stage]
            assert all(max(parts) - min(parts) <= 1 for parts in per_block)
        assert all(rows["context_refiner"] == whole["context_refiner"] for rows in ranks)


def error_of(worker: Worker, model: nn.Module, run: Callable[[], torch.Tensor]) -> float:
    """How far ``run`` with the wrapped model is from ``run`` with the model as it is."""
    with torch.no_grad():
        wanted = run()
        adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
        adapter.attach()
        try:
            return error(run(), wanted)
        finally:
            adapter.detach()


def with_a_controlnet(worker: Worker, mode: str) -> float:
    """The error with a ControlNet whose hints come between the blocks of the refiner that it shares."""
    model, inputs = model_for(Case("z-image")), inputs_for(Case("z-image"))
    control = z_image_controlnet(model, mode)
    image = [torch.ones_like(inputs["x"][0])]

    def run() -> torch.Tensor:
        samples = control([x.clone() for x in inputs["x"]], inputs["t"], inputs["cap_feats"], image)
        return output(model, inputs | {"controlnet_block_samples": samples})

    return error_of(worker, model, run)


@pytest.mark.parametrize("mode", ["control_noise_refiner", "control_layers"])
def test_a_controlnet_may_share_the_refiner_of_z_image(mode: str) -> None:
    assert max(pool().run(2, with_a_controlnet, mode)) <= LIMIT


def images_of_two_sizes(worker: Worker) -> float:
    """The error with two images of unequal sizes in one batch: the refiner's keys are masked."""
    model = model_for(Case("z-image"))
    one, other = (inputs_for(Case("z-image", tokens)) for tokens in (49, 75))
    inputs = {name: one[name] + other[name] for name in ("x", "cap_feats")} | {"t": torch.cat([one["t"], other["t"]])}
    return error_of(worker, model, lambda: torch.cat([x.flatten() for x in model(**inputs, return_dict=False)[0]]))


def test_images_of_a_batch_may_have_unequal_sizes() -> None:
    for world in (2, 3):
        assert max(pool().run(world, images_of_two_sizes)) <= LIMIT
