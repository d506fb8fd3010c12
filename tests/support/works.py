"""Shares of a call, as the cost model sees them."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.fast.attention.cost import Work
from chitu_diffusion.parallel.cp.fast.attention.schedule import Schedule


def agkv(heads: int = 24, seq: int = 8192, world: int = 2, head_bytes: int = 256, **changes: Any) -> Work:
    """One rank's share of a call under AGKV: all heads, its own queries, everybody's keys."""
    own = seq // world
    received = 2 * (seq - own) * heads * head_bytes
    usual = Work("agkv", 1, 1, own, seq, heads, heads, head_bytes, received, 0, own, text_queries=False)
    return replace(usual, **changes)


def ulysses(heads: int = 24, seq: int = 8192, world: int = 2, head_bytes: int = 256, **changes: Any) -> Work:
    """The same call under Ulysses: a share of the heads, all queries and keys."""
    share, own = heads // world, seq // world
    received = 3 * (seq - own) * share * head_bytes
    usual = Work("ulysses", world, 1, seq, seq, share, share, head_bytes, received, received // 3, own, False)
    return replace(usual, **changes)


works = st.builds(
    agkv,
    heads=st.integers(1, 48),
    seq=st.integers(2, 200_000),
    world=st.integers(2, 8),
    head_bytes=st.sampled_from([128, 256]),
) | st.builds(ulysses, heads=st.integers(8, 48), seq=st.integers(2, 200_000), world=st.integers(2, 8))
some_schedules = st.builds(Schedule, st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple), st.booleans())
