"""Very many calls of the operators in one process, each with other numbers, for extension_endurance.py."""

import argparse
import gc
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import extension_cases as cases
import fast_ulysses as fu
import torch
from common import Place
from torch import Tensor

SHAPES = 48
TURNS = 12  # a common multiple of the numbers of kinds, 4 and 6
WARM_UP = 0.1  # the part of the calls after which memory must not grow


@dataclass(frozen=True)
class Memory:
    """Bytes: of the GPU in use by all, by torch's tensors, and of this process on the host."""

    gpu: int
    tensors: int
    host: int

    def growth_percent(self, since: "Memory") -> dict[str, float]:
        """Collective: of the rank where it has grown most."""
        now, then = asdict(self), asdict(since)
        return {name: round(common.largest(100 * (now[name] / max(then[name], 1) - 1)), 3) for name in now}


def memory() -> Memory:
    """Read with all ranks at rest."""
    gc.collect()
    common.together()
    free, everything = torch.cuda.mem_get_info()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = Memory(everything - free, torch.cuda.memory_allocated(), pages * 4096)
    common.together()
    return found


class Work:
    """One shape: its sources, and what must arrive of them. Every call first adds 1 to the bits of all sources."""

    def __init__(self, case: cases.Case, rank: int) -> None:
        split, want = case.split, cases.Expected(case, rank)
        self.case, self.sent = case, 0
        heads = {"q": sum(split.q_heads), "k": sum(split.kv_heads), "v": sum(split.kv_heads)}
        self.sources = {n: cases.source(case, rank, n, split.seq_lens[rank], heads[n]) for n in "qkv"}
        self.sources["o"] = want.held(want.index)
        self.wanted = {n: want.sent(n) for n in "qkv"} | {"o": want.returned(False)}
        self.kinds = [self.exchange, self.give_back, self.exchange_call, self.give_back_call]
        if case.degree == 1:
            self.kinds += [self.gather, self.projection]

    def call(self, turn: int, wrong: Tensor | None) -> None:
        """One operator, or its parts. Faults are added to ``wrong``, on the GPU, where it is given."""
        for tensor in self.sources.values():
            tensor.view(torch.int16).add_(1)
        self.sent += 1
        self.kinds[turn % len(self.kinds)](wrong)

    def compare(self, name: str, got: Tensor, wrong: Tensor | None) -> None:
        if wrong is None:
            return
        want = self.wanted[name].view(torch.int16)
        assert got.shape == want.shape, f"{name} is {tuple(got.shape)}, not {tuple(want.shape)}: {self.case}"
        added = (self.sent + 32768) % 65536 - 32768  # as 16 bits count
        wrong.add_((got.view(torch.int16) != want + added).any())

    def tokens(self, name: str, window: Tensor) -> Tensor:
        text = self.case.split.text
        front, back = (text.q_front, text.q_back) if name == "q" else (text.kv_front, text.kv_back)
        return window[:, front : window.shape[1] - back]

    def exchange(self, wrong: Tensor | None) -> None:
        case, own = self.case, self.sources
        q = own["q"] if case.with_query else None
        windows = fu.exchange_start(q, own["k"], own["v"], case.split, tag="in", transfer=case.transfer)
        for chunk in range(len(case.split.chunks)):
            fu.exchange_wait(windows, chunk, tag="in")
        for name, window in zip("qkv", windows, strict=True):
            if name != "q" or q is not None:
                self.compare(name, self.tokens(name, window), wrong)
        fu.exchange_done(windows, tag="in")

    def give_back(self, wrong: Tensor | None) -> None:
        case = self.case
        window = fu.return_start(self.sources["o"], case.split, tag="out", transfer=case.transfer)
        for chunk in range(len(case.split.chunks)):
            fu.exchange_wait([window], chunk, tag="out")
        self.compare("o", window, wrong)
        fu.exchange_done([window], tag="out")

    def exchange_call(self, wrong: Tensor | None) -> None:
        own, case = self.sources, self.case
        windows = fu.all_to_all_qkv_4d(own["q"], own["k"], own["v"], case.split, transfer=case.transfer)
        for name, window in zip("qkv", windows, strict=True):
            self.compare(name, self.tokens(name, window), wrong)

    def give_back_call(self, wrong: Tensor | None) -> None:
        self.compare("o", fu.all_to_all_out_4d(self.sources["o"], self.case.split, transfer=self.case.transfer), wrong)

    def gather(self, wrong: Tensor | None) -> None:
        own, case = self.sources, self.case
        full = fu.all_gather_kv_4d(own["k"], own["v"], case.split.seq_lens, transfer=case.transfer)
        for name, window in zip("kv", full, strict=True):
            self.compare(name, window, wrong)

    def projection(self, wrong: Tensor | None) -> None:
        own, case, heads = self.sources, self.case, self.case.split.kv_heads[0]
        groups = min(len(case.split.chunks), heads)
        k, v, k_slot, v_slot = fu.kv_projection_prepare(
            own["k"], case.batch, case.split.seq_lens, heads, case.head_dim, num_groups=groups
        )
        k_slot.copy_(own["k"])
        v_slot.copy_(own["v"])
        for group in range(groups):
            fu.kv_projection_send_ce_group(k, v, group)
        for group in range(groups):
            fu.projection_sync(k, v, group)
        self.compare("k", k, wrong)
        self.compare("v", v, wrong)


def many_calls(place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """``options.calls`` calls of random kinds and shapes, or as many as ``options.budget`` seconds allow."""
    rng = random.Random(11)
    works = [Work(cases.random_case(rng, 50_000 + i, place.world), place.rank) for i in range(SHAPES)]
    wrong = torch.zeros((), dtype=torch.int64, device=place.device)
    for work in works:
        for turn in range(len(work.kinds)):
            work.call(turn, wrong)
    first, calls, checked, late = memory(), 0, 0, False
    block, series, began = max(1, options.calls // 50), [], time.monotonic()
    while calls < options.calls and not late:
        for _ in range(min(block, options.calls - calls)):
            check = calls % options.every == 0
            rng.choice(works).call(rng.randrange(TURNS), wrong if check else None)
            calls, checked = calls + 1, checked + check
        fu.check()
        series.append(memory())
        if calls <= WARM_UP * options.calls:
            first = series[-1]
        late = common.largest(time.monotonic() - began) > options.budget
    return {
        "asked": options.calls,
        "calls": calls,
        "checked": checked,
        "microseconds_per_call": round(1e6 * (time.monotonic() - began) / max(calls, 1), 1),
        "wrong": common.summed(int(wrong.item())),
        "growth_percent": series[-1].growth_percent(first),
        "series": [asdict(point) for point in series],
    }
