"""A part whose files lack a weight is refused, with its name; weights that are only named otherwise are found."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo.test_generate import save_models
from tests.support.pool import Worker, pool

pytestmark = pytest.mark.xdist_group("gloo")
GONE = {
    "text_encoder": "layers.1.input_layernorm.weight",
    "transformer": "layers.1.attention.to_q.weight",
    "vae": "decoder.conv_in.bias",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("models")
    pool().run(1, save_models, found)
    return found


def load_changed(worker: Worker, folder: Path, name: str, part: str, gone: list[str], renamed: dict[str, str]) -> None:
    """Load a folder, the names in one of whose parts have been changed."""
    from safetensors.torch import load_file, save_file

    from chitu_diffusion.models.folder import read_folder
    from chitu_diffusion.models.pipeline import load
    from chitu_diffusion.models.registry import MODELS

    (file,) = (folder / part).glob("*.safetensors")
    weights = {key: value for key, value in load_file(file).items() if key not in gone}
    for start, other in renamed.items():
        weights = {other + key.removeprefix(start) if key.startswith(start) else key: weights[key] for key in weights}
    save_file(weights, file, metadata={"format": "pt"})
    pipeline = load(read_folder(folder, MODELS[name]), torch.bfloat16, torch.device("cpu"))
    assert not any(each.is_meta for each in getattr(pipeline.inner, part).parameters())


def outcome(root: Path, out: Path, name: str, part: str, gone: list[str], renamed: dict[str, str]) -> Any:
    folder = shutil.copytree(root / name, out / name)
    return pool().results(1, load_changed, folder, name, part, gone, renamed)[0]


@pytest.mark.parametrize("part", GONE)
def test_a_part_without_one_of_its_weights_is_one_sentence(part: str, root: Path, tmp_path: Path) -> None:
    told = outcome(root, tmp_path, "zimage", part, [GONE[part]], {})
    assert told is not None, "it was loaded"
    assert (told.kind, told.message) == (
        "CPError",
        f"the {part} in {tmp_path}/zimage lacks the weights {GONE[part]}; copy the whole model again",
    )


def test_of_many_weights_that_are_missing_the_first_are_named(root: Path, tmp_path: Path) -> None:
    gone = [f"layers.1.mlp.{name}_proj.weight" for name in ("down", "gate", "up")]
    told = outcome(root, tmp_path, "zimage", "text_encoder", [*gone, "norm.weight"], {})
    assert f"lacks the weights {', '.join(gone)} and 1 more; copy" in told.message


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("zimage", {"": "model."}),  # as a language model, of which the encoder is the trunk, writes them
        ("wan", {"shared.": "encoder.embed_tokens."}),  # one tensor under the other of its two names
    ],
)
def test_weights_by_other_names_are_not_missing(name: str, renamed: dict[str, str], root: Path, tmp_path: Path) -> None:
    assert outcome(root, tmp_path, name, "text_encoder", [], renamed) is None
