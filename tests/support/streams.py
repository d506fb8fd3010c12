"""CUDA streams that only write down what is launched on them, and who waits for whom."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


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

    def launch(self, what: str) -> None:
        self.log.append(f"{what} on {self.current.name}")

    @contextmanager
    def switch(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
