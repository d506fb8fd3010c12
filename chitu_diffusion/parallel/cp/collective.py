"""Transport over torch.distributed (NCCL or gloo): the oracle and the fallback of every other transport.

What arrives lands where attention reads it; nothing is padded, whatever the sizes of the shards. One batch item, which
is what models send, goes by all-gather (AGKV) or all-to-all (Ulysses); everything else, batches and uneven AGKV, by one
batch of point-to-point messages, which costs 0.2 ms more of the host's time (docs/results/NOTES.md).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.blocks import block_of, window_for
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT, Schedule
from chitu_diffusion.parallel.cp.layout import Layout, Move, Span, TensorName
from chitu_diffusion.parallel.cp.transport import Arrived, Inputs

Tensors = dict[TensorName, torch.Tensor]
# two ranks exchange at most one block of each tensor at a time, so its name tells messages apart (gloo needs that)
TAGS: dict[TensorName, int] = {"q": 0, "k": 1, "v": 2, "out": 3, "text_out": 4}


def library_for(group: dist.ProcessGroup, device_type: str) -> str | None:
    """``nccl``, ``gloo`` or another library that carries tensors of that type of device in ``group``; None: none does.

    A group has one for each type of device where it was made from several, or from none by name: what
    ``dist.get_backend`` calls it then is no library.
    """
    libraries = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return libraries.get(device_type)


class CollectiveTransport:
    """Carries the blocks of a layout over ``group``; ``name`` is what carries them. Creating one is collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.name = str(library_for(group, device.type))
        self.rank = dist.get_rank(group)
        # NCCL connects in its first operation, in which every rank must take part; a rank without tokens sends nothing.
        # No barrier: in a group of two libraries that one goes by the CPUs'.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def send(
        self, layout: Layout, inputs: Inputs, schedule: Schedule = ONE_SHOT, transfer: str | None = None
    ) -> Arrived:
        """Give every rank what it attends with; a tensor that stays whole where it is, is passed on uncopied.

        Everything has arrived, in the order of the stream, when this returns; ``transfer`` is the library's business.
        """
        assert schedule == ONE_SHOT, "the planner overlaps nothing with collectives"
        sources: Tensors = {"q": inputs.q}
        if inputs.k is not None and inputs.v is not None:
            sources |= {"k": inputs.k, "v": inputs.v}
        windows = self._windows(layout, inputs)
        moves = layout.moves_in(self.rank)
        if layout.degree > 1 and inputs.q.shape[0] == 1:
            for name, source in sources.items():
                offset = layout.q_token_offset if name == "q" else layout.kv_token_offset
                tokens = layout.group_tokens(self.rank).size if name == "q" else layout.seq_len
                self._all_to_all(_only(moves, name), source, windows[name].narrow(1, offset, tokens))
        elif _gathers_evenly(layout, inputs):
            for name in ("k", "v"):
                tokens_of_all = windows[name].narrow(1, layout.kv_token_offset, layout.seq_len)
                dist.all_gather_into_tensor(_bytes(tokens_of_all), _bytes(sources[name].contiguous()), self.group)
            self._exchange(_only(moves, "q"), sources, windows)
        else:
            self._exchange(moves, sources, windows)
        return Arrived(windows["q"], windows["k"], windows["v"])

    def receive(
        self, layout: Layout, out: torch.Tensor, home: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring the output home; with one rank per group it is home already, and views of it are returned."""
        assert home is None, "only calls that are replayed have a place for their output, and these are not"
        tokens, text = layout.shards[self.rank].size, layout.text_len if layout.text_queries else 0
        if layout.degree == 1:
            home = out.narrow(1, layout.q_token_offset, tokens)
            return home, block_of(out, layout.q_text_rows(self.rank), Span(0, out.shape[2])) if text else None
        batch, head_dim = out.shape[0], out.shape[3]
        homes: Tensors = {"out": out.new_empty(batch, tokens, layout.num_heads, head_dim)}
        if text:
            homes["text_out"] = out.new_empty(batch, text, layout.num_heads, head_dim)
        moves = layout.moves_out(self.rank)
        if batch == 1:
            self._bring_home(_only(moves, "out"), out, homes["out"])
            moves = _only(moves, "text_out")
        self._exchange(moves, {"out": out, "text_out": out}, homes)
        return homes["out"], homes.get("text_out")

    def _windows(self, layout: Layout, inputs: Inputs) -> Tensors:
        """Where Q, K and V arrive, with the text's rows in place."""
        rank, text = self.rank, inputs.text
        text_q, text_k, text_v = (text.q, text.k, text.v) if text else (None, None, None)
        q_rows, q_text, q_heads = layout.q_rows(rank), layout.q_text_rows(rank), layout.q_heads(rank)
        kv_rows, kv_text, kv_heads = layout.kv_rows, layout.kv_text_rows, layout.kv_heads(rank)
        return {
            "q": window_for(inputs.q, text_q, q_rows, q_text, q_heads),
            "k": window_for(inputs.k, text_k, kv_rows, kv_text, kv_heads),
            "v": window_for(inputs.v, text_v, kv_rows, kv_text, kv_heads),
        }

    def _all_to_all(self, moves: tuple[Move, ...], source: torch.Tensor, landing: torch.Tensor) -> None:
        """Every block of one tensor, of one batch item; what arrives lies in ``landing`` by source rank."""
        row_bytes = source.shape[3] * source.element_size()
        sizes_in, sizes_out = ([0] * dist.get_world_size(self.group) for _ in range(2))
        blocks: list[torch.Tensor] = []
        for move in sorted(moves, key=lambda move: move.dst):
            if move.src == self.rank:
                sizes_in[move.dst] = move.elements * row_bytes
                blocks.append(block_of(source, move.src_rows, move.src_heads).reshape(-1))
            if move.dst == self.rank:
                sizes_out[move.src] = move.elements * row_bytes
        packed = torch.cat(blocks) if blocks else source.new_empty(0)
        dist.all_to_all_single(_bytes(landing), _bytes(packed), sizes_out, sizes_in, self.group)

    def _bring_home(self, moves: tuple[Move, ...], out: torch.Tensor, home: torch.Tensor) -> None:
        """The output's way back for one batch item: blocks of other ranks' heads, put beside each other."""
        arriving = sorted((move for move in moves if move.dst == self.rank), key=lambda move: move.src)
        landing = out.new_empty(sum(move.elements for move in arriving) * out.shape[3])
        self._all_to_all(moves, out, landing)
        parts = torch.split(landing, [move.elements * out.shape[3] for move in arriving])
        for move, part in zip(arriving, parts, strict=True):
            block = block_of(home, move.dst_rows, move.dst_heads)
            block.copy_(part.view(block.shape))

    def _exchange(self, moves: tuple[Move, ...], sources: Tensors, windows: Tensors) -> None:
        """Carry out ``moves``: local ones as copies, the others as one batch of messages."""
        messages: list[dist.P2POp] = []
        landings: list[tuple[torch.Tensor, torch.Tensor]] = []
        for move in moves:
            if self.rank == move.src:
                block = block_of(sources[move.tensor], move.src_rows, move.src_heads)
                if move.dst != self.rank:
                    messages.append(self._message(dist.isend, block.contiguous(), move.dst, move))
                    continue
            home = block_of(windows[move.tensor], move.dst_rows, move.dst_heads)
            if move.src == self.rank:
                if home.data_ptr() != block.data_ptr():
                    home.copy_(block)
                continue
            landing = home if home.is_contiguous() else torch.empty_like(home, memory_format=torch.contiguous_format)
            messages.append(self._message(dist.irecv, landing, move.src, move))
            if landing is not home:
                landings.append((home, landing))
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        for home, landing in landings:
            home.copy_(landing)

    def _message(self, op: Callable[..., object], block: torch.Tensor, peer: int, move: Move) -> dist.P2POp:
        return dist.P2POp(op, block, group=self.group, tag=TAGS[move.tensor], group_peer=peer)


def _gathers_evenly(layout: Layout, inputs: Inputs) -> bool:
    even = layout.seq_len % layout.world == 0
    return inputs.k is not None and layout.world > 1 and layout.degree == 1 and inputs.q.shape[0] == 1 and even


def _only(moves: tuple[Move, ...], name: TensorName) -> tuple[Move, ...]:
    return tuple(move for move in moves if move.tensor == name)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes: gloo's collectives know no bfloat16."""
    return x.view(-1).view(torch.uint8)
