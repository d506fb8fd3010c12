"""Plans on disk: found again, ignored with one note where they cannot be, and never half a file."""

import json
import logging
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chitu_diffusion.parallel.cp.plan_cache import PlanCache, default_folder

QUESTION = {"call": "[24 heads]", "world": 2, "asked": ["agkv", None], "versions": {"torch": "2", "triton": None}}
MEASURED = {"a/eager": 2.0, "b/graph": 1.5, "c/eager": 3}
NAMES = tuple(MEASURED)


@pytest.fixture
def kept(tmp_path: Path) -> PlanCache:
    """A cache that holds one answer; what it notes is seen by ``caplog``."""
    PlanCache(tmp_path).keep(QUESTION, "b/graph", MEASURED)
    return PlanCache(tmp_path)


def only_file(cache: PlanCache) -> Path:
    (path,) = cache.folder.iterdir()
    return path


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_kept_is_found_with_the_used_plan_first(kept: PlanCache, caplog: pytest.LogCaptureFixture) -> None:
    found = kept.find(QUESTION, NAMES)
    assert found == MEASURED
    assert next(iter(found)) == "b/graph"
    assert not notes(caplog)


def test_the_order_of_a_question_does_not_matter(kept: PlanCache) -> None:
    assert kept.find(dict(reversed(QUESTION.items())), NAMES) == MEASURED


def test_tuples_in_a_question_are_found_again(tmp_path: Path) -> None:
    question = QUESTION | {"asked": ("agkv", None)}
    PlanCache(tmp_path).keep(question, "b/graph", MEASURED)
    assert PlanCache(tmp_path).find(question, NAMES) == MEASURED


def test_another_question_has_no_answer_and_no_note(kept: PlanCache, caplog: pytest.LogCaptureFixture) -> None:
    assert kept.find(QUESTION | {"world": 4}, NAMES) is None
    assert not notes(caplog)


def test_the_newest_answer_replaces_the_others(kept: PlanCache) -> None:
    kept.keep(QUESTION, "a/eager", {"a/eager": 0.5})
    assert kept.find(QUESTION, NAMES) == {"a/eager": 0.5}
    assert only_file(kept).name.endswith(".json")


def changed(**parts: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | parts)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[: len(text) // 2], "it cannot be read"),
        (lambda text: "", "it cannot be read"),
        (lambda text: "[" * 200_000, "it cannot be read"),
        (lambda text: "\ud800", "it cannot be read"),
        (lambda text: "[]", "it has another format"),
        (changed(schema="chitu.fast_cp.plan/0"), "it has another format"),
        (changed(question=QUESTION | {"world": 8}), "it answers another question"),
        (changed(used="d/eager"), "its plan 'd/eager' is no candidate any more"),
        (changed(used=None), "its plan None is no candidate any more"),
        (changed(used=["b/graph"]), "is no candidate any more"),
        (changed(measured_ms=[1, 2]), "its times are not numbers"),
        (changed(measured_ms={"b/graph": "1.5"}), "its times are not numbers"),
        (changed(measured_ms={"a/eager": 2.0}), "it has no time for its plan 'b/graph'"),
    ],
)
def test_a_file_that_is_no_answer_is_ignored_with_one_note(
    damage: Callable[[str], str], told: str, kept: PlanCache, caplog: pytest.LogCaptureFixture
) -> None:
    path = only_file(kept)
    path.write_bytes(damage(path.read_text()).encode(errors="surrogatepass"))
    for _ in range(2):
        assert kept.find(QUESTION, dict.fromkeys(NAMES)) is None
    (note,) = notes(caplog)
    assert told in note
    assert str(path) in note


def test_a_vanished_candidate_that_was_not_used_does_no_harm(kept: PlanCache) -> None:
    assert kept.find(QUESTION, ["b/graph"]) == MEASURED


def test_a_damaged_file_is_replaced_by_the_next_answer(kept: PlanCache) -> None:
    only_file(kept).write_text("{")
    kept.keep(QUESTION, "a/eager", MEASURED)
    assert PlanCache(kept.folder).find(QUESTION, NAMES) == MEASURED


def test_a_file_that_cannot_be_opened_is_ignored_with_one_note(
    kept: PlanCache, caplog: pytest.LogCaptureFixture
) -> None:
    path = only_file(kept)
    path.unlink()
    path.mkdir()
    assert kept.find(QUESTION, NAMES) is None
    (note,) = notes(caplog)
    assert "it cannot be read" in note


def test_a_folder_that_cannot_be_made_is_one_note_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / "file" / "plans")
    for _ in range(2):
        cache.keep(QUESTION, "b/graph", MEASURED)
        assert cache.find(QUESTION, NAMES) == MEASURED  # this process knows it anyway
    (note,) = notes(caplog)
    assert PlanCache(cache.folder).find(QUESTION, NAMES) is None
    assert "plans are not kept for later processes" in note


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    PlanCache(tmp_path).keep(QUESTION, "b/graph", MEASURED)
    assert list(tmp_path.iterdir()) == []
    (note,) = notes(caplog)
    assert "no space left on device" in note


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"CHITU_CACHE_DIR": "here", "XDG_CACHE_HOME": "there"}, Path("here")),
        ({"XDG_CACHE_HOME": "there"}, Path("there/chitu/plans")),
        ({"CHITU_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, Path.home() / ".cache/chitu/plans"),
        ({}, Path.home() / ".cache/chitu/plans"),
    ],
)
def test_the_folder_is_the_users_cache_unless_it_is_named(environ: dict[str, str], folder: Path) -> None:
    assert default_folder(environ) == folder


WRITERS, SECONDS = 4, 1.0
LARGE = {f"candidate {i}": float(i) for i in range(2000)}  # many pages: a write in place would be seen half


def write_for_a_while(folder: Path, writer: int) -> int:
    """Writes answers again and again, and reads them back; how many of its reads found none."""
    cache, end, missing = PlanCache(folder), time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        cache.keep(QUESTION, "candidate 0", LARGE | {"candidate 0": float(writer)})
        missing += PlanCache(folder).find(QUESTION, LARGE) is None
    return missing


def test_a_reader_never_sees_half_a_file_while_others_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PlanCache(tmp_path).keep(QUESTION, "candidate 0", LARGE)
    with multiprocessing.get_context("spawn").Pool(WRITERS) as pool:
        writing = pool.starmap_async(write_for_a_while, [(tmp_path, writer) for writer in range(WRITERS)])
        reads = 0
        while not writing.ready():
            found = PlanCache(tmp_path).find(QUESTION, LARGE)
            assert found is not None
            assert len(found) == len(LARGE)
            reads += 1
        assert writing.get() == [0] * WRITERS
    assert reads > 10
    assert not notes(caplog)
    assert only_file(PlanCache(tmp_path)).suffix == ".json"
