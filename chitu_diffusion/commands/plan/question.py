"""What is asked of `chitu plan`, checked without torch."""

from dataclasses import asdict, dataclass
from pathlib import Path

from chitu_diffusion.parallel.cp.config import METHODS
from chitu_diffusion.parallel.cp.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
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


def check_output(path: Path) -> None:
    """Raises ConfigError, before anything is measured, where the file could not be written."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise ConfigError(f"--json {path} {what}; give the name of a file in a folder that is there")
