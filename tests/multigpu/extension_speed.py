"""What extension_probe.py measures: transfers against a flat copy and NCCL, round trips, and the cost to a GEMM."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import fast_ulysses as fu
import torch
import torch.distributed as dist
from torch import Tensor

SIZES_MB = (1, 4, 16, 64, 256)
LARGE_MB = (64, 256)
IN_A_ROW = 8
HEAD_START = 600_000  # cycles, some 300 µs: the host launches what is measured while the GPU sleeps


def milliseconds(call: Callable[[], object], repeats: int = 10, calls: int = 1, *, host: bool = False) -> float:
    """The median over ``repeats`` of the time per call on the GPU, of the slowest rank.

    The host is ahead, so that its launches are queued before the clock starts, and the GPUs meet before that, so that
    none waits for another's later beginning; with ``host`` it is not ahead, and its time is included.
    """
    times, token = [], torch.zeros(1, 1, 1, 8, device="cuda", dtype=torch.bfloat16)
    for _ in range(repeats + 2):
        common.together()
        if not host:
            torch.cuda._sleep(HEAD_START)
            fu.all_gather_kv_4d(token, token, tag="meet")
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return common.largest(statistics.median(times[2:]))


def kv(megabytes: int, world: int) -> tuple[Tensor, Tensor, list[int]]:
    """K and V of this rank that hold ``megabytes`` together, heads as in Wan (40 × 128)."""
    rows = max(1, megabytes * common.MB // (2 * 40 * 128 * 2))
    k = torch.randn(1, rows, 40, 128, device="cuda", dtype=torch.bfloat16)
    return k, k.clone(), [rows] * world


def rate(call: Callable[[], object], payload: int, calls: int = 1) -> float:
    return payload / milliseconds(call, calls=calls) / 1e6


def rates_of(megabytes: int, rank: int, world: int) -> dict[str, Any]:
    """GB/s to all peers together: flat copies, exchanges with and without the rank's own copies, NCCL."""
    k, v, seq = kv(megabytes, world)
    sent, right = 2 * k.numel() * 2, (rank + 1) % world
    flat = torch.cat([k, v], 1)
    full = torch.empty(world * flat.numel(), device="cuda", dtype=flat.dtype)
    copy = torch.ops.fast_ulysses.fast_cp_peer_copy
    to_all = sent * (world - 1)
    row: dict[str, Any] = {"megabytes": megabytes}
    for transfer in ("ce", "sm", "tma"):
        row[f"flat_{transfer}"] = rate(lambda t=transfer: copy(flat, right, "flat", t), sent)
        row[f"gather_{transfer}"] = rate(lambda t=transfer: fu.all_gather_kv_4d(k, v, seq, transfer=t), to_all)
    row["in_place_ce"] = rate(lambda: in_place(k, seq), to_all)
    row["nccl"] = rate(lambda: dist.all_gather_into_tensor(full, flat.view(-1)), to_all)
    return row


def rates(rank: int, world: int) -> list[dict[str, Any]]:
    """One row per size."""
    return [rates_of(size, rank, world) for size in SIZES_MB]


def back_to_back(rank: int, world: int) -> list[dict[str, Any]]:
    """GB/s of ``IN_A_ROW`` calls without a pause, where what one call costs beside its copies shows."""
    rows, copy = [], torch.ops.fast_ulysses.fast_cp_peer_copy
    for size in LARGE_MB:
        k, v, seq = kv(size, world)
        sent, flat = 2 * k.numel() * 2, torch.cat([k, v], 1)
        to_all, right = sent * (world - 1), (rank + 1) % world
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "flat_ce": (partial(copy, flat, right, "flat", "ce"), sent),
            "gather_ce": (partial(fu.all_gather_kv_4d, k, v, seq, transfer="ce"), to_all),
            "in_place_ce": (partial(in_place, k, seq), to_all),
            "nccl": (partial(dist.all_gather_into_tensor, flat.new_empty(world * flat.numel()), flat.view(-1)), to_all),
        }
        rows.append({"megabytes": size} | {n: rate(call, payload, IN_A_ROW) for n, (call, payload) in calls.items()})
    return rows


def in_place(k: Tensor, seq: list[int]) -> None:
    k_full, v_full, *_ = fu.kv_projection_prepare(k, 1, seq, 40, 128)
    fu.kv_projection_send_ce_group(k_full, v_full, 0)
    fu.projection_sync(k_full, v_full, 0)


def round_trips(rank: int, world: int) -> dict[str, float]:
    """Microseconds of one flag round trip between ranks 0 and 1, by one kernel and as exchanges announce."""
    trip = torch.ops.fast_ulysses.fast_cp_round_trip

    def microseconds(by: str, count: int) -> float:
        return milliseconds(lambda: trip(1 - rank, count, by) if rank < 2 else None) * 1000 / count

    return {"kernel": microseconds("kernel", 1000), "ce": microseconds("ce", 50)}


def gemm_beside(a: Tensor, send: Callable[[], Callable[[], None]]) -> float:
    """Milliseconds of ``a`` times itself, launched after ``send``; what ``send`` returns ends the transfer."""
    out, times = torch.empty_like(a), []
    for _ in range(12):
        common.together()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START)
        finish = send()
        start.record()
        torch.mm(a, a, out=out)
        end.record()
        finish()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return common.largest(statistics.median(times[2:]))


def gemm_cost(rank: int, world: int) -> dict[str, float]:
    """Milliseconds of an 8192³ GEMM, and per cent that it takes longer while 256 MB travel to every peer.

    ``flat_ce``: beside one flat copy of the same bytes to one peer, which is what the hardware itself costs.
    """
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    k, v, seq = kv(256, world)
    split = fu.Split(tuple(seq), (40,), (40,))

    def exchange(transfer: str) -> Callable[[], None]:
        windows = fu.exchange_start(None, k, v, split, tag="gemm", transfer=transfer)
        return lambda: fu.exchange_done(windows, tag="gemm")

    def projection() -> Callable[[], None]:
        k_full, v_full, *_ = fu.kv_projection_prepare(k, 1, seq, 40, 128)
        fu.kv_projection_send_ce_group(k_full, v_full, 0)
        return lambda: fu.projection_sync(k_full, v_full, 0)

    flat, side = torch.cat([k, v], 1), torch.cuda.Stream()

    def flat_copy() -> Callable[[], None]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.ops.fast_ulysses.fast_cp_peer_copy(flat, (rank + 1) % world, "flat", "ce")
        return lambda: torch.cuda.current_stream().wait_stream(side)

    def alone() -> Callable[[], None]:
        return lambda: None

    base = gemm_beside(a, alone)
    beside = {t: gemm_beside(a, lambda t=t: exchange(t)) for t in ("ce", "sm", "tma")}
    beside["in_place_ce"] = gemm_beside(a, projection)
    beside["flat_ce"] = gemm_beside(a, flat_copy)
    base = min(base, gemm_beside(a, alone))
    return {"alone_ms": base, **{f"{name}_percent": (ms / base - 1) * 100 for name, ms in beside.items()}}


def call_times(world: int) -> dict[str, float]:
    """Microseconds of small calls: on the GPU, with the host's time, and back to back."""
    k, v, seq = kv(1, world)
    split = fu.Split(tuple(seq), (40,), (40,))

    def parts() -> None:
        windows = fu.exchange_start(None, k, v, split, tag="small")
        fu.exchange_wait(windows, 0, tag="small")
        fu.exchange_done(windows, tag="small")

    found = {}
    for name, call in (("gather", partial(fu.all_gather_kv_4d, k, v, seq)), ("parts", parts)):
        found[f"{name}_1mb_us"] = milliseconds(call) * 1000
        found[f"{name}_1mb_host_included_us"] = milliseconds(call, host=True) * 1000
        found[f"{name}_1mb_back_to_back_us"] = milliseconds(call, calls=20, host=True) * 1000
    return found
