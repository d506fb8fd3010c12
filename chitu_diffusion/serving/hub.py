"""Rank 0's end of the connections: one reading thread per rank, which hands everything to the event loop.

A rank that waits between two steps is answered by the thread itself, so that no step waits for the event loop.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener

from chitu_diffusion.serving.job import Gate
from chitu_diffusion.serving.wire import Beat, Hello, Stepped, Turn, hang_up

type Wire = Connection[object, object]
Receive = Callable[[int, object], None]  # gets the rank and what it said, None when it has ended


@dataclass
class Peer:
    """The connection of one rank; ``heard`` is when it last gave a sign of life."""

    wire: Wire
    pid: int
    heard: float


class Hub:
    """The ranks that have come. ``receive`` is called in the event loop."""

    def __init__(self, listener: Listener, loop: asyncio.AbstractEventLoop, receive: Receive) -> None:
        self._listener, self._loop, self._receive = listener, loop, receive
        self.peers: dict[int, Peer] = {}
        self._gates: dict[str, Gate] = {}
        threading.Thread(target=self._accept, name="chitu-accept", daemon=True).start()

    def send(self, rank: int, message: object) -> None:
        """Tell a rank. That one has ended is heard where its words are read."""
        with suppress(OSError):
            self.peers[rank].wire.send(message)

    def open_gate(self, job: str, gate: Gate) -> None:
        """Let ``gate`` answer the ranks that run ``job``."""
        self._gates[job] = gate

    def drop_gate(self, job: str) -> None:
        """All ranks have left it."""
        self._gates.pop(job, None)

    def hang_up(self) -> None:
        """End all connections; ranks end where theirs does."""
        self._listener.close()
        for peer in self.peers.values():
            hang_up(peer.wire)

    def _accept(self) -> None:
        while True:
            try:
                wire = self._listener.accept()
            except (AuthenticationError, EOFError):
                continue  # somebody else's process
            except OSError:
                return  # hung up
            threading.Thread(target=self._read, args=(wire,), name="chitu-read", daemon=True).start()

    def _read(self, wire: Wire) -> None:
        rank: int | None = None
        try:
            hello = wire.recv()
            assert isinstance(hello, Hello), "ranks introduce themselves"
            rank = hello.rank
            self.peers[rank] = peer = Peer(wire, hello.pid, time.monotonic())
            self._tell(rank, hello)
            while True:
                message = wire.recv()
                peer.heard = time.monotonic()
                if isinstance(message, Stepped):
                    wire.send(Turn(self._gates[message.job].ask(message.steps)))
                if not isinstance(message, Beat):
                    self._tell(rank, message)
        except (OSError, EOFError):
            if rank is not None:
                self._tell(rank, None)

    def _tell(self, rank: int, message: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever could hear
            self._loop.call_soon_threadsafe(self._receive, rank, message)
