"""What the command and its job tell each other, as files in a folder that both know: no torch, no pipes to block on."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.result import Result

JOB, RESULTS, STEP = "job.json", "results.json", "step.json"


@dataclass(frozen=True)
class Job:
    """Cases for one job, in order, and the seconds that a rank waits for another."""

    cases: tuple[Case, ...]
    timeout_s: float
    seed: int | None

    def write(self, folder: Path) -> None:
        """For ``read``."""
        told = {"cases": [asdict(case) for case in self.cases], "timeout_s": self.timeout_s, "seed": self.seed}
        _replace(folder / JOB, told)

    @classmethod
    def read(cls, folder: Path) -> "Job":
        """As written."""
        told = json.loads((folder / JOB).read_text())
        return cls(tuple(Case(**case) for case in told["cases"]), told["timeout_s"], told["seed"])


def write_results(folder: Path, results: list[tuple[int, Result]]) -> None:
    """Results so far, by the number of their case in the job."""
    _replace(folder / RESULTS, [[number, result.model_dump(mode="json")] for number, result in results])


def read_results(folder: Path) -> dict[int, Result]:
    """What a job has told, however it ended."""
    file = folder / RESULTS
    told = json.loads(file.read_text()) if file.exists() else []
    return {number: Result.model_validate(result) for number, result in told}


def write_step(folder: Path, case: int | None, count: int) -> None:
    """The case that begins its step number ``count``; None when all have ended."""
    _replace(folder / STEP, {"case": case, "count": count})


def read_step(folder: Path) -> tuple[int | None, int]:
    """The last step that began, (None, 0) before the first."""
    file = folder / STEP
    if not file.exists():
        return None, 0
    told = json.loads(file.read_text())
    return told["case"], told["count"]


def _replace(path: Path, content: Any) -> None:
    """In one step: the other side reads at any time."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    Path(name).replace(path)
