"""Text on a stream of its own: which stream waits for which, and that it comes behind the waits of the tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.adapters import aside as module
from chitu_diffusion.parallel.cp.fast.adapters import region_run
from chitu_diffusion.parallel.cp.fast.adapters.aside import Aside
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall, Stream
from chitu_diffusion.parallel.cp.fast.adapters.region_plan import RegionPlan
from chitu_diffusion.parallel.cp.fast.adapters.slots import Still
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT, Schedule
from chitu_diffusion.parallel.cp.layout import Layout
from tests.support.streams import Streams

GPU = torch.device("cuda", 0)
LAYOUT = Layout(2, 1, 8, 2, 2, text_len=3, text_in_front=True, text_queries=True)
HEAD_DIM = 8


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams.put(monkeypatch, module, "_stream")


def test_aside_follows_the_current_stream_and_is_joined(streams: Streams) -> None:
    with Aside(GPU) as aside:
        streams.launch("keys")
        aside.follow()
        with aside.running():
            streams.launch("text")
        streams.launch("tokens")
    assert streams.log == [
        "keys on main",
        "side waits for main",
        "text on side",
        "tokens on main",
        "main waits for side",
    ]


def test_what_was_joined_is_not_waited_for_again(streams: Streams) -> None:
    with Aside(GPU) as aside:
        aside.follow()
        aside.join()
    with Aside(GPU):
        pass
    assert streams.log == ["side waits for main", "main waits for side"]


def test_an_error_leaves_no_stream_behind(streams: Streams) -> None:
    aside = Aside(GPU)
    aside.follow()
    with pytest.raises(RuntimeError), aside, aside.running():  # the streams are what is tested
        raise RuntimeError("a kernel broke")
    assert streams.log[-1] == "main waits for side"


class Logged(Still):
    """Of which nothing travels, and every wait is written down."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(rank=0)
        self._log = log

    def projection_sync(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        self._log.append(f"wait for {group}")

    def projection_ticket(self, k: torch.Tensor, v: torch.Tensor, *, tag: str) -> torch.Tensor:
        self._log.append("ticket")
        return super().projection_ticket(k, v, tag=tag)


class LoggedAside(Aside):
    def __init__(self, log: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self._log = log

    def follow(self) -> None:
        self._log.append("aside follows")

    @contextmanager
    def running(self) -> Iterator[None]:
        self._log.append("aside:")
        yield
        self._log.append("current:")

    def join(self) -> None:
        self._log.append("current follows")


def order_of(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What run_overlapped asks for, in its order, with a text of three rows beside eight tokens on two ranks."""
    log: list[str] = []
    places = region_run.place_keys

    def place_keys(*args: Any) -> None:
        log.append("text keys")
        places(*args)

    def attend(plan: RegionPlan, arriving: Any, **options: Any) -> torch.Tensor:
        if plan.schedule.fused:
            arriving.ticket()
        else:
            for group in range(len(plan.schedule.groups)):
                arriving.wait(group)
        log.append(f"{arriving.q.shape[1]} ask by {plan.schedule}")
        return torch.zeros_like(arriving.q)

    monkeypatch.setattr(region_run, "Aside", lambda device: LoggedAside(log))
    monkeypatch.setattr(region_run, "place_keys", place_keys)
    monkeypatch.setattr(region_run, "attend", attend)
    layer = nn.Linear(2 * HEAD_DIM, 2 * HEAD_DIM)
    text, tokens = (
        Stream(torch.zeros(1, rows, 2 * HEAD_DIM), 2, layer, layer, layer, None, None, (layer,), None)
        for rows in (3, 4)
    )
    sends = len(schedule.groups)
    plan = RegionPlan("agkv", 1, "ce", schedule, "sdpa", sends=sends, text_aside=True)
    region_run.run_overlapped(plan, RegionCall(tokens, text, 8, None), LAYOUT, Logged(log), 0)
    return log


BEFORE = ["aside follows", "aside:", "text keys", "current:", "current follows"]


def test_the_text_asks_behind_the_waits_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert order_of(Schedule((1, 1)), monkeypatch) == [
        *BEFORE,
        "wait for 0",
        "aside follows",
        "wait for 1",
        "aside follows",
        "4 ask by head_pipeline(2)",
        "aside:",
        "3 ask by one_shot",
        "current:",
        "current follows",
    ]


def test_kernels_that_wait_share_one_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = Schedule((1, 1), fused=True)
    assert order_of(fused, monkeypatch) == [
        *BEFORE,
        "ticket",
        "aside follows",
        "4 ask by fused(2)",
        "aside:",
        "3 ask by fused(2)",
        "current:",
        "current follows",
    ]
    assert order_of(ONE_SHOT, monkeypatch)[len(BEFORE)] == "wait for 0"
