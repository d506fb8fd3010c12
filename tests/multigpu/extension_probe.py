"""The extension on real GPUs: is it right, and how fast.

    FAST_CP_LIBRARY=build/libfast_cp.so python -m torch.distributed.run --standalone --nproc-per-node=2 \
        tests/multigpu/extension_probe.py --output probe.json

Prints a short table last; exit code 0 where everything is right, 1 where something is not. Nothing waits longer than
``--limit`` seconds. With ``--one-gpu`` all ranks share one GPU, and speed is not measured.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import extension_cases as cases
import extension_speed as speed
import fast_ulysses as fu
import torch
import torch.distributed as dist
from extension_packed import packed_all_to_all, packed_verdict

SHARED_POOLS_MB = 100_000  # of all ranks on one GPU: enough for eight, and an H200 has it beside their contexts


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__, limit=230)
    parser.add_argument("--shapes", type=int, default=500)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--pool-mb", type=int, default=None, help="default: 4096 and 2048 per rank, as far as they fit")
    parser.add_argument("--timeout-ms", type=int, default=10_000)
    parser.add_argument("--skip-speed", action="store_true")
    options = parser.parse_args()
    options.skip_speed |= options.one_gpu  # speed.rates needs NCCL, and ranks on one GPU take turns
    return options


def start(options: argparse.Namespace) -> tuple[int, int]:
    place = common.start(options)
    enough = 4096 + 2048 * place.world
    fits = SHARED_POOLS_MB // place.world if place.one_gpu else enough
    pool_bytes = (options.pool_mb or min(enough, fits)) * common.MB
    ids = [fu.unique_id(pool_bytes) if place.rank == 0 else ""]
    dist.broadcast_object_list(ids, src=0)
    fu.init(ids[0], place.rank, place.world, place.device.index, pool_bytes, options.timeout_ms)
    return place.rank, place.world


def random_shapes(rank: int, world: int, options: argparse.Namespace) -> dict[str, Any]:
    rng, wrong, exchanges = random.Random(7), [], 0
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for seed in range(options.shapes):
        case = cases.random_case(rng, seed, world, large=seed % 25 == 0)
        wrong += cases.run_in(case, rank, busy) + cases.run_out(case, rank, busy)
        exchanges += 2
        if seed % 3 == 0:
            wrong += cases.run_calls(case, rank)
            exchanges += 3 if case.degree == 1 else 2
        if case.degree == 1:
            wrong += cases.run_projection(case, rank, busy)
            exchanges += 1
        fu.check()
    return {"shapes": options.shapes, "exchanges": exchanges, "wrong": common.total(wrong)}


def removed_waits(rank: int, world: int) -> dict[str, Any]:
    """Without waits, and with a late peer, results must be wrong: else the test above would prove nothing."""
    busy, seen = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16), 0
    common.together()
    fu.remove_waits(True)
    for seed in range(6):
        split = fu.Split((512,) * world, (4,), (4,))
        case = cases.Case(10_000 + seed, 1, 128, split, cases.TRANSFERS[seed % 3], False, False, False)
        if seed % world == rank:
            torch.cuda._sleep(40_000_000)
        seen += bool(cases.run_in(case, rank, busy, tag="unwaited"))
        common.together()
    fu.remove_waits(False)
    caught = common.summed(seen)
    fu.check()
    return {"attempts": 6, "caught": caught}


class Step:
    """A one-call gather, a Ulysses exchange in two chunks and its way back, on inputs that stay where they are."""

    def __init__(self, rank: int, world: int, transfer: str) -> None:
        self.rank, self.world, self.transfer = rank, world, transfer
        self.split = fu.Split(tuple(200 + 8 * r for r in range(world)), (4,) * world, (2,) * world, (1, 1))
        self.inputs = {n: t.clone() for n, t in self.sources(0).items()}

    def case(self, seed: int) -> cases.Case:
        return cases.Case(seed, 1, 128, self.split, self.transfer, False, True, False)

    def sources(self, seed: int) -> dict[str, torch.Tensor]:
        case, rows = self.case(seed), self.split.seq_lens[self.rank]
        own = {n: cases.source(case, self.rank, n, rows, (4 if n == "q" else 2) * self.world) for n in "qkv"}
        return own | {"o": cases.Expected(case, self.rank).held(self.rank)}

    def expected(self, seed: int) -> dict[str, torch.Tensor]:
        case, want = self.case(seed), cases.Expected(self.case(seed), self.rank)
        gathered = [cases.source(case, r, "k", self.split.seq_lens[r], 2 * self.world) for r in range(self.world)]
        return {"k": torch.cat(gathered, 1), "q": want.sent("q"), "v": want.sent("v"), "o": want.returned(False)}

    def __call__(self) -> dict[str, torch.Tensor]:
        k, v = self.inputs["k"], self.inputs["v"]
        gathered = fu.all_gather_kv_4d(k, v, self.split.seq_lens, tag="graph_kv", transfer=self.transfer)
        return {"k": gathered[0].clone()} | self.exchange()

    def exchange(self, generation: int = -1) -> dict[str, torch.Tensor]:
        q, k, v, o = (self.inputs[n] for n in "qkvo")
        windows = fu.exchange_start(q, k, v, self.split, tag="graph_in", transfer=self.transfer, generation=generation)
        for chunk in range(2):
            fu.exchange_wait(windows, chunk, tag="graph_in")
        results = {"q": windows[0].clone(), "v": windows[2].clone()}
        for window in windows:
            cases.mark(window, cases.POISON)
        fu.exchange_done(windows, tag="graph_in")
        window = fu.return_start(o, self.split, tag="graph_out", transfer=self.transfer, generation=generation)
        for chunk in range(2):
            fu.exchange_wait([window], chunk, tag="graph_out")
        results["o"] = window.clone()
        cases.mark(window, cases.POISON)
        fu.exchange_done([window], tag="graph_out")
        return results


def graph_replays(rank: int, world: int, replays: int, transfer: str) -> dict[str, Any]:
    """The step captured once and replayed with new inputs, one rank late each time, eager calls in between."""
    work = Step(rank, world, transfer)
    for _ in range(3):
        work()
    common.together()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    common.together()
    wrong = []
    for replay in range(replays):
        seed = 20_000 + replay
        for name, tensor in work.sources(seed).items():
            work.inputs[name].copy_(tensor)
        if replay % world == rank:
            torch.cuda._sleep(2_000_000)
        graph.replay()
        want = work.expected(seed)
        wrong += [f"replay {replay}, {n} ({transfer})" for n, w in want.items() if cases.differs(results[n], w)]
        if replay % 10 == 0:
            work()
    fu.check()
    return {"replays": replays, "wrong": common.total(wrong)}


def mixed_replays(rank: int, world: int, replays: int) -> dict[str, Any]:
    """The first rank replays a graph of two exchanges that it owns, while the others call; then the windows move."""
    work, wrong = Step(rank, world, "ce"), []

    def both() -> list[dict[str, torch.Tensor]]:
        return [work.exchange(generation) for generation in (0, 1)]

    results, version = both(), fu.check()
    common.together()
    graph = torch.cuda.CUDAGraph()
    if rank == 0:
        with fu.managed_capture(), torch.cuda.graph(graph):
            results = both()
    common.together()
    unmoved = fu.check() == version
    for replay in range(replays):
        seed = 30_000 + replay
        for name, tensor in work.sources(seed).items():
            work.inputs[name].copy_(tensor)
        if replay % world == rank:
            torch.cuda._sleep(2_000_000)
        if rank == 0:
            graph.replay()
        else:
            results = both()
        want = work.expected(seed)
        wrong += [f"mixed replay {replay}, {n}" for found in results for n in found if cases.differs(found[n], want[n])]
    fu.check()
    k = torch.zeros(1, 4 * work.split.seq_lens[0], 2 * world, 128, device="cuda", dtype=torch.bfloat16)
    larger = fu.Split((k.shape[1],) * world, (2 * world,), (2 * world,))
    fu.exchange_done(fu.exchange_start(None, k, k, larger, tag="graph_in"), tag="graph_in")
    moved = fu.check() > version
    return {"replays": replays, "wrong": common.total(wrong), "version": unmoved and moved}


def verdict(report: dict[str, Any]) -> dict[str, bool]:
    checks = {
        "shapes": report["shapes"]["wrong"] == 0,
        "removed waits are seen": report["removed_waits"]["caught"] > 0,
        **{f"graph {t}": report[f"graph_{t}"]["wrong"] == 0 for t in cases.TRANSFERS},
        "one rank replays, the others call": report["mixed"]["wrong"] == 0,
        "the layout's version grows when windows move": report["mixed"]["version"],
    }
    if "rates" in report:
        large = [row for row in report["rates"] if row["megabytes"] >= 64]
        checks["97 % of a flat copy at 64 MB and more"] = all(r["in_place_ce"] >= 0.97 * r["flat_ce"] for r in large)
        if report["world"] == 2:  # asked of two GPUs; with more, NCCL's rates are only reported
            checks["1.4 × NCCL"] = all(r["in_place_ce"] >= 1.4 * r["nccl"] for r in large)
        checks["round trip ≤ 8 µs"] = report["round_trips"]["kernel"] <= 8
        checks["GEMM slowed ≤ 6 %"] = report["gemm"]["in_place_ce_percent"] <= 6
        checks |= packed_verdict(report["packed"], report["world"])
    return checks


def show(report: dict[str, Any]) -> None:
    if "rates" not in report:
        return
    for title, rows in (("GB/s", report["rates"]), (f"{speed.IN_A_ROW} in a row", report["back_to_back"])):
        names = [n for n in rows[0] if n != "megabytes"]
        print(f"{title:12}" + " ".join(f"{n:>12}" for n in names))
        for row in rows:
            print(f"{row['megabytes']:9d} MB" + " ".join(f"{row[n]:12.1f}" for n in names))
    for name in ("round_trips", "gemm", "calls", "packed"):
        print(name + ": " + ", ".join(f"{k} {v:.2f}" for k, v in report[name].items()))


def main() -> int:
    options = arguments()
    began = time.monotonic()
    rank, world = start(options)
    report: dict[str, Any] = {"world": world, "device": fu.device_info(torch.cuda.current_device())}
    report |= {"one_gpu": options.one_gpu, "seconds": {"start": round(time.monotonic() - began, 1)}}
    steps: dict[str, Callable[[], Any]] = {
        "shapes": lambda: random_shapes(rank, world, options),
        "removed_waits": lambda: removed_waits(rank, world),
        **{f"graph_{t}": partial(graph_replays, rank, world, options.replays, t) for t in cases.TRANSFERS},
        "mixed": lambda: mixed_replays(rank, world, options.replays),
    }
    if not options.skip_speed:
        steps |= {
            "rates": lambda: speed.rates(rank, world),
            "back_to_back": lambda: speed.back_to_back(rank, world),
            "round_trips": lambda: speed.round_trips(rank, world),
            "gemm": lambda: speed.gemm_cost(rank, world),
            "calls": lambda: speed.call_times(world),
            "packed": lambda: packed_all_to_all(rank, world),
        }
    for name, call in steps.items():
        common.step(name, report, call, options.output)
        fu.check()
    if rank == 0:
        show(report)
    fu.finalize()
    return common.finish(report, verdict(report), options.output)


if __name__ == "__main__":
    sys.exit(main())
