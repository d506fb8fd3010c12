"""Sessions that see many shapes, and Fast CP beside NCCL and torch's symmetric memory, for extension_endurance.py."""

import gc
import os
import random
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

import attention_cases as cases
import common
import torch
import torch.distributed as dist
from common import Place
from endurance_calls import memory
from torch import Tensor

from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.fast.attention import cudnn
from chitu_diffusion.parallel.cp.fast.runtime import FastCP, init_fast_cp
from chitu_diffusion.parallel.cp.layout import split_sizes
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.tuning import Tuner
from tests.gloo.scenarios import Case

HEADS, HEAD_DIM = 8, 64
TOKENS = range(256, 6001, 4)


class TimedCalls:
    """Counts the calls that sessions make only to time them."""

    def __init__(self) -> None:
        self.count = 0
        self._timed = Tuner._timed

    def __enter__(self) -> "TimedCalls":
        def counting(*args: Any) -> float:
            self.count += 1
            return self._timed(*args)

        Tuner._timed = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Tuner._timed = self._timed  # type: ignore[method-assign]


def attend_once(session: CPSession, tokens: int) -> Tensor:
    """One call with ``tokens`` in all, on inputs that depend on nothing but their number and the rank."""
    rows = split_sizes(tokens, session.world)[session.rank]
    generator = torch.Generator("cuda").manual_seed(tokens * 64 + session.rank)
    shape = (3, 1, rows, HEADS, HEAD_DIM)
    q, k, v = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    return cp_attention(session, q, k, v, seq_len=tokens)[0].cpu()


def resolutions(place: Place, fast: FastCP, count: int, again: int) -> dict[str, Any]:
    """``count`` resolutions, the largest first so that only what is kept per shape can grow; then the first again."""
    with TemporaryDirectory() as folder, TimedCalls() as timed:
        os.environ["CHITU_CACHE_DIR"] = folder  # every shape is new
        sessions = cases.Sessions(place, fast)
        used = [sessions.get(method) for method in cases.METHODS]
        del os.environ["CHITU_CACHE_DIR"]
        chosen = [TOKENS[-1], *random.Random(5).sample(TOKENS[:-1], count - 1)]
        half, outputs, series = memory(), list[Tensor](), list[dict[str, int]]()
        for index, tokens in enumerate(chosen):
            out = attend_once(used[index % len(used)], tokens)
            if index < again:
                outputs.append(out)
            if index == count - 101:
                half = memory()
            if index % 20 == 19:
                series.append({**asdict(memory()), "reserved": torch.cuda.memory_reserved()})
        whole, timed_before = memory(), timed.count
        unlike = [
            f"resolution {index}, {tokens} tokens"
            for index, (tokens, out) in enumerate(zip(chosen, outputs, strict=False))
            if not cases.same_bits((attend_once(used[index % len(used)], tokens), None), (out, None))
        ]
        fast.check()
    return {
        "resolutions": count,
        "again": len(outputs),
        "timed_calls": timed_before,
        "timed_again": common.summed(timed.count - timed_before),
        "unlike": common.total(unlike),
        "last_100_growth_percent": whole.growth_percent(half),
        "series": series,
    }


class Neighbours:
    """NCCL and torch's symmetric memory, in use in the same process."""

    def __init__(self, place: Place) -> None:
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        assert group is not None
        self.place = place
        self.mine = symmetric.empty(1 << 20, dtype=torch.int32, device=place.device)
        self.handle = symmetric.rendezvous(self.mine, group)

    def wrong(self, value: int) -> list[str]:
        """Read the peer's memory and gather over NCCL; say what is not as it must be."""
        rank, world = self.place.rank, self.place.world
        peer = (rank + 1) % world
        self.mine.fill_(value + rank)
        self.handle.barrier()
        theirs = self.handle.get_buffer(peer, self.mine.shape, self.mine.dtype)
        seen = bool((theirs == value + peer).all())
        self.handle.barrier()
        gathered = torch.empty(world, dtype=torch.int32, device=self.place.device)
        dist.all_gather_into_tensor(gathered, torch.full_like(gathered[:1], value + rank))
        met = gathered.tolist() == [value + r for r in range(world)]
        return [name for name, good in (("torch's symmetric memory", seen), ("NCCL", met)) if not good]


def gpu_bytes() -> int:
    """In use on this GPU, without what torch only keeps for later."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return memory().gpu


def warm_up(place: Place, given: list[cases.Given], others: Neighbours | None) -> None:
    """Load what calls need besides Fast CP, so that it is not taken for something left behind."""
    sessions = cases.Sessions(place, None)
    for item in given:
        q, k, v = (x.to(place.device) for x in (item.inputs.q, item.inputs.k, item.inputs.v))
        cudnn.run(q, k, v, scale=1.0)
        if others:
            item.attend(sessions.get(item.case.method, backend="nccl"))
    if others:
        others.wrong(7)


def living_together(place: Place, times: int) -> dict[str, Any]:
    """Fast CP created, used and closed ``times`` times beside its neighbours."""
    others = None if place.one_gpu else Neighbours(place)
    given = [
        cases.give(Case(301, 8, 4, head_dim=64, dtype=torch.bfloat16, method=m, seed=9), place) for m in cases.METHODS
    ]
    warm_up(place, given, others)
    before, after = gpu_bytes(), list[int]()
    wrong: list[str] = []
    for turn in range(times):
        with init_fast_cp(device=place.device, pool_bytes=cases.POOL_BYTES, timeout_s=cases.TIMEOUT_S) as fast:
            sessions = cases.Sessions(place, fast)
            for item in given:
                excess = item.excess(
                    item.attend(sessions.get(item.case.method, transfer=cases.TRANSFERS[turn % 3])), place
                )
                wrong += [] if excess <= 1 else [f"turn {turn}, {excess:.1f} times the limit: {item.case}"]
            wrong += others.wrong(100 * turn) if others else []
            common.together()
            fast.check()
        wrong += others.wrong(100 * turn + 50) if others else []
        after.append(gpu_bytes())
    return {
        "times": times,
        "skipped": "NCCL and torch's symmetric memory need a GPU per rank" if place.one_gpu else None,
        "wrong": common.total(wrong),
        "gpu_mb_before": round(before / common.MB, 1),
        "gpu_mb_after": [round(value / common.MB, 1) for value in after],
        # ranks that share a GPU see what all of them hold
        "left_mb": round(common.largest(after[-1] - before) / common.MB / (place.world if place.one_gpu else 1), 1),
    }
