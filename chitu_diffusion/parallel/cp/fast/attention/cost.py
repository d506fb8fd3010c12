"""How long a call takes by a model in plain numbers, on GPUs that need not be there.

The model plays a schedule through: groups of heads arrive one after the other, a kernel runs waves of tiles over the
SMs, and waits where its keys are not there yet. tests/unit/test_cost.py holds it against the result files.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate, pairwise

from chitu_diffusion.parallel.cp.fast.attention.hardware import ELEMENT_BYTES, H200, TILE_ROWS, Hardware
from chitu_diffusion.parallel.cp.fast.attention.schedule import Schedule


@dataclass(frozen=True)
class Work:
    """One method's share of a call on the rank that has most of it; bytes are received from other ranks."""

    method: str
    ulysses_degree: int
    batch: int
    q_rows: int
    kv_rows: int
    num_heads: int
    num_kv_heads: int
    head_bytes: int
    bytes_in: int
    bytes_out: int
    least_own_rows: int  # on any rank, of the keys
    text_queries: bool

    @property
    def flops(self) -> float:
        """Floating-point operations of attention: 4 · rows · keys · D for every head."""
        return 4 * self.batch * self.num_heads * self.q_rows * self.kv_rows * self.head_bytes / ELEMENT_BYTES

    def tiles(self, q_heads: int) -> int:
        """Tiles of queries of ``q_heads`` heads."""
        return self.batch * q_heads * -(-self.q_rows // TILE_ROWS)

    def tile_flops(self, keys: int) -> float:
        """Floating-point operations of one tile against that many keys."""
        return 4 * TILE_ROWS * keys * self.head_bytes / ELEMENT_BYTES

    def out_bytes(self, q_heads: int) -> int:
        """Bytes of the output of ``q_heads`` heads on this rank."""
        return self.batch * self.q_rows * q_heads * self.head_bytes


def attention_s(work: Work, hardware: Hardware = H200) -> float:
    """Seconds of one kernel over all heads and keys, all of which are there."""
    tile_flops, rate = work.tile_flops(work.kv_rows), hardware.kernel_rate(work.flops)
    return hardware.kernel_s(work.tiles(work.num_heads), tile_flops, rate)


def transfer_s(work: Work, hardware: Hardware = H200) -> float:
    """Seconds of what travels, one exchange there and, under Ulysses, one back, while nothing else runs."""
    exchanges = (work.bytes_in > 0) + (work.bytes_out > 0)
    return exchanges * hardware.signal_s + (work.bytes_in + work.bytes_out) / hardware.link_bytes_per_s


def estimate_s(work: Work, schedule: Schedule, hardware: Hardware = H200) -> float:
    """Seconds that ``schedule`` takes."""
    total, ratio = sum(schedule.groups), work.num_heads // work.num_kv_heads
    bounds = [work.num_kv_heads * w // total for w in accumulate(schedule.groups, initial=0)]
    kv_heads = [b - a for a, b in pairwise(bounds)]
    shares = [count / work.num_kv_heads for count in kv_heads]
    sent = accumulate(share * work.bytes_in / hardware.link_bytes_per_s for share in shares)
    if schedule.fused:
        return _fused_s(work, list(accumulate(shares, initial=0.0)), list(sent), hardware)
    own = work.least_own_rows if schedule.local_first else 0
    kernels = [_Kernel(0.0, work.tiles(work.num_heads), work.tile_flops(own))] if schedule.local_first else []
    kernels += [
        _Kernel(hardware.signal_s + at, work.tiles(count * ratio), work.tile_flops(work.kv_rows - own))
        for at, count in zip(sent, kv_heads, strict=True)
    ]
    rate = hardware.kernel_rate(work.flops)
    ends = _ends_alone(kernels, hardware, rate)
    if hardware.shares_waves:
        ends = [min(pair) for pair in zip(ends, _ends_shared(kernels, hardware, rate), strict=True)]
    now = ends[-1]
    if schedule.local_first:  # the last merge; those before it run beside attention
        now += hardware.launch_s + 3 * work.out_bytes(kv_heads[-1] * ratio) / hardware.copy_bytes_per_s
    return _with_way_back(work, shares, ends[-len(shares) :], hardware) if work.bytes_out else now


def _fused_s(work: Work, bounds: Sequence[float], sent: Sequence[float], hardware: Hardware) -> float:
    """One kernel whose tiles wait each for its own group of heads, after the keys that are there; an SM takes the next
    tile when it has done with one. ``bounds``: shares of the heads before each group.
    """
    rate, tiles = hardware.kernel_rate(work.flops), work.tiles(work.num_heads)
    whole, own = (hardware.tile_s(work.tile_flops(keys), rate) for keys in (work.kv_rows, work.least_own_rows))
    free = [hardware.signal_s] * min(hardware.num_sms, tiles)  # all ranks have begun
    for tile in range(tiles):
        if free[0] + own >= hardware.signal_s + sent[-1]:
            return _end_of(free, tiles - tile, whole) + hardware.launch_s
        group = min(bisect_right(bounds, tile / tiles) - 1, len(sent) - 1)
        there = max(free[0] + own, hardware.signal_s + sent[group])
        heapreplace(free, there + whole - own)
    return max(free, default=hardware.signal_s) + hardware.launch_s


def _end_of(free: Sequence[float], tiles: int, tile_s: float) -> float:
    """When SMs have done that many tiles which wait for nothing, from when each of them is ``free``."""
    each, further = divmod(tiles, len(free))
    early = sorted(free)[:further]
    return max(max(free) + each * tile_s, early[-1] + (each + 1) * tile_s if early else 0.0)


def _with_way_back(work: Work, shares: Sequence[float], ends: Sequence[float], hardware: Hardware) -> float:
    """When the last output has come back: each group's leaves as its kernel ends."""
    returned = 0.0
    for share, end in zip(shares, ends, strict=True):
        returned = max(returned, end) + share * work.bytes_out / hardware.link_bytes_per_s
    returned = max(returned, (work.bytes_in + work.bytes_out) / hardware.link_bytes_per_s)  # all of it by one link
    return returned + hardware.signal_s + 2 * work.out_bytes(work.num_heads) / hardware.copy_bytes_per_s


@dataclass(frozen=True)
class _Kernel:
    """One kernel of a schedule; ``ready_s`` is when its keys are there."""

    ready_s: float
    tiles: int
    tile_flops: float


def _ends_alone(kernels: Sequence[_Kernel], hardware: Hardware, rate: float) -> list[float]:
    """When each kernel ends where the next one begins after it."""
    ends, now = [], 0.0
    for kernel in kernels:
        now = max(now, kernel.ready_s) + hardware.kernel_s(kernel.tiles, kernel.tile_flops, rate)
        ends.append(now)
    return ends


def _ends_shared(kernels: Sequence[_Kernel], hardware: Hardware, rate: float) -> list[float]:
    """When each kernel ends where the next one fills the SMs that its last wave leaves.

    From the moment when a kernel's keys are there, it and those behind it take their tiles in whole waves together; the
    kernel that is held up longest decides. Waves are counted in tiles of the last kernel, which is too many where the
    tiles before are shorter.
    """
    unit_s = hardware.tile_s(kernels[-1].tile_flops, rate)
    loads = [k.tiles * (hardware.tile_s(k.tile_flops, rate) / unit_s) / hardware.num_sms for k in kernels]
    return [
        max(
            kernel.ready_s + (last - first) * hardware.launch_s + _whole(sum(loads[first:last])) * unit_s
            for first, kernel in enumerate(kernels[:last])
        )
        for last in range(1, len(kernels) + 1)
    ]


def _whole(waves: float) -> int:
    return math.ceil(waves - 1e-9)  # sums of fractions of one are not exact
