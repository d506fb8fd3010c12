"""Who holds which tokens and heads, and which blocks travel between which ranks: plain integers, no tensors.

All methods are one exchange with a *Ulysses degree* u that divides the world P. Ranks are numbered so that rank r has
index r mod u in Ulysses group r div u. Within a group the heads are split by index; across groups K and V are gathered:

* u = 1 is AGKV: every rank keeps its Q and receives all K and V;
* u = P is Ulysses: every rank receives all tokens for its share of the heads;
* between them lies the hybrid, for models with fewer heads than ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from chitu_diffusion.parallel.cp.errors import ConfigError

TensorName = Literal["q", "k", "v", "out", "text_out"]


@dataclass(frozen=True)
class Span:
    """Rows or heads [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many it holds."""
        return self.stop - self.start

    def shifted(self, by: int) -> "Span":
        """The same span, ``by`` further on."""
        return Span(self.start + by, self.stop + by)


@dataclass(frozen=True)
class Move:
    """One block of one tensor that rank ``src`` gives to rank ``dst`` (which may be itself)."""

    tensor: TensorName
    src: int
    dst: int
    src_rows: Span
    src_heads: Span
    dst_rows: Span
    dst_heads: Span

    @property
    def elements(self) -> int:
        """Elements per batch item and per element of the head dimension."""
        return self.src_rows.size * self.src_heads.size


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of ``total`` in ``parts`` nearly equal parts, larger ones first (the rule of ``torch.tensor_split``)."""
    base, extra = divmod(total, parts)
    return tuple(base + (i < extra) for i in range(parts))


def split_spans(total: int, parts: int) -> tuple[Span, ...]:
    """The same parts as spans."""
    sizes = split_sizes(total, parts)
    starts = [sum(sizes[:i]) for i in range(parts)]
    return tuple(Span(start, start + size) for start, size in zip(starts, sizes, strict=True))


def ulysses_degree(method: str, world: int, num_kv_heads: int, requested: int | None = None) -> int:
    """The number of ranks that split the heads: 1 for AGKV; for Ulysses ``requested``, else the largest legal one.

    Legal is a divisor of ``world`` that leaves every rank at least one K/V head. Raises ConfigError where
    ``requested`` is not legal.
    """
    if method == "agkv":
        return 1
    legal = [u for u in range(1, world + 1) if world % u == 0 and u <= num_kv_heads]
    if requested is None:
        return legal[-1]
    if requested not in legal:
        raise ConfigError(
            f"ulysses_degree={requested} does not fit {world} ranks and {num_kv_heads} K/V heads; "
            f"choose one of {', '.join(map(str, legal))}"
        )
    return requested


@dataclass(frozen=True)
class Layout:
    """The placement of one attention call.

    ``seq_len`` tokens are split over ``world`` ranks by ``split_sizes``. ``text_len`` replicated rows stand in front
    of them (or behind, with ``text_in_front=False``) in keys and values, and in queries where ``text_queries``.
    ``kv_sharded`` is False where only the replicated rows are attended to (cross-attention): nothing is sent then.
    """

    world: int
    degree: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    text_len: int = 0
    text_in_front: bool = True
    text_queries: bool = False
    kv_sharded: bool = True

    @cached_property
    def shards(self) -> tuple[Span, ...]:
        """The tokens of each rank."""
        return split_spans(self.seq_len, self.world)

    def group_ranks(self, rank: int) -> range:
        """The ranks of ``rank``'s Ulysses group."""
        first = rank // self.degree * self.degree
        return range(first, first + self.degree)

    def group_tokens(self, rank: int) -> Span:
        """The tokens whose queries ``rank`` attends for: those of its group."""
        ranks = self.group_ranks(rank)
        return Span(self.shards[ranks[0]].start, self.shards[ranks[-1]].stop)

    def kv_heads(self, rank: int) -> Span:
        """The K/V heads that ``rank`` attends with."""
        return split_spans(self.num_kv_heads, self.degree)[rank % self.degree]

    def q_heads(self, rank: int) -> Span:
        """The query heads that belong to those K/V heads (the GQA ratio is kept)."""
        ratio = self.num_heads // self.num_kv_heads
        kv = self.kv_heads(rank)
        return Span(kv.start * ratio, kv.stop * ratio)

    @property
    def kv_text_rows(self) -> Span:
        """Where the replicated rows lie among the keys."""
        return self._text_rows(self.seq_len if self.kv_sharded else 0)

    def q_text_rows(self, rank: int) -> Span:
        """Where they lie among the queries of ``rank``; empty where the text has no queries."""
        return self._text_rows(self.group_tokens(rank).size) if self.text_queries else Span(0, 0)

    def _text_rows(self, tokens: int) -> Span:
        return Span(0, self.text_len).shifted(0 if self.text_in_front else tokens)

    @property
    def kv_token_offset(self) -> int:
        """The row of the first token among the keys."""
        return self.text_len if self.text_in_front else 0

    @property
    def q_token_offset(self) -> int:
        """The row of the first token among the queries."""
        return self.text_len if self.text_in_front and self.text_queries else 0

    @property
    def kv_rows(self) -> int:
        """Keys that are attended to."""
        return self.text_len + (self.seq_len if self.kv_sharded else 0)

    def q_rows(self, rank: int) -> int:
        """Queries that ``rank`` attends for."""
        return self.group_tokens(rank).size + (self.text_len if self.text_queries else 0)

    def moves_in(self, rank: int) -> tuple[Move, ...]:
        """Every block of Q, K and V that ``rank`` sends or receives, in one order that all ranks share."""
        pairs = self._pairs(rank, range(self.world))
        kv = [self._kv_move(name, src, dst) for name in ("k", "v") for src, dst in pairs if self.kv_sharded]
        q = [self._q_move(src, dst) for src, dst in self._pairs(rank, self.group_ranks(rank))]
        return tuple(move for move in [*kv, *q] if move.elements)

    def moves_out(self, rank: int) -> tuple[Move, ...]:
        """Every block of the output that ``rank`` sends or receives, and of the text's output."""
        pairs = self._pairs(rank, self.group_ranks(rank))
        tokens = [self._out_move(src, dst) for src, dst in pairs]
        text = [self._text_out_move(src, dst) for src, dst in pairs if self.text_queries]
        return tuple(move for move in [*tokens, *text] if move.elements)

    def _pairs(self, rank: int, ranks: range) -> list[tuple[int, int]]:
        """(src, dst) with ``rank`` on one side; at the same step every rank talks to another peer."""
        steps = [(src, ranks[(i + step) % len(ranks)]) for step in range(len(ranks)) for i, src in enumerate(ranks)]
        return [pair for pair in steps if rank in pair]

    def _kv_move(self, name: TensorName, src: int, dst: int) -> Move:
        heads, rows = self.kv_heads(dst), self.shards[src]
        own = Span(0, rows.size)
        return Move(name, src, dst, own, heads, rows.shifted(self.kv_token_offset), Span(0, heads.size))

    def _q_move(self, src: int, dst: int) -> Move:
        heads, rows = self.q_heads(dst), self._rows_in_group(src)
        return Move("q", src, dst, Span(0, rows.size), heads, rows, Span(0, heads.size))

    def _out_move(self, src: int, dst: int) -> Move:
        heads, rows = self.q_heads(src), self._rows_in_group(dst)
        return Move("out", src, dst, rows, Span(0, heads.size), Span(0, rows.size), heads)

    def _text_out_move(self, src: int, dst: int) -> Move:
        heads = self.q_heads(src)
        text = Span(0, self.text_len)
        return Move("text_out", src, dst, self.q_text_rows(src), Span(0, heads.size), text, heads)

    def _rows_in_group(self, rank: int) -> Span:
        """The tokens of ``rank`` as rows of its group's queries."""
        return self.shards[rank].shifted(self.q_token_offset - self.group_tokens(rank).start)

    def bytes_received(self, rank: int, element_bytes: int, head_dim: int, batch: int) -> int:
        """Bytes that ``rank`` receives from other ranks in one call, both directions of the exchange together."""
        moves = [*self.moves_in(rank), *self.moves_out(rank)]
        return sum(m.elements for m in moves if m.dst == rank != m.src) * element_bytes * head_dim * batch
