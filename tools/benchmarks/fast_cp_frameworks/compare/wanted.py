"""What compare runs: the shapes of its presets, and at every shape each method with each of its kernels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chitu_diffusion.parallel.cp.errors import ConfigError
from tools.benchmarks.fast_cp_frameworks.cases import FLAT_COPY, Case
from tools.benchmarks.fast_cp_frameworks.peers.table import PEERS

# our methods and what computes alone, with their kernels: the best, and the one that most libraries have
OURS_GPU = (
    ("single", ("auto", "cudnn")),
    ("nccl_agkv", ("auto", "cudnn")),
    ("nccl_ulysses", ("auto", "cudnn")),
    ("fast_agkv", ("auto",)),
    ("fast_ulysses", ("auto",)),
    (FLAT_COPY, ("none",)),
)
OURS_CPU = (("single", ("auto",)), ("nccl_agkv", ("auto",)), ("nccl_ulysses", ("auto",)))
GPU_WORLD = 2  # the fewest that share anything
CPU_WORLDS = (2, 4)


@dataclass(frozen=True)
class Point:
    """One shape: heads of ``head_dim`` over ``sequence`` tokens, with or without a key mask."""

    heads: int
    sequence: int
    head_dim: int = 128
    masked: bool = False


_WAN = (4096, 8192, 16384, 32760, 75600)
# images of 1024x1024 and 1328x1328, whose 6889 tokens nothing divides; of 1024x1024 and 2048x2048; Wan 1.3B
_OTHERS = (Point(24, 4096), Point(24, 6889), Point(30, 4096), Point(30, 16384), Point(12, 32760))
PRESETS: dict[str, tuple[Point, ...]] = {"dit": (*(Point(40, s) for s in _WAN), *_OTHERS)}
# where libraries are silently wrong or refuse: unequal parts, masks, heads that four ranks do not divide
CPU_POINTS = (
    Point(8, 64, 16),
    Point(8, 73, 16),
    Point(8, 64, 16, masked=True),
    Point(8, 73, 16, masked=True),  # on four ranks 19, 18, 18 and 18: who pads each part shifts the mask of the third
    Point(6, 64, 16),
)


def points(preset: str, shapes: Sequence[tuple[int, int]] | None, device_type: str) -> tuple[Point, ...]:
    """The shapes to run, ``shapes`` (heads, tokens) in place of the preset's. Raises ConfigError for unknown names."""
    if preset not in PRESETS:
        raise ConfigError(f"preset {preset!r} is unknown; choose one of {', '.join(PRESETS)}")
    if shapes is not None:
        return tuple(Point(heads, tokens, 16 if device_type == "cpu" else 128) for heads, tokens in shapes)
    return CPU_POINTS if device_type == "cpu" else PRESETS[preset]


def rows(only: Sequence[str] | None, device_type: str) -> list[tuple[str, str]]:
    """(method, kernel) of everything that runs at one shape; ``only`` are parts of names, beside one GPU alone."""
    everything = [(m, k) for m, kernels in (OURS_CPU if device_type == "cpu" else OURS_GPU) for k in kernels]
    everything += [(peer.name, kernel) for peer in PEERS.values() for kernel in peer.kernels]
    if only is None:
        return everything
    for part in only:
        if not any(part in name for name, _ in everything):
            raise ConfigError(f"--only {part} is part of no name; the names are {', '.join(_names(everything))}")
    return [(m, k) for m, k in everything if m == "single" or any(part in m for part in only)]


def cases(at: Iterable[Point], methods: Sequence[tuple[str, str]], device_type: str) -> list[Case]:
    """Every method at every shape; those of one shape follow each other."""
    dtype = "float32" if device_type == "cpu" else "bfloat16"
    return [
        Case(
            method=method,
            sequence=point.sequence,
            heads=point.heads,
            kv_heads=point.heads,
            head_dim=point.head_dim,
            batch=1,
            dtype=dtype,
            component="communication" if method == FLAT_COPY else "e2e",
            kernel=kernel,
            transfer="auto" if method.startswith("fast_") and method not in PEERS else None,
            masked=point.masked,
        )
        for point in at
        for method, kernel in methods
    ]


def _names(methods: Sequence[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for name, _ in methods))
