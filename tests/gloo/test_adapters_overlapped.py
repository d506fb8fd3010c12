"""The overlapped region computes what one process computes, by every plan: over windows that are poison at first."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.fast.adapters import region_run
from chitu_diffusion.parallel.cp.fast.adapters.region_plan import RegionPlan
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST, Schedule
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from tests.gloo.checks import error
from tests.gloo.overlapped_runs import LIMIT, PLANS, SEEN, Unmoved, only, run_cases, use_overlapped
from tests.gloo.region_fake import FakeSlots
from tests.support import reference_row
from tests.support.pool import Worker, pool
from tests.support.tiny_models import Case, inputs_for, model_for, output

CASES = {
    "wan": [
        Case("wan", 75),
        Case("wan", 49, (6, 6), heads=5),
        Case("wan", 2, heads=3),
        Case("wan", 49, per_token=True),
    ],
    "qwen-image": [
        Case("qwen-image", 75, (13,)),
        Case("qwen-image", 49, (13, 6), heads=5, mask=True),
        Case("qwen-image", 2, (1,), heads=3),
    ],
    "z-image": [Case("z-image", 75, (13,), heads=5), Case("z-image", 49, (33, 1)), Case("z-image", 49, heads=30)],
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("model", CASES)
def test_equals_one_process_by_every_plan(model: str, world: int) -> None:
    for plan in PLANS.values():
        if plan.text_aside and model != "qwen-image":
            continue  # the others have no text that asks
        cases = [case for case in CASES[model] if case.heads >= plan.sends]
        for errors in pool().run(world, run_cases, cases, plan, FakeSlots, timeout=110):
            assert max(errors) <= LIMIT, (plan.name, dict(zip(cases, errors, strict=True)))


def test_equals_one_process_on_eight_ranks() -> None:
    cases = [Case("wan", 49, heads=30), Case("qwen-image", 75, (13, 6), mask=True), Case("z-image", 75, (13,), heads=5)]
    for errors in pool().run(8, run_cases, cases, PLANS["by_group(4)/head_pipeline(4)/sdpa"], FakeSlots, timeout=110):
        assert max(errors) <= LIMIT


def attends_locally_first(worker: Worker, cases: list[Case]) -> list[float]:
    """By a kernel that gives the log-sum-exp on CPUs too."""
    plan = replace(PLANS["whole(1)/one_shot/sdpa"], schedule=LOCAL_FIRST, kernel="exact")
    with mock.patch.dict(KERNELS, {"exact": reference_row.EXACT}):
        return run_cases(worker, cases, plan, FakeSlots)


@pytest.mark.parametrize("world", [2, 3])
def test_equals_one_process_where_own_keys_come_first(world: int) -> None:
    for errors in pool().run(world, attends_locally_first, [Case("wan"), Case("z-image", 49, (33, 1))]):
        assert max(errors) <= LIMIT


def attends_in_one_kernel(worker: Worker, cases: list[Case], groups: int, by_group: bool, aside: bool) -> list[float]:
    """By a kernel that would wait by itself: here all is there when it has its ticket."""
    fused = Schedule((1,) * groups, fused=True)
    plan = replace(PLANS["whole(1)/one_shot/sdpa"], schedule=fused, kernel="exact", sends=groups, by_group=by_group)
    plan = replace(plan, text_aside=aside)
    with mock.patch.dict(KERNELS, {"exact": reference_row.EXACT}):
        return run_cases(worker, cases, plan, FakeSlots)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_equals_one_process_where_the_kernel_waits(world: int) -> None:
    """Own rows last, but for text that asks: there every rank takes the rows in one order."""
    cases = [Case("wan"), Case("z-image", 49, (33,)), Case("qwen-image", 75, (13, 6))]
    for groups, by_group, aside in ((1, False, False), (2, True, False), (2, False, True)):
        for errors in pool().run(world, attends_in_one_kernel, cases, groups, by_group, aside, timeout=110):
            assert max(errors) <= LIMIT


@pytest.mark.parametrize("model", CASES)
def test_a_missing_wait_is_seen(model: str) -> None:
    plan = PLANS["by_group(2)/head_pipeline(2)/sdpa"]
    for errors in pool().run(2, run_cases, [Case(model)], plan, Unmoved):
        assert min(errors) > SEEN


def sends_in_reverse(worker: Worker) -> float:
    """A group that leaves before it is projected."""

    def project_after_sending(plan: RegionPlan, tokens: Any, slots: Any) -> None:
        for group in range(plan.sends):
            slots.send(group)
        with mock.patch.object(slots, "send"):
            right(plan, tokens, slots)

    right = region_run.send_projected
    with mock.patch.object(region_run, "send_projected", project_after_sending):
        return run_cases(worker, [Case("wan")], PLANS["whole(1)/one_shot/sdpa"], FakeSlots)[0]


def test_a_send_before_its_projection_is_seen() -> None:
    assert min(pool().run(2, sends_in_reverse)) > SEEN


class Scaled(nn.Linear):
    """Not exactly a linear layer: its forward has to be called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.5 * x.sum(-1, keepdim=True)


def with_other_layers(worker: Worker) -> float:
    """A layer of a class of its own in the place of one, a hook on another, and a forward of its own on a third."""
    case = Case("z-image", heads=4)
    model = model_for(replace(case, heads=6))
    case = replace(case, heads=6)
    first, second = (getattr(block, "attention") for block in model.layers)  # type: ignore[union-attr]  # noqa: B009
    scaled = Scaled(first.to_k.in_features, first.to_k.out_features, bias=False)
    scaled.load_state_dict(first.to_k.state_dict())
    plain_k, first.to_k = first.to_k, scaled
    hook = first.to_v.register_forward_hook(lambda layer, args, out: 2 * out)
    plain = second.to_q.forward
    second.to_q.forward = lambda x: -plain(x)
    try:
        wanted = output(model, inputs_for(case))
        adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
        use_overlapped(adapter, FakeSlots(worker.group))
        adapter.attach()
        with only(PLANS["by_group(2)/head_pipeline(2)/sdpa"]):
            got = output(model, inputs_for(case))
        adapter.detach()
    finally:
        hook.remove()
        first.to_k = plain_k
        del second.to_q.forward
    assert error(wanted, output(model, inputs_for(case))) > SEEN, "the layers change nothing"
    return error(got, wanted)


def test_layers_that_are_more_than_a_linear_one_are_called_as_modules() -> None:
    assert max(pool().run(2, with_other_layers)) <= LIMIT
