"""One rank of `chitu plan`: makes a session, lets it plan the call on random tensors, and prints the plan as JSON.

``python -m chitu_diffusion.commands.plan.rank QUESTION WORLD FOLDER RANK``
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chitu_diffusion.commands.doctor.process import own_stdout
from chitu_diffusion.commands.plan.estimate import signature
from chitu_diffusion.commands.plan.question import Question
from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.errors import CPError, ExitCode, first_line
from chitu_diffusion.parallel.cp.fast.runtime import default_pool_bytes, init_fast_cp
from chitu_diffusion.parallel.cp.layout import split_sizes
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.transport import Inputs

WAIT_S = 30.0


def main(arguments: Sequence[str]) -> None:
    """Plan, print, and end at once: a peer may be gone."""
    question, world, folder, rank = arguments
    with own_stdout() as out:
        told, code = attempt(Question(**json.loads(question)), int(world), Path(folder), int(rank))
        print(json.dumps(told), file=out)
        out.flush()
        os._exit(code)


def attempt(question: Question, world: int, folder: Path, rank: int) -> tuple[dict[str, Any], int]:
    """The plan in plain values, or the problem, and the exit code."""
    try:
        return plan(question, world, folder, rank), ExitCode.RIGHT
    except CPError as error:
        problem, code = str(error), error.exit_code
    except Exception as error:  # CUDA and gloo raise what they like
        problem, code = first_line(error), ExitCode.CHECK_FAILED
    return {"problem": problem, "exit_code": int(code)}, code


def plan(question: Question, world: int, folder: Path, rank: int) -> dict[str, Any]:
    """What this rank's session decides; all ranks decide the same."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store, limit = f"file://{folder / 'store'}", timedelta(seconds=WAIT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    config = CPConfig(method=question.method, backend="fast", timeout_s=WAIT_S)
    with (
        init_fast_cp(device=device, pool_bytes=pool_bytes(question, device), timeout_s=WAIT_S) as fast,
        CPSession(config, device=device, fast=fast) as session,
    ):
        chosen = session.admit(inputs(question, world, rank, device), question.sequence, None, None).plan
    return {
        "name": chosen.name,
        "reason": chosen.reason,
        "ms": chosen.ms,
        "rejected": [asdict(entry) for entry in chosen.rejected],
        "bytes_received": chosen.bytes_received,
        "device": torch.cuda.get_device_name(device),
    }


def inputs(question: Question, world: int, rank: int, device: torch.device) -> Inputs:
    """Random tensors of this rank's share."""
    tokens, dtype = split_sizes(question.sequence, world)[rank], signature(question).dtype
    q, k, v = (
        torch.randn(question.batch, tokens, heads, question.head_dim, device=device, dtype=dtype)
        for heads in (question.heads, question.kv_heads, question.kv_heads)
    )
    return Inputs(q, k, v)


def pool_bytes(question: Question, device: torch.device) -> int:
    """Room for what arrives, twice over, by either method: AGKV 2X and Ulysses at most as much, X a whole tensor."""
    whole = question.batch * question.sequence * question.heads * question.head_dim * signature(question).dtype.itemsize
    return max(default_pool_bytes(device), 2 * (2 + 2) * whole)


if __name__ == "__main__":
    main(sys.argv[1:])
