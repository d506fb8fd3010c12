"""The weight files of one part of a pipeline: safetensors only, complete, and as long as their headers say."""

import json
import struct
from pathlib import Path
from typing import Any

from chitu_diffusion.parallel.cp.errors import ConfigError

INDEX = ".safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LENGTH = struct.Struct("<Q")  # of the header, in front of it
_HEADER_LIMIT = 100_000_000  # of the format


def check_weights(folder: Path) -> None:
    """Raise ConfigError where the files in ``folder`` cannot be loaded. Reads headers, not weights."""
    files = sorted(folder.glob("*.safetensors"))
    missing = sorted(set(_listed(folder)) - {file.name for file in files})
    if missing:
        raise ConfigError(f"{folder} lacks {missing[0]}, which its index names; copy the whole model again")
    if not files:
        pickles = [file.name for file in sorted(folder.iterdir()) if file.suffix in PICKLES]
        found = f"has {pickles[0]}, a pickle, which may run code" if pickles else "has no weights"
        raise ConfigError(f"{folder} {found}; weights are read from .safetensors files only")
    for file in files:
        problem = _problem(file)
        if problem is not None:
            raise ConfigError(f"{file} {problem}; copy it again")


def _listed(folder: Path) -> list[str]:
    """The files that an index names, of a model in several files."""
    names: list[str] = []
    for index in folder.glob("*" + INDEX):
        names += read_json(index).get("weight_map", {}).values()
    return names


def _problem(file: Path) -> str | None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else _HEADER_LIMIT
        if length >= min(_HEADER_LIMIT, size):
            return "is no safetensors file, or was cut off"
        try:
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return "has a damaged header"
    needed = _LENGTH.size + length + max(ends, default=0)
    return None if size == needed else f"has {size} bytes where its header says {needed}"


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError where it is none."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return data
