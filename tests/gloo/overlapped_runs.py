"""What the ranks of the worker pool do with an overlapped region: by which plans, and over which windows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from chitu_diffusion.parallel.cp import rounds
from chitu_diffusion.parallel.cp.fast.adapters import overlapped, region_tuning
from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter
from chitu_diffusion.parallel.cp.fast.adapters.overlapped import OverlappedPath
from chitu_diffusion.parallel.cp.fast.adapters.paths import Paths, SessionPath
from chitu_diffusion.parallel.cp.fast.adapters.region_plan import RegionPlan, RegionWork, candidates
from chitu_diffusion.parallel.cp.plan_cache import PlanCache
from tests.gloo.adapter_runs import run_case
from tests.gloo.region_fake import FakeSlots, KeptInMemory
from tests.support.pool import Worker
from tests.support.tiny_models import Case

LIMIT = 1e-6
SEEN = 1e-2
POOL = 1 << 30
WORK = RegionWork(4, True, 1, ("sdpa",), (), (), session_fits=True)
PLANS = {plan.name: plan for plan in candidates(WORK)}


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
        [OverlappedPath(session, ops, ops.meet, POOL, cache or KeptInMemory()), SessionPath(session)], quiet=True
    )
    adapter.region = paths
    return paths


def only(plan: RegionPlan | None) -> Any:
    """Nothing but this plan is a candidate; with None all are, and they are measured."""
    return mock.patch.object(overlapped, "candidates", lambda work: [plan] if plan else candidates(work))


@contextmanager
def few_rounds() -> Iterator[None]:
    """Every way is timed as seldom as can be."""
    counts = dict.fromkeys(("FEWEST_FIRST", "MOST_FIRST", "FEWEST_ROUNDS", "MOST_ROUNDS"), 1)
    with mock.patch.object(region_tuning, "WARM_CALLS", 1), mock.patch.multiple(rounds, **counts):
        yield


def run_cases(worker: Worker, cases: list[Case], plan: RegionPlan | None, ops: type[FakeSlots]) -> list[float]:
    """The errors of several cases by one plan, over windows of one kind, in one trip to the workers."""
    errors = []
    for case in cases:
        with only(plan):
            run = run_case(worker, "agkv", case, lambda adapter: use_overlapped(adapter, ops(worker.group)) and None)
        assert run.restored
        errors.append(run.error)
    return errors
