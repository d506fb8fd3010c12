"""Two streams in turn: which one waits for which, on streams that only write it down."""

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.attention import lanes as module
from chitu_diffusion.parallel.cp.fast.attention.lanes import Lanes
from tests.support.streams import Streams

GPU = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams.put(monkeypatch, module, "_side_stream")


def test_the_streams_take_turns_between_a_fork_and_a_join(streams: Streams) -> None:
    with Lanes(GPU) as lanes:
        for number in range(3):
            with lanes.next():
                streams.launch(str(number))
    assert streams.log == ["side waits for main", "0 on side", "1 on main", "2 on side", "main waits for side"]


def test_what_the_current_stream_made_in_between_is_waited_for_where_it_is_needed(streams: Streams) -> None:
    with Lanes(GPU) as lanes:
        streams.launch("own part")
        for number in range(2):
            with lanes.next():
                streams.launch(f"part {number}")
                lanes.after_entry()
                streams.launch(f"merge {number}")
    assert streams.log[1:-1] == [
        "own part on main",
        "part 0 on side",
        "side waits for main",
        "merge 0 on side",
        "part 1 on main",
        "merge 1 on main",
    ]


def test_an_error_leaves_no_stream_behind(streams: Streams) -> None:
    with pytest.raises(RuntimeError), Lanes(GPU) as lanes, lanes.next():  # the streams are what is tested
        raise RuntimeError("a kernel broke")
    assert streams.log[-1] == "main waits for side"


def test_on_a_cpu_there_is_only_the_order() -> None:
    done = []
    with Lanes(torch.device("cpu")) as lanes:
        for number in range(3):
            with lanes.next():
                lanes.after_entry()
                done.append(number)
    assert done == [0, 1, 2]
