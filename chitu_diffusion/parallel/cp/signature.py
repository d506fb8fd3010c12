"""What one call is, in plain values: checked on this rank, compared between ranks, and the key of its plan."""

from dataclasses import dataclass, replace

import torch

from chitu_diffusion.parallel.cp.config import METHODS
from chitu_diffusion.parallel.cp.errors import InputError
from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds
from chitu_diffusion.parallel.cp.layout import Layout, split_sizes, ulysses_degree
from chitu_diffusion.parallel.cp.transport import Inputs

PLAN_ROWS, SHORTEST_ROUNDED = 128, 1024  # a tile of queries; below that many tokens a rank may have none
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Signature:
    """Everything that must be the same on every rank of a call; its lengths are those of the whole sequence."""

    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    text_len: int
    text_in_front: bool
    text_queries: bool
    kv_sharded: bool
    key_mask: bool
    scale: float

    def __str__(self) -> str:
        text = f", {self.text_len} text rows {'in front' if self.text_in_front else 'behind'}" if self.text_len else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return (
            f"[batch {self.batch}, {self.seq_len} tokens, {heads}, {str(self.dtype).removeprefix('torch.')}{text}"
            f"{'' if self.kv_sharded else ', text keys only'}{', key mask' if self.key_mask else ''}, "
            f"scale {self.scale:g}]"
        )

    @property
    def planned_as(self) -> "Signature":
        """The call whose plan this one takes: tokens and text in whole tiles. Prompts have many lengths, and a server
        must not measure at each of them.
        """
        if self.seq_len < SHORTEST_ROUNDED:
            return self
        tokens, text = (-(-rows // PLAN_ROWS) * PLAN_ROWS for rows in (self.seq_len, self.text_len))
        return replace(self, seq_len=tokens, text_len=text)

    def layout(self, world: int, degree: int) -> Layout:
        """The placement of this call on ``world`` ranks with Ulysses degree ``degree``."""
        return Layout(
            world=world,
            degree=degree,
            seq_len=self.seq_len,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            text_len=self.text_len,
            text_in_front=self.text_in_front,
            text_queries=self.text_queries,
            kv_sharded=self.kv_sharded,
        )

    def bytes_received(self, world: int) -> dict[str, int]:
        """For each method, the bytes that the busiest of ``world`` ranks receives in one call."""
        if not self.kv_sharded:
            return dict.fromkeys(METHODS, 0)
        layouts = {name: self.layout(world, ulysses_degree(name, world, self.num_kv_heads)) for name in METHODS}
        size = self.dtype.itemsize
        return {
            name: max(layout.bytes_received(rank, size, self.head_dim, self.batch) for rank in range(world))
            for name, layout in layouts.items()
        }

    def kernel_needs(self, device: torch.device) -> KernelNeeds:
        """What the call asks of a kernel on ``device``."""
        return KernelNeeds(
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dtype=self.dtype,
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            key_mask=self.key_mask,
        )


def quick_key(
    inputs: Inputs, seq_len: int | None, key_mask: torch.Tensor | None, scale: float | None
) -> tuple[object, ...]:
    """Everything that ``of`` looks at, unchecked: what has been admitted once need not be checked again."""
    text = inputs.text
    more = (text.q, text.k, text.v, text.in_front) if text is not None else ()
    tensors = (inputs.q, inputs.k, inputs.v, key_mask, *more)
    return (
        seq_len,
        scale,
        *((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in tensors),
    )


def of(
    inputs: Inputs,
    seq_len: int | None,
    key_mask: torch.Tensor | None,
    scale: float | None,
    device: torch.device,
    world: int,
    rank: int,
) -> Signature:
    """The signature of a call. Raises InputError, with one sentence, where its tensors do not fit together."""
    q, k, v, text = inputs.q, inputs.k, inputs.v, inputs.text
    tensors = _named_tensors(inputs)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, q, device)
    if (k is None) != (v is None):
        raise InputError("k and v go together: give both, or neither to attend to the text only")
    if k is None and text is None:
        raise InputError("there is nothing to attend to: give k and v, or a text")
    total = q.shape[1] * world if seq_len is None else seq_len
    _check_share(total, q.shape[1], world, rank)
    keys = k if k is not None else text.k if text is not None else q
    _check_heads(q, keys)
    _check_shapes(inputs, keys)
    text_len = text.k.shape[1] if text is not None else 0
    mine = Signature(
        batch=q.shape[0],
        seq_len=total,
        num_heads=q.shape[2],
        num_kv_heads=keys.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype,
        text_len=text_len,
        text_in_front=text.in_front if text is not None else True,
        text_queries=text is not None and text.q is not None,
        kv_sharded=k is not None,
        key_mask=key_mask is not None,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
    )
    if key_mask is not None:
        _check_mask(key_mask, (q.shape[0], mine.layout(world, 1).kv_rows), device)
    return mine


def _named_tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    text = inputs.text
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if text is not None:
        named |= {"text.q": text.q, "text.k": text.k, "text.v": text.v}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _check_tensor(name: str, x: torch.Tensor, q: torch.Tensor, device: torch.device) -> None:
    if x.dim() != 4:
        raise InputError(f"{name} has shape {tuple(x.shape)}; attention takes (batch, sequence, heads, head dimension)")
    if x.dtype not in DTYPES:
        raise InputError(f"{name} is {x.dtype}; attention takes float32, float16 or bfloat16")
    if x.dtype != q.dtype:
        raise InputError(f"{name} is {x.dtype} but q is {q.dtype}; give all tensors one dtype")
    if x.device != device:
        raise InputError(f"{name} lies on {x.device} but the session runs on {device}; move it there first")
    if x.numel() and x.stride(-1) != 1:
        raise InputError(
            f"{name} has strides {x.stride()}, so its head dimension is not contiguous; call .contiguous() on it first"
        )
    if 0 in (x.shape[0], x.shape[2], x.shape[3]):
        raise InputError(f"{name} has shape {tuple(x.shape)}; batch, heads and head dimension must not be 0")


def _check_share(total: int, local: int, world: int, rank: int) -> None:
    if total <= 0:
        raise InputError(f"the sequence has {total} tokens; attention needs at least one")
    share = split_sizes(total, world)[rank]
    if local != share:
        raise InputError(
            f"q has {local} tokens, but rank {rank} of {world} holds {share} of {total}; "
            "split the sequence with torch.tensor_split and give its whole length as seq_len"
        )


def _check_heads(q: torch.Tensor, keys: torch.Tensor) -> None:
    if q.shape[2] % keys.shape[2]:
        raise InputError(
            f"q has {q.shape[2]} heads and k has {keys.shape[2]}; the first must be a multiple of the second"
        )


def _check_shapes(inputs: Inputs, keys: torch.Tensor) -> None:
    q, text = inputs.q, inputs.text
    batch, heads, kv_heads, head_dim = q.shape[0], q.shape[2], keys.shape[2], q.shape[3]
    text_len = text.k.shape[1] if text is not None else 0
    wanted = {
        "k": (batch, q.shape[1], kv_heads, head_dim),
        "v": (batch, q.shape[1], kv_heads, head_dim),
        "text.q": (batch, text_len, heads, head_dim),
        "text.k": (batch, text_len, kv_heads, head_dim),
        "text.v": (batch, text_len, kv_heads, head_dim),
    }
    for name, tensor in _named_tensors(inputs).items():
        if name != "q" and tuple(tensor.shape) != wanted[name]:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}, but the other tensors ask for {wanted[name]}")


def _check_mask(mask: torch.Tensor, wanted: tuple[int, int], device: torch.device) -> None:
    if mask.dtype != torch.bool or tuple(mask.shape) != wanted:
        raise InputError(
            f"key_mask is {mask.dtype} {tuple(mask.shape)}; it must be torch.bool {wanted}: "
            "one entry for each key of the whole sequence, text included"
        )
    if mask.device != device:
        raise InputError(f"key_mask lies on {mask.device} but the session runs on {device}; move it there first")
