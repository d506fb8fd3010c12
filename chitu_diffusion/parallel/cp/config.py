"""What a user asks for, checked, and the record of every choice made from it."""

from dataclasses import dataclass

from chitu_diffusion.parallel.cp.errors import ConfigError

METHODS = ("agkv", "ulysses")
BACKENDS = ("nccl", "fast")
TRANSFERS = ("auto", "ce", "sm", "tma")


@dataclass(frozen=True)
class Rejected:
    """One candidate that was not taken, and why; ``ms`` is how many milliseconds it took, None where it has no time."""

    name: str
    reason: str
    ms: float | None = None


@dataclass(frozen=True)
class Choice:
    """What was asked for, what is used, why, and what was turned down.

    ``ms`` is how many milliseconds the used one took, None where nothing was measured.
    """

    requested: str
    used: str
    reason: str
    rejected: tuple[Rejected, ...] = ()
    ms: float | None = None


@dataclass(frozen=True)
class CPConfig:
    """Settings of one context-parallel session.

    ``method`` is ``agkv`` (keep Q, gather K and V), ``ulysses`` (all-to-all by heads), or under ``fast`` also
    ``auto``, for the faster of the two at the first call of a shape. ``backend`` is ``nccl``
    (torch.distributed: NCCL on GPUs, gloo on CPUs) or ``fast`` (the CUDA extension). ``ulysses_degree`` forces the
    number of ranks that split the heads; the rest of the group gathers K and V. ``kernel`` is ``auto`` or a row of
    the kernel table. ``transfer`` is what moves bytes under ``fast``: copy engines, SMs, TMA, or the fastest of
    them, measured at the first call of a shape; None leaves it to the environment (``environment.default_transfer``),
    which a session reads, not this class. ``plan`` forces a plan under ``fast``, or parts of one, by a candidate's name
    such as ``head_pipeline(4)/graph``. ``timeout_s`` limits every wait for another rank, in seconds.
    """

    method: str = "agkv"
    backend: str = "nccl"
    ulysses_degree: int | None = None
    kernel: str = "auto"
    transfer: str | None = None
    plan: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        _one_of("method", self.method, (*METHODS, "auto"))
        _one_of("backend", self.backend, BACKENDS)
        if self.transfer is not None:
            _one_of("transfer", self.transfer, TRANSFERS)
        if self.ulysses_degree is not None and self.method != "ulysses":
            raise ConfigError(
                f"ulysses_degree={self.ulysses_degree} belongs to method ulysses, but the method is {self.method}; "
                "leave it out or choose ulysses"
            )
        if self.backend != "fast" and (self.method == "auto" or self.plan is not None):
            what = "method auto" if self.method == "auto" else f"plan {self.plan}"
            raise ConfigError(f"{what} belongs to backend fast, but the backend is {self.backend}")
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s={self.timeout_s} is not a time limit; give a positive number of seconds")


def _one_of(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{what} {value!r} is unknown; choose one of {', '.join(choices)}")
