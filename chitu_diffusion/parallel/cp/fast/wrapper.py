"""Context parallelism for a diffusers script in three lines: ``with enable_fast_cp(pipeline): pipeline(...)``."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import torch.distributed as dist
from torch import nn

from chitu_diffusion.parallel.cp.config import Choice, CPConfig, Rejected
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError
from chitu_diffusion.parallel.cp.fast.adapters.paths import Paths, SessionPath
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from chitu_diffusion.parallel.cp.session import CPSession

TRANSFORMERS = ("transformer", "transformer_2")  # what pipelines call them; Wan 2.2 has two

logger = logging.getLogger(__name__)


class FastCPHandle:
    """What ``enable_fast_cp`` has turned on; ``close()``, or the end of a ``with`` block, turns it off.

    ``choice`` says which backend was requested, which is used, and why; ``block_choices`` the same for the attention
    of the blocks that ran so far; ``session.calls`` has the plan of every kind of call.
    """

    def __init__(self, choice: Choice, session: CPSession, paths: Paths, ends: ExitStack) -> None:
        self.choice, self.session = choice, session
        self._paths, self._ends = paths, ends

    @property
    def block_choices(self) -> tuple[Choice, ...]:
        """One entry for each way in which blocks ran."""
        return self._paths.choices

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
) -> FastCPHandle:
    """Split the tokens of a diffusers pipeline's transformers, or of one transformer, between the ranks of a group.

    Collective. Every rank has loaded the same model and calls it with the same inputs and the same seed; every rank
    gets the whole result.

    Args:
        pipeline_or_transformer: a pipeline with ``transformer`` or ``transformer_2``, or a transformer itself: Wan,
            Qwen-Image or Z-Image.
        cp_group: the ranks that share a sequence; by default all ranks.
        method: ``agkv``, ``ulysses`` or, under ``fast``, ``auto``.
        backend: ``fast`` (the CUDA extension) or ``nccl`` (torch.distributed; gloo on CPUs).
        strict: whether it is an error where ``fast`` cannot serve. Without it torch.distributed serves instead, and
            the handle and the log say why.

    Raises:
        ConfigError, UnavailableError, DisagreementError: one sentence that says what to do.

    """
    config = CPConfig(method=method, backend=backend)
    models = _transformers_of(pipeline_or_transformer)
    classes = [adapter_class(model) for model in models]
    for model, adapter_of in zip(models, classes, strict=True):
        adapter_of.check(model)
    with ExitStack() as ends:
        choice, sessions = _open_sessions(config, cp_group, strict, ends)
        session = sessions[0]
        paths = Paths([SessionPath(other) for other in sessions], strict=strict, quiet=session.rank != 0)
        for model, adapter_of in zip(models, classes, strict=True):
            adapter = adapter_of(model, session, paths)
            ends.callback(adapter.detach)
            adapter.attach()
        ends = ends.pop_all()
    return FastCPHandle(choice, session, paths, ends)


def _transformers_of(target: object) -> list[nn.Module]:
    if isinstance(target, nn.Module):
        return [target]
    found = [getattr(target, name, None) for name in TRANSFORMERS]
    models = [model for model in found if isinstance(model, nn.Module)]
    if not models:
        raise ConfigError(
            f"enable_fast_cp takes a diffusers pipeline with a transformer, or a transformer; {type(target).__name__} "
            f"has no {' or '.join(TRANSFORMERS)}"
        )
    return models


def _open_sessions(
    config: CPConfig, group: dist.ProcessGroup | None, strict: bool, ends: ExitStack
) -> tuple[Choice, list[CPSession]]:
    """The session asked for; behind a fast one, another over torch.distributed for blocks that it cannot serve."""
    method = "agkv" if config.method == "auto" else config.method  # auto is measured, and only under fast
    over_collectives = replace(config, method=method, backend="nccl")
    if config.backend != "fast":
        session = ends.enter_context(CPSession(config, group))
        return session.choice, [session]
    try:
        fast = ends.enter_context(CPSession(config, group))
    except UnavailableError as error:
        if strict:
            raise
        session = ends.enter_context(CPSession(over_collectives, group))
        choice = Choice("fast", session.choice.used, str(error), (Rejected("fast", str(error)),))
        if session.rank == 0:
            logger.warning("context parallelism runs over %s: %s", choice.used, choice.reason)
        return choice, [session]
    return fast.choice, [fast, ends.enter_context(CPSession(over_collectives, group))]
