"""Random exchanges whose result every rank can compute by itself, for extension_probe.py."""

import random
from dataclasses import dataclass

import fast_ulysses as fu
import torch
from torch import Tensor

POISON, TEXT = 0x7FA5, 0x1234  # what no source holds; what a rank writes into its own text rows
TRANSFERS = ("ce", "sm", "tma")
CHUNKS = ((1,), (1,), (1, 1), (1, 3, 2))  # weights
ROLES = {"q": 0, "k": 1, "v": 2, "o": 3}


@dataclass(frozen=True)
class Case:
    """One exchange and its way back; equal on all ranks."""

    seed: int
    batch: int
    head_dim: int
    split: fu.Split
    transfer: str
    overlapped: bool
    with_query: bool
    packed: bool
    own_chunks: int = -1

    @property
    def degree(self) -> int:
        return len(self.split.kv_heads)


def random_case(rng: random.Random, seed: int, world: int, *, large: bool = False) -> Case:
    degree = rng.choice([u for u in range(1, world + 1) if world % u == 0])
    ratio = rng.choice((1, 1, 2, 4))
    kv = tuple(rng.randint(1, 6) for _ in range(degree))
    longest = 4000 if large else rng.choice((3, 40, 700))
    seq = tuple(0 if rng.random() < 0.1 else rng.randint(1, longest) for _ in range(world))
    if rng.random() < 0.3:
        seq = (longest,) * world
    front, back = (rng.randint(0, 9), rng.randint(0, 5)) if rng.random() < 0.5 else (0, 0)
    text = fu.TextRows(front, back, front, back) if rng.random() < 0.5 else fu.TextRows(front, back)
    split = fu.Split(seq, tuple(h * ratio for h in kv), kv, rng.choice(CHUNKS), text)
    return Case(
        seed, rng.choice((1, 1, 2)), rng.choice((8, 64, 96, 128)), split, rng.choice(TRANSFERS),
        rng.random() < 0.4, degree > 1 or rng.random() < 0.3, rng.random() < 0.3, rng.choice((-1, -1, 0, 1)),
    )  # fmt: skip


def source(case: Case, rank: int, role: str, rows: int, heads: int) -> Tensor:
    """What ``rank`` holds for ``role``: the same numbers on whichever rank they are made."""
    generator = torch.Generator("cuda").manual_seed((case.seed * 64 + rank) * 8 + ROLES[role])
    shape = (case.batch, rows, heads, case.head_dim)
    bits = torch.randint(-30000, 30000, shape, generator=generator, device="cuda", dtype=torch.int16)
    if case.packed:  # a slice of a wider tensor, as in a packed QKV
        wide = bits.new_zeros((case.batch, rows, heads + 3, case.head_dim))
        wide[:, :, 2 : 2 + heads] = bits
        bits = wide[:, :, 2 : 2 + heads]
    return bits.view(torch.bfloat16)


def differs(got: Tensor, want: Tensor) -> bool:
    return got.shape != want.shape or not torch.equal(
        got.contiguous().view(torch.int16), want.contiguous().view(torch.int16)
    )


def mark(window: Tensor, value: int) -> None:
    """Fill with one bit pattern. A view, so that the window itself is written."""
    window.view(torch.int16).fill_(value)


def text_rows(window: Tensor, front: int, back: int) -> list[Tensor]:
    return [window[:, :front], window[:, window.shape[1] - back :]]


class Expected:
    """The tokens' part of every window of ``rank``, from the definition of the exchange."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.index, self.first = rank % case.degree, rank // case.degree * case.degree

    def sent(self, role: str) -> Tensor:
        case, counts = self.case, self.case.split.q_heads if role == "q" else self.case.split.kv_heads
        ranks = range(self.first, self.first + case.degree) if role == "q" else range(len(case.split.seq_lens))
        heads = slice(sum(counts[: self.index]), sum(counts[: self.index + 1]))
        parts = [source(case, r, role, case.split.seq_lens[r], sum(counts))[:, :, heads] for r in ranks]
        return torch.cat(parts, 1)

    def place_own(self, window: Tensor, role: str, heads: slice) -> None:
        """Put this rank's own rows of K or V where they were not copied to."""
        split = self.case.split
        own = source(self.case, self.rank, role, split.seq_lens[self.rank], sum(split.kv_heads))
        first, before = split.text.kv_front + sum(split.seq_lens[: self.rank]), sum(split.kv_heads[: self.index])
        rows = slice(first, first + split.seq_lens[self.rank])
        window[:, rows, heads] = own[:, :, before + heads.start : before + heads.stop]

    def held(self, index: int) -> Tensor:
        """The output of the rank with ``index`` in this rank's group, text rows included."""
        split, text = self.case.split, self.case.split.text
        rows = sum(split.seq_lens[self.first : self.first + self.case.degree]) + text.q_front + text.q_back
        return source(self.case, self.first + index, "o", rows, split.q_heads[index])

    def returned(self, send_text: bool) -> Tensor:
        split, text = self.case.split, self.case.split.text
        begin = text.q_front + sum(split.seq_lens[self.first : self.rank])
        parts = []
        for index in range(self.case.degree):
            held = self.held(index)
            own = held[:, begin : begin + split.seq_lens[self.rank]]
            front, back = text_rows(held, text.q_front, text.q_back)
            parts.append(torch.cat([front, own, back], 1) if send_text else own)
        return torch.cat(parts, 2)


def run_in(case: Case, rank: int, busy: Tensor, tag: str = "in") -> list[str]:
    """Q, K and V in parts, chunk by chunk; returns what is wrong."""
    split, want = case.split, Expected(case, rank)
    names = (["q"] if case.with_query else []) + ["k", "v"]
    rows = split.seq_lens[rank]
    sources = {n: source(case, rank, n, rows, sum(split.q_heads if n == "q" else split.kv_heads)) for n in names}
    q = sources.get("q")
    windows = fu.exchange_start(
        q, sources["k"], sources["v"], split, tag=tag, transfer=case.transfer, own_chunks=case.own_chunks
    )
    del sources, q  # the library must keep them alive
    by_name = dict(zip("qkv", windows, strict=True))
    edges = {
        n: (split.text.q_front, split.text.q_back) if n == "q" else (split.text.kv_front, split.text.kv_back)
        for n in names
    }
    for name in names:
        for part in text_rows(by_name[name].view(torch.int16), *edges[name]):
            part.fill_(TEXT)
    if case.overlapped:
        torch.mm(busy, busy)
    copies = {n: torch.full_like(by_name[n].view(torch.int16), POISON).view(torch.bfloat16) for n in names}
    own = (split.q_heads[want.index], split.kv_heads[want.index])
    for chunk, (q_heads, kv_heads) in enumerate(fu.chunk_heads(*own, split.chunks)):
        fu.exchange_wait(windows, chunk, tag=tag)
        for n in names:
            heads = q_heads if n == "q" else kv_heads
            copies[n][:, :, heads] = by_name[n][:, :, heads]
            if n != "q" and 0 <= case.own_chunks <= chunk:
                want.place_own(copies[n], n, heads)
    for n in names:
        mark(by_name[n], POISON)
    fu.exchange_done(windows, tag=tag)
    wrong = []
    for n in names:
        front, back = edges[n]
        tokens = copies[n][:, front : copies[n].shape[1] - back]
        text_ok = all(bool((part == TEXT).all()) for part in text_rows(copies[n].view(torch.int16), front, back))
        if differs(tokens, want.sent(n)) or not text_ok:
            wrong.append(f"in, {n}: {case}")
    return wrong


def run_out(case: Case, rank: int, busy: Tensor, tag: str = "out") -> list[str]:
    """The output's way back, sent chunk by chunk where the case overlaps."""
    want = Expected(case, rank)
    send_text = case.seed % 2 == 0
    held = want.held(want.index)
    window = fu.return_start(
        held, case.split, tag=tag, transfer=case.transfer, send_text=send_text, send_now=not case.overlapped
    )
    for chunk in range(len(case.split.chunks)):
        if case.overlapped:
            torch.mm(busy, busy)
            fu.exchange_send([held], [window], chunk, tag=tag)
    del held
    for chunk in range(len(case.split.chunks)):
        fu.exchange_wait([window], chunk, tag=tag)
    copy = window.clone()
    mark(window, POISON)
    fu.exchange_done([window], tag=tag)
    return [f"out: {case}"] if differs(copy, want.returned(send_text)) else []


def run_calls(case: Case, rank: int) -> list[str]:
    """The one-call operators."""
    split, want, wrong = case.split, Expected(case, rank), []
    rows, text = split.seq_lens[rank], split.text
    q, k, v = (source(case, rank, n, rows, sum(split.q_heads if n == "q" else split.kv_heads)) for n in "qkv")
    windows = fu.all_to_all_qkv_4d(q, k, v, split, transfer=case.transfer)
    for n, window in zip("qkv", windows, strict=True):
        front, back = (text.q_front, text.q_back) if n == "q" else (text.kv_front, text.kv_back)
        if differs(window[:, front : window.shape[1] - back], want.sent(n)):
            wrong.append(f"all_to_all_qkv, {n}: {case}")
        mark(window, POISON)
    out = fu.all_to_all_out_4d(want.held(want.index), split, send_text=True, transfer=case.transfer)
    if differs(out, want.returned(True)):
        wrong.append(f"all_to_all_out: {case}")
    mark(out, POISON)
    if case.degree == 1:
        full = fu.all_gather_kv_4d(k, v, split.seq_lens, transfer=case.transfer)
        wrong += [f"all_gather_kv, {n}: {case}" for n, w in zip("kv", full, strict=True) if differs(w, want.sent(n))]
        for window in full:
            mark(window, POISON)
    return wrong


def run_projection(case: Case, rank: int, busy: Tensor) -> list[str]:
    """K and V written in place group by group, sent by copy engine under a GEMM, awaited armed and unarmed."""
    split, want = case.split, Expected(case, rank)
    heads = split.kv_heads[0]
    k, v = (source(case, rank, n, split.seq_lens[rank], heads) for n in "kv")
    groups = min(len(split.chunks), heads)
    k_full, v_full, k_slot, v_slot = fu.kv_projection_prepare(
        k, case.batch, split.seq_lens, heads, case.head_dim, num_groups=groups
    )
    spans = [slice(heads * g // groups, heads * (g + 1) // groups) for g in range(groups)]
    for group, span in enumerate(spans):
        k_slot[:, :, span] = k[:, :, span]
        v_slot[:, :, span] = v[:, :, span]
        fu.kv_projection_send_ce_group(k_full, v_full, group)
        torch.mm(busy, busy)
    if case.seed % 2:
        for group in range(groups):
            fu.projection_sync_prepare(k_full, v_full, group)
    for group in range(groups):
        fu.projection_sync(k_full, v_full, group)
    wrong = [f"projection, {n}: {case}" for n, w in (("k", k_full), ("v", v_full)) if differs(w, want.sent(n))]
    mark(k_full, POISON)
    mark(v_full, POISON)
    return wrong
