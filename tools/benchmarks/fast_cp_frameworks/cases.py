"""What can be measured: methods, components, shapes and presets; checked without torch, so bad input answers fast."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product

from chitu_diffusion.parallel.cp.config import TRANSFERS, CPConfig
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError


@dataclass(frozen=True)
class Method:
    """One row: the session's method and backend; both are None where one GPU computes alone."""

    name: str
    method: str | None = None
    backend: str | None = None

    def config(self, kernel: str, transfer: str) -> CPConfig | None:
        """The session's settings, None where there is no session."""
        if self.method is None or self.backend is None:
            return None
        if self.backend == "fast":
            return CPConfig(method=self.method, backend="fast", kernel=kernel, transfer=transfer)
        return CPConfig(method=self.method, backend=self.backend, kernel=kernel)


METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method("single"),
        Method("nccl_agkv", "agkv", "nccl"),
        Method("nccl_ulysses", "ulysses", "nccl"),
        Method("fast_agkv", "agkv", "fast"),
        Method("fast_ulysses", "ulysses", "fast"),
    )
}
COMPONENTS = ("e2e", "communication", "attention")
DTYPES = ("bfloat16", "float16", "float32")
# the names of the kernel table, which imports torch; a test keeps the two equal
KERNEL_NAMES = ("auto", "cudnn", "flash", "triton", "sdpa")


@dataclass(frozen=True)
class Shape:
    """Attention heads and their dimension, with the sequence lengths to run them at."""

    heads: int
    head_dim: int
    sequences: tuple[int, ...]


_VIDEO = (32760, 75600)  # 81 frames of 480x832 and of 720x1280
MODELS: dict[str, Shape] = {
    "wan-1.3b": Shape(12, 128, _VIDEO),
    "wan-14b": Shape(40, 128, _VIDEO),
    "qwen-image": Shape(24, 128, (4096, 6032, 6348, 6534, 6889)),  # its five aspect ratios, without text
    "z-image": Shape(30, 128, (4096, 16384)),  # 1024x1024 and 2048x2048, without caption
}


@dataclass(frozen=True)
class Preset:
    """Shapes to run, and more of them where there are GPUs."""

    shapes: tuple[Shape, ...]
    gpu_shapes: tuple[Shape, ...] = ()


PRESETS: dict[str, Preset] = {
    "dit": Preset((Shape(40, 128, (4096, 8192, 16384, 32760, 75600)),)),
    "quick": Preset((Shape(8, 64, (509, 1024)),), (Shape(40, 128, (4096, 16384)),)),
}


@dataclass(frozen=True)
class Case:
    """One measurement: one method at one shape."""

    method: str
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: str
    component: str
    kernel: str
    transfer: str | None = None  # of the fast methods

    @property
    def workload(self) -> "Case":
        """What cases share that attend to the same tensors: the case without how they are attended to."""
        return replace(self, method="", kernel="", component="", transfer=None)

    def __str__(self) -> str:
        heads = f"H={self.heads}" if self.kv_heads == self.heads else f"H={self.heads}/{self.kv_heads}"
        method = f"{self.method} {self.transfer}" if self.transfer else self.method
        return f"{method} {self.component} S={self.sequence} {heads} D={self.head_dim} B={self.batch} {self.dtype}"


@dataclass(frozen=True)
class Request:
    """What the user asked for, as typed; None where an option was left out.

    Without ``dtype``, GPUs compute in bfloat16 and CPUs in float32.
    """

    methods: tuple[str, ...]
    kernels: tuple[str, ...] = ("auto",)
    transfers: tuple[str, ...] = ("auto",)
    sequences: tuple[int, ...] | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    model: str | None = None
    preset: str | None = None
    batch: int = 1
    dtype: str | None = None
    component: str = "e2e"

    def check(self) -> None:
        """Raises ConfigError for what cannot be meant and UnavailableError for what is not installed."""
        for name, values, known in (
            ("method", self.methods, tuple(METHODS)),
            ("kernel", self.kernels, KERNEL_NAMES),
            ("transfer", self.transfers, TRANSFERS),
            ("component", (self.component,), COMPONENTS),
            ("dtype", (self.dtype,), (None, *DTYPES)),
            ("model", (self.model,), (None, *MODELS)),
            ("preset", (self.preset,), (None, *PRESETS)),
        ):
            _known(name, values, known)
        self._check_one_source_of_shapes()
        for name, count in self._counts():
            if count < 1:
                raise ConfigError(f"--{name} {count} cannot run; give a number of at least 1")
        self._check_heads()
        if self.component == "communication" and "single" in self.methods:
            raise ConfigError("--component communication has nothing to time for method single; leave single out")
        if self.transfers != ("auto",) and not any(METHODS[name].backend == "fast" for name in self.methods):
            raise ConfigError("--transfer belongs to the fast methods, and none was asked for; leave it out")
        for name in self.methods:
            if METHODS[name].backend == "fast" and find_spec("fast_ulysses") is None:
                raise UnavailableError(
                    f"method {name} was asked for, but the CUDA extension fast_ulysses is not installed; "
                    f"run tools/install/setup_fast_cp.sh, or measure {name.replace('fast', 'nccl')}"
                )

    def cases(self, device_type: str) -> list[Case]:
        """Every combination; those of one shape follow each other."""
        dtype = self.dtype or ("float32" if device_type == "cpu" else "bfloat16")
        return [
            Case(
                method=method,
                sequence=sequence,
                heads=shape.heads,
                kv_heads=self.kv_heads or shape.heads,
                head_dim=shape.head_dim,
                batch=self.batch,
                dtype=dtype,
                component=self.component,
                kernel=kernel,
                transfer=transfer,
            )
            for shape in self._shapes(device_type)
            for sequence, kernel, method in product(shape.sequences, self.kernels, self.methods)
            for transfer in (self.transfers if METHODS[method].backend == "fast" else (None,))
        ]

    def _shapes(self, device_type: str) -> tuple[Shape, ...]:
        if self.preset is not None:
            preset = PRESETS[self.preset]
            return preset.shapes + (preset.gpu_shapes if device_type == "cuda" else ())
        if self.model is not None:
            shape = MODELS[self.model]
            return (replace(shape, sequences=self.sequences or shape.sequences),)
        assert self.sequences is not None, "check() comes first"
        return (Shape(self.heads or 40, self.head_dim or 128, self.sequences),)

    def _check_one_source_of_shapes(self) -> None:
        given = {
            "--preset": self.preset,
            "--model": self.model,
            "--sequence": self.sequences,
            "--heads": self.heads,
            "--kv-heads": self.kv_heads,
            "--head-dim": self.head_dim,
        }
        named = [name for name, value in given.items() if value is not None]
        clashes = {"--preset": named[1:], "--model": [n for n in named if n not in ("--model", "--sequence")]}
        if named and named[0] in clashes and clashes[named[0]]:
            raise ConfigError(f"{named[0]} fixes the shape, so {' and '.join(clashes[named[0]])} cannot be given too")
        if not {"--preset", "--model", "--sequence"} & set(named):
            raise ConfigError("there is no sequence length to run; give --sequence, --model or --preset")

    def _check_heads(self) -> None:
        heads, kv_heads = self.heads or 40, self.kv_heads
        if kv_heads is not None and heads % kv_heads:
            raise ConfigError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}; K/V heads must divide it")

    def _counts(self) -> list[tuple[str, int]]:
        optional = [("heads", self.heads), ("kv-heads", self.kv_heads), ("head-dim", self.head_dim)]
        counts = [("sequence", s) for s in self.sequences or ()] + [("batch", self.batch)]
        return counts + [(name, count) for name, count in optional if count is not None]


def _known(what: str, values: Sequence[str | None], known: Sequence[str | None]) -> None:
    for value in values:
        if value not in known:
            choices = ", ".join(name for name in known if name is not None)
            raise ConfigError(f"{what} {value!r} is unknown; choose one of {choices}")
    if len(set(values)) < len(values):
        raise ConfigError(f"--{what} {','.join(map(str, values))} names one twice; give each once")
