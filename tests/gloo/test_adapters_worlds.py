"""The overlapped region on the numbers of ranks that the long tests of it leave out: uneven shards, heads and texts."""

import pytest

from tests.gloo.overlapped_runs import LIMIT, PLANS, run_cases
from tests.gloo.region_fake import FakeSlots
from tests.support.pool import pool
from tests.support.tiny_models import Case

CASES = [Case("wan", 49, heads=30), Case("qwen-image", 75, (13, 6), mask=True), Case("z-image", 75, (13,), heads=5)]


@pytest.mark.parametrize("world", [5, 6, 7])
def test_equals_one_process_on_every_number_of_ranks(world: int) -> None:
    for plan in ("by_group(4)/head_pipeline(4)/sdpa", "whole(1)/one_shot/sdpa"):
        for errors in pool().run(world, run_cases, CASES, PLANS[plan], FakeSlots, timeout=110):
            assert max(errors) <= LIMIT, plan
