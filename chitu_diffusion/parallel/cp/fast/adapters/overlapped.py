"""The path that overlaps projections with the transfer of K and V, over the CUDA extension."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import DisagreementError
from chitu_diffusion.parallel.cp.fast.adapters.paths import SessionPath
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall
from chitu_diffusion.parallel.cp.fast.adapters.region_cache import RegionCache
from chitu_diffusion.parallel.cp.fast.adapters.region_plan import RegionPlan, RegionWork, by_name, candidates
from chitu_diffusion.parallel.cp.fast.adapters.region_run import Outputs, run_overlapped
from chitu_diffusion.parallel.cp.fast.adapters.region_tuning import RegionTuner, Run
from chitu_diffusion.parallel.cp.fast.adapters.slots import SlotOperators, Still
from chitu_diffusion.parallel.cp.fast.attention.planner import Decision, as_before, choose_kernel, decide, serving
from chitu_diffusion.parallel.cp.fast.attention.table import explain
from chitu_diffusion.parallel.cp.layout import Layout
from chitu_diffusion.parallel.cp.plan_cache import PlanCache
from chitu_diffusion.parallel.cp.recorder import Recorder
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.signature import DTYPES, Signature
from chitu_diffusion.parallel.cp.tuning import PATIENCE_S

KERNELS_MEASURED = 2
# the session captures a graph when a set of addresses comes for the second time, in each of two turns
SESSION_CALLS = 4


class OverlappedPath:
    """AGKV's region by slots of the extension's windows; its plan is measured at the first call of each shape.

    ``meet`` lets the current streams of all ranks go on together; ``pool_bytes`` is the size of the windows' pool;
    ``cache`` keeps what was measured for later processes; with ``recorder`` short regions are measured as graphs.
    """

    name = "overlapped"

    def __init__(
        self,
        session: CPSession,
        ops: SlotOperators,
        meet: Callable[[], None],
        pool_bytes: int,
        cache: PlanCache,
        recorder: Recorder | None = None,
    ) -> None:
        self._session, self._pool_bytes = session, pool_bytes
        self._ops: SlotOperators = ops
        self._control = ControlChannel(session.group, session.config.timeout_s)
        self._cache = RegionCache(cache, session, self._control)
        self._tuner = RegionTuner(self._control, session.device, meet, recorder)
        self._fallback = SessionPath(session)
        self._plans: dict[Signature, tuple[RegionPlan, Layout]] = {}
        self.choices: dict[str, Choice] = {}  # by shape, with what else was measured

    def why_not(self, call: RegionCall) -> str | None:
        """See ``Path``. Any batch, sequence, text, mask and linear layer is served."""
        session, tokens = self._session, call.tokens
        batch, text_len = tokens.hidden.shape[0], call.text.hidden.shape[1] if call.text is not None else 0
        mask = call.key_mask
        checks = (
            (session.world == 1, "one rank sends nothing"),
            (session.config.method == "ulysses", "the method is ulysses, whose exchange begins when all is projected"),
            (session.config.plan is not None, f"the plan {session.config.plan} was asked for"),
            (tokens.head_bytes % 16 != 0, f"heads of {tokens.head_bytes} bytes are no multiple of 16 bytes"),
            (tokens.hidden.dtype not in DTYPES, f"the hidden states are {tokens.hidden.dtype}"),
            (
                mask is not None and (mask.dtype, tuple(mask.shape)) != (torch.bool, (batch, text_len + call.seq_len)),
                "the key mask is not one truth value for every key",
            ),
            (torch.compiler.is_compiling(), "torch.compile traces the session's attention as one operator"),
        )
        return next((reason for wrong, reason in checks if wrong), None)

    def run(self, call: RegionCall) -> Outputs:
        """See ``Path``. Collective the first time that a shape comes."""
        signature = signature_of(call)
        known = self._plans.get(signature)
        if known is None:
            layout = signature.layout(self._session.world, 1)
            known = self._plans[signature] = self._plan(signature, call, layout), layout
        return self._way(known[0], call, known[1])()

    @contextmanager
    def without_transfer(self) -> Iterator[None]:
        """While it lasts, regions take as long as if everything were there at once; what they compute is wrong.

        For attention layers with hooks, whose blocks are not captured: a graph would stay wrong.
        """
        ops, self._ops = self._ops, Still(self._session.rank)
        try:
            yield
        finally:
            self._ops = ops

    def _way(self, plan: RegionPlan, call: RegionCall, layout: Layout) -> Run:
        if not plan.overlapped:
            return partial(self._fallback.run, call)
        return partial(run_overlapped, plan, call, layout, self._ops, self._session.rank)

    def _plan(self, signature: Signature, call: RegionCall, layout: Layout) -> RegionPlan:
        """The fastest way on the slowest rank. Raises DisagreementError where ranks call with different shapes."""
        self._agree(signature)
        near = signature.planned_as
        placed = near.layout(self._session.world, 1)
        needs = signature.kernel_needs(self._session.device)
        reasons = self._control.gather(explain(needs), PATIENCE_S)
        kernel = choose_kernel(self._session.config.kernel, reasons)
        with_lse = serving(self._control.gather(explain(replace(needs, lse=True)), PATIENCE_S))
        waiting = serving(self._control.gather(explain(replace(needs, arriving=True)), PATIENCE_S))
        fits = self._session_fits(near, placed)
        work = RegionWork(
            num_heads=signature.num_heads,
            text_queries=signature.text_queries,
            least_own_rows=min(span.size for span in placed.shards),
            kernels=tuple(serving(reasons, kernel)[:KERNELS_MEASURED]),
            with_lse=tuple(with_lse),
            waiting=tuple(waiting),
            session_fits=fits is None,
        )
        found = by_name(candidates(work))
        decided = self._fastest(near, found, call, layout)
        name, rejected = decided.used.name, decided.rejected
        if fits is not None:
            rejected = (*rejected, Rejected("project, then attend", fits))
        self.choices[str(signature)] = Choice("auto", name, decided.why, rejected, decided.ms)
        return found[name]

    def _fastest(
        self, signature: Signature, found: dict[str, RegionPlan], call: RegionCall, layout: Layout
    ) -> Decision:
        if len(found) == 1:
            return Decision(next(iter(found.values())), "the only way there is")
        kept = self._cache.find(signature, found)
        if kept is not None:
            return as_before(kept, found)
        trials = {name: self._way(plan, call, layout) for name, plan in found.items()}
        warm_calls = {name: SESSION_CALLS for name, plan in found.items() if not plan.overlapped}
        measured = self._tuner.measure(trials, warm_calls)
        decided = decide(list(found.values()), measured)
        self._cache.keep(signature, found, decided.used.name, measured)
        return decided

    def _session_fits(self, signature: Signature, layout: Layout) -> str | None:
        """Why the session's windows have no room beside the region's, or None."""
        window = 2 * signature.batch * layout.kv_rows * signature.num_heads * signature.head_dim
        needed = 2 * window * signature.dtype.itemsize
        if needed <= self._pool_bytes:
            return None
        return f"its windows need {needed >> 20} MiB together with these; raise pool_bytes to have it measured too"

    def _agree(self, signature: Signature) -> None:
        for rank, other in enumerate(signatures := self._control.gather(signature)):
            if other != signatures[0]:
                raise DisagreementError(
                    f"the ranks call attention with different inputs: rank 0 with {signatures[0]}, rank {rank} with "
                    f"{other}; every rank must make the same call"
                )


def signature_of(call: RegionCall) -> Signature:
    """What must be the same on every rank."""
    tokens = call.tokens
    return Signature(
        batch=tokens.hidden.shape[0],
        seq_len=call.seq_len,
        num_heads=tokens.heads,
        num_kv_heads=tokens.heads,
        head_dim=tokens.head_dim,
        dtype=tokens.hidden.dtype,
        text_len=call.text.hidden.shape[1] if call.text is not None else 0,
        text_in_front=True,
        text_queries=call.text is not None,
        kv_sharded=True,
        key_mask=call.key_mask is not None,
        scale=tokens.head_dim**-0.5,
    )
