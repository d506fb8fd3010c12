"""What is asked of `chitu plan`, checked without torch."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from chitu_diffusion.parallel.cp.config import METHODS
from chitu_diffusion.parallel.cp.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
MODELLED_DTYPES = ("bfloat16", "float16")  # of the kernels whose rate the cost model knows
MOST_RANKS = 8
ANY_METHOD = ("auto", *METHODS)


@dataclass(frozen=True)
class Question:
    """One attention call, ``sequence`` tokens on all ranks together, and the method that may serve it."""

    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: str
    method: str

    def check(self, cp_size: int | None) -> None:
        """Raises ConfigError for what cannot be meant."""
        counts = {name: value for name, value in asdict(self).items() if isinstance(value, int)}
        for name, count in counts.items():
            if count < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {count} cannot be; give a number of at least 1")
        if cp_size is not None and cp_size < 2:
            raise ConfigError(f"--cp-size {cp_size} leaves nothing to plan, since nothing travels; give 2 or more")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}; K/V heads must divide it"
            )
        for name, value, known in (("dtype", self.dtype, DTYPES), ("method", self.method, ANY_METHOD)):
            if value not in known:
                raise ConfigError(f"--{name} {value!r} is unknown; choose one of {', '.join(known)}")

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.sequence} tokens, {heads} heads of {self.head_dim}, batch {self.batch}, {self.dtype}"


@dataclass(frozen=True)
class Machine:
    """GPUs that need not be at hand; what is None is left open: as many as are here, and the rates of an H200.

    ``link_gbs`` is what each receives from all others together while it sends as much, in 1e9 bytes per second;
    ``kernel_tflops`` is what its attention kernel reaches on long sequences, in 1e12 operations per second.
    """

    world: int | None = None
    link_gbs: float | None = None
    kernel_tflops: float | None = None

    def check(self, cp_size: int | None) -> None:
        """Raises ConfigError for what cannot be meant."""
        if self.world is not None and not 2 <= self.world <= MOST_RANKS:
            raise ConfigError(f"--world {self.world} is not a number of GPUs of one node; give 2 to {MOST_RANKS}")
        if self.world is not None and cp_size not in (None, self.world):
            raise ConfigError(f"--world {self.world} contradicts --cp-size {cp_size}; give one of them")
        rates = (("link-gbs", self.link_gbs, "GB/s"), ("kernel-tflops", self.kernel_tflops, "TFLOP/s"))
        for name, value, unit in rates:
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"--{name} {value:g} cannot be; give a positive number of {unit}")

    def modelled(self, gpus: int) -> bool:
        """Whether the cost model answers: a rate is given, or ``world`` is more than the ``gpus`` that are here."""
        given = self.link_gbs is not None or self.kernel_tflops is not None
        return given or (self.world is not None and self.world > gpus)


def check_modelled(question: Question, ranks: int) -> None:
    """Raises ConfigError for a call of which the model knows nothing."""
    if question.dtype not in MODELLED_DTYPES:
        known = " or ".join(MODELLED_DTYPES)
        raise ConfigError(f"--dtype {question.dtype} is not in the model, which knows kernels of {known}; choose one")
    if ranks > MOST_RANKS:
        raise ConfigError(f"--cp-size {ranks} is beyond the model, which is of one node; give 2 to {MOST_RANKS}")


def check_output(path: Path) -> None:
    """Raises ConfigError, before anything is measured, where the file could not be written."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise ConfigError(f"--json {path} {what}; give the name of a file in a folder that is there")
