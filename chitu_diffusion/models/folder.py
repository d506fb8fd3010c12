"""A model's folder, checked before anything heavy is imported: the right pipeline, complete, no code, no pickles."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chitu_diffusion.models.registry import MODELS
from chitu_diffusion.models.spec import Grid, ModelSpec
from chitu_diffusion.models.weights import check_weights, read_json
from chitu_diffusion.parallel.cp.errors import ConfigError

INDEX = "model_index.json"
PARTS = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
LIBRARIES = ("diffusers", "transformers")
WITHOUT_WEIGHTS = ("scheduler", "tokenizer")


@dataclass(frozen=True)
class ModelFolder:
    """A folder that can be loaded as ``spec``. ``classes`` has the library and class of each part with weights."""

    path: Path
    spec: ModelSpec
    grid: Grid
    classes: Mapping[str, tuple[str, str]]


def read_folder(path: Path, spec: ModelSpec) -> ModelFolder:
    """Check ``path`` without loading it. Raises ConfigError with the first thing that is wrong."""
    index = _index(path)
    _check_class(path, index, spec)
    parts = {name: made for name, made in index.items() if isinstance(made, list) and made and made[0] is not None}
    for name in PARTS:
        if name not in parts:
            raise ConfigError(f"{path / INDEX} names no {name}, which {spec.pipeline_class} needs")
    configs = {name: _part(path / name, name, parts[name], spec) for name in parts}
    classes = {name: (made[0], made[1]) for name, made in parts.items() if name not in WITHOUT_WEIGHTS}
    return ModelFolder(path, spec, spec.grid(configs), classes)


def _index(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"the model folder {path} {what}; give a local folder with a {INDEX}")
    if not (path / INDEX).is_file():
        raise ConfigError(f"{path} has no {INDEX}; give the folder of a whole diffusers pipeline")
    return read_json(path / INDEX)


def _check_class(path: Path, index: dict[str, Any], spec: ModelSpec) -> None:
    found = index.get("_class_name")
    if found == spec.pipeline_class:
        return
    fits = [other.name for other in MODELS.values() if other.pipeline_class == found]
    advice = f"choose model {fits[0]}" if fits else f"there are {', '.join(m.pipeline_class for m in MODELS.values())}"
    raise ConfigError(f"{path} holds a {found}, and model {spec.name} is a {spec.pipeline_class}; {advice}")


def _part(folder: Path, name: str, made: list[Any], spec: ModelSpec) -> dict[str, Any]:
    """The configuration of one part, empty where it has none."""
    library, class_name = made[0], made[1]
    if library not in LIBRARIES:
        raise ConfigError(f"{folder.parent} has a {name} of library {library!r}; only {' and '.join(LIBRARIES)} run")
    if name.startswith("transformer") and class_name != spec.transformer_class:
        raise ConfigError(f"{folder.parent} has a {class_name} as {name}; {spec.name} runs {spec.transformer_class}")
    if not folder.is_dir():
        raise ConfigError(f"{folder.parent} lacks the folder {name}, which its {INDEX} names; copy the whole model")
    code = sorted(folder.glob("*.py"))
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if code or "auto_map" in config:
        where = code[0].name if code else "config.json (auto_map)"
        raise ConfigError(f"{folder} brings code of its own in {where}, which does not run here")
    if name not in WITHOUT_WEIGHTS:
        check_weights(folder)
    return config
