"""Short regions are measured as graphs, long ones and those without a recorder as they are."""

from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp import rounds
from chitu_diffusion.parallel.cp.fast.adapters.region_tuning import LONGEST_RECORDED_MS, RegionTuner
from tests.support.fake_recorder import FakeRecorder


class Alone:
    """The control channel of one rank."""

    def gather(self, value: Any, limit_s: float = 0.0) -> list[Any]:
        return [value]


def measured(monkeypatch: pytest.MonkeyPatch, ms: float, recorder: FakeRecorder | None) -> tuple[set[str], list[str]]:
    """Which trials were told a time, and what the recorder did."""
    for name, count in {"FEWEST_FIRST": 1, "MOST_FIRST": 1, "FEWEST_ROUNDS": 2, "MOST_ROUNDS": 2}.items():
        monkeypatch.setattr(rounds, name, count)
    control: Any = Alone()
    tuner = RegionTuner(control, torch.device("cpu"), lambda: None, recorder)
    monkeypatch.setattr(tuner, "_timed", lambda run: (run(), ms)[1])
    told = tuner.measure({name: lambda: (torch.ones(2), None) for name in "ab"}, {})
    return {name for name, time in told[0].items() if time == ms}, recorder.log if recorder else []


def test_short_regions_are_timed_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    names, log = measured(monkeypatch, LONGEST_RECORDED_MS / 2, FakeRecorder(turns=2))
    assert names == {"a", "b"}
    assert 2 <= log.count("record") <= 2 * 2  # each of the two comes in one turn, or in both
    assert log.count("replay") == 2 * (2 + 1 + 3)  # warming up, one round to count by, three rounds


def test_long_regions_are_timed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, LONGEST_RECORDED_MS + 1, FakeRecorder()) == ({"a", "b"}, [])


def test_without_a_recorder_regions_are_timed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, 1.0, None) == ({"a", "b"}, [])


def test_a_region_that_cannot_be_recorded_is_timed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, 1.0, FakeRecorder(fails=True)) == ({"a", "b"}, [])


@pytest.mark.parametrize("text", [None, 1.0, 1.05], ids=str)
def test_the_output_for_the_text_is_compared_too(monkeypatch: pytest.MonkeyPatch, text: float | None) -> None:
    control: Any = Alone()
    tuner = RegionTuner(control, torch.device("cpu"), lambda: None)
    monkeypatch.setattr(tuner, "_timed", lambda run: (run(), 1.0)[1])
    ones = torch.ones(2)
    told = tuner.measure(
        {
            "a": lambda: (ones, None if text is None else ones),
            "b": lambda: (ones, None if text is None else text * ones),
        },
        {},
    )[0]
    wrong = "its output for the text differs from the first candidate's by 5.0e-02, relative"
    assert told == {"a": 1.0, "b": wrong if text == 1.05 else 1.0}
