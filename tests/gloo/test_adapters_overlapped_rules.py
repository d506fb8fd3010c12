"""The overlapped region's rules: what is measured and kept, what is served, the order of steps, failing ranks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from chitu_diffusion.parallel.cp.config import Choice, CPConfig
from chitu_diffusion.parallel.cp.fast.adapters import region_run
from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter
from chitu_diffusion.parallel.cp.fast.adapters.overlapped import OverlappedPath
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall, Stream
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from chitu_diffusion.parallel.cp.plan_cache import PlanCache
from chitu_diffusion.parallel.cp.session import CPSession
from tests.gloo.adapter_runs import one_process, run_case
from tests.gloo.checks import error
from tests.gloo.overlapped_runs import LIMIT, PLANS, POOL, Unmoved, few_rounds, only, use_overlapped
from tests.gloo.region_fake import FakeSlots, KeptInMemory
from tests.support.pool import RankError, Worker, pool
from tests.support.tiny_models import Case, inputs_for, model_for, output


def measured_without_waits(worker: Worker) -> tuple[float, Choice]:
    case = Case("z-image", 49)
    model, wanted, ops = model_for(case), one_process(case), Unmoved(worker.group)
    adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
    path = use_overlapped(adapter, ops)._paths[0]
    assert isinstance(path, OverlappedPath)
    adapter.attach()
    try:
        with few_rounds():
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
        with few_rounds():
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
            assert choice.reason.startswith(f"{choice.used} took {choice.ms:.3f} ms")
        assert ran == (Choice("overlapped", "overlapped", "its contract holds"),)
    assert len({str(plans) for _, plans, _ in results}) == 1
    # rank 0 has kept them for the next process
    again = pool().run(3, measured, str(tmp_path), timeout=110)
    for (_, plans, _), (errors, kept, _) in zip(results, again, strict=True):
        assert max(errors) <= LIMIT
        assert {shape: choice.used for shape, choice in kept.items()} == {s: c.used for s, c in plans.items()}
        assert all("when it was measured, earlier" in choice.reason for choice in kept.values())
    assert [folder.name for folder in tmp_path.iterdir()] == ["0"]


def prompts(worker: Worker, lengths: tuple[int, ...]) -> tuple[float, list[Choice], int]:
    """One image by prompts of several lengths: the worst error, every choice, and how often something was measured."""
    model, ops = model_for(Case("qwen-image")), FakeSlots(worker.group)
    adapter = adapter_class(model)(model, worker.session(CPConfig(timeout_s=30)))
    path = use_overlapped(adapter, ops)._paths[0]
    assert isinstance(path, OverlappedPath)
    cases = [Case("qwen-image", 1056, (length,)) for length in lengths]
    wanted, measure = [one_process(case) for case in cases], path._tuner.measure
    adapter.attach()
    try:
        with few_rounds(), mock.patch.object(path._tuner, "measure", side_effect=measure) as counted:
            errors = [error(output(model, inputs_for(case)), want) for case, want in zip(cases, wanted, strict=True)]
    finally:
        adapter.detach()
    return max(errors), list(path.choices.values()), counted.call_count


def test_a_prompt_of_about_the_same_length_is_not_measured_again() -> None:
    for wrong, (first, second, longer), count in pool().run(2, prompts, (13, 30, 140), timeout=110):
        assert wrong <= LIMIT
        assert (count, first.used) == (2, second.used)
        assert "when it was measured, earlier" in second.reason
        assert "earlier" not in first.reason + longer.reason


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
        found[name] = OverlappedPath(alone or worker.session(config), ops, ops.meet, POOL, KeptInMemory()).why_not(call)
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
    return ops.events[: ops.events.index("prepare", 1)]  # of the first block


def test_groups_leave_while_the_next_is_projected_and_queries_come_last() -> None:
    name = "by_group(2)/head_pipeline(2)/sdpa"
    wan, z_image = (pool().run(2, order_of_events, Case(model), name)[0] for model in ("wan", "z-image"))
    after = ["q", "project", "wait 0", "wait 1"]
    # Wan's norm spans all heads: all keys are projected before the first group of values
    assert wan == ["prepare", "project", "project", "send 0", "project", "send 1", *after]
    assert z_image == ["prepare", "project", "project", "send 0", "project", "project", "send 1", *after]


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
