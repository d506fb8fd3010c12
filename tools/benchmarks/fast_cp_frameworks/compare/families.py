"""Which rows are variants of one thing, by the beginning of their method's name, and what people call it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """``key`` begins the names of its methods; ``ours`` says whether it is this project's."""

    key: str
    label: str
    ours: bool = False


# a longer key before a shorter one that begins it
FAMILIES = (
    Family("single", "one GPU alone", ours=True),
    Family("flat_copy", "flat copy", ours=True),
    Family("fast_ulysses_upstream", "fast-ulysses (upstream)"),
    Family("fast_", "Fast CP", ours=True),
    Family("nccl_", "our methods over NCCL", ours=True),
    Family("torch_cp", "torch context_parallel"),
    Family("diffusers", "diffusers"),
    Family("yunchang", "yunchang"),
    Family("xdit", "xDiT"),
    Family("para_attn", "ParaAttention"),
    Family("cache_dit", "cache-dit"),
    Family("ring_flash_attn", "ring-flash-attention"),
    Family("flashinfer", "FlashInfer"),
)
SINGLE, FLAT, _UPSTREAM, FAST = FAMILIES[:4]


def family_of(method: str) -> Family:
    """The family of a method; a method that none begins is one by itself."""
    return next((family for family in FAMILIES if method.startswith(family.key)), Family(method, method))
