"""Random calls of cp_attention, and how far a result may lie from the exact one."""

import dataclasses
import random
from dataclasses import dataclass
from functools import cache

import common
import torch
from common import Place
from torch import Tensor

from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.fast.attention import cute
from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds
from chitu_diffusion.parallel.cp.fast.attention.planner import AttentionPlan
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from chitu_diffusion.parallel.cp.fast.runtime import FastCP
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.transport import Inputs, Text
from tests.gloo.checks import one_process
from tests.gloo.scenarios import Case, Whole, share, whole

METHODS = ("agkv", "ulysses")
TRANSFERS = ("ce", "sm", "tma")
EXACT_PLANS = ("one_shot", "head_pipeline(2)", "head_pipeline(1:2)", "head_pipeline(5)")
MERGING_PLANS = ("local_first", "local_first(2)", "local_first(3:1)")
FUSED_PLANS = ("fused", "fused(2)", "fused(5)", "fused(8)")  # with CuTe, whose kernel waits for its keys
REPEATS = 5  # of a call that is replayed: its graphs are captured at the second use of either turn
POOL_BYTES = 1024 * common.MB
TIMEOUT_S = 30.0  # the ranks compute references on the CPU, and may drift apart
SMALLEST_LIMIT = 1e-3

Outputs = tuple[Tensor, Tensor | None]


def random_case(rng: random.Random, seed: int) -> Case:
    """BF16, GQA, uneven and empty shards, text in front or behind, with and without queries, keys and masks."""
    kv_heads, text_len = rng.choice((1, 2, 3, 5, 8)), rng.choice((0, 0, 6, 13))
    case = Case(
        rng.randint(1, 300),
        kv_heads * rng.choice((1, 1, 3)),
        kv_heads,
        head_dim=rng.choice((64, 128)),
        batch=rng.choice((1, 1, 2)),
        text_len=text_len,
        text_in_front=rng.random() < 0.5,
        text_queries=rng.random() < 0.6,
        kv_sharded=text_len == 0 or rng.random() < 0.9,
        dtype=torch.bfloat16,
        method=rng.choice(METHODS),
        pad_value=3.0,
        seed=seed,
    )
    masked = text_len > 0 and rng.random() < 0.5
    valid = tuple(max(1, text_len - 3 * item) for item in range(case.batch)) if masked else ()
    return dataclasses.replace(case, valid_text=valid)


def random_plan(rng: random.Random, case: Case, world: int) -> str | None:
    """A plan that this call can run, or now and then None: then all candidates are measured."""
    if rng.random() < 0.04:
        return None
    own_keys = case.method == "agkv" and case.seq_len >= world and case.kv_sharded
    names = EXACT_PLANS + (MERGING_PLANS if own_keys and not case.text_queries else ())
    if own_keys and case.kv_heads in (None, case.heads) and not case.valid_text and cute_waits(case.head_dim):
        names += FUSED_PLANS
    name = rng.choice(names)
    return f"{name}/{rng.choice(('graph', 'eager'))}"


@cache
def cute_waits(head_dim: int) -> bool:
    """Whether CuTe is there; the same on every rank of one machine."""
    needs = KernelNeeds("cuda", torch.cuda.get_device_capability(), torch.bfloat16, head_dim, 1, 1, arriving=True)
    return cute.why_not(needs) is None


@dataclass(frozen=True)
class Given:
    """One case: the whole of it on the CPU, and this rank's part on its GPU."""

    case: Case
    inputs: Whole
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    text: Text | None
    key_mask: Tensor | None

    def attend(self, session: CPSession) -> Outputs:
        """The tokens' output and the text's, in memory of their own."""
        case = self.case
        out, text = cp_attention(
            session, self.q, self.k, self.v, seq_len=case.seq_len, text=self.text, key_mask=self.key_mask
        )
        return out.clone(), None if text is None else text.clone()

    def plan(self, session: CPSession) -> AttentionPlan:
        """How ``session`` runs this call; agreed on by the first ``attend``."""
        return session.admit(Inputs(self.q, self.k, self.v, self.text), self.case.seq_len, self.key_mask, None).plan

    def attend_again(self, session: CPSession) -> Outputs | None:
        """The same call some more times, each into memory that holds NaN; None where any two differ."""
        first = self.attend(session)
        for _ in range(REPEATS - 1):
            torch.full_like(first[0], torch.nan)  # freed at once: the next output lands there
            if not same_bits(first, self.attend(session)):
                return None
        return first

    def excess(self, outputs: Outputs, place: Place, kernel: str = "cudnn") -> float:
        """The error, as a multiple of what is allowed: twice that of the same kernel in one process."""
        exact, exact_text = one_process(self.case, self.inputs, exact=True)
        limit = 2 * max(self.own_error(exact, exact_text, place.device, kernel), SMALLEST_LIMIT)
        out, text = outputs
        if (text is None) != (exact_text is None):
            return float("inf")
        worst = relative(out.cpu(), share(exact, place.rank, place.world))
        if text is not None and exact_text is not None:
            worst = max(worst, relative(text.cpu(), exact_text))
        return worst / limit

    def own_error(self, exact: Tensor, exact_text: Tensor | None, device: torch.device, kernel: str) -> float:
        """The error of the kernel on the whole sequence."""
        q, k, v = (x.to(device) for x in self.inputs.joined(self.case))
        mask = None if self.inputs.key_mask is None else self.inputs.key_mask.to(device)
        out = KERNELS[kernel].run(q, k, v, scale=q.shape[3] ** -0.5, key_mask=mask)[0].cpu()
        parts = [exact] if exact_text is None else [exact, exact_text]
        return relative(out, torch.cat(parts if not self.case.text_in_front else parts[::-1], 1))


def relative(out: Tensor, exact: Tensor) -> float:
    """The L2 norm of the difference over that of ``exact``; infinite for another shape or a NaN."""
    if out.shape != exact.shape or not bool(out.isfinite().all()):
        return float("inf")
    norm = torch.linalg.vector_norm(exact.double())
    return float(torch.linalg.vector_norm(out.double() - exact.double()) / norm) if out.numel() else 0.0


def give(case: Case, place: Place) -> Given:
    inputs, device = whole(case), place.device
    q, k, v = (share(x, place.rank, place.world).to(device) for x in (inputs.q, inputs.k, inputs.v))
    text = None
    if inputs.text is not None:
        asked = inputs.text.q
        text = Text(
            inputs.text.k.to(device),
            inputs.text.v.to(device),
            None if asked is None else asked.to(device),
            inputs.text.in_front,
        )
    mask = None if inputs.key_mask is None else inputs.key_mask.to(device)
    sharded = case.kv_sharded
    return Given(case, inputs, q, k if sharded else None, v if sharded else None, text, mask)


class Sessions:
    """One session per configuration, made when it is first needed: collective, so ask for the same on every rank."""

    def __init__(self, place: Place, fast: FastCP | None) -> None:
        self.place, self.fast = place, fast
        self._made: dict[CPConfig, CPSession] = {}

    def get(
        self,
        method: str,
        *,
        kernel: str = "auto",
        backend: str = "fast",
        transfer: str = "auto",
        plan: str | None = None,
    ) -> CPSession:
        config = CPConfig(
            method=method, backend=backend, kernel=kernel, transfer=transfer, plan=plan, timeout_s=TIMEOUT_S
        )
        if config not in self._made:
            self._made[config] = CPSession(config, device=self.place.device, fast=self.fast)
        return self._made[config]


def same_bits(one: Outputs, other: Outputs) -> bool:
    def bits(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous().view(torch.int16)

    for a, b in zip(map(bits, one), map(bits, other), strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.shape != b.shape or not torch.equal(a, b):
            return False
    return True
