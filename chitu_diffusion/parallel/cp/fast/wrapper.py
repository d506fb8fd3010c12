"""Context parallelism for a diffusers script in three lines: ``with enable_fast_cp(pipeline): pipeline(...)``."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chitu_diffusion.parallel.cp.config import Choice, CPConfig
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import ConfigError, DisagreementError
from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter
from chitu_diffusion.parallel.cp.fast.adapters.block_graphs import BlockGraphs
from chitu_diffusion.parallel.cp.fast.adapters.overlapped import OverlappedPath
from chitu_diffusion.parallel.cp.fast.adapters.paths import Paths
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from chitu_diffusion.parallel.cp.fast.backend import Backend, open_backend
from chitu_diffusion.parallel.cp.fast.transport import FastTransport
from chitu_diffusion.parallel.cp.recorder import GraphRecorder

TRANSFORMERS = ("transformer", "transformer_2")  # what pipelines call them; Wan 2.2 has two
PREPARE_CALLS = 3  # the first one plans and compiles, the second one is timed, the third one captures CUDA graphs


class FastCPHandle:
    """What ``enable_fast_cp`` has turned on; ``close()``, or the end of a ``with`` block, turns it off.

    ``choice`` says which backend was requested, which is used, and why; ``profile`` what is known of this hardware,
    under ``fast``. ``block_choices`` says the same as ``choice`` for the attention of the blocks that ran so far;
    ``region_choices`` how the overlapped ones run, and ``session.calls`` how the others do.
    """

    def __init__(
        self, target: object, backend: Backend, paths: Paths, adapters: Sequence[Adapter], ends: ExitStack
    ) -> None:
        self.choice, self.session, self.profile = backend.choice, backend.session, backend.profile
        self._target, self._backend, self._paths, self._ends = target, backend, paths, ends
        self._adapters = tuple(adapters)
        self._control = ControlChannel(self.session.group, self.session.config.timeout_s)

    @property
    def block_choices(self) -> tuple[Choice, ...]:
        """One entry for each way in which blocks ran."""
        return self._paths.choices

    @property
    def region_choices(self) -> dict[str, Choice]:
        """By shape: the plan of the overlapped region, why, and the others that were measured."""
        return {shape: choice for path in self.overlapped for shape, choice in path.choices.items()}

    @property
    def block_graphs(self) -> tuple[str, ...]:
        """For each kind of inputs that the blocks were called with, the latest last: ``graphs`` where they run as CUDA
        graphs, else why they do not.
        """
        told = [adapter.graphs.told for adapter in self._adapters if adapter.graphs is not None]
        return tuple(state for states in told for state in states)

    @property
    def overlapped(self) -> tuple[OverlappedPath, ...]:
        """The path that overlaps projections with transfers, where there is one."""
        return self._backend.overlapped

    @torch.no_grad()
    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Call the pipeline, or the transformer, with these inputs, so that later calls of their shapes only run.

        Collective. It sizes the windows, measures plans, compiles kernels and warms up. A call with other shapes
        prepares itself when it comes. Raises DisagreementError, within ``timeout_s``, where another rank does not
        prepare, or prepares something else.
        """
        mine = str((args_shape(args), args_shape(kwargs)))
        for rank, other in enumerate(everyone := self._control.gather(mine)):
            if other != everyone[0]:
                raise DisagreementError(
                    f"the ranks prepare for different inputs: rank 0 for {everyone[0]}, rank {rank} for {other}; "
                    "give every rank the same"
                )
        assert callable(self._target), "pipelines and modules are"
        for _ in range(PREPARE_CALLS):
            self._target(*args, **kwargs)

    def close(self) -> None:
        """Give the model back as it was, and end the session. Collective; the second time it does nothing."""
        self._ends.close()

    def __enter__(self) -> "FastCPHandle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.__exit__(kind, error, trace)


def enable_fast_cp(
    pipeline_or_transformer: object,
    cp_group: dist.ProcessGroup | None = None,
    method: str = "agkv",
    backend: str = "fast",
    *,
    strict: bool = False,
    pool_bytes: int | None = None,
    timeout_s: float = 10.0,
) -> FastCPHandle:
    """Split the tokens of a diffusers pipeline's transformers, or of one transformer, between the ranks of a group.

    Collective. Every rank has loaded the same model and calls it with the same inputs and the same seed; every rank
    gets the whole result.

    Args:
        pipeline_or_transformer: a pipeline with ``transformer`` or ``transformer_2``, or a transformer itself: Wan,
            Qwen-Image or Z-Image, within ``torch.compile`` or not.
        cp_group: the ranks that share a sequence; by default all ranks.
        method: ``agkv``, ``ulysses`` or, under ``fast``, ``auto``.
        backend: ``fast`` (the CUDA extension) or ``nccl`` (torch.distributed; gloo on CPUs).
        strict: whether it is an error where ``fast`` cannot serve. Without it torch.distributed serves instead, and
            the handle and the log say why.
        pool_bytes: symmetric memory of each GPU under ``fast``, for what arrives: by default a twentieth of the GPU's.
            The README says how much is enough.
        timeout_s: limit of every wait for another rank, in seconds.

    Raises:
        ConfigError, UnavailableError, DisagreementError: one sentence that says what to do.

    """
    config = CPConfig(method=method, backend=backend, timeout_s=timeout_s)
    models = _transformers_of(pipeline_or_transformer)
    classes = [adapter_class(model) for model in models]
    for model, adapter_of in zip(models, classes, strict=True):
        adapter_of.check(model)
    with ExitStack() as ends:
        opened = open_backend(config, cp_group, strict, pool_bytes, ends)
        paths = Paths(opened.paths, strict=strict, quiet=opened.session.rank != 0)
        adapters: list[Adapter] = []
        for model, adapter_of in zip(models, classes, strict=True):
            adapter = adapter_of(model, opened.session, paths)
            adapter.graphs = _graphs_of(adapter, paths)
            adapters.append(adapter)
            ends.callback(adapter.detach)
            adapter.attach()
        ends = ends.pop_all()
    return FastCPHandle(pipeline_or_transformer, opened, paths, adapters, ends)


def _graphs_of(adapter: Adapter, paths: Paths) -> BlockGraphs | None:
    """What may run an adapter's blocks as CUDA graphs; None where torch.distributed carries them."""
    transport = adapter.session.transport
    if not isinstance(transport, FastTransport):
        return None

    def unfit() -> str | None:
        used = {choice.used for choice in paths.choices} - {OverlappedPath.name, FastTransport.name}
        return f"blocks run over {', '.join(sorted(used))}" if used else None

    return BlockGraphs(list(getattr(adapter.model, adapter.blocks)), GraphRecorder(transport), unfit)


def args_shape(value: Any) -> Any:
    """Inputs in plain values that ranks can compare: tensors as shape and dtype, objects as their class."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, dict):
        return {name: args_shape(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [args_shape(item) for item in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def _transformers_of(target: object) -> list[nn.Module]:
    if isinstance(target, nn.Module):
        return [_itself(target)]
    found = [getattr(target, name, None) for name in TRANSFORMERS]
    models = [_itself(model) for model in found if isinstance(model, nn.Module)]
    if not models:
        raise ConfigError(
            f"enable_fast_cp takes a diffusers pipeline with a transformer, or a transformer; {type(target).__name__} "
            f"has no {' or '.join(TRANSFORMERS)}"
        )
    return models


def _itself(model: nn.Module) -> nn.Module:
    """The transformer within what ``torch.compile`` made of it, which calls it with its hooks; else ``model``."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model
