"""The files that are written: their names, and writing them whole or not at all."""

import os
import re
from pathlib import Path

from chitu_diffusion.models.spec import ModelSpec
from chitu_diffusion.parallel.cp.errors import ConfigError, CPError


def output_files(output: Path, spec: ModelSpec, count: int) -> tuple[Path, ...]:
    """``output`` itself; with a number before its suffix where there are several; numbered files in a folder.

    In a folder they follow the highest number that is there. Raises ConfigError where they could not be written.
    """
    if output.is_dir():
        check_file("--output", output / "file")
        pattern = re.compile(rf"{spec.name}-(\d+){spec.suffix}")
        taken = [int(found.group(1)) for file in output.iterdir() if (found := pattern.fullmatch(file.name))]
        start = max(taken, default=0) + 1
        return tuple(output / f"{spec.name}-{number:04d}{spec.suffix}" for number in range(start, start + count))
    if output.suffix.lower() != spec.suffix:
        raise ConfigError(f"--output {output}: {spec.name} makes {spec.suffix} files; name one, or an existing folder")
    check_file("--output", output)
    if count == 1:
        return (output,)
    return tuple(output.with_stem(f"{output.stem}-{number}") for number in range(1, count + 1))


def check_file(option: str, file: Path) -> None:
    """Raise ConfigError where ``file`` cannot be written, as far as that is known before."""
    folder = file.parent
    problems = {
        "is a folder": file.is_dir(),
        "lies in a folder that does not exist": not folder.is_dir(),
        "lies in a folder that cannot be written to": not os.access(folder, os.W_OK),
    }
    found = [told for told, is_so in problems.items() if is_so]
    if found:
        raise ConfigError(f"{option} {file} {found[0]}; name a file in a folder that can be written to")


def write_file(file: Path, data: bytes) -> None:
    """Write ``file`` whole, or leave what was there. Raises CPError where that fails."""
    try:
        if file.exists() and not file.is_file():
            file.write_bytes(data)  # a pipe or a device, such as /dev/stdout, must not be replaced
        else:
            _replace(file.resolve(), data)
    except OSError as error:
        raise CPError(f"{file} could not be written: {error.strerror or error}") from error


def _replace(file: Path, data: bytes) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
