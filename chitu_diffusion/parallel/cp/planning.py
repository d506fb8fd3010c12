"""From an agreed call to its plan: by rule where there is one way, else measured, else as measured before."""

import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from chitu_diffusion.parallel.cp.call import Call
from chitu_diffusion.parallel.cp.config import Choice, CPConfig
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.fast.attention.candidates import candidates
from chitu_diffusion.parallel.cp.fast.attention.cost import Work
from chitu_diffusion.parallel.cp.fast.attention.planner import (
    Candidate,
    Decision,
    as_before,
    choose_kernel,
    decide,
    make_plan,
    serving,
)
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT
from chitu_diffusion.parallel.cp.fast.attention.table import explain
from chitu_diffusion.parallel.cp.fast.attention.wanted import Wanted
from chitu_diffusion.parallel.cp.fast.transport import TRANSFERS, FastTransport, travels
from chitu_diffusion.parallel.cp.layout import Layout, ulysses_degree
from chitu_diffusion.parallel.cp.plan_cache import PlanCache, default_folder
from chitu_diffusion.parallel.cp.signature import Signature
from chitu_diffusion.parallel.cp.transport import Inputs, Transport
from chitu_diffusion.parallel.cp.tuning import PATIENCE_S, Trial, Tuner

KERNELS_MEASURED = 2  # the preferred one, and the next as a check on the preference
# packages whose version may change which plan is fastest
PACKAGES = (
    "torch",
    "nvidia-cudnn-cu13",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "triton",
    "fast-ulysses",
    "chitu-diffusion",
)


class CallPlanner:
    """Plans the calls of one session; ``plan`` is collective."""

    def __init__(
        self, config: CPConfig, wanted: Wanted, transport: Transport, control: ControlChannel, device: torch.device
    ) -> None:
        self._config, self._transport, self._control, self._device = config, transport, control, device
        self._world = control.world
        self._cache = PlanCache(default_folder(os.environ))
        self._wanted = wanted

    def plan(self, signature: Signature, inputs: Inputs, key_mask: torch.Tensor | None) -> Call:
        """The call for inputs of this signature. Raises UnavailableError, on every rank, where none can run."""
        # a kernel may have to be compiled before it can say whether it serves
        needs = signature.kernel_needs(self._device)
        reasons_by_rank = self._control.gather(explain(needs), PATIENCE_S)
        kernel = choose_kernel(self._wanted.kernel or self._config.kernel, reasons_by_rank)
        degrees = self._degrees(signature)
        if not isinstance(self._transport, FastTransport) or not travels(signature.layout(self._world, 1), inputs):
            method, degree = next(iter(degrees.items()))
            only = Candidate(method, degree, self._transport.name, ONE_SHOT, kernel.used)
            return self._call(signature, Decision(only), kernel)
        near = signature.planned_as
        layouts = {method: near.layout(self._world, degree) for method, degree in degrees.items()}
        works = [work_of(near, method, layout) for method, layout in layouts.items()]
        names = serving(reasons_by_rank, kernel)[:KERNELS_MEASURED]
        with_lse = serving(self._control.gather(explain(replace(needs, lse=True)), PATIENCE_S))
        waiting = serving(self._control.gather(explain(replace(needs, arriving=True)), PATIENCE_S))
        named = self._config.transfer or "auto"
        transfers = TRANSFERS if named == "auto" else (named,)
        found = candidates(works, names, with_lse, transfers, self._wanted, waiting)
        return self._call(signature, self._fastest(signature, found, kernel, inputs, key_mask), kernel)

    def _degrees(self, signature: Signature) -> dict[str, int]:
        """The Ulysses degree of every method that may be used."""
        methods = ("agkv", "ulysses") if self._config.method == "auto" else (self._config.method,)
        if not signature.kv_sharded:
            return dict.fromkeys(methods, 1)
        heads, asked = signature.num_kv_heads, self._config.ulysses_degree
        return {m: ulysses_degree(m, self._world, heads, asked if m == "ulysses" else None) for m in methods}

    def _fastest(
        self,
        signature: Signature,
        found: list[Candidate],
        kernel: Choice,
        inputs: Inputs,
        key_mask: torch.Tensor | None,
    ) -> Decision:
        if len(found) == 1:
            return Decision(found[0], "the only way that was asked for")
        by_name = {candidate.name: candidate for candidate in found}
        question = {**self._question(signature.planned_as), "candidates": sorted(by_name)}
        mine = self._cache.find(question, by_name) if self._control.rank == 0 else None
        kept = self._control.gather(mine, PATIENCE_S)[0]
        if kept is not None:
            return as_before(kept, by_name)
        assert isinstance(self._transport, FastTransport)
        trials = [Trial(candidate, self._call(signature, Decision(candidate), kernel)) for candidate in found]
        measured = Tuner(self._transport, self._control).measure(trials, inputs, key_mask)
        decided = decide(found, measured)
        if self._control.rank == 0:
            slowest = {
                name: max(float(ms[name]) for ms in measured)
                for name in by_name
                if all(isinstance(ms.get(name), float) for ms in measured)
            }
            self._cache.keep(question, decided.used.name, slowest)
        return decided

    def _call(self, signature: Signature, decided: Decision, kernel: Choice) -> Call:
        layout = signature.layout(self._world, decided.used.ulysses_degree)
        plan = make_plan(
            decided.used,
            world=self._world,
            kernel=kernel,
            why=decided.why,
            rejected=decided.rejected,
            bytes_received=signature.bytes_received(self._world),
            ms=decided.ms,
        )
        return Call(layout, plan, signature.scale)

    def _question(self, signature: Signature) -> dict[str, Any]:
        """What the fastest plan depends on, in plain values."""
        config = self._config
        return {
            "call": str(signature),
            "world": self._world,
            "asked": [config.method, config.ulysses_degree, config.kernel, config.transfer, str(self._wanted)],
            "gpu": torch.cuda.get_device_name(self._device),
            "link": self._transport.link() if isinstance(self._transport, FastTransport) else None,
            "sms": torch.cuda.get_device_properties(self._device).multi_processor_count,
            "cuda": torch.version.cuda,
            "versions": {name: _version(name) for name in PACKAGES},
        }


def work_of(signature: Signature, method: str, layout: Layout) -> Work:
    """The share of the busiest rank."""
    ranks, size = range(layout.world), signature.dtype.itemsize
    row = signature.head_dim * size
    moved_in = max(sum(m.elements for m in layout.moves_in(r) if m.dst == r != m.src) for r in ranks)
    moved_out = max(sum(m.elements for m in layout.moves_out(r) if m.dst == r != m.src) for r in ranks)
    return Work(
        method=method,
        ulysses_degree=layout.degree,
        batch=signature.batch,
        q_rows=max(layout.q_rows(r) for r in ranks),
        kv_rows=layout.kv_rows,
        num_heads=max(layout.q_heads(r).size for r in ranks),
        num_kv_heads=max(layout.kv_heads(r).size for r in ranks),
        head_bytes=row,
        bytes_in=moved_in * row * signature.batch,
        bytes_out=moved_out * row * signature.batch,
        least_own_rows=min(span.size for span in layout.shards),
        text_queries=layout.text_queries,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
