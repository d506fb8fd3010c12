"""`chitu generate` on several ranks: the picture of one process, whatever the ranks, the method and the split."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from chitu_diffusion.parallel.groups import Lane
from chitu_diffusion.parallel.selection import VARIABLE_OF
from tests.support.pool import SIZE, RankError, Worker, pool

LIMIT = 2e-6  # of numbers between 0 and 1
CPU = torch.device("cpu")
IMAGE: dict[str, Any] = {"height": 112, "width": 80, "steps": 2}  # 7 × 5 tokens: no world size divides them
VIDEO: dict[str, Any] = {"height": 48, "width": 80, "frames": 5, "steps": 3}  # 2 × 3 × 5 tokens
# the prompts of a guided step differ in length; guidance multiplies rounding (whose, tells test_generate_rounding)
GUIDED: dict[str, Any] = {"guidance": 2.0, "prompt": 3 * "a red fox in the snow ", "negative_prompt": "blur"}
CASES: dict[str, dict[str, Any]] = {
    "wan": {"model": "wan", **VIDEO, **GUIDED},
    "wan-2.2": {"model": "wan", **VIDEO, **GUIDED},
    "qwen-image": {"model": "qwen-image", **IMAGE, **GUIDED},
    "zimage": {"model": "zimage", **IMAGE, **GUIDED},
    "zimage, not guided": {"model": "zimage", **IMAGE, "guidance": 0.0, "prompt": "a fox"},
}


def save_models(worker: Worker, root: Path) -> None:
    """A folder for each model."""
    from tests.support import tiny_pipelines

    makers = {
        "wan": tiny_pipelines.wan,
        "wan-2.2": tiny_pipelines.wan22,
        "qwen-image": tiny_pipelines.qwen_image,
        "zimage": tiny_pipelines.z_image,
    }
    for name, make in makers.items():
        make().save_pretrained(root / name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("models")
    pool().run(1, save_models, found)
    return found


@dataclass
class Shape:
    """How many ranks, how many of them share a sequence, and what they are asked for."""

    cfg: int
    cp: int
    method: str = "agkv"
    environ: dict[str, str] | None = None
    typed: dict[str, Any] | None = None


# in each worker: groups and folders are made once, as in a job
_made: dict[tuple[int, int], tuple[Any, Any]] = {}
_loaded: dict[Path, Any] = {}


def groups_of(shape: Shape) -> tuple[Any, Any]:
    """A rank's place in the lane, None for a rank outside, and the group of all ranks of the lane. Collective."""
    from chitu_diffusion.parallel.groups import LaneGroups, create_groups

    key = (shape.cfg, shape.cp)
    if key not in _made:
        lane = Lane(0, *key)
        everyone = dist.new_group(list(lane.ranks))
        place = create_groups([lane]).get(lane)
        _made[key] = place if lane.size > 1 or place is None else LaneGroups(lane, 0, 0, None, None), everyone
    return _made[key]


def asked_for(root: Path, out: Path, name: str, shape: Shape) -> Any:
    """What a user types for a case."""
    from chitu_diffusion.commands.generate.options import Asked

    case = {**CASES[name], **(shape.typed or {})}
    suffix = ".mp4" if case["model"] == "wan" else ".png"
    nothing = dict.fromkeys(("negative_prompt", "height", "width", "frames", "fps", "steps", "guidance", "dtype"))
    parallel = {"method": shape.method, "cp_size": shape.cp, "cfg_parallel": shape.cfg == 2}
    rest = {"seed": 0, "num_images": 1, "output": out / f"x{suffix}", "report": out / "x.json", "parallel": parallel}
    return Asked(model_path=root / name.split(",")[0], **{**nothing, **rest, **case})


def generated(worker: Worker, root: Path, out: Path, name: str, shape: Shape) -> list[Any] | None:
    """The pixels that each file was made of, on rank 0; runs the job of `chitu generate` behind its joining."""
    from chitu_diffusion.commands.generate import job as jobs
    from chitu_diffusion.commands.generate.options import check
    from chitu_diffusion.commands.generate.ranks import Ranks
    from chitu_diffusion.models.pipeline import load

    place, everyone = groups_of(shape)
    if place is None:
        return None
    job = check(asked_for(root, out, name, shape), shape.environ or {}, shape.cfg * shape.cp)
    ranks = Ranks(CPU, everyone)
    seen: list[Any] = []

    def loaded(folder: Any, *given: Any) -> Any:
        if folder.path not in _loaded:
            _loaded[folder.path] = load(folder, *given)
        return _loaded[folder.path]

    def encoded(result: Any, *given: Any) -> bytes:
        seen.append(result.pixels)
        return encode(result, *given)

    encode = jobs.encode
    with patch.object(jobs, "load", loaded), patch.object(jobs, "encode", encoded):
        jobs.work(job, ranks, place, jobs.agree_on_backend(job.parallel, ranks))
    return seen


_alone: dict[str, Any] = {}


def alone(name: str, root: Path, out: Path) -> Any:
    """What one process makes."""
    if name not in _alone:
        _alone[name] = pool().run(SIZE, generated, root, out, name, Shape(1, 1))[0][0]
    return _alone[name]


SHAPES = [
    Shape(1, 2, "ulysses"),
    Shape(1, 3),
    Shape(1, 4, "ulysses"),
    Shape(2, 1),
    Shape(2, 2),
    Shape(1, 7),
    Shape(2, 3, "ulysses"),
    Shape(2, 4),
]


RUNS = [(name, shape) for name in CASES for shape in SHAPES if shape.cfg == 1 or "not guided" not in name]


@pytest.mark.parametrize(("name", "shape"), RUNS, ids=[f"{name}-{shape.cfg}x{shape.cp}" for name, shape in RUNS])
def test_ranks_together_make_the_picture_of_one_process(name: str, shape: Shape, root: Path, tmp_path: Path) -> None:
    wanted = alone(name, root, tmp_path)
    (got,) = pool().run(SIZE, generated, root, tmp_path, name, shape)[0]
    assert got.shape == wanted.shape
    assert abs(got - wanted).max() <= LIMIT
    report = json.loads((tmp_path / "x.json").read_text())
    assert (report["parallel"]["cfg"], report["parallel"]["cp"]) == (shape.cfg, shape.cp)
    assert report["parallel"]["backend"]["used"] == ("gloo" if shape.cp > 1 else "none")
    assert {plan["method"] for plan in report["parallel"]["plans"]} == ({shape.method} if shape.cp > 1 else set())


def test_pictures_depend_on_seed_and_guidance(root: Path, tmp_path: Path) -> None:
    """A comparison that could not fail would show nothing."""
    for name, typed in (("zimage", {"seed": 1}), ("wan", {"guidance": 0.0}), ("qwen-image", {"negative_prompt": "x"})):
        (other,) = pool().run(SIZE, generated, root, tmp_path, name, Shape(1, 1, typed=typed))[0]
        assert abs(other - alone(name, root, tmp_path)).max() > 1000 * LIMIT


def test_each_of_several_pictures_is_that_of_its_seed(root: Path, tmp_path: Path) -> None:
    both = pool().run(SIZE, generated, root, tmp_path, "zimage", Shape(2, 1, typed={"num_images": 2}))[0]
    (second,) = pool().run(SIZE, generated, root, tmp_path, "zimage", Shape(1, 1, typed={"seed": 1}))[0]
    assert abs(both[0] - alone("zimage", root, tmp_path)).max() <= LIMIT
    assert abs(both[1] - second).max() <= LIMIT
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x-1.png", "x-2.png", "x.json", "x.png"]


def cancelled(worker: Worker, root: Path, out: Path, name: str, shape: Shape) -> tuple[list[int], Any] | None:
    """The steps of a request that is ended after the first, twice; then, after one that has failed, the picture."""
    from chitu_diffusion.commands.generate.options import check
    from chitu_diffusion.models.request import CancelledError
    from chitu_diffusion.models.sharing import share
    from chitu_diffusion.parallel.selection import choose_backend

    place, _ = groups_of(shape)
    if place is None:
        return None
    job = check(asked_for(root, out, name, shape), {}, shape.cfg * shape.cp)
    steps: list[int] = []
    ends = ExitStack()

    def break_off(*_: Any) -> None:
        raise ValueError("broken off between two predictions")

    with share(pipeline := _loaded[job.folder.path], place, shape.method, choose_backend(job.parallel.backend, [])):
        for _ in range(2):
            with pytest.raises(CancelledError, match="ended after 1 of"):
                pipeline.generate(job.requests[0], lambda done: bool(steps.append(done)))
        for model in pipeline.transformers:
            ends.callback(model.register_forward_hook(break_off).remove)
        with ends, pytest.raises(ValueError, match="between two predictions"):
            pipeline.generate(job.requests[0])
        picture = pipeline.generate(job.requests[0]).pixels
    assert pipeline.before_request == []
    assert "forward" not in vars(pipeline.inner.transformer), "guidance is still split"
    return steps, picture


@pytest.mark.parametrize("name", ["wan", "zimage"])
def test_a_request_ends_at_the_next_step_and_leaves_nothing_behind(name: str, root: Path, tmp_path: Path) -> None:
    shape = Shape(2, 2)
    wanted = alone(name, root, tmp_path)
    pool().run(SIZE, generated, root, tmp_path, name, shape)
    for steps, picture in pool().run(SIZE, cancelled, root, tmp_path, name, shape)[:4]:
        assert steps == [1, 1]
        assert abs(picture - wanted).max() <= LIMIT


def test_fast_by_name_where_it_cannot_run_is_an_error_on_every_rank_before_weights_load(
    root: Path, tmp_path: Path
) -> None:
    shape = Shape(1, 2, environ={VARIABLE_OF["agkv"]: "fast"})
    results = pool().results(SIZE, generated, root, tmp_path, "zimage", shape)[:2]
    assert all(isinstance(result, RankError) and result.kind == "UnavailableError" for result in results), results
    messages = {result.message for result in results}
    assert len(messages) == 1
    assert messages.pop().startswith("CHITU_AGKV_TRANSPORT asks for backend fast, but on rank 0 ")
    assert list(tmp_path.iterdir()) == []


def test_auto_falls_back_and_says_why(root: Path, tmp_path: Path) -> None:
    shape = Shape(1, 2, environ={VARIABLE_OF["agkv"]: "auto"})
    (got,) = pool().run(SIZE, generated, root, tmp_path, "zimage", shape)[0]
    assert abs(got - alone("zimage", root, tmp_path)).max() <= LIMIT
    found = json.loads((tmp_path / "x.json").read_text())["parallel"]["backend"]
    assert (found["requested"], found["used"]) == ("auto", "gloo")
    assert found["reason"].startswith("CHITU_AGKV_TRANSPORT is auto, and on rank 0 ")
    assert "fast" in [entry["name"] for entry in found["rejected"]]
