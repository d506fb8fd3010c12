"""How a model is split between ranks: from what the command line, the environment and a stage file say to one answer.

Everything here is pure. The command line counts more than the environment, the environment more than the file, the file
more than the default. Two names for one thing in one place must agree; the transport of a method that is not used is an
error, not something to ignore.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chitu_diffusion.parallel.cp.config import BACKENDS, METHODS, Choice, Rejected
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError

DEFAULT = "default"
TRANSPORT_OF = {"agkv": "agkv_transport", "ulysses": "ulysses_transport"}
VARIABLE_OF = {"agkv": "CHITU_AGKV_TRANSPORT", "ulysses": "CHITU_ULYSSES_TRANSPORT"}
# older names of backends; auto is fast where it can run and nccl elsewhere
TRANSPORTS = {"auto": "auto", "torch": "nccl", "nccl": "nccl", "native": "nccl", "fast": "fast"}
OPTIONS = {
    "method": "--cp-method",
    "backend": "--cp-backend",
    "cp_size": "--cp-size",
    "cfg_parallel": "--cfg-parallel",
    "attention_mode": "--attention-mode",
    "agkv_transport": "--agkv-transport",
    "ulysses_transport": "--ulysses-transport",
}
KEYS = {
    "method": "parallelism.cp.method",
    "backend": "parallelism.cp.backend",
    "cp_size": "parallelism.cp.world_size",
    "cfg_parallel": "parallelism.cfg",
    "attention_mode": "attention_mode",
    "agkv_transport": "agkv_transport",
    "ulysses_transport": "ulysses_transport",
}


@dataclass(frozen=True)
class Setting[T]:
    """A value, and the name under which it was given: an option, a variable, a key of a file, or ``default``."""

    value: T
    origin: str


@dataclass(frozen=True)
class ParallelConfig:
    """What was asked for. ``backend`` is nccl, fast, or auto: fast where it can run.

    ``cp_size`` and ``cfg_parallel`` are None where nobody said anything, and what there is decides.
    """

    method: Setting[str]
    backend: Setting[str]
    cp_size: Setting[int | None]
    cfg_parallel: Setting[bool | None]


@dataclass(frozen=True)
class _Place:
    """One place that was read: how it calls the settings, and the values that it gives."""

    labels: Mapping[str, str]
    values: Mapping[str, object]

    def get(self, name: str) -> Setting[object] | None:
        value = self.values.get(name)
        return None if value is None else Setting(value, self.labels[name])


def resolve_parallel_config(
    options: Mapping[str, object], environ: Mapping[str, str], stage: Mapping[str, object] | None = None
) -> ParallelConfig:
    """The settings with their origin.

    Args:
        options: what was typed, by the names of ``OPTIONS``; None is the same as nothing.
        environ: the environment; an empty variable is the same as none.
        stage: what a stage file says, by the names of ``KEYS``.

    Raises:
        ConfigError: an unknown value, names that contradict each other (it tells both), or the transport of another
            method than the one that is used.

    """
    places = (_Place(OPTIONS, options), _Place(KEYS, stage or {}))
    method = _method(places)
    _refuse_other_transports(places, method)
    cp_size = _plain(places, "cp_size", int)
    if cp_size.value is not None and cp_size.value < 1:
        raise ConfigError(f"{cp_size.origin} {cp_size.value} cannot be; give a number of ranks of at least 1")
    return ParallelConfig(
        method=method,
        backend=_backend(places, environ, method.value),
        cp_size=cp_size,
        cfg_parallel=_plain(places, "cfg_parallel", bool),
    )


def choose_backend(wanted: Setting[str], why_not_fast: Sequence[str | None]) -> Choice:
    """``wanted`` to the backend that runs, from why each rank could not run fast (None: it could).

    Raises UnavailableError where fast was asked for by name and some rank cannot run it.
    """
    asked = "the default" if wanted.origin == DEFAULT else f"asked for by {wanted.origin}"
    lacking = [f"on rank {rank} {reason}" for rank, reason in enumerate(why_not_fast) if reason is not None]
    if wanted.value == "nccl":
        return Choice("nccl", "nccl", asked)
    if not lacking:
        return Choice(wanted.value, "fast", asked)
    if wanted.value == "fast":
        raise UnavailableError(f"{wanted.origin} asks for backend fast, but {lacking[0]}")
    return Choice("auto", "nccl", f"{wanted.origin} is auto, and {lacking[0]}", (Rejected("fast", lacking[0]),))


def _method(places: Sequence[_Place]) -> Setting[str]:
    for place in places:
        given = [_known(found, METHODS) for name in ("method", "attention_mode") if (found := place.get(name))]
        if given:
            return _agreed(given)
    return Setting("agkv", DEFAULT)


def _backend(places: Sequence[_Place], environ: Mapping[str, str], method: str) -> Setting[str]:
    typed, stage = (_backends(place, method) for place in places)
    variable = VARIABLE_OF[method]
    value = environ.get(variable)
    environment = [_transport(Setting(value, variable), method)] if value else []
    for given in (typed, environment, stage):
        if given:
            return _agreed(given)
    return Setting("nccl", DEFAULT)


def _backends(place: _Place, method: str) -> list[Setting[str]]:
    new, old = place.get("backend"), place.get(TRANSPORT_OF[method])
    return [*([_known(new, BACKENDS)] if new else []), *([_transport(old, method)] if old else [])]


def _refuse_other_transports(places: Sequence[_Place], method: Setting[str]) -> None:
    for other in METHODS:
        for place in places:
            found = place.get(TRANSPORT_OF[other])
            if found is not None and other != method.value:
                raise ConfigError(
                    f"{found.origin} {found.value} belongs to method {other}, but the method is {method.value} "
                    f"({method.origin}); leave one of them out"
                )


def _transport(given: Setting[object], method: str) -> Setting[str]:
    """An older name of a transport, in any spelling, as a backend."""
    known = TRANSPORTS | {f"fast_{method}": "fast"}
    name = str(given.value).strip().lower().replace("-", "_")
    return Setting(known[_known(Setting(name, given.origin), known).value], given.origin)


def _known(given: Setting[object], choices: Sequence[str] | Mapping[str, str]) -> Setting[str]:
    if given.value not in choices:
        raise ConfigError(f"{given.origin} {given.value!r} is unknown; choose one of {', '.join(choices)}")
    return Setting(str(given.value), given.origin)


def _agreed(given: Sequence[Setting[str]]) -> Setting[str]:
    first, *others = given
    for other in others:
        if other.value != first.value:
            raise ConfigError(
                f"{first.origin} says {first.value} and {other.origin} says {other.value}; leave one of them out"
            )
    return first


def _plain[T](places: Sequence[_Place], name: str, kind: type[T]) -> Setting[T | None]:
    for place in places:
        found = place.get(name)
        if found is not None:
            if type(found.value) is not kind:
                raise ConfigError(f"{found.origin} {found.value!r} is no {kind.__name__}")
            return Setting(found.value, found.origin)
    return Setting(None, DEFAULT)
