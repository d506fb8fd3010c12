"""The build summary: one value, shown as lines or as JSON."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from tools.install.errors import ExitCode, InstallError

SCHEMA = "chitu.build/1"


@dataclass(frozen=True)
class Summary:
    """What was built, from what, with what, and what was checked; sizes in bytes, times in seconds."""

    wheel: str
    wheel_bytes: int
    version: str
    sources: str
    upstream: str | None
    architectures: tuple[int, ...]
    architectures_reason: str
    images: tuple[str, ...]
    flags: tuple[str, ...]
    cxx: str
    nvcc: str
    torch_range: str
    torch_tried: str
    nvshmem_built_against: str
    python: str
    build_folder: str
    checks: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    def lines(self) -> list[str]:
        """For a terminal."""
        rows = {
            "wheel": f"{self.wheel} ({self.wheel_bytes / 1e6:.2f} MB)",
            "sources": self.sources + (f", beside upstream {self.upstream}" if self.upstream else ""),
            "architectures": f"{', '.join(map(str, self.architectures))} ({self.architectures_reason}); "
            f"images {', '.join(self.images)}",
            "flags": " ".join(self.flags),
            "g++": self.cxx,
            "nvcc": self.nvcc,
            "torch": f"{self.torch_range}; imported in {self.torch_tried}",
            "NVSHMEM": f"built against {self.nvshmem_built_against}",
            "checked": ", ".join(self.checks),
            "build folder": self.build_folder,
            "time": f"{self.seconds:.1f} s",
        }
        width = max(map(len, rows))
        return [f"{name:<{width}}  {text}" for name, text in rows.items()] + [f"note: {note}" for note in self.notes]


def write_json(path: Path, summary: Summary) -> None:
    """The summary as JSON, with ``status`` complete."""
    _write(path, {"schema": SCHEMA, "status": "complete", "exit_code": 0, **dataclasses.asdict(summary)})


def write_failure(path: Path, error: InstallError) -> None:
    """How the build ended, where it made no wheel."""
    status = "incomplete" if error.exit_code is ExitCode.INCOMPLETE else "failed"
    _write(path, {"schema": SCHEMA, "status": status, "exit_code": int(error.exit_code), "message": str(error)})


def build_info(architectures: tuple[int, ...], images: tuple[str, ...], nvcc: str, nvshmem: str) -> bytes:
    """What a wheel says about its own build; nothing in it depends on the machine, so that wheels are reproducible."""
    content = {"architectures": architectures, "images": images, "nvcc": nvcc, "nvshmem_built_against": nvshmem}
    return (json.dumps(content, indent=2) + "\n").encode()


def _write(path: Path, content: dict[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise InstallError(f"--json {path} cannot be written: {error}", ExitCode.USAGE) from error
