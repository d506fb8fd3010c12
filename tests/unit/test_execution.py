"""Attention by a schedule, over keys that hold NaN until they are awaited."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.fast.attention.execution import attend, run
from chitu_diffusion.parallel.cp.fast.attention.kernels import TICKET_NUMBERS
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST, ONE_SHOT, Schedule, head_groups, parse
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from chitu_diffusion.parallel.cp.layout import Span
from tests.support.reference import reference_attention, relative_error
from tests.support.reference_row import EXACT, IN_PLACE, ROUNDED

HEAD_DIM, BATCH, SCALE = 8, 2, 0.5
BOUND = 1e-6


@pytest.fixture(autouse=True, scope="module")
def _rows_that_run_here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for row in (EXACT, IN_PLACE, ROUNDED):
            patch.setitem(KERNELS, row.name, row)
        yield


@dataclass
class Arriving:
    """Whole tensors, of which the heads of a group are NaN until somebody waits for them.

    Where the schedule is locally first, k and v never get the rank's own rows, which lie in own_k and own_v.
    """

    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    schedule: Schedule
    own_rows: Span = field(default_factory=lambda: Span(0, 0))
    q_travels: bool = False
    events: list[tuple[str, int]] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        q, k, v = self.whole
        self.q = torch.full_like(q, torch.nan) if self.q_travels else q
        self.k, self.v = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
        own = slice(self.own_rows.start, self.own_rows.stop)
        self.own_k, self.own_v = (x[:, own].clone() if self.own_rows.size else None for x in (k, v))
        self._heads = head_groups(q.shape[2], k.shape[2], self.schedule.groups)

    def wait(self, group: int) -> None:
        self.events.append(("wait", group))
        for side, (here, whole) in enumerate(zip((self.q, self.k, self.v), self.whole, strict=True)):
            heads = self._heads[group][min(side, 1)]
            window = here[:, :, heads.start : heads.stop]
            kept = (
                window[:, self.own_rows.start : self.own_rows.stop].clone()
                if self.schedule.local_first and side
                else None
            )
            window.copy_(whole[:, :, heads.start : heads.stop])
            if kept is not None:
                window[:, self.own_rows.start : self.own_rows.stop] = kept

    def ticket(self) -> torch.Tensor:
        self.events.append(("ticket", 0))
        for here, whole in zip((self.k, self.v), self.whole[1:], strict=True):
            here.copy_(whole)
        return torch.zeros(TICKET_NUMBERS, dtype=torch.int64)

    def finished(self, group: int, out: torch.Tensor) -> None:
        self.events.append(("finished", group))
        heads = self._heads[group][0]
        assert not out[:, :, heads.start : heads.stop].isnan().any(), "the group has not been written"
        self.outs.append(out)


def draw(
    seq_q: int, seq_k: int, heads: int, kv_heads: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, seq_q, heads, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, BATCH, seq_k, kv_heads, HEAD_DIM, generator=generator)
    k[:, seq_k // 2 :] *= 1.5  # parts must not look alike, or a merge without their weights would pass
    return q.to(dtype), k.to(dtype), v.to(dtype)


def plan(schedule: Schedule, kernel: str = EXACT.name) -> Candidate:
    return Candidate("agkv", 1, "ce", schedule, kernel)


def order(schedule: Schedule) -> list[tuple[str, int]]:
    return [(what, group) for group in range(len(schedule.groups)) for what in ("wait", "finished")]


SCHEDULES = ["one_shot", "head_pipeline(2)", "head_pipeline(1:3)", "head_pipeline(1:1:2)",
             "local_first", "local_first(2)", "local_first(1:3)", "local_first(1:1:2)"]  # fmt: skip
# the rank's own rows among 13 keys: first, between two others (or between a text and the others), last
OWN = {"first": Span(0, 5), "in the middle": Span(5, 9), "last": Span(9, 13)}


@pytest.mark.parametrize("out_given", [False, True], ids=["new memory", "given memory"])
@pytest.mark.parametrize("own", OWN.values(), ids=OWN.keys())
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (12, 4)], ids=["plain", "grouped"])
@pytest.mark.parametrize("text", SCHEDULES)
def test_every_schedule_equals_one_kernel_over_all_keys(
    text: str, heads: int, kv_heads: int, own: Span, out_given: bool
) -> None:
    schedule, whole = parse(text), draw(7, 13, heads, kv_heads)
    arriving = Arriving(whole, schedule, own if schedule.local_first else Span(0, 0))
    home = torch.full((BATCH, 7, heads + 2, HEAD_DIM + 8), torch.nan)[:, :, 1:-1, 4:-4] if out_given else None
    out = attend(plan(schedule), arriving, scale=SCALE, out=home)
    assert relative_error(out, reference_attention(*whole, scale=SCALE)[0]) <= BOUND
    assert arriving.events == order(schedule)
    assert all(told is out for told in arriving.outs)
    assert home is None or out is home


@pytest.mark.parametrize("out_given", [False, True], ids=["new memory", "given memory"])
@pytest.mark.parametrize("text", ["fused", "fused(2)", "fused(4)"])
def test_a_fused_schedule_leaves_the_waiting_to_its_one_kernel(text: str, out_given: bool) -> None:
    schedule, whole = parse(text), draw(7, 13, 4, 4)
    arriving = Arriving(whole, schedule)
    home = torch.full_like(whole[0], torch.nan) if out_given else None
    out = attend(plan(schedule), arriving, scale=SCALE, out=home)
    assert relative_error(out, reference_attention(*whole, scale=SCALE)[0]) <= BOUND
    assert arriving.events == [("ticket", 0)]
    assert home is None or out is home


@pytest.mark.parametrize("schedule", [ONE_SHOT, Schedule((1, 1)), Schedule((1, 2, 1))], ids=str)
def test_queries_that_arrive_are_awaited_too(schedule: Schedule) -> None:
    whole = draw(9, 11, 8, 4)
    out = attend(plan(schedule), Arriving(whole, schedule, q_travels=True), scale=SCALE)
    assert relative_error(out, reference_attention(*whole, scale=SCALE)[0]) <= BOUND


@pytest.mark.parametrize("own", OWN.values(), ids=OWN.keys())
@pytest.mark.parametrize("text", SCHEDULES)
def test_key_masks_reach_the_right_keys(text: str, own: Span) -> None:
    schedule, whole = parse(text), draw(7, 13, 4, 4)
    key_mask = torch.rand(BATCH, 13, generator=torch.Generator().manual_seed(3)) > 0.5
    key_mask[0, own.start : own.stop] = False  # nothing is left of the own keys of one batch item
    key_mask[1] = False
    key_mask[1, own.start : own.stop] = True  # and only the own keys of the other
    out = attend(plan(schedule), Arriving(whole, schedule, own), scale=SCALE, key_mask=key_mask)
    assert relative_error(out, reference_attention(*whole, scale=SCALE, key_mask=key_mask)[0]) <= BOUND


def test_a_query_without_any_key_gets_0_in_every_schedule() -> None:
    whole, nothing = draw(5, 13, 4, 4), torch.zeros(BATCH, 13, dtype=torch.bool)
    for schedule in map(parse, SCHEDULES):
        assert attend(plan(schedule), Arriving(whole, schedule, Span(5, 9)), scale=SCALE, key_mask=nothing).eq(0).all()


@st.composite
def calls(draw: st.DrawFn) -> tuple[Schedule, int, int, int, Span, int]:
    schedule = Schedule(
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)), local_first=draw(st.booleans())
    )
    start, size = draw(st.integers(0, 8)), draw(st.integers(1, 6))
    seq_k = start + size + draw(st.integers(0, 6))
    return (
        schedule,
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        seq_k,
        Span(start, start + size),
        draw(st.integers()),
    )


@settings(deadline=None, max_examples=40)
@given(calls())
def test_any_schedule_any_heads_and_any_place_of_the_own_keys(case: tuple[Schedule, int, int, int, Span, int]) -> None:
    schedule, kv_heads, ratio, seq_k, own, seed = case  # groups may be empty, and no other keys be there
    whole = draw(3, seq_k, kv_heads * ratio, kv_heads, seed % 2**32)
    arriving = Arriving(whole, schedule, own)
    out = attend(plan(schedule), arriving, scale=SCALE)
    assert relative_error(out, reference_attention(*whole, scale=SCALE)[0]) <= BOUND
    assert arriving.events == order(schedule)


def test_the_own_keys_are_attended_to_before_anything_is_awaited() -> None:
    schedule, whole = parse("local_first(2)"), draw(7, 13, 4, 4)
    arriving = Arriving(whole, schedule, Span(5, 9))
    own_k = arriving.own_k
    assert own_k is not None
    with pytest.MonkeyPatch.context() as patch:
        seen: list[tuple[list[tuple[str, int]], int]] = []

        def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
            seen.append((list(arriving.events), k.shape[1]))
            return EXACT.run(q, k, v, **options)  # type: ignore[arg-type]

        patch.setitem(KERNELS, EXACT.name, EXACT.__class__(EXACT.name, EXACT.why_not, watched))  # type: ignore[arg-type]
        attend(plan(schedule), arriving, scale=SCALE)
    assert seen[0] == ([], own_k.shape[1])  # of all heads at once
    assert [keys for _, keys in seen[1:]] == [5, 4, 5, 4]  # group by group, those before the own and those behind


@pytest.mark.parametrize("kernel", [IN_PLACE.name, ROUNDED.name])
@pytest.mark.parametrize("own", OWN.values(), ids=OWN.keys())
@pytest.mark.parametrize("text", ["head_pipeline(1:3)", "local_first", "local_first(1:3)"])
def test_kernels_that_write_in_place_and_those_that_do_not_give_the_same(text: str, own: Span, kernel: str) -> None:
    schedule, whole = parse(text), draw(7, 13, 8, 4)
    home = torch.full((BATCH, 7, 10, HEAD_DIM), torch.nan)[:, :, 1:-1]
    out = attend(plan(schedule, kernel), Arriving(whole, schedule, own), scale=SCALE, out=home)
    assert out is home
    assert relative_error(out, reference_attention(*whole, scale=SCALE)[0]) <= BOUND


def test_partial_outputs_stay_in_float32_where_the_kernel_can_keep_them() -> None:
    whole = draw(64, 13, 4, 4, dtype=torch.bfloat16)
    exact = reference_attention(*whole, scale=SCALE)[0]
    errors = {}
    for kernel in (EXACT.name, IN_PLACE.name, ROUNDED.name):
        out = attend(plan(LOCAL_FIRST, kernel), Arriving(whole, LOCAL_FIRST, Span(5, 9)), scale=SCALE)
        assert out.dtype == torch.bfloat16
        errors[kernel] = relative_error(out, exact)
    rounding = relative_error(exact.bfloat16(), exact)
    assert errors[EXACT.name] <= 1.01 * rounding
    assert min(errors[IN_PLACE.name], errors[ROUNDED.name]) > 1.1 * rounding


def test_without_a_transfer_the_kernel_of_the_plan_runs_at_once() -> None:
    whole = draw(5, 9, 4, 2)
    out = run(plan(ONE_SHOT), *whole, scale=SCALE)
    assert relative_error(out, reference_attention(*whole, scale=SCALE)[0]) <= BOUND
