"""The placement arithmetic: every element arrives once, in its place, for any sizes."""

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.layout import Layout, Move, split_sizes, split_spans, ulysses_degree
from chitu_diffusion.parallel.cp.signature import Signature


@given(total=st.integers(0, 1000), parts=st.integers(1, 8))
def test_split_is_the_rule_of_tensor_split(total: int, parts: int) -> None:
    assert split_sizes(total, parts) == tuple(len(part) for part in torch.arange(total).tensor_split(parts))
    spans = split_spans(total, parts)
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]


def layouts() -> st.SearchStrategy[Layout]:
    @st.composite
    def build(draw: st.DrawFn) -> Layout:
        world = draw(st.integers(1, 8))
        kv_heads = draw(st.integers(1, 12))
        degree = draw(st.sampled_from([u for u in range(1, world + 1) if world % u == 0 and u <= kv_heads]))
        return Layout(
            world=world,
            degree=degree,
            seq_len=draw(st.integers(1, 40)),
            num_heads=kv_heads * draw(st.integers(1, 3)),
            num_kv_heads=kv_heads,
            text_len=draw(st.integers(0, 5)),
            text_in_front=draw(st.booleans()),
            text_queries=draw(st.booleans()),
        )

    return build()


def written(moves: list[Move], dst: int, tensor: str) -> Counter[tuple[int, int]]:
    """How often each (row, head) of ``dst``'s window is written."""
    return Counter(
        (row, head)
        for move in moves
        if (move.tensor, move.dst) == (tensor, dst)
        for row in range(move.dst_rows.start, move.dst_rows.stop)
        for head in range(move.dst_heads.start, move.dst_heads.stop)
    )


def cells(rows: range, heads: int) -> Counter[tuple[int, int]]:
    return Counter((row, head) for row in rows for head in range(heads))


@given(layout=layouts())
def test_every_row_and_head_is_written_exactly_once(layout: Layout) -> None:
    moves = [m for r in range(layout.world) for m in layout.moves_in(r) if m.src == r]
    back = [m for r in range(layout.world) for m in layout.moves_out(r) if m.src == r]
    for rank in range(layout.world):
        kv = range(layout.kv_token_offset, layout.kv_token_offset + layout.seq_len)
        tokens = layout.group_tokens(rank).size
        q = range(layout.q_token_offset, layout.q_token_offset + tokens)
        assert written(moves, rank, "k") == written(moves, rank, "v") == cells(kv, layout.kv_heads(rank).size)
        assert written(moves, rank, "q") == cells(q, layout.q_heads(rank).size)
        assert written(back, rank, "out") == cells(range(layout.shards[rank].size), layout.num_heads)
        text = layout.text_len if layout.text_queries else 0
        assert written(back, rank, "text_out") == cells(range(text), layout.num_heads)
        assert not set(kv) & set(range(layout.kv_text_rows.start, layout.kv_text_rows.stop))
        assert layout.kv_rows == layout.seq_len + layout.text_len


@given(layout=layouts())
def test_both_ends_of_a_message_list_it_in_the_same_order(layout: Layout) -> None:
    for a in range(layout.world):
        for b in range(layout.world):
            for moves in (layout.moves_in, layout.moves_out):
                assert [m for m in moves(a) if {m.src, m.dst} == {a, b}] == [
                    m for m in moves(b) if {m.src, m.dst} == {a, b}
                ]


@given(layout=layouts())
def test_a_move_keeps_its_shape(layout: Layout) -> None:
    for rank in range(layout.world):
        for move in (*layout.moves_in(rank), *layout.moves_out(rank)):
            assert (move.src_rows.size, move.src_heads.size) == (move.dst_rows.size, move.dst_heads.size)


@given(layout=layouts())
def test_query_heads_stay_with_their_kv_heads(layout: Layout) -> None:
    ratio = layout.num_heads // layout.num_kv_heads
    for rank in range(layout.world):
        kv, q = layout.kv_heads(rank), layout.q_heads(rank)
        assert (q.start, q.stop) == (kv.start * ratio, kv.stop * ratio)
        assert kv.size >= 1


@pytest.mark.parametrize("world", range(2, 9))
def test_at_one_step_every_rank_talks_to_another_peer(world: int) -> None:
    layout = Layout(world=world, degree=1, seq_len=4 * world + 1, num_heads=4, num_kv_heads=4)
    steps = [[m.dst for m in layout.moves_in(r) if m.src == r and m.tensor == "k"] for r in range(world)]
    for targets in zip(*steps, strict=True):
        assert sorted(targets) == list(range(world))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_follow_the_formulas_of_the_two_methods(world: int) -> None:
    """AGKV receives 2X(P−1)/P, Ulysses 4X(P−1)/P², X being one whole tensor (DeepSpeed-Ulysses, arXiv 2309.14509)."""
    seq_len, heads, head_dim = 64, 16, 128
    whole = seq_len * heads * head_dim * 2
    agkv, ulysses = (
        Layout(world=world, degree=degree, seq_len=seq_len, num_heads=heads, num_kv_heads=heads)
        for degree in (1, world)
    )
    assert agkv.bytes_received(0, 2, head_dim, 1) == 2 * whole * (world - 1) // world
    assert ulysses.bytes_received(0, 2, head_dim, 1) == 4 * whole * (world - 1) // world**2


@pytest.mark.parametrize(
    ("world", "kv_heads", "degree"), [(8, 30, 8), (8, 12, 8), (8, 4, 4), (8, 7, 4), (6, 4, 3), (7, 4, 1), (1, 1, 1)]
)
def test_ulysses_takes_the_largest_legal_degree(world: int, kv_heads: int, degree: int) -> None:
    assert ulysses_degree("ulysses", world, kv_heads) == degree
    assert ulysses_degree("agkv", world, kv_heads) == 1


@pytest.mark.parametrize("degree", [0, -1, 3, 8, 16])
def test_a_degree_that_does_not_fit_is_refused_with_the_choices(degree: int) -> None:
    with pytest.raises(ConfigError, match=r"choose one of 1, 2, 4"):
        ulysses_degree("ulysses", 8, 4, degree)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kv_heads", [28, 4])
def test_a_plan_is_told_the_bytes_of_both_methods_with_grouped_queries(world: int, kv_heads: int) -> None:
    """AGKV moves K and V, (P-1)/P of each; Ulysses moves Q, K, V and the output, (P-1)/P² of each."""
    asked = Signature(
        batch=2,
        seq_len=64,
        num_heads=28,
        num_kv_heads=kv_heads,
        head_dim=128,
        dtype=torch.bfloat16,
        text_len=0,
        text_in_front=True,
        text_queries=False,
        kv_sharded=True,
        key_mask=False,
        scale=0.1,
    )
    per_head = 2 * 64 * 128 * 2
    assert asked.bytes_received(world) == {
        "agkv": per_head * 2 * kv_heads * (world - 1) // world,
        "ulysses": per_head * (2 * 28 + 2 * kv_heads) * (world - 1) // world**2,
    }
    assert dataclasses.replace(asked, kv_sharded=False).bytes_received(world) == {"agkv": 0, "ulysses": 0}


CALL = Signature(
    batch=1, seq_len=4096, num_heads=24, num_kv_heads=24, head_dim=128, dtype=torch.bfloat16, text_len=77,
    text_in_front=True, text_queries=True, kv_sharded=True, key_mask=False, scale=0.1,
)  # fmt: skip


def test_calls_whose_prompts_differ_by_less_than_a_tile_take_one_plan() -> None:
    of_text = [dataclasses.replace(CALL, text_len=rows).planned_as.text_len for rows in (0, 1, 127, 128, 129)]
    assert of_text == [0, 128, 128, 128, 256]
    of_tokens = [dataclasses.replace(CALL, seq_len=rows).planned_as.seq_len for rows in (4096, 4097, 4224, 4225)]
    assert of_tokens == [4096, 4224, 4224, 4352]
    assert CALL.planned_as == dataclasses.replace(CALL, text_len=128)
    assert CALL.planned_as.planned_as == CALL.planned_as


@pytest.mark.parametrize("tokens", [1, 7, 1023])
def test_short_calls_are_planned_as_they_are(tokens: int) -> None:
    """A rank may have no token, which rules schedules out."""
    short = dataclasses.replace(CALL, seq_len=tokens)
    assert short.planned_as is short


@pytest.mark.parametrize("world", range(2, 9))
def test_whoever_has_a_token_when_lengths_are_rounded_has_one_anyway(world: int) -> None:
    shortest = dataclasses.replace(CALL, seq_len=1024)
    assert min(span.size for span in shortest.layout(world, 1).shards) > 0
