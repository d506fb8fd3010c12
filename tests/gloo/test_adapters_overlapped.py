"""The overlapped region computes what one process computes, by every plan: over windows that are poison at first."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from chitu_diffusion.parallel.cp.config import Choice, CPConfig
from chitu_diffusion.parallel.cp.fast.adapters import overlapped, region_run, region_tuning
from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter
from chitu_diffusion.parallel.cp.fast.adapters.overlapped import OverlappedPath
from chitu_diffusion.parallel.cp.fast.adapters.paths import Paths, SessionPath
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall, Stream
from chitu_diffusion.parallel.cp.fast.adapters.region_plan import RegionPlan, RegionWork, candidates
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from chitu_diffusion.parallel.cp.plan_cache import PlanCache
from chitu_diffusion.parallel.cp.session import CPSession
from tests.gloo.adapter_runs import one_process, run_case
from tests.gloo.checks import error
from tests.gloo.region_fake import FakeSlots, kept_nowhere
from tests.support import reference_row
from tests.support.pool import RankError, Worker, pool
from tests.support.tiny_models import Case, inputs_for, model_for, output

LIMIT = 1e-6
SEEN = 1e-2
POOL = 1 << 30
WORK = RegionWork(4, False, 1, ("sdpa",), (), session_fits=True)
PLANS = {plan.name: plan for plan in candidates(WORK)}
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


class Unmoved(FakeSlots):
    """Of a library whose waits return at once: nothing has come yet."""

    def projection_sync(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        before = k.clone(), v.clone()
        super().projection_sync(k, v, group, tag=tag)
        k.copy_(before[0]), v.copy_(before[1])


def use_overlapped(adapter: Adapter, ops: FakeSlots, cache: PlanCache | None = None) -> Paths:
    """Let an adapter over gloo run its regions over the windows of ``ops``."""
    session = adapter.session
    paths = Paths(
        [OverlappedPath(session, ops, ops.meet, POOL, cache or kept_nowhere()), SessionPath(session)], quiet=True
    )
    adapter.region = paths
    return paths


def only(plan: RegionPlan | None) -> Any:
    """Nothing but this plan is a candidate; with None all are, and they are measured."""
    return mock.patch.object(overlapped, "candidates", lambda work: [plan] if plan else candidates(work))


def run_cases(worker: Worker, cases: list[Case], plan: RegionPlan | None, ops: type[FakeSlots]) -> list[float]:
    errors = []
    for case in cases:
        with only(plan):
            run = run_case(worker, "agkv", case, lambda adapter: use_overlapped(adapter, ops(worker.group)) and None)
        assert run.restored
        errors.append(run.error)
    return errors


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("model", CASES)
def test_equals_one_process_by_every_plan(model: str, world: int) -> None:
    for plan in PLANS.values():
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


def measured_without_waits(worker: Worker) -> tuple[float, Choice]:
    case = Case("z-image", 49)
    model, wanted, ops = model_for(case), one_process(case), Unmoved(worker.group)
    adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
    path = use_overlapped(adapter, ops)._paths[0]
    assert isinstance(path, OverlappedPath)
    adapter.attach()
    try:
        with mock.patch.multiple(region_tuning, WARM_CALLS=1, rounds_for=lambda ms: 1):
            return error(output(model, inputs_for(case)), wanted), next(iter(path.choices.values()))
    finally:
        adapter.detach()


def test_measuring_turns_down_what_is_not_finite() -> None:
    for wrong, choice in pool().run(2, measured_without_waits):
        assert wrong <= LIMIT
        assert choice.used == "project, then attend"
        assert all("its output is not finite" in other.reason for other in choice.rejected)


def measured(worker: Worker, folder: str) -> tuple[list[float], dict[str, Choice], tuple[Choice, ...]]:
    """Two shapes in turn, each measured at its first call."""
    model, ops = model_for(Case("qwen-image")), FakeSlots(worker.group)
    adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
    paths = use_overlapped(adapter, ops, PlanCache(Path(folder) / str(worker.rank)))
    cases = [Case("qwen-image"), Case("qwen-image", 49, (6,)), Case("qwen-image")]
    wanted = [one_process(case) for case in cases]
    adapter.attach()
    try:
        with mock.patch.multiple(region_tuning, WARM_CALLS=1, rounds_for=lambda ms: 1):
            errors = [error(output(model, inputs_for(case)), want) for case, want in zip(cases, wanted, strict=True)]
    finally:
        adapter.detach()
    path = paths._paths[0]
    assert isinstance(path, OverlappedPath)
    return errors, path.choices, paths.choices


def test_the_plan_of_a_shape_is_measured_once_on_all_ranks_together(tmp_path: Path) -> None:
    results = pool().run(3, measured, str(tmp_path), timeout=110)
    for errors, plans, ran in results:
        assert max(errors) <= LIMIT
        assert len(plans) == 2
        for choice in plans.values():
            assert {choice.used, *(other.name for other in choice.rejected)} == set(PLANS)
            assert choice.reason.startswith(f"{choice.used} took")
        assert ran == (Choice("overlapped", "overlapped", "its contract holds"),)
    assert len({str(plans) for _, plans, _ in results}) == 1
    # rank 0 has kept them for the next process
    again = pool().run(3, measured, str(tmp_path), timeout=110)
    for (_, plans, _), (errors, kept, _) in zip(results, again, strict=True):
        assert max(errors) <= LIMIT
        assert {shape: choice.used for shape, choice in kept.items()} == {s: c.used for s, c in plans.items()}
        assert all("when it was measured, earlier" in choice.reason for choice in kept.values())
    assert [folder.name for folder in tmp_path.iterdir()] == ["0"]


def reasons(worker: Worker) -> dict[str, str | None]:
    """Why the path does not serve some calls, and one that it does."""
    served = region_call()
    odd_heads = replace(served, tokens=replace(served.tokens, heads=64))
    no_mask = replace(served, key_mask=torch.ones(2, 6))
    alone = CPSession(CPConfig(timeout_s=30), worker.group) if worker.world == 1 else None
    found: dict[str, str | None] = {}
    for name, call, config in (
        ("served", served, CPConfig(timeout_s=30)),
        ("masked", replace(served, key_mask=torch.ones(2, 6, dtype=torch.bool)), CPConfig(timeout_s=30)),
        ("ulysses", served, CPConfig("ulysses", timeout_s=30)),
        ("heads", odd_heads, CPConfig(timeout_s=30)),
        ("mask", no_mask, CPConfig(timeout_s=30)),
        ("dtype", replace(served, tokens=replace(served.tokens, hidden=served.tokens.hidden.double())), CPConfig()),
    ):
        ops = FakeSlots(worker.group)
        found[name] = OverlappedPath(alone or worker.session(config), ops, ops.meet, POOL, kept_nowhere()).why_not(call)
    return found


def region_call() -> RegionCall:
    layer = nn.Linear(64, 64)
    tokens = Stream(torch.randn(2, 3, 64), 4, layer, layer, layer, None, None, (layer,), None)
    return RegionCall(tokens, None, 6, None)


def test_the_contract_says_what_it_does_not_serve() -> None:
    for found in pool().run(2, reasons):
        assert found["served"] is None
        assert found["masked"] is None
        assert found["ulysses"] == "the method is ulysses, whose exchange begins when all is projected"
        assert found["heads"] == "heads of 4 bytes are no multiple of 16 bytes"
        assert found["mask"] == "the key mask is not one truth value for every key"
        assert found["dtype"] == "the hidden states are torch.float64"
    assert pool().run(1, reasons)[0]["served"] == "one rank sends nothing"


def order_of_events(worker: Worker, case: Case, name: str) -> list[str]:
    ops = FakeSlots(worker.group)
    projected: list[str] = []

    def watch(adapter: Adapter) -> None:
        use_overlapped(adapter, ops)
        for block in getattr(adapter.model, adapter.blocks):
            layer = getattr(block, adapter.attention)
            projected.append(type(layer).__name__)

    def noted(step: Callable[..., Any], told: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            ops.events.append(told)
            return step(*args, **kwargs)

        return run

    with (
        only(PLANS[name]),
        mock.patch.object(region_run, "queries", noted(region_run.queries, "q")),
        mock.patch.object(region_run, "project", noted(region_run.project, "project")),
    ):
        run_case(worker, "agkv", case, watch)
    return ops.events[: len(ops.events) // 2]  # of the first of two blocks


def test_groups_leave_while_the_next_is_projected_and_queries_come_last() -> None:
    name = "by_group(2)/head_pipeline(2)/sdpa"
    wan, z_image = (pool().run(2, order_of_events, Case(model), name)[0] for model in ("wan", "z-image"))
    after = ["q", "project", "wait 0", "wait 1"]
    # Wan's norm spans all heads: all keys are projected before the first group of values
    assert wan == ["prepare", "project", "project", "send 0", "project", "send 1", *after]
    assert z_image == ["prepare", "project", "project", "send 0", "project", "project", "send 1", *after]


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


def fails_on_rank_1(worker: Worker) -> tuple[str, list[str]]:
    """A kernel that fails on one rank in the middle of a block."""
    ops = FakeSlots(worker.group)

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        if worker.rank == 1 and ops.prepared == 1:
            raise RuntimeError("no memory")
        return right(*args, **kwargs)

    right = region_run.attend
    told = ""
    with mock.patch.object(region_run, "attend", attend), only(PLANS["whole(2)/head_pipeline(2)/sdpa"]):
        model = model_for(Case("wan"))
        adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
        use_overlapped(adapter, ops)
        adapter.attach()
        handle = model.blocks[1].register_forward_pre_hook(stop)  # type: ignore[union-attr,operator]
        try:
            output(model, inputs_for(Case("wan")))
        except (RuntimeError, StopIteration) as failure:
            told = str(failure)
        finally:
            handle.remove()
            adapter.detach()
    return told, ops.events


def stop(*args: Any) -> None:
    raise StopIteration("the block behind")


def test_a_rank_that_fails_in_the_middle_keeps_no_other_waiting() -> None:
    (first, events), (second, others) = pool().run(2, fails_on_rank_1)
    assert (first, second) == ("the block behind", "no memory")
    assert sorted(events) == sorted(others) == sorted(["prepare", "send 0", "send 1", "wait 0", "wait 1"])


def with_different_masks(worker: Worker) -> None:
    case = Case("qwen-image", 49, (13,), mask=worker.rank == 1)
    run_case(worker, "agkv", case, lambda adapter: use_overlapped(adapter, FakeSlots(worker.group)) and None)


def test_ranks_that_differ_get_one_sentence() -> None:
    results = pool().results(2, with_different_masks)
    assert all(isinstance(result, RankError) and result.kind == "DisagreementError" for result in results), results
    assert len({result.message for result in results}) == 1
