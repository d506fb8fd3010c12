"""The channel on which ranks agree: its time limits, and what becomes of it after one."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import DisagreementError


class Store:
    """A key-value store that never waits: what is not there at once is late."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.limits: list[float] = []

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return int(self.values[key])

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return bytes(self.values[key])

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.limits.append(limit.total_seconds())
        if any(key not in self.values for key in keys):
            raise RuntimeError("wait timeout")

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def get_group_store(self) -> "Store":
        return self


Open = Callable[[int], ControlChannel]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def channel_of(store: Store, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the channel of one of two ranks, with a limit of 3 s."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)

    def make(rank: int) -> ControlChannel:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
        return ControlChannel(store, timeout_s=3)  # type: ignore[arg-type]

    return make


def late(channel: ControlChannel, value: Any, **options: Any) -> None:
    """A gather in which the other rank has not answered yet."""
    with pytest.raises(DisagreementError):
        channel.gather(value, **options)


@pytest.mark.parametrize(("patience_s", "limit_s"), [(0.0, 3.0), (1.0, 3.0), (120.0, 120.0)])
def test_patience_makes_the_limit_longer_and_never_shorter(
    patience_s: float, limit_s: float, store: Store, channel_of: Open
) -> None:
    late(channel_of(0), "mine", patience_s=patience_s)
    assert store.limits == [limit_s, limit_s]


def test_patience_is_for_one_exchange(store: Store, channel_of: Open) -> None:
    first, second = channel_of(0), channel_of(1)
    late(second, "b", patience_s=120)
    assert first.gather("a", patience_s=120) == ["a", "b"]
    late(first, "c")
    assert store.limits[-1] == 3


def test_a_rank_that_does_not_answer_is_named_with_the_time(channel_of: Open) -> None:
    with pytest.raises(DisagreementError, match="rank 0 of 2 waited 5 s for rank 1 to agree on a call and got no"):
        channel_of(0).gather("mine", patience_s=5)


def test_after_a_missing_answer_the_channel_repeats_the_error_and_waits_no_more(store: Store, channel_of: Open) -> None:
    channel, other = channel_of(0), channel_of(1)
    late(channel, "mine")
    assert other.gather("theirs") == ["mine", "theirs"]  # too late for the first
    waits = len(store.limits)
    with pytest.raises(DisagreementError, match="waited 3 s for rank 1"):
        channel.gather("again")
    assert len(store.limits) == waits


def test_values_come_in_the_order_of_ranks_and_are_copies(channel_of: Open) -> None:
    first, second = channel_of(0), channel_of(1)
    mine = {"a": [1]}
    late(first, mine)
    got = second.gather({"b": [2]})
    assert got == [{"a": [1]}, {"b": [2]}]
    assert got[0] is not mine


def test_two_channels_over_one_group_do_not_read_each_other(store: Store, channel_of: Open) -> None:
    one, other = channel_of(0), channel_of(0)
    late(one, "one")
    late(other, "other")
    answers = [value for key, value in store.values.items() if not key.startswith("chitu/channels/")]
    assert len(answers) == 2
