"""Finished pictures that clients fetch by an address: the newest ones, in memory, for a limited time."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

KEPT_S = 3600.0  # as long as OpenAI's own addresses are valid


class Pictures:
    """At most ``most`` files, each for ``KEPT_S``; the oldest makes room."""

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now = most, now
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # by name: when it was kept, and the file

    def keep(self, media: bytes) -> str:
        """The name of ``media``, which nobody can guess: who has it needs no token."""
        name = secrets.token_urlsafe(24)
        self._kept[name] = (self._now(), media)
        self._forget()
        return name

    def get(self, name: str) -> bytes | None:
        """The file of that name, None where there is none any more."""
        self._forget()
        found = self._kept.get(name)
        return None if found is None else found[1]

    def _forget(self) -> None:
        while self._kept:
            oldest, (kept, _) = next(iter(self._kept.items()))
            if len(self._kept) <= self._most and self._now() - kept <= KEPT_S:
                return
            del self._kept[oldest]
