"""What holds for every test."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """Commands that tests call take signals over, or ignore them at their end, and children inherit what is ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
