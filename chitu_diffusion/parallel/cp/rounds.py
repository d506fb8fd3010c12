"""Rounds of measuring, on all ranks together: candidates take turns, in another order in each round.

GPUs at full load are held to a power limit: what follows a slower kernel that draws less finds a higher clock, by some
per cent, and always the same candidate would profit from always the same order. After two rounds only those go on that
may still win, so that what is slow neither takes the time nor lends its neighbours the clock.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

BUDGET_S = 0.8  # of the rounds together
FIRST_SHARE = 0.3  # of it, for the rounds after which those that cannot win are left out
FEWEST_FIRST, MOST_FIRST = 2, 8
FEWEST_ROUNDS, MOST_ROUNDS = 3, 40  # of the rest; short calls differ by the hosts' moods, and only many tell them apart
MAY_WIN = 1.15  # times the fastest: more than clocks and moods make out

Times = dict[str, float]


def in_rounds(
    names: Sequence[str],
    time_one: Callable[[str], float],
    gather: Callable[[Times], Sequence[Mapping[str, float]]],
    one_round_ms: float,
) -> Times:
    """Median milliseconds of every candidate on this rank.

    Args:
        names: the candidates, the same on every rank.
        time_one: runs a candidate once, together with the other ranks, and gives milliseconds.
        gather: collective; gives what every rank has passed.
        one_round_ms: about what all of them take, once each; the same on every rank.

    """
    if not names:
        return {}
    first = _within(FIRST_SHARE * BUDGET_S * 1e3, one_round_ms, FEWEST_FIRST, MOST_FIRST)
    told = _rounds(names, time_one, range(first))
    slowest = _slowest(told, gather)
    left = [name for name in names if slowest[name] <= MAY_WIN * min(slowest.values())]
    left_ms = BUDGET_S * 1e3 - first * one_round_ms
    rest = _within(left_ms, sum(slowest[name] for name in left), FEWEST_ROUNDS, MOST_ROUNDS)
    return told | _rounds(left, time_one, range(first, first + rest))


def _within(budget_ms: float, one_round_ms: float, fewest: int, most: int) -> int:
    """How many rounds fit into a time."""
    return max(fewest, min(most, int(budget_ms / max(one_round_ms, 1e-3))))


def _slowest(mine: Times, gather: Callable[[Times], Sequence[Mapping[str, float]]]) -> Times:
    everyone = gather(mine)
    return {name: max(times[name] for times in everyone) for name in mine}


def _rounds(names: Sequence[str], time_one: Callable[[str], float], rounds: range) -> Times:
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in rounds:
        for name in random.Random(number).sample(names, len(names)):  # the same on every rank
            times[name].append(time_one(name))
    return {name: statistics.median(taken) for name, taken in times.items()}
