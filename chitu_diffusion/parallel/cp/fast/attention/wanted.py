"""What a user forces with ``--plan``: any part of a candidate's name."""

from dataclasses import dataclass
from typing import Any

from chitu_diffusion.parallel.cp.config import METHODS, TRANSFERS
from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate
from chitu_diffusion.parallel.cp.fast.attention.schedule import Schedule, parse
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS


@dataclass(frozen=True)
class Wanted:
    """The parts of a plan that are fixed; None leaves one open."""

    method: str | None = None
    transfer: str | None = None
    schedule: Schedule | None = None
    kernel: str | None = None
    graph: bool | None = None

    def allows(self, candidate: Candidate) -> bool:
        """Whether ``candidate`` is what was asked for."""
        return all(value is None or value == getattr(candidate, name) for name, value in vars(self).items())

    def __str__(self) -> str:
        parts = [str(value) for name, value in vars(self).items() if value is not None and name != "graph"]
        return "/".join([*parts, *([] if self.graph is None else ["graph" if self.graph else "eager"])])


def parse_wanted(text: str) -> Wanted:
    """``agkv/ce/head_pipeline(5)/cute/graph``, or any part of it. Raises ConfigError for a word that means nothing."""
    found: dict[str, Any] = {}
    for word in text.split("/"):
        name, value = _meaning(word)
        if name in found:
            raise ConfigError(f"plan {text!r} names the {name} twice; name each part once")
        found[name] = value
    return Wanted(**found)


def _meaning(word: str) -> tuple[str, Any]:
    if word in ("graph", "eager"):
        return "graph", word == "graph"
    for name, known in (("method", METHODS), ("transfer", TRANSFERS), ("kernel", KERNELS)):
        if word in known and word != "auto":
            return name, word
    return "schedule", parse(word)
