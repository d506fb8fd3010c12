"""A peer as the benchmark checks and times it: behind the interface of our own methods, with the same tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.execution import run
from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds
from chitu_diffusion.parallel.cp.fast.attention.planner import AttentionPlan, choose_kernel
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS, explain
from chitu_diffusion.parallel.cp.layout import Layout
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.contender import Operands
from tools.benchmarks.fast_cp_frameworks.inputs import Source, Tensors, torch_dtype
from tools.benchmarks.fast_cp_frameworks.peers.base import (
    OURS,
    MissingError,
    Peer,
    Prepared,
    RefusedError,
    Setting,
)


def ulysses_degree(method: str, world: int) -> int:
    """What travels, as the layout of our own methods says it: a ring moves what an all-gather does."""
    return {"ulysses": world, "unified": 2}.get(method, 1)


class Theirs:
    """One case of one peer; creating one is collective."""

    warm_calls_per_set = 0

    def __init__(self, case: Case, source: Source, peer: Peer, rank: int) -> None:
        self.case, self._peer, self._rank = case, peer, rank
        peer.check(case, source.world, source.device.type)
        self.ranks = tuple(range(source.world))
        degree = ulysses_degree(peer.method, source.world)
        self._layout = Layout(source.world, degree, case.sequence, case.heads, case.kv_heads)
        size = torch_dtype(case).itemsize
        self.bytes_received = max(self._layout.bytes_received(r, size, case.head_dim, case.batch) for r in self.ranks)
        self._mask = source.key_mask()
        part = slice(None) if peer.whole_mask else source.rows(rank)
        self._given_mask = None if self._mask is None else self._mask[:, part].contiguous()
        self.plan = self._plan(degree, source.device)
        carrier = "gloo" if source.device.type == "cpu" else "nccl"
        self.transport = Choice(peer.name, carrier, f"{peer.package} {peer.installed_version()}")
        attend = self._attend if case.kernel == OURS else None
        self._setting = Setting(rank, source.world, source.device, case.kernel, case.sequence, attend)
        self._prepared = self._prepare(self._setting)

    def _plan(self, degree: int, device: torch.device) -> AttentionPlan:
        """How the library attends, with the kernel of our table that its own is: what it is checked against."""
        case = self.case
        needs = KernelNeeds(
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dtype=torch_dtype(case),
            head_dim=case.head_dim,
            num_heads=case.heads // degree,
            num_kv_heads=case.kv_heads // degree,
            key_mask=case.masked,
            lse=case.kernel == OURS and self._peer.method != "ulysses",
        )
        wanted = "auto" if case.kernel == OURS or device.type == "cpu" else case.kernel
        try:
            kernel = choose_kernel(wanted, [explain(needs)])
        except UnavailableError as error:
            told = str(error).partition(" (")[0]  # without what each kernel lacks
            raise RefusedError(f"{self._peer.name} cannot be checked or given a kernel here: {told}") from error
        whose = "our kernel, passed to the library" if case.kernel == OURS else "the library's own call of it"
        return AttentionPlan(self._peer.method, degree, "library", ONE_SHOT, kernel.used, reason=whose)

    def _prepare(self, setting: Setting) -> Prepared:
        try:
            return self._peer.prepare(setting)
        except ImportError as error:
            installed = f"{self._peer.package} {self._peer.installed_version()}"
            raise MissingError(f"{installed} cannot be imported: {error}") from error

    def tensors(self, source: Source) -> Tensors:
        """The tokens of this rank."""
        return source.share(self._rank)

    def attend(self, tensors: Tensors) -> torch.Tensor:
        """The library's call, with all that must be in force around it.

        Returns when every stream of the device has come to rest: what a library has left behind on a stream of its own
        would otherwise end, or never end, in somebody else's time.
        """
        with self.active():
            out = self._prepared.call(tensors.q, tensors.k, tensors.v, self._given_mask)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        return out

    def active(self) -> AbstractContextManager[object]:
        """The library's own context."""
        return self._prepared.active()

    def operands(self, source: Source) -> Operands:
        """The call over a set of tensors; beside it the kernel alone and, where it can be taken out, what travels."""
        mine = self.tensors(source)
        arrived = source.once(("arrived", self._layout.degree), lambda: self._arrived(source))
        call = partial(self._prepared.call, mine.q, mine.k, mine.v, self._given_mask)
        beside: dict[str, Callable[[], object]] = {
            "attention": partial(self._attend, arrived.q, arrived.k, arrived.v, key_mask=self._mask)
        }
        if OURS in self._peer.kernels and self._peer.method == "ulysses":
            carry = self._prepare(replace(self._setting, attend=_nothing)).call
            beside["communication"] = partial(carry, mine.q, mine.k, mine.v, self._given_mask)
        return Operands(call, mine.bytes, beside, arrived.bytes)

    def _arrived(self, source: Source) -> Tensors:
        """What this rank's kernel computes with, once everything is there."""
        everyone, layout = source.whole(), self._layout
        if layout.degree == 1:
            return Tensors(source.share(self._rank).q, everyone.k, everyone.v)
        rows, heads, kv_heads = (part(self._rank) for part in (layout.group_tokens, layout.q_heads, layout.kv_heads))
        return Tensors(
            everyone.q[:, rows.start : rows.stop, heads.start : heads.stop].contiguous(),
            everyone.k[:, :, kv_heads.start : kv_heads.stop].contiguous(),
            everyone.v[:, :, kv_heads.start : kv_heads.stop].contiguous(),
        )

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        key_mask: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The kernel of our table that ``plan`` names."""
        scale = self.case.head_dim**-0.5
        q, k, v = (_waited(x) for x in (q, k, v))
        if not return_lse:
            return run(self.plan, q, k, v, scale=scale, key_mask=key_mask), None
        return KERNELS[self.plan.kernel].run(q, k, v, scale=scale, key_mask=key_mask, return_lse=True)


def _waited(x: torch.Tensor) -> torch.Tensor:
    """What a functional collective gives, once it is there: kernels that take addresses would not wait for it."""
    while isinstance(x, AsyncCollectiveTensor):
        x = x.trigger_wait()  # type: ignore[no-untyped-call]
    return x


def _nothing(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """No kernel: the queries stand in for the output, of the same shape."""
    return q, None
