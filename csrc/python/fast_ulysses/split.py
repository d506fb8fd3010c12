"""How an exchange splits tokens and heads: plain numbers, equal on all ranks."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from torch import Tensor

from .lifetime import rank_and_world

MAX_CHUNKS = 32
LARGEST_WEIGHT = 1_000_000
Lists = tuple[list[int], list[int], list[int], list[int], list[int]]


@dataclass(frozen=True)
class TextRows:
    """Rows of replicated text around the tokens, in K and V and (where the text asks) in Q and the output."""

    kv_front: int = 0
    kv_back: int = 0
    q_front: int = 0
    q_back: int = 0

    def as_list(self) -> list[int]:
        """As the operators take it."""
        return [self.kv_front, self.kv_back, self.q_front, self.q_back]


@dataclass(frozen=True)
class Split:
    """How tokens and heads are split; equal on all ranks.

    ``seq_lens``: tokens of each rank. ``q_heads``, ``kv_heads``: heads of each rank of an Ulysses group; their length
    is the Ulysses degree: 1 for AGKV, the world for Ulysses. ``chunks``: the weights of the head groups that travel
    one by one (see ``chunk_heads``).

    What the operators need of it is computed once: ``as_lists`` (lengths, query heads, key heads, chunks, text),
    ``q_total`` and ``kv_total``.
    """

    seq_lens: tuple[int, ...]
    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    chunks: tuple[int, ...] = (1,)
    text: TextRows = field(default_factory=TextRows)
    as_lists: Lists = field(init=False, repr=False, compare=False)
    q_total: int = field(init=False, repr=False, compare=False)
    kv_total: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError where the numbers contradict each other."""
        degree, world = len(self.kv_heads), len(self.seq_lens)
        if not degree or world % degree or len(self.q_heads) != degree:
            raise ValueError(
                f"head counts were given for {len(self.q_heads)} (queries) and {degree} (keys) ranks of a group; both "
                f"must be the same number, and divide the {world} ranks"
            )
        text = self.text.as_list()
        if min(*self.seq_lens, *self.q_heads, *self.kv_heads, *text) < 0:
            raise ValueError(f"lengths and head counts must not be negative: {self}")
        if not 1 <= len(self.chunks) <= MAX_CHUNKS:
            raise ValueError(f"chunks must hold 1 to {MAX_CHUNKS} weights, not {len(self.chunks)}")
        if not all(1 <= weight <= LARGEST_WEIGHT for weight in self.chunks):
            raise ValueError(f"weights of chunks must be 1 to {LARGEST_WEIGHT}: {self.chunks}")
        lists = (list(self.seq_lens), list(self.q_heads), list(self.kv_heads), list(self.chunks), text)
        object.__setattr__(self, "as_lists", lists)
        object.__setattr__(self, "q_total", sum(self.q_heads))
        object.__setattr__(self, "kv_total", sum(self.kv_heads))

    def require_rows(self, tensor: Tensor, heads: int, name: str) -> None:
        """Raise ValueError unless ``tensor`` holds this rank's tokens with ``heads`` heads."""
        rank, world = rank_and_world()
        if world > 1 and len(self.seq_lens) != world:
            raise ValueError(f"seq_lens has {len(self.seq_lens)} entries and the runtime {world} ranks")
        rows, shape = self.seq_lens[rank], tensor.shape
        if shape[1] != rows or shape[2] != heads:
            raise ValueError(
                f"{name} is {tuple(shape)} and rank {rank} of this split holds (batch, {rows}, {heads}, head_dim)"
            )


def chunk_heads(q_heads: int, kv_heads: int, chunks: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """The query heads and the key heads of every chunk, among this rank's own heads (the rule of copy_plan.hpp).

    The heads are split by the chunks' weights: chunk c begins at heads × (sum of the weights before it) // (of all).
    """
    ends = list(accumulate(chunks, initial=0))

    def parts(heads: int) -> list[slice]:
        return [slice(a, b) for a, b in pairwise(heads * end // ends[-1] for end in ends)]

    kv = parts(kv_heads)
    if kv_heads and q_heads % kv_heads == 0:
        ratio = q_heads // kv_heads
        return [(slice(part.start * ratio, part.stop * ratio), part) for part in kv]
    return list(zip(parts(q_heads), kv, strict=True))
