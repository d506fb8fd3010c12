"""CUDA streams that only write down what is launched on them, and who waits for whom."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch


@dataclass
class Stream:
    name: str
    log: list[str]

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@dataclass
class Streams:
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.main, self.side = Stream("main", self.log), Stream("side", self.log)
        self.current = self.main

    @classmethod
    def put(cls, monkeypatch: pytest.MonkeyPatch, module: ModuleType, side: str) -> "Streams":
        """In the place of torch's; ``side`` is the function of ``module`` that gives the stream beside the current."""
        found = cls()
        monkeypatch.setattr(module, side, lambda device: found.side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
        monkeypatch.setattr(torch.cuda, "stream", found.switch)
        return found

    def launch(self, what: str) -> None:
        self.log.append(f"{what} on {self.current.name}")

    @contextmanager
    def switch(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
