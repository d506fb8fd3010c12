"""How attention and its transfers interleave: a schedule in plain values, as the plan carries it and users type it.

The heads of a rank are cut into groups that are sent, announced and attended to one after the other. *Locally first*
means that attention begins with the keys this rank holds anyway, for all heads at once, and goes on with the others'
keys group by group, merged by their log-sum-exp. *Fused* means one kernel over all heads and keys that waits by itself:
each of its tiles takes the keys that this rank holds first, and waits for its own group of heads before the others'.

    one_shot             everything arrives, then one kernel
    head_pipeline(5)     five equal groups; exact, no merge
    head_pipeline(1:4)   two groups that share the heads 1 to 4
    local_first          own keys, then the others' in one group
    local_first(2)       own keys, then the others' in two equal groups: one is merged while the next is attended to
    local_first(1:3)     the same with two groups that share the heads 1 to 3
    fused                one kernel, everything in one group
    fused(8)             one kernel, eight equal groups
"""

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.layout import Span

MOST_GROUPS, LARGEST_WEIGHT = 32, 10_000  # the extension announces up to 32 groups one by one
EXAMPLES = "one_shot, head_pipeline(4), head_pipeline(1:4), local_first, local_first(2), local_first(1:3) or fused(8)"


@dataclass(frozen=True)
class Schedule:
    """``groups``: weights of the head groups, in the order of sending; ``local_first``: own keys before the others';
    ``fused``: one kernel that waits by itself, for groups of equal weight.
    """

    groups: tuple[int, ...] = (1,)
    local_first: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.groups) <= MOST_GROUPS or min(self.groups) < 1 or max(self.groups) > LARGEST_WEIGHT:
            raise ConfigError(
                f"a schedule has 1 to {MOST_GROUPS} head groups of weights from 1 to {LARGEST_WEIGHT}, "
                f"not {len(self.groups)} groups of weights {str(self.groups)[:80]}"
            )
        if len(set(self.groups)) == 1:  # equal weights are all the same schedule
            object.__setattr__(self, "groups", (1,) * len(self.groups))
        elif self.fused:
            raise ConfigError(f"a fused schedule has groups of equal weight, not {':'.join(map(str, self.groups))}")
        if self.fused and self.local_first:
            raise ConfigError("a schedule is fused or local_first, not both: a fused one begins with own keys anyway")

    @property
    def exact(self) -> bool:
        """Whether every output is bit by bit what one_shot gives: one kernel over all keys, in the same order."""
        return not self.local_first and not self.fused

    @property
    def kind(self) -> str:
        """What it is called, without its groups."""
        alone = "one_shot" if len(self.groups) == 1 else "head_pipeline"
        return "local_first" if self.local_first else "fused" if self.fused else alone

    def __str__(self) -> str:
        if len(self.groups) == 1:
            return self.kind
        groups = str(len(self.groups)) if set(self.groups) == {1} else ":".join(map(str, self.groups))
        return f"{self.kind}({groups})"


ONE_SHOT = Schedule()
LOCAL_FIRST = Schedule((1,), local_first=True)
FUSED = Schedule((1,), fused=True)
ALONE = {str(schedule): schedule for schedule in (ONE_SHOT, LOCAL_FIRST, FUSED)}  # of one group


def parse(text: str) -> Schedule:
    """The inverse of ``str``. Raises ConfigError for anything else."""
    if text in ALONE:
        return ALONE[text]
    match = re.fullmatch(r"(head_pipeline|local_first|fused)\((\d{1,6}(?::\d{1,6})*)\)", text)
    if match is None:
        raise ConfigError(f"schedule {text!r} is unknown; write {EXAMPLES}")
    kind, groups = match.groups()
    weights = tuple(int(w) for w in groups.split(":")) if ":" in groups else (1,) * min(int(groups), MOST_GROUPS + 1)
    return Schedule(weights, local_first=kind == "local_first", fused=kind == "fused")


def head_groups(num_heads: int, num_kv_heads: int, weights: tuple[int, ...]) -> list[tuple[Span, Span]]:
    """The query heads and the K/V heads of every group, among a rank's own (the rule of csrc's copy_plan.hpp).

    Group c begins at K/V head h·(w_0+…+w_{c−1}) div Σw, and the query heads follow their K/V heads. A group may be
    empty where there are more groups than heads.
    """
    total, ratio = sum(weights), num_heads // num_kv_heads
    bounds = [num_kv_heads * w // total for w in accumulate(weights, initial=0)]
    return [(Span(a * ratio, b * ratio), Span(a, b)) for a, b in pairwise(bounds)]
