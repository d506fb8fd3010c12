"""What can be measured: methods, components, shapes and presets, and one measurement as a case. Imports no torch."""

from dataclasses import dataclass, replace

from chitu_diffusion.parallel.cp.config import CPConfig


@dataclass(frozen=True)
class Method:
    """One row: the session's method and backend; both are None where one GPU computes alone."""

    name: str
    method: str | None = None
    backend: str | None = None

    @property
    def fast(self) -> bool:
        """Whether it needs the CUDA extension; only then there are transfers and plans to choose from."""
        return self.backend == "fast"

    def config(self, kernel: str, transfer: str, plan: str | None) -> CPConfig | None:
        """The session's settings, None where there is no session."""
        if self.method is None or self.backend is None:
            return None
        if self.fast:
            return CPConfig(method=self.method, backend="fast", kernel=kernel, transfer=transfer, plan=plan)
        return CPConfig(method=self.method, backend=self.backend, kernel=kernel)


METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method("single"),
        Method("nccl_agkv", "agkv", "nccl"),
        Method("nccl_ulysses", "ulysses", "nccl"),
        Method("fast_agkv", "agkv", "fast"),
        Method("fast_ulysses", "ulysses", "fast"),
        Method("fast_auto", "auto", "fast"),
    )
}
# of compare: one copy between two GPUs, the ceiling of every transfer
FLAT_COPY = "flat_copy"
COMPONENTS = ("e2e", "communication", "attention")
DTYPES = ("bfloat16", "float16", "float32")
# the names of the kernel table, which imports torch; a test keeps the two equal
KERNEL_NAMES = ("auto", "cute", "cudnn", "flash", "triton", "sdpa")


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
    plan: str | None = None  # likewise, where one was asked for
    masked: bool = False  # whether a mask leaves out some keys of every rank

    @property
    def workload(self) -> "Case":
        """What cases share that attend to the same tensors: the case without how they are attended to."""
        return replace(self, method="", kernel="", component="", transfer=None, plan=None)

    def __str__(self) -> str:
        heads = f"H={self.heads}" if self.kv_heads == self.heads else f"H={self.heads}/{self.kv_heads}"
        method = " ".join(word for word in (label(self.method, self.plan), self.transfer) if word)
        shape = f"S={self.sequence} {heads} D={self.head_dim} B={self.batch} {self.dtype}"
        return f"{method} {self.component} {shape}{' masked' if self.masked else ''}"


def label(method: str, plan: str | None) -> str:
    """A method with the plan that is forced on it, as ``--compare`` takes it."""
    return method if plan is None else f"{method}:{plan}"
