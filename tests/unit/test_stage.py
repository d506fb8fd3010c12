"""Stage files: what is read, what is refused, and the lanes that follow."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from chitu_diffusion.models.request import Request
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.groups import Lane
from chitu_diffusion.serving.lanes import PATIENCE_S, LanePlan, Waiting, choose
from chitu_diffusion.serving.setup import Setup, prepare, visible_devices
from chitu_diffusion.serving.stage import Stage, read_stage
from tests.unit.test_generate_folder import make_folder

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("stage-*.yaml"))


def written(tmp_path: Path, **keys: Any) -> Path:
    file = tmp_path / "stage.yaml"
    file.write_text(yaml.safe_dump({"model": {"name": "wan", "path": str(tmp_path / "wan")}, **keys}))
    return file


def stage(tmp_path: Path, **keys: Any) -> Stage:
    return read_stage(written(tmp_path, **keys))


def prepared(
    tmp_path: Path, name: str = "wan", environ: dict[str, str] | None = None, launched: int | None = None, **keys: Any
) -> Setup:
    if not (tmp_path / name).exists():
        make_folder(tmp_path / name, name)
    keys["model"] = {"name": name, "path": str(tmp_path / name)}
    return prepare(stage(tmp_path, **keys), environ or {}, launched)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_is_a_valid_stage(file: Path, tmp_path: Path) -> None:
    found = read_stage(file)
    data = yaml.safe_load(file.read_text())
    data["model"]["path"] = str(make_folder(tmp_path / "m", found.model.name))
    setup = prepare(Stage.model_validate(data), {}, None)
    assert setup.plan.world == found.world
    assert setup.parallel.backend.value == ("fast" if "fast" in file.name else "nccl")


def test_there_are_the_examples_that_the_docs_name() -> None:
    assert [file.name for file in EXAMPLES] == [
        "stage-qwen-image-nccl.yaml",
        "stage-wan-fast-cp.yaml",
        "stage-zimage-fast-cp.yaml",
    ]


def test_every_key_is_in_the_docs() -> None:
    docs = (ROOT / "docs" / "serve.md").read_text()

    def names(schema: dict[str, Any]) -> set[str]:
        tables = [schema, *schema["$defs"].values()]
        return {name for table in tables for name in table["properties"]}

    assert [name for name in names(Stage.model_json_schema()) if f"`{name}`" not in docs] == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"modle": 1}, "the key modle is unknown; did you mean model?"),
    ({"xyz": 1}, "the key xyz is unknown; there are model, devices"),
    ({"parallelism": {"cp": {"metod": "agkv"}}}, "the key parallelism.cp.metod is unknown; did you mean method?"),
    ({"parallelism": {"cp": {"world_size": "4"}}}, "parallelism.cp.world_size '4' cannot be: input should be a valid"),
    ({"parallelism": {"cp": 4}}, "parallelism.cp is 4; give a table with keys of world_size, method, backend"),
    ({"devices": 0}, "devices 0 cannot be: input should be greater than or equal to 1"),
    ({"devices": [0, 0]}, "devices [0, 0] names one twice"),
    ({"service": {"port": 70000}}, "service.port 70000 cannot be"),
    ({"scheduler": {"policy": "fifo"}}, "scheduler.policy 'fifo' cannot be: input should be 'static_cp', 'static_dp'"),
    ({"limits": {"queue": 0}}, "limits.queue 0 cannot be"),
    ({"model": {"name": "wan"}}, "the key model.path is missing"),
]


@pytest.mark.parametrize(("keys", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_a_wrong_file_is_one_sentence(keys: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        stage(tmp_path, **keys)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [("model: [", "is no YAML"), ("- 1", "holds no table"), (b"\xff\xfe\x00", "is no YAML"), (None, "cannot be read")],
)
def test_what_is_no_stage_file_is_one_sentence(text: str | bytes | None, told: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=told):
        read_stage(file)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"devices": 3, "parallelism": {"cp": {"world_size": 2}}}, "parallelism.cp.world_size 2 asks for 2 ranks"),
    ({"devices": 4, "parallelism": {"cp": {"world_size": 4}, "cfg": True}}, "which leaves 2"),
    ({"parallelism": {"cp": {"method": "ring"}}}, "parallelism.cp.method 'ring' is unknown"),
    ({"attention_mode": "ulysses", "parallelism": {"cp": {"method": "agkv"}}}, "attention_mode says ulysses"),
    ({"agkv_transport": "fast", "parallelism": {"cp": {"method": "ulysses"}}}, "belongs to method agkv"),
    ({"devices": 2, "launched": 4}, "devices asks for 2 ranks, but 4 were started"),
    ({"scheduler": {"policy": "static_cp", "widths": [1]}}, "scheduler.widths belongs to policy elastic"),
    ({"devices": 4, "scheduler": {"policy": "elastic", "widths": [3]}}, "has 3, which does not divide the 4 ranks"),
    ({"devices": 4, "scheduler": {"policy": "elastic"}, "parallelism": {"cfg": True}}, "belongs to a static policy"),
    (
        {"devices": 4, "scheduler": {"policy": "elastic", "widths": [1, 4]}, "parallelism": {"cp": {"world_size": 2}}},
        "parallelism.cp.world_size 2 is none of the lane widths 4, 1",
    ),
    (
        {"devices": 3, "scheduler": {"policy": "static_dp"}, "parallelism": {"cp": {"world_size": 2}}},
        "3 ranks, which lanes of 2 (cp 2 × cfg 1) do not divide",
    ),
    ({"service": {"token_env": "NO_TOKEN"}}, "service.token_env names the variable NO_TOKEN, which is empty"),
]


@pytest.mark.parametrize(("keys", "told"), CONTRADICTIONS, ids=[told for _, told in CONTRADICTIONS])
def test_what_does_not_come_out_is_one_sentence(keys: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        prepared(tmp_path, **keys)
    assert told in str(error.value)


def elastic(tmp_path: Path, **keys: Any) -> LanePlan:
    keys = {"devices": 4, "scheduler": {"policy": "elastic"}, "parallelism": {"cfg": False}, **keys}
    return prepared(tmp_path, **keys).plan


def test_a_split_of_guidance_leaves_a_lane_for_requests_without_any(tmp_path: Path) -> None:
    plan = prepared(tmp_path, devices=4).plan
    assert (plan.fitting(True), plan.fitting(False)) == ((Lane(0, 2, 2),), (Lane(0, 1, 4),))
    plan = prepared(tmp_path, "zimage", devices=4, parallelism={"cfg": True}).plan  # its default has no guidance
    assert plan.fitting(True) == (Lane(0, 2, 2),)


def test_static_dp_has_lanes_side_by_side(tmp_path: Path) -> None:
    keys = {"devices": 4, "scheduler": {"policy": "static_dp"}}
    assert prepared(tmp_path, **keys).plan.lanes == tuple(Lane(first, 1, 1) for first in range(4))
    wide = prepared(tmp_path, **keys, parallelism={"cp": {"world_size": 2}}).plan
    assert wide.lanes == (Lane(0, 1, 2), Lane(2, 1, 2))


def test_only_lanes_of_the_fast_width_are_fast(tmp_path: Path) -> None:
    plan = elastic(tmp_path, parallelism={"cp": {"world_size": 2, "backend": "fast"}})
    fast = Choice("fast", "fast", "asked for")
    used = {lane.size: plan.backend(lane, fast) for lane in plan.lanes}
    assert (used[2].used, used[4].used) == ("fast", "nccl")
    assert "4 ranks, and Fast serves 2 here" in used[4].reason


def waiting(steps: int = 10, waited_s: float = 0.0) -> Waiting:
    return Waiting(Request("a", "", 512, 512, 1, steps, 0.0, 0), False, waited_s)


def test_elastic_gives_one_request_all_ranks_and_several_a_lane_each(tmp_path: Path) -> None:
    plan, idle = elastic(tmp_path), frozenset[int]()
    assert choose(plan, [waiting()], idle) == (0, Lane(0, 1, 4))
    assert choose(plan, [waiting()] * 2, idle) == (0, Lane(0, 1, 2))
    assert choose(plan, [waiting()] * 9, idle) == (0, Lane(0, 1, 1))
    assert choose(plan, [waiting()], frozenset({0, 1})) == (0, Lane(2, 1, 2))


def test_elastic_counts_requests_of_the_same_size_only(tmp_path: Path) -> None:
    plan = elastic(tmp_path)
    assert choose(plan, [waiting(), waiting(1000), waiting(1000)], frozenset()) == (0, Lane(0, 1, 4))


def test_elastic_lets_nobody_wait_for_the_best_lane_for_long(tmp_path: Path) -> None:
    plan, busy = elastic(tmp_path), frozenset({1})  # 3 ranks are free, so that 2 is the best width for one request
    assert choose(plan, [waiting(), waiting()], frozenset({1, 2})) == (0, Lane(0, 1, 1))
    assert choose(plan, [waiting()], busy) == (0, Lane(2, 1, 2))
    late = waiting(waited_s=PATIENCE_S)
    assert choose(plan, [late, late], frozenset({1})) == (0, Lane(2, 1, 2))
    assert choose(plan, [late], frozenset(range(4))) is None


def test_devices_become_the_only_ones(tmp_path: Path) -> None:
    some = stage(tmp_path, devices=[2, 3])
    assert visible_devices(some, {}) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert visible_devices(some, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert visible_devices(stage(tmp_path, devices=2), {}) == {}
    with pytest.raises(ConfigError, match="names GPU 3, but CUDA_VISIBLE_DEVICES leaves 2"):
        visible_devices(some, {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_a_wrong_stage_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    file = written(tmp_path, devices=-1)
    code = (
        f"import sys; sys.argv = ['chitu', 'serve', '--stage-config', {str(file)!r}]\n"
        "from chitu_diffusion.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'diffusers', 'fastapi'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "[]\n")
    assert ended.stderr == f"chitu: {file}: devices -1 cannot be: input should be greater than or equal to 1\n"
