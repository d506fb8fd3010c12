"""What a row of the table of peers says, and the signature that all of them share. Imports no torch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol

from chitu_diffusion.parallel.cp.errors import UnavailableError
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.result import Failure

if TYPE_CHECKING:
    import torch

OURS = "ours"  # the kernel of a row that is given the first of our table that serves the call


class MissingError(UnavailableError):
    """A library that is not installed here, or is too old."""

    failure: Failure = "missing"


class RefusedError(UnavailableError):
    """A library that does not take this shape, this number of ranks, or this device."""

    failure: Failure = "refused"


class Attend(Protocol):
    """A kernel that a library is given: q (B, Sq, H, D), k and v (B, Sk, H, D) → the output, and its log-sum-exp.

    The log-sum-exp is (B, H, Sq) float32, None unless asked for. ``key_mask`` is (B, Sk) bool, True where attended to.
    """

    def __call__(
        self,
        q: "torch.Tensor",
        k: "torch.Tensor",
        v: "torch.Tensor",
        *,
        key_mask: "torch.Tensor | None" = None,
        return_lse: bool = False,
    ) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """Attention over keys that are all there."""


class Call(Protocol):
    """A library's call: this rank's q, k, v (B, S_local, H, D) → its rows of the output, in the same shape.

    ``key_mask`` is this rank's part of the mask (B, S_local) bool, or the whole one (B, S), None where there is none.
    """

    def __call__(
        self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", key_mask: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """Context-parallel attention; collective."""


@dataclass(frozen=True)
class Setting:
    """What a library is prepared for.

    ``kernel`` is its own, by one of the row's names; where ``attend`` is given, it computes instead.
    """

    rank: int
    world: int
    device: "torch.device"
    kernel: str
    tokens: int
    attend: Attend | None = None


@dataclass(frozen=True)
class Prepared:
    """A library that is ready: its call, and what must be in force around it (entered once for many calls)."""

    call: Call
    active: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Peer:
    """One way to run one library.

    ``method`` says what travels: agkv or ring (every rank receives all K and V), ulysses, or unified. ``kernels`` are
    the library's own by name, its best first, and OURS where a caller may pass one. ``needs`` are sentences about what
    the call must be, and the keys of NEEDS. With ``whole_mask`` every rank gives it the mask of all keys, else
    of its own. ``group`` says how it is installed.
    """

    name: str
    package: str
    oldest: str
    method: str
    kernels: tuple[str, ...]
    prepare: Callable[[Setting], Prepared]
    needs: tuple[str, ...] = ()
    whole_mask: bool = False
    group: str = "uv sync --inexact --group peers"

    def installed_version(self) -> str:
        """As installed. Raises MissingError where it is not, or is older than what was tried."""
        try:
            found = version(self.package)
        except PackageNotFoundError as error:
            raise MissingError(f"{self.package} is not installed ({self.group})") from error
        if _numbers(found) < _numbers(self.oldest):
            raise MissingError(f"{self.package} {found} is too old: this is how {self.oldest} and later are called")
        return found

    def check(self, case: Case, world: int, device_type: str) -> None:
        """Raises RefusedError for a call that the library is known not to take, and MissingError without it."""
        self.installed_version()
        for need in self.needs:
            if not NEEDS[need](case, world, device_type):
                raise RefusedError(f"{self.name} {need} (S={case.sequence}, H={case.heads}, {world} ranks)")


# libraries that are called with another shape do not always say so: they hang, or write where they should not
NEEDS: dict[str, Callable[[Case, int, str], bool]] = {
    "takes equal parts of the sequence only": lambda case, world, device: case.sequence % world == 0,
    "takes head counts that the ranks divide only": lambda case, world, device: case.heads % world == 0,
    "takes at least as many heads as ranks": lambda case, world, device: case.heads >= world,
    "takes no key mask": lambda case, world, device: not case.masked,
    "needs four ranks, to split them in two ways": lambda case, world, device: world >= 4 and world % 2 == 0,
    "runs on GPUs only": lambda case, world, device: device == "cuda",
}
EQUAL, HEADS, ENOUGH_HEADS, UNMASKED, FOUR, GPUS = NEEDS


def _numbers(text: str) -> tuple[int, ...]:
    """``0.6.3.post1`` as numbers; what is no number ends it."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
