"""A recorder of work without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, field

from chitu_diffusion.parallel.cp.recorder import NotRecordedError


@dataclass
class Recorded:
    recorder: "FakeRecorder"
    work: Callable[[], object]
    version: int
    turn: int

    def replay(self) -> bool:
        if (self.version, self.turn) != (self.recorder.now, self.recorder.turn):
            return False
        self.recorder.log.append("replay")
        self.recorder.turn = (self.turn + 1) % self.recorder.turns
        self.work()
        return True


@dataclass
class FakeRecorder:
    """Replays by doing the work again, on the memory that it was recorded with. ``turns`` are those of one window."""

    log: list[str] = field(default_factory=list)
    now: int = 1
    turn: int = 0
    turns: int = 1
    blocks_ms: tuple[float, ...] = (1.0,)  # of the devices, block after block, over and over
    launch_ms: float = 1.0  # of the host, for a block
    clock: float = 0.0
    stamps: int = 0
    fails: bool = False
    in_use: str | None = None

    def busy(self) -> str | None:
        return self.in_use

    def version(self) -> int:
        return self.now

    def record(self, work: Callable[[], object]) -> Recorded:
        if self.fails:
            raise NotRecordedError("a copy from the host")
        self.log.append("record")
        return Recorded(self, work, self.now, self.turn)

    def stamp(self) -> int:
        self.stamps += 1
        return self.stamps

    def elapsed_ms(self, begin: int, end: int) -> float:
        return sum(self.blocks_ms[(block - 1) % len(self.blocks_ms)] for block in range(begin, end))

    def took(self) -> list[str]:
        taken, self.log = self.log, []
        return taken

    def host_ms(self) -> float:
        self.clock += self.launch_ms
        return self.clock
