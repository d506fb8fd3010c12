"""Model folders are refused in one sentence before anything heavy is imported."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chitu_diffusion.models.folder import INDEX, PARTS, read_folder
from chitu_diffusion.models.registry import MODELS, model
from chitu_diffusion.models.spec import Grid
from chitu_diffusion.parallel.cp.errors import ConfigError

WEIGHTS = "diffusion_pytorch_model.safetensors"


def safetensors(numbers: int = 4) -> bytes:
    header = json.dumps({"x": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * numbers)


def make_folder(path: Path, name: str = "wan", **configs: dict[str, Any]) -> Path:
    """What a folder of a model looks like to all checks that do not load it."""
    spec = model(name)
    index: dict[str, Any] = {part: ["diffusers", f"Some{part}"] for part in PARTS}
    index |= {"text_encoder": ["transformers", "SomeEncoder"], "transformer": ["diffusers", spec.transformer_class]}
    index |= {"transformer_2": [None, None], "_class_name": spec.pipeline_class, "boundary_ratio": None}
    for part in PARTS:
        (path / part).mkdir(parents=True)
        (path / part / "config.json").write_text(json.dumps(configs.get(part, {})))
    for part in ("text_encoder", "transformer", "vae"):
        (path / part / WEIGHTS).write_bytes(safetensors())
    (path / INDEX).write_text(json.dumps(index))
    return path


def change_index(path: Path, **new: Any) -> None:
    index = json.loads((path / INDEX).read_text()) | new
    (path / INDEX).write_text(json.dumps({key: value for key, value in index.items() if value is not ...}))


@pytest.mark.parametrize(
    ("name", "configs", "grid"),
    [
        ("wan", {}, Grid(16, 4)),
        ("wan", {"vae": {"scale_factor_spatial": 16}, "transformer": {"patch_size": [1, 2, 2]}}, Grid(32, 4)),
        ("qwen-image", {"vae": {"temperal_downsample": [False, True, True]}}, Grid(16)),
        ("zimage", {"vae": {"block_out_channels": [8, 8, 8, 8]}}, Grid(16)),
    ],
)
def test_a_whole_folder_tells_the_sizes_that_its_model_makes(
    name: str, configs: dict[str, Any], grid: Grid, tmp_path: Path
) -> None:
    assert read_folder(make_folder(tmp_path / "m", name, **configs), MODELS[name]).grid == grid


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "m")
    (path / "vae" / WEIGHTS).rename(path / "vae" / "a.safetensors")
    (path / "vae" / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    read_folder(path, MODELS["wan"])


def pickle_instead(path: Path) -> None:
    (path / "vae" / WEIGHTS).rename(path / "vae" / "diffusion_pytorch_model.bin")


def second_file_missing(path: Path) -> None:
    weight_map = {"weight_map": {"x": WEIGHTS, "y": "b.safetensors"}}
    (path / "vae" / f"{WEIGHTS}.index.json").write_text(json.dumps(weight_map))


def truncated(by: int) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        file = path / "transformer" / WEIGHTS
        file.write_bytes(file.read_bytes()[:-by])

    return cut


def written(file: str, data: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / file).write_bytes(data.encode() if isinstance(data, str) else data)

    return write


def indexed(**new: Any) -> Callable[[Path], None]:
    return lambda path: change_index(path, **new)


def without(part: str) -> Callable[[Path], None]:
    return lambda path: shutil.rmtree(path / part)


BROKEN: list[tuple[Callable[[Path], None], list[str]]] = [
    (lambda path: shutil.rmtree(path), ["does not exist"]),
    (lambda path: (path / INDEX).unlink(), [f"has no {INDEX}"]),
    (written(INDEX, "{"), [INDEX, "cannot be read as JSON"]),
    (written(INDEX, "[]"), ["holds no JSON object"]),
    (indexed(_class_name="ZImagePipeline"), ["holds a ZImagePipeline", "choose model zimage"]),
    (indexed(_class_name="FluxPipeline"), ["holds a FluxPipeline", "there are WanPipeline"]),
    (indexed(vae=...), ["names no vae"]),
    (indexed(vae=[None, None]), ["names no vae"]),
    (indexed(vae=["pipeline_own", "Vae"]), ["library 'pipeline_own'"]),
    (indexed(transformer=["diffusers", "WanVACETransformer3DModel"]), ["runs WanTransformer3DModel"]),
    (indexed(transformer_2=["diffusers", "WanTransformer3DModel"]), ["lacks the folder transformer_2"]),
    (without("text_encoder"), ["lacks the folder text_encoder"]),
    (written("vae/vae.py", ""), ["code of its own in vae.py"]),
    (written("text_encoder/config.json", '{"auto_map": {}}'), ["code of its own in config.json"]),
    (pickle_instead, ["diffusion_pytorch_model.bin, a pickle", ".safetensors files only"]),
    (lambda path: (path / "vae" / WEIGHTS).unlink(), ["has no weights"]),
    (second_file_missing, ["lacks b.safetensors"]),
    (truncated(1), ["where its header says", "copy it again"]),
    (truncated(60), ["was cut off"]),
    (written(f"vae/{WEIGHTS}", b""), ["was cut off"]),
    (written(f"vae/{WEIGHTS}", struct.pack("<Q", 2) + b"no" + bytes(9)), ["damaged header"]),
]


@pytest.mark.parametrize(("break_it", "told"), BROKEN, ids=[told[-1] for _, told in BROKEN])
def test_a_broken_folder_is_one_sentence(break_it: Callable[[Path], None], told: list[str], tmp_path: Path) -> None:
    path = make_folder(tmp_path / "m")
    break_it(path)
    with pytest.raises(ConfigError) as error:
        read_folder(path, MODELS["wan"])
    for words in told:
        assert words in str(error.value)
