"""In which order methods take turns. GPUs under a power limit remember what ran before: neighbours have to change."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

TRIES = 200


class Orders:
    """Random orders, the same on every rank for one ``seed``, in which few stand behind the same one again."""

    def __init__(self, seed: str) -> None:
        self._random, self._behind = random.Random(seed), Counter[tuple[int, int]]()

    def next[T](self, items: Sequence[T]) -> list[T]:
        """All of ``items``, which keep their identity from turn to turn; the best of some tries."""
        tries = (self._random.sample(items, len(items)) for _ in range(TRIES))
        order = min(tries, key=lambda each: sum(self._behind[pair] for pair in _pairs(each)))
        self._behind.update(_pairs(order))
        return order


def _pairs(order: Sequence[object]) -> list[tuple[int, int]]:
    return [(id(one), id(other)) for one, other in pairwise(order)]
