"""What the user asks for: checked without torch, so bad input answers fast, and turned into cases."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product

from chitu_diffusion.parallel.cp.config import TRANSFERS
from chitu_diffusion.parallel.cp.environment import FAST_TRANSFER
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError
from tools.benchmarks.fast_cp_frameworks.cases import (
    COMPONENTS,
    DTYPES,
    KERNEL_NAMES,
    METHODS,
    MODELS,
    PRESETS,
    Case,
    Shape,
)


@dataclass(frozen=True)
class Way:
    """A method, and the plan that is forced on it where one was asked for."""

    method: str
    plan: str | None = None


@dataclass(frozen=True)
class Request:
    """What the user asked for, as typed; None where an option was left out.

    Without ``dtype``, GPUs compute in bfloat16 and CPUs in float32; without ``transfers``, the fast methods use
    ``default_transfer``. ``compare`` names two ways in place of ``methods`` and ``plans``.
    """

    methods: tuple[str, ...] | None = None
    kernels: tuple[str, ...] = ("auto",)
    transfers: tuple[str, ...] | None = None
    plans: tuple[str, ...] | None = None
    compare: tuple[str, str] | None = None
    default_transfer: str = "auto"
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
            ("method", self.methods or (), tuple(METHODS)),
            ("kernel", self.kernels, KERNEL_NAMES),
            ("transfer", self.transfers or (), TRANSFERS),
            ("component", (self.component,), COMPONENTS),
            ("dtype", (self.dtype,), (None, *DTYPES)),
            ("model", (self.model,), (None, *MODELS)),
            ("preset", (self.preset,), (None, *PRESETS)),
        ):
            _known(name, values, known)
            _once(name, values)
        _once("plan", self.plans or ())
        self._check_one_source_of_ways()
        self._check_one_source_of_shapes()
        for name, count in self._counts():
            if count < 1:
                raise ConfigError(f"--{name} {count} cannot run; give a number of at least 1")
        self._check_heads()
        self._check_ways()

    @property
    def ways(self) -> list[Way]:
        """What runs at every shape, in turn. Raises ConfigError where ``compare`` cannot be read."""
        if self.compare is not None:
            return [parse_way(text) for text in self.compare]
        plans: tuple[str | None, ...] = self.plans or (None,)
        return [Way(m, plan) for m in self.methods or () for plan in (plans if METHODS[m].fast else (None,))]

    @property
    def needs_extension(self) -> bool:
        """Whether a fast method is among them."""
        return any(METHODS[way.method].fast for way in self.ways)

    def cases(self, device_type: str) -> list[Case]:
        """Every combination; those of one shape follow each other."""
        dtype = self.dtype or ("float32" if device_type == "cpu" else "bfloat16")
        return [
            Case(
                method=way.method,
                sequence=sequence,
                heads=shape.heads,
                kv_heads=self.kv_heads or shape.heads,
                head_dim=shape.head_dim,
                batch=self.batch,
                dtype=dtype,
                component=self.component,
                kernel=kernel,
                transfer=transfer,
                plan=way.plan,
            )
            for shape in self._shapes(device_type)
            for sequence, kernel, way in product(shape.sequences, self.kernels, self.ways)
            for transfer in (self._transfers() if METHODS[way.method].fast else (None,))
            if _fits(way.plan, kernel, transfer)
        ]

    def _transfers(self) -> tuple[str, ...]:
        return (self.default_transfer,) if self.transfers is None else self.transfers

    def _shapes(self, device_type: str) -> tuple[Shape, ...]:
        if self.preset is not None:
            preset = PRESETS[self.preset]
            return preset.shapes + (preset.gpu_shapes if device_type == "cuda" else ())
        if self.model is not None:
            shape = MODELS[self.model]
            return (replace(shape, sequences=self.sequences or shape.sequences),)
        assert self.sequences is not None, "check() comes first"
        return (Shape(self.heads or 40, self.head_dim or 128, self.sequences),)

    def _check_one_source_of_ways(self) -> None:
        if self.compare is None:
            if self.methods is None:
                raise ConfigError("there is nothing to run; give --method, or two plans with --compare")
            return
        for name, value in (("--method", self.methods), ("--plan", self.plans)):
            if value is not None:
                raise ConfigError(f"--compare names methods and plans itself, so {name} cannot be given too")
        for name, values in (("--kernel", self.kernels), ("--transfer", self.transfers or ())):
            if len(values) > 1:
                raise ConfigError(f"--compare takes one {name} for both; name kernel and transfer in the two plans")

    def _check_ways(self) -> None:
        ways = self.ways
        if self.component == "communication" and any(way.method == "single" for way in ways):
            raise ConfigError("--component communication has nothing to time for method single; leave single out")
        for name, value in (("transfer", self.transfers), ("plan", self.plans)):
            if value is not None and not self.needs_extension:
                raise ConfigError(f"--{name} belongs to the fast methods, and none was asked for; leave it out")
        for way in ways:
            self._check_plan(way)
        for way in ways:
            if METHODS[way.method].fast and find_spec("fast_ulysses") is None:
                raise UnavailableError(
                    f"method {way.method} was asked for, but the CUDA extension fast_ulysses is not installed; "
                    "run tools/install/setup_fast_cp.sh, or measure nccl_agkv or nccl_ulysses"
                )

    def _check_plan(self, way: Way) -> None:
        if way.plan is None:
            return
        if not METHODS[way.method].fast:
            raise ConfigError(f"plan {way.plan!r} belongs to the fast methods, and {way.method} is none; leave it out")
        try:
            fits = any(_fits(way.plan, *asked) for asked in product(self.kernels, self._transfers()))
        except ConfigError as error:
            what = "is neither a method nor a plan" if self.compare else "cannot be read"
            raise ConfigError(f"{way.plan!r} {what}: {error}") from error
        if not fits:
            raise ConfigError(
                f"plan {way.plan!r} names another kernel or transfer than --kernel, --transfer or {FAST_TRANSFER} "
                "allow; name each in one place"
            )

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


def parse_way(text: str) -> Way:
    """``nccl_agkv``, ``fast_agkv:ce/one_shot``, or a plan by itself, which is fast_auto's."""
    method, _, plan = text.partition(":")  # a schedule may hold a colon too, but no method begins a schedule
    return Way(method, plan or None) if method in METHODS else Way("fast_auto", text)


def _fits(plan: str | None, kernel: str, transfer: str | None) -> bool:
    """Whether ``plan`` allows what was asked for beside it. Raises ConfigError where the plan cannot be read."""
    if plan is None:
        return True
    # as the session reads it: takes torch, which bad input of other kinds must not wait for
    from chitu_diffusion.parallel.cp.fast.attention.wanted import parse_wanted

    wanted = parse_wanted(plan)
    pairs = ((wanted.kernel, kernel), (wanted.transfer, transfer))
    return all(named is None or asked in ("auto", named) for named, asked in pairs)


def _known(what: str, values: Sequence[str | None], known: Sequence[str | None]) -> None:
    for value in values:
        if value not in known:
            choices = ", ".join(name for name in known if name is not None)
            raise ConfigError(f"{what} {value!r} is unknown; choose one of {choices}")


def _once(what: str, values: Sequence[str | None]) -> None:
    if len(set(values)) < len(values):
        raise ConfigError(f"--{what} {','.join(map(str, values))} names one twice; give each once")
