"""What diffusers computes between the projections and attention, taken from its own processors, norms and embedders."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers import transformer_qwenimage as qwen
from diffusers.models.transformers import transformer_wan as wan
from diffusers.models.transformers import transformer_z_image as z_image
from torch import nn

from chitu_diffusion.parallel.cp.fast.norm_rope import Rope, rope_from_complex, rope_from_real

TEXT_TOKENS = 5
# Another order of a float32 sum moves a number by some units of its last place, and in half precision across the edge
# between two neighbours, at one rounding point or two. Relative to the length of the pair that RoPE turns:
UNITS = {torch.float32: 8, torch.float16: 2, torch.bfloat16: 2}
# and so many numbers may differ at all; a rounding point that is missing or too many moves a fifth of them.
SHARES = {torch.float32: 1.0, torch.float16: 1e-2, torch.bfloat16: 1e-2}


class Case(NamedTuple):
    """Arguments of ``norm_rope`` and what diffusers makes of them."""

    x: torch.Tensor
    weight: torch.Tensor
    rope: Rope
    eps: float
    expected: torch.Tensor


class Shape(NamedTuple):
    batch: int
    seq: int
    heads: int
    head_dim: int


def _without_projections(attn: nn.Module, dtype: torch.dtype, device: str) -> Any:
    """``attn``, made on the meta device, with its norms alive and random and every projection an identity."""
    for name, child in list(attn.named_children()):
        if name.startswith("norm"):
            child.to_empty(device=device).to(dtype)
            nn.init.uniform_(child.get_parameter("weight"), 0.5, 1.5)
        else:
            several = isinstance(child, nn.ModuleList)
            setattr(attn, name, nn.ModuleList([nn.Identity()]) if several else nn.Identity())
    if isinstance(attn, wan.WanAttention):
        attn.to_out.append(nn.Identity())
    return attn.requires_grad_(False)


def _queries_and_keys(module: Any, processor: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``processor`` gives to the attention of its model file."""
    with mock.patch.object(module, "dispatch_attention_fn", side_effect=lambda q, k, v, **_: v) as attend:
        processor(*args, **kwargs)
    q, k = attend.call_args.args[:2]
    return q, k


def _hidden(shape: Shape, seq: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random (B, seq, H·D) whose heads differ in size, as theirs do."""
    size = 0.5 + torch.arange(shape.heads, device=device)[:, None] / 4
    return (torch.randn(shape.batch, seq, shape.heads, shape.head_dim, device=device) * size).to(dtype).flatten(2)


def wan_cases(shape: Shape, dtype: torch.dtype, device: str) -> list[Case]:
    """Q and K of Wan's self-attention."""
    width = shape.heads * shape.head_dim
    with torch.device("meta"):
        attn = wan.WanAttention(width, shape.heads, shape.head_dim, eps=1e-6)
    attn = _without_projections(attn, dtype, device)
    embedder = wan.WanRotaryPosEmbed(shape.head_dim, (1, 1, 1), 1024).to(device)
    video = torch.empty(1, 1, shape.seq // 384 + 9, 16, 24)
    angles = [x[:, -shape.seq :] for x in embedder(video)]  # the last tokens: the first hardly turn
    hidden = _hidden(shape, shape.seq, dtype, device)
    expected = _queries_and_keys(wan, wan.WanAttnProcessor(), attn, hidden, rotary_emb=angles)
    x, rope = hidden.view(shape), rope_from_real(*angles)
    return [Case(x, n.weight, rope, 1e-6, y) for n, y in zip((attn.norm_q, attn.norm_k), expected, strict=True)]


def qwen_cases(shape: Shape, dtype: torch.dtype, device: str) -> list[Case]:
    """Q and K of Qwen-Image's image tokens, then of its text tokens."""
    width, dim = shape.heads * shape.head_dim, shape.head_dim
    with torch.device("meta"):
        attn = Attention(
            width, heads=shape.heads, dim_head=dim, qk_norm="rms_norm", eps=1e-6,
            added_kv_proj_dim=width, context_pre_only=False,
        )  # fmt: skip
    attn = _without_projections(attn, dtype, device)
    height = dim // 16 * 6
    embedder = qwen.QwenEmbedRope(10000, [dim - 2 * height, height, height], scale_rope=True)
    picture = (1, shape.seq // 24 + 16, 24)
    freqs = embedder(picture, device=torch.device(device), max_txt_seq_len=TEXT_TOKENS)
    freqs = freqs[0][-shape.seq :], freqs[1]
    image, text = _hidden(shape, shape.seq, dtype, device), _hidden(shape, TEXT_TOKENS, dtype, device)
    processor = qwen.QwenDoubleStreamAttnProcessor2_0()
    joint = _queries_and_keys(qwen, processor, attn, image, text, image_rotary_emb=freqs)
    streams = [
        (image, freqs[0], (attn.norm_q, attn.norm_k), slice(TEXT_TOKENS, None)),
        (text, freqs[1], (attn.norm_added_q, attn.norm_added_k), slice(0, TEXT_TOKENS)),
    ]
    return [
        Case(hidden.view(shape.batch, -1, shape.heads, dim), norm.weight, rope_from_complex(freqs), 1e-6, y[:, rows])
        for hidden, freqs, norms, rows in streams
        for norm, y in zip(norms, joint, strict=True)
    ]


def z_image_cases(shape: Shape, dtype: torch.dtype, device: str) -> list[Case]:
    """Q and K of Z-Image, whose batch items have angles of their own."""
    dim = shape.head_dim
    with torch.device("meta"):
        attn = Attention(shape.heads * dim, heads=shape.heads, dim_head=dim, qk_norm="rms_norm", bias=False, eps=1e-5)
    attn = _without_projections(attn, dtype, device)
    height = dim // 16 * 6
    embedder = z_image.RopeEmbedder(256.0, [dim - 2 * height, height, height], [64, 64, 64])
    freqs = embedder(torch.randint(0, 64, (shape.batch * shape.seq, 3), device=device))
    freqs = freqs.view(shape.batch, shape.seq, -1)
    hidden = _hidden(shape, shape.seq, dtype, device)
    expected = _queries_and_keys(z_image, z_image.ZSingleStreamAttnProcessor(), attn, hidden, freqs_cis=freqs)
    x, rope = hidden.view(shape), rope_from_complex(freqs)
    return [Case(x, n.weight, rope, 1e-5, y) for n, y in zip((attn.norm_q, attn.norm_k), expected, strict=True)]


MODELS: dict[str, Callable[[Shape, torch.dtype, str], list[Case]]] = {
    "wan": wan_cases,
    "qwen": qwen_cases,
    "z_image": z_image_cases,
}
SHAPES = [Shape(2, 7, 12, 128), Shape(1, 5, 24, 64), Shape(2, 3, 30, 96), Shape(1, 4, 40, 128), Shape(2, 9, 3, 64)]


def difference(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The largest difference, in units of the dtype's epsilon times the pair's length, and the share that differ."""
    exact = expected.double()
    length = torch.hypot(exact[..., 0::2], exact[..., 1::2]).clamp(min=1e-30).repeat_interleave(2, dim=-1)
    units = (got.double() - exact).abs() / length / torch.finfo(expected.dtype).eps
    return float(units.max()), float(got.ne(expected).double().mean())


def assert_same_within_rounding(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    units, share = difference(got, expected)
    assert units <= UNITS[expected.dtype], f"{units} units"
    assert share <= SHARES[expected.dtype], f"{share:.2%} of the numbers differ"
