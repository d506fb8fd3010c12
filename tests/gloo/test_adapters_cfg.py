"""Guidance in two lanes of two ranks each: the branches have prompts of different length and meet once per step."""

from typing import Any

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.fast.wrapper import enable_fast_cp
from tests.gloo.checks import error
from tests.support.pool import SIZE, Worker, pool
from tests.support.tiny_models import Case, inputs_for, model_for, output

STEPS, GUIDANCE = 4, 4.0
IMAGE = Case("qwen-image", 75)


def branch(text_len: int, latents: torch.Tensor, step: int) -> dict[str, Any]:
    """The inputs of one branch; its prompt is drawn anew from its length, the same on every rank."""
    prompt = inputs_for(Case("qwen-image", 75, (text_len,)), seed=text_len)
    return {**prompt, "hidden_states": latents, "timestep": torch.full((1,), 1 - step / STEPS)}


def alone(text_lens: tuple[int, int]) -> list[torch.Tensor]:
    """Both branches of every step in one process."""
    model, latents = model_for(IMAGE), inputs_for(IMAGE)["hidden_states"]
    made = []
    for step in range(STEPS):
        pair = [output(model, branch(length, latents, step)) for length in text_lens]
        made += pair
        latents = latents - guided(*pair) / STEPS
    return made


def guided(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    return negative + GUIDANCE * (positive - negative)


def groups_of(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's lane of two ranks, and its pair in the other lane; made by all ranks in one order."""
    lanes = [dist.new_group([first, first + 1]) for first in range(0, SIZE, 2)]
    pairs = [dist.new_group([first, first + 2]) for first in (0, 1, 4, 5)]
    return lanes[rank // 2], pairs[rank // 4 * 2 + rank % 2]


def two_lanes(worker: Worker, prompts: list[tuple[int, int]]) -> list[float]:
    """The errors of this rank's branch in every step, for one pair of prompts after another under one handle."""
    lane, pair = groups_of(worker.rank)
    if worker.rank >= 4:  # all eight make the groups, four generate
        return []
    model, mine = model_for(IMAGE), worker.rank // 2
    errors = []
    wanted = [alone(text_lens) for text_lens in prompts]
    with enable_fast_cp(model, lane, backend="nccl"):
        for text_lens, made_alone in zip(prompts, wanted, strict=True):
            latents = inputs_for(IMAGE)["hidden_states"]
            for step in range(STEPS):
                made = output(model, branch(text_lens[mine], latents, step))
                errors.append(error(made, made_alone[2 * step + mine]))
                both = [torch.empty_like(made) for _ in range(2)]
                dist.all_gather(both, made, pair)
                latents = latents - guided(*both) / STEPS
    return errors


def test_each_branch_equals_its_reference_in_every_step() -> None:
    prompts = [(24, 247), (24, 6), (247, 6)]
    results = pool().run(SIZE, two_lanes, prompts, timeout=110)
    for errors in results[:4]:
        assert len(errors) == STEPS * len(prompts)
        assert max(errors) <= 2e-6  # rounding of one step goes into the next
