"""The cases of one row on this rank: one GPU, torch.distributed and the fast wrapper in turn, compared and timed."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter
from chitu_diffusion.parallel.cp.fast.adapters.shares import share_of
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from chitu_diffusion.parallel.cp.fast.test import models, report
from chitu_diffusion.parallel.cp.fast.test.report import Record, Side
from chitu_diffusion.parallel.cp.fast.test.rows import Case, Row
from chitu_diffusion.parallel.cp.fast.test.watch import Times, Watch
from chitu_diffusion.parallel.cp.fast.wrapper import FastCPHandle, enable_fast_cp
from chitu_diffusion.parallel.cp.session import CPSession

LAYERS = 2
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # relative
SLACK = 64 << 20  # of the pool, for small windows
TIMEOUT_S = 60.0  # for a rank that compiles what another one has on disk
HEAD_START_CYCLES = 60_000_000  # some 30 ms of the device, in which the host launches the whole forward
WARM_CALLS, SHORT_CALLS, LONG_CALLS, LONG_TOKENS = 3, 9, 3, 20_000


@dataclass(frozen=True)
class Place:
    """Where this rank stands; ``alone`` is a group of itself."""

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype
    group: dist.ProcessGroup
    alone: dist.ProcessGroup
    control: ControlChannel
    facts: dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """One forward: the whole output, and what the first block's attention gave on this rank."""

    output: torch.Tensor
    first: tuple[torch.Tensor, ...]


class RowRun:
    """The cases of one row; ``close`` gives the memory back."""

    def __init__(self, row: Row, place: Place) -> None:
        self.row, self.place = row, place
        self.model = models.build(row, LAYERS, place.device, place.dtype)
        self.inputs = models.inputs_for(row, place.device, place.dtype)
        self.adapter_of: type[Adapter] = adapter_class(self.model)
        self.calls = LONG_CALLS if row.tokens > LONG_TOKENS else SHORT_CALLS
        self.wanted = self._look()
        self.one_gpu = self._one_gpu()

    def close(self) -> None:
        """Free the model and what the allocator keeps."""
        del self.model, self.inputs, self.wanted
        gc.collect()
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, case: Case) -> Record:
        """One method: over torch.distributed, then over the extension."""
        with self._wrapped(case, "nccl") as handle:
            origin = self._side(handle)
        with self._wrapped(case, "fast") as handle:
            if handle.choice.used != "fast":
                return self._judge(Record(case, report.PARTLY, f"Fast: {handle.choice.reason}"), origin, None)
            fast, still = self._side(handle), self._still(handle)
        made = Record(case, report.RIGHT)
        if still is not None:
            made = replace(made, still_ms=still[0], still_queued_ms=still[1])
        return self._judge(made, origin, fast)

    def _judge(self, record: Record, origin: Side, fast: Side | None) -> Record:
        limit = LIMITS[self.place.dtype]
        off = {
            f"{name}'s {what} is off by {error:.1e}, limit {limit:.0e}"
            for name, side in (("NCCL", origin), ("Fast", fast))
            if side is not None
            for what, error in (("attention", side.region_error), ("output", side.output_error))
            if not error <= limit
        }
        status, reason = (report.WRONG, "; ".join(sorted(off))) if off else (record.status, record.reason)
        if status == report.PARTLY and self.place.device.type == "cpu":
            status, reason = report.RIGHT, ""  # nobody asked for the extension there
        facts = {**self.place.facts, "tokens": self.row.tokens, "text": self.row.text, "heads": self.row.heads}
        facts["blocks"] = LAYERS
        return replace(
            record, status=status, reason=reason, facts=facts, one_gpu=self.one_gpu, origin=origin, fast=fast
        )

    def _one_gpu(self) -> Side:
        """Rank 0 computes while the others wait on the host: two GPUs at full load slow each other's clocks."""
        sides: list[Side] = []
        if self.place.rank == 0:
            times = self._timed(together=False)
            sides.append(Side("diffusers", times.region_ms, times.block_ms, 0.0, 0.0, queued_ms=times.queued_ms))
            with ExitStack() as ends:
                session = ends.enter_context(CPSession(CPConfig(), self.place.alone, self.place.device))
                adapter = self.adapter_of(self.model, session)
                ends.callback(adapter.detach)
                adapter.attach()
                seen, times = self._look(), self._timed(together=False)
                plans = {str(name): call.plan.kernel for name, call in session.calls.items()}
                errors = self._errors(seen, session)
                sides.append(
                    Side("one rank", times.region_ms, times.block_ms, *errors, {"kernels": plans}, times.queued_ms)
                )
        told = self.place.control.gather(sides, TIMEOUT_S + 600)[0]
        return min(told, key=lambda side: side.region_ms)

    @contextmanager
    def _wrapped(self, case: Case, backend: str) -> Iterator[FastCPHandle]:
        window = 2 * (self.row.tokens + self.row.text) * self.row.heads * self.row.head_dim * self.place.dtype.itemsize
        pool = 4 * window + SLACK  # two generations, of the region's windows and of the session's
        with enable_fast_cp(
            self.model, self.place.group, case.method, backend, pool_bytes=pool, timeout_s=TIMEOUT_S
        ) as handle:
            handle.prepare(**self.inputs)
            yield handle

    def _side(self, handle: FastCPHandle) -> Side:
        seen = self._look()
        errors = self._errors(seen, handle.session)
        del seen
        times = self._timed(together=True)
        again = relative(models.output(self.model, self.inputs), self.wanted.output)  # as blocks run without hooks
        ranks = self.place.control.gather((times, (errors[0], max(errors[1], again))), TIMEOUT_S)
        worst = [max(rank_errors[i] for _, rank_errors in ranks) for i in range(2)]
        choice = {
            "choice": asdict(handle.choice),
            "blocks": [asdict(choice) for choice in handle.block_choices],
            "regions": {shape: asdict(choice) for shape, choice in handle.region_choices.items()},
            "block_graphs": list(handle.block_graphs),
            "calls": {str(name): call.plan.name for name, call in handle.session.calls.items()},
            "profile": str(handle.profile) if handle.profile else None,
        }
        region, block = (max(getattr(t, name) for t, _ in ranks) for name in ("region_ms", "block_ms"))
        queued = max((t.queued_ms for t, _ in ranks if t.queued_ms is not None), default=None)
        return Side(handle.choice.used, region, block, worst[0], worst[1], choice, queued)

    def _still(self, handle: FastCPHandle) -> tuple[float, float | None] | None:
        """The region's times where nothing travels; None where the session's own way is the fastest.

        Of regions alone: a block without their hooks would be captured as a graph of what is wrong.
        """
        used = [choice.used for choice in handle.region_choices.values()]
        if not handle.overlapped or not used or "project, then attend" in used:
            return None
        with handle.overlapped[0].without_transfer():
            times = self._region_times(together=True)
        return max(self.place.control.gather(times, TIMEOUT_S), key=lambda rank: rank[0])

    def _timed(self, *, together: bool) -> Times:
        region_ms, queued_ms = self._region_times(together=together)
        with self._watch(regions=False) as watch:
            self._call(WARM_CALLS, together)
            return Times(region_ms, self._median(watch, together), queued_ms)

    def _region_times(self, *, together: bool) -> tuple[float, float | None]:
        """Milliseconds of a region, and of the device alone, where that was taken."""
        with self._watch(regions=True) as watch:
            self._call(WARM_CALLS, together)
            region_ms, queued_ms = self._median(watch, together), None
            if self.place.device.type != "cpu" and self.row.tokens <= LONG_TOKENS:
                queued_ms = self._median(watch, together, head_start=True)
        return region_ms, queued_ms

    def _median(self, watch: Watch, together: bool, *, head_start: bool = False) -> float:
        watch.forget()
        self._call(self.calls, together, head_start=head_start)
        return watch.median_ms()

    @contextmanager
    def _watch(self, *, regions: bool) -> Iterator[Watch]:
        watch = Watch(self.model, self.adapter_of, self.place.device, regions=regions)
        try:
            yield watch
        finally:
            watch.close()

    def _call(self, count: int, together: bool, *, head_start: bool = False) -> None:
        for _ in range(count):
            if together:
                dist.barrier(self.place.group)
            if head_start:
                torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            models.output(self.model, self.inputs)

    def _look(self) -> Seen:
        with self._watch(regions=True) as watch:
            watch.keep = True
            made = models.output(self.model, self.inputs)
        assert watch.first is not None
        return Seen(made, watch.first)

    def _errors(self, seen: Seen, session: CPSession) -> tuple[float, float]:
        """Of the first attention's rows of this rank, its text included, and of the whole output."""
        tokens, *text = self.wanted.first
        wanted = [share_of(tokens, 1, session), *text]
        return max(relative(a, b) for a, b in zip(seen.first, wanted, strict=True)), relative(
            seen.output, self.wanted.output
        )


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative L2 error; NaN counts as infinite."""
    if not wanted.numel():
        return 0.0
    off = torch.linalg.vector_norm(got.float() - wanted.float()) / torch.linalg.vector_norm(wanted.float())
    return float(off.nan_to_num(torch.inf))
