"""Reading and writing the benchmark's JSON, whose schema is result.py."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from chitu_diffusion.parallel.cp.errors import ConfigError
from tools.benchmarks.fast_cp_frameworks.result import Report, ReportSet

AnyReport = Annotated[Report | ReportSet, Field(discriminator="schema_")]
_READER: TypeAdapter[Report | ReportSet] = TypeAdapter(AnyReport)


def read(path: Path) -> Report | ReportSet:
    """A file of this benchmark. Raises ConfigError where it is not one."""
    try:
        return _READER.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{path} is not a result of this benchmark ({first})") from error


def check_output(path: Path) -> None:
    """Raises ConfigError, before anything runs, where the result could not be written."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; give the name of a JSON file")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path} lies in a folder that does not exist; create {path.parent} first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--output {path} lies in a folder that you may not write to; choose another")


def write(path: Path, report: Report | ReportSet) -> None:
    """Replace ``path`` in one step, so that a reader never sees half a file."""
    text = report.model_dump_json(indent=1, by_alias=True) + "\n"
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.chmod(0o644)  # mkstemp's 0600 would keep others from reading a result
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
