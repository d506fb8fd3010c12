"""What rank 0's engine and the ranks say to each other, and the local socket on which they do.

A socket and not a process group: the end of a rank shows at once as the end of its connection, one that waits for work
needs no time limit, and nothing is left in a store. Only processes that were given ``Place.key`` get in.
"""

import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener

from chitu_diffusion.models.request import Request
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.groups import Lane

BEAT_S = 1.0  # between two signs of life


@dataclass(frozen=True)
class Place:
    """Where the engine listens: a name that is no file, and the key."""

    address: str
    key: bytes

    def connect(self) -> "Connection[object, object]":
        """Go there, from the process of a rank."""
        return Client(self.address, "AF_UNIX", authkey=self.key)


def hang_up(wire: "Connection[object, object]") -> None:
    """End a connection, for whoever reads at either end; closing alone would not, while a thread reads."""
    with suppress(OSError), socket.socket(fileno=os.dup(wire.fileno())) as its_socket:
        its_socket.shutdown(socket.SHUT_RDWR)


def new_place() -> tuple[Place, Listener]:
    """Begin to listen. A leading zero byte makes Linux keep the name out of the file system."""
    place = Place(f"\0chitu-serve-{secrets.token_hex(16)}", secrets.token_bytes(32))
    return place, Listener(place.address, "AF_UNIX", backlog=64, authkey=place.key)


@dataclass(frozen=True)
class Run:
    """To every rank of a lane: make this together."""

    job: str
    lane: Lane
    request: Request
    fps: int


@dataclass(frozen=True)
class Release:
    """To every rank of the lane that ran last: give the model back, since one of you is needed in another lane."""


@dataclass(frozen=True)
class Turn:
    """To a rank that has said ``Stepped``: whether the request goes on. The same to all ranks for the same step."""

    go_on: bool


@dataclass(frozen=True)
class Leave:
    """To a rank: there will be no more."""


@dataclass(frozen=True)
class Hello:
    """A rank's first words."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""


@dataclass(frozen=True)
class Beat:
    """A sign of life."""


@dataclass(frozen=True)
class Stepped:
    """So many steps of a request are done; the rank waits for a ``Turn``."""

    job: str
    steps: int


@dataclass(frozen=True)
class Left:
    """A rank is through with a request. ``media`` is the file, from the lane's first rank.

    ``error`` says that the ranks may have parted; ``no_media`` that the result could not be encoded.
    """

    job: str
    error: str | None = None
    media: bytes | None = None
    no_media: str | None = None
    choice: Choice | None = None
    step_seconds: tuple[float, ...] = ()
