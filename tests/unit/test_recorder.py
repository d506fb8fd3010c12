"""CUDA graphs that hold exchanges: their turns, their memory, and what is left of one that failed. Without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.graph_pool import GraphPool
from chitu_diffusion.parallel.cp.recorder import GraphRecorder, NotRecordedError


class Pools:
    """What torch's allocator allows: a pool ends with the last of its graphs, and its memory stays taken."""

    def __init__(self) -> None:
        self.handles = 0
        self.users: dict[int, int] = {}

    def handle(self) -> int:
        self.handles += 1
        return self.handles


class Graph:
    """A CUDA graph of torch."""

    pools: Pools
    failed = False

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert self.pools.users.get(pool) != 0, "use_count > 0"
        self.pools.users[pool] = self.pools.users.get(pool, 0) + 1
        self.pool, self.users = pool, self.pools.users

    def capture_end(self) -> None:
        if self.failed:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        self.users[self.pool] -= 1


class Transport:
    """The windows of two tags that take turns."""

    def __init__(self) -> None:
        self.fast = SimpleNamespace(turns={"in": 1}, device=torch.device("cpu"))
        self.graph_pool = GraphPool(self.fast.device)
        self.now = 1
        self.abandoned: list[str] = []
        self.tags: set[str] = set()

    def check(self) -> int:
        return self.now

    @contextmanager
    def managed_capture(self) -> Iterator[set[str]]:
        self.tags = set()
        yield self.tags

    def use(self, tag: str) -> None:
        self.tags.add(tag)
        self.fast.turns[tag] = 1 - self.fast.turns.get(tag, 0)

    def abandon(self, tags: set[str], turns: dict[str, int]) -> None:
        self.abandoned += sorted(tags)
        self.fast.turns.update(turns)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Transport:
    pools = Pools()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(Graph, "pools", pools, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", pools.handle)
    return Transport()


def recorder_of(transport: Transport) -> GraphRecorder:
    given: Any = transport
    return GraphRecorder(given)


def test_a_graph_is_replayed_in_its_turn_and_takes_it(transport: Transport) -> None:
    graph = recorder_of(transport).record(lambda: [transport.use("in"), transport.use("kv"), transport.use("kv")])
    assert transport.fast.turns == {"in": 1, "kv": 0}, "nothing has run"
    assert graph.replay()
    assert transport.fast.turns == {"in": 0, "kv": 0}
    assert not graph.replay()
    transport.fast.turns["in"] = 1
    transport.fast.turns["kv"] = 1  # used twice, it must be where it was all the same
    assert not graph.replay()


def test_a_graph_on_windows_that_have_moved_is_not_replayed(transport: Transport) -> None:
    graph = recorder_of(transport).record(lambda: transport.use("in"))
    transport.now = 2
    assert not graph.replay()
    assert transport.fast.turns == {"in": 1}


def test_what_cannot_be_recorded_leaves_nothing_behind(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        transport.use("in")
        monkeypatch.setattr(Graph, "failed", True)
        raise RuntimeError("not while a graph is captured")

    with pytest.raises(NotRecordedError, match="not while a graph is captured"):
        recorder_of(transport).record(work)
    assert (transport.abandoned, transport.fast.turns) == (["in"], {"in": 1})


def test_graphs_of_a_transport_share_one_pool_also_after_the_last_of_them_has_gone(transport: Transport) -> None:
    graphs = [recorder_of(transport).record(lambda: None) for _ in range(3)]
    graphs.clear()
    assert recorder_of(transport).record(lambda: None).replay()
    assert Graph.pools.handles == 1
