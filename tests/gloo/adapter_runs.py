"""What the ranks of the worker pool do with tiny transformers: one process's output, then the wrapped one's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from tests.gloo.checks import error
from tests.support import pool
from tests.support.pool import Worker
from tests.support.tiny_models import Case, inputs_for, model_for, output

# diffusers takes seconds to import: the server that the workers are forked from does it for all of them, and nobody
# does where these tests are not collected
pool.PRELOAD.append("tests.support.tiny_pipelines")

Sabotage = Callable[[Adapter], None]


@dataclass(frozen=True)
class Run:
    """One case on one rank. ``error`` is a share of the largest value, or of 1 where that is less."""

    error: float
    restored: bool  # the output after detach, processors, hooks and forward are what they were


@cache
def one_process(case: Case) -> torch.Tensor:
    """The output of the model as diffusers made it."""
    return output(model_for(case), inputs_for(case))


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything that an adapter could have left behind."""
    return {
        name: (
            id(getattr(module, "processor", None)),
            len(module._forward_pre_hooks),
            len(module._forward_hooks),
            len(module._forward_pre_hooks_with_kwargs),
            "forward" in vars(module),
            sorted(vars(module)),
        )
        for name, module in model.named_modules()
    }


def run_case(worker: Worker, method: str, case: Case, sabotage: Sabotage = lambda adapter: None) -> Run:
    """One forward over the ranks of ``worker``, compared with one process."""
    model, wanted = model_for(case), one_process(case)
    before = traces(model)
    adapter = adapter_class(model)(model, worker.session(CPConfig(method, timeout_s=30)))
    sabotage(adapter)
    adapter.attach()
    try:
        got = output(model, inputs_for(case))
    finally:
        adapter.detach()
    restored = traces(model) == before and torch.equal(output(model, inputs_for(case)), wanted)
    return Run(error(got, wanted), restored)


def run_cases(worker: Worker, method: str, cases: list[Case]) -> list[Run]:
    """Several cases in one trip to the workers."""
    return [run_case(worker, method, case) for case in cases]
