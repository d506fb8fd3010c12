"""What the ranks of the worker pool do in the tests of this folder, and the whole inputs that they slice."""

from dataclasses import dataclass

import torch

from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.layout import split_spans
from chitu_diffusion.parallel.cp.transport import Text
from tests.support.pool import Worker


@dataclass(frozen=True)
class Case:
    """One attention call on the whole sequence; lengths in rows."""

    seq_len: int
    heads: int
    kv_heads: int | None = None
    head_dim: int = 16
    batch: int = 1
    text_len: int = 0
    text_in_front: bool = True
    text_queries: bool = True
    valid_text: tuple[int, ...] = ()  # per batch item, how many text rows are no padding; empty: no key mask
    kv_sharded: bool = True
    dtype: torch.dtype = torch.float32
    method: str = "agkv"
    degree: int | None = None
    pad_value: float = 1e4
    seed: int = 0

    @property
    def config(self) -> CPConfig:
        """The session's configuration."""
        return CPConfig(method=self.method, ulysses_degree=self.degree, timeout_s=5)


@dataclass(frozen=True)
class Whole:
    """The inputs of one process: q, k, v of the whole sequence without text, the text, and the key mask."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    text: Text | None
    key_mask: torch.Tensor | None

    def joined(self, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the whole sequence with the text in its place."""
        if self.text is None:
            return self.q, self.k, self.v
        q = self._join(self.text.q, self.q, case) if self.text.q is not None else self.q
        if not case.kv_sharded:
            return q, self.text.k, self.text.v
        return q, self._join(self.text.k, self.k, case), self._join(self.text.v, self.v, case)

    @staticmethod
    def _join(text: torch.Tensor, tokens: torch.Tensor, case: Case) -> torch.Tensor:
        return torch.cat([text, tokens] if case.text_in_front else [tokens, text], 1)


def whole(case: Case) -> Whole:
    """Random inputs from the seed; later keys are larger, so that a part that is lost or weighed wrongly shows."""
    gen = torch.Generator().manual_seed(case.seed + 1)
    heads, kv_heads = case.heads, case.kv_heads or case.heads

    def draw(rows: int, h: int) -> torch.Tensor:
        return torch.randn(case.batch, rows, h, case.head_dim, generator=gen)

    q, k, v = draw(case.seq_len, heads), draw(case.seq_len, kv_heads), draw(case.seq_len, kv_heads)
    k = k * torch.linspace(0.5, 2.0, case.seq_len).view(1, -1, 1, 1)
    text, mask = None, None
    if case.text_len:
        tq, tk, tv = draw(case.text_len, heads), draw(case.text_len, kv_heads), draw(case.text_len, kv_heads)
        if case.valid_text:
            mask = torch.ones(case.batch, case.text_len, dtype=torch.bool)
            for item, valid in enumerate(case.valid_text):
                mask[item, valid:] = False
                tk[item, valid:], tv[item, valid:] = case.pad_value, case.pad_value
            tokens = torch.ones(case.batch, case.seq_len if case.kv_sharded else 0, dtype=torch.bool)
            mask = torch.cat([mask, tokens] if case.text_in_front else [tokens, mask], 1)
        queries = tq.to(case.dtype) if case.text_queries else None
        text = Text(tk.to(case.dtype), tv.to(case.dtype), queries, case.text_in_front)
    return Whole(q.to(case.dtype), k.to(case.dtype), v.to(case.dtype), text, mask)


def share(x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """This rank's tokens of ``x``, in memory of their own."""
    span = split_spans(x.shape[1], world)[rank]
    return x[:, span.start : span.stop].clone()


def attend(worker: Worker, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One context-parallel call; returns this rank's output and the text's, with memory poisoned before it."""
    inputs = whole(case)
    q, k, v = (share(x, worker.rank, worker.world) for x in (inputs.q, inputs.k, inputs.v))
    kept = [x.clone() for x in (q, k, v)]
    kv = (k, v) if case.kv_sharded else (None, None)
    out, text_out = cp_attention(
        worker.session(case.config), q, *kv, seq_len=case.seq_len, text=inputs.text, key_mask=inputs.key_mask
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v), strict=True)), "the call changed its inputs"
    return out.contiguous(), None if text_out is None else text_out.contiguous()


def attend_all(worker: Worker, cases: list[Case]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Several calls in one trip to the workers."""
    return [attend(worker, case) for case in cases]
