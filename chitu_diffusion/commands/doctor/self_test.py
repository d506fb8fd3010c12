"""The self-test: two processes start the extension, exchange fresh random data, and pass a flag there and back.

``run_ranks`` starts them; ``python -m chitu_diffusion.commands.doctor.self_test RANK DEVICE FOLDER`` is one of them.
It prints one JSON line per step as soon as the step has ended, and stops at the first that goes wrong.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from chitu_diffusion.commands.doctor.facts import Seen, SelfTestFacts
from chitu_diffusion.commands.doctor.process import Ended, own_stdout, run_together
from chitu_diffusion.parallel.cp.errors import CPError, first_line
from chitu_diffusion.parallel.cp.fast import extension

if TYPE_CHECKING:
    import torch

    from chitu_diffusion.parallel.cp.fast.runtime import FastCP

LIMIT_S = 60.0  # for everything; each wait for the other process has a shorter one
WAIT_S = 20.0
STEPS = {
    "start": "two processes share symmetric GPU memory",
    "copy": "keys and values of both arrive everywhere, bit for bit",
    "signal": "a flag goes there and back",
    "end": "the memory is given back",
}
_POOL_BYTES = 64 << 20
_SEQ_LENS, _HEADS, _HEAD_DIM = (96, 64), 4, 64
_MODULE = "chitu_diffusion.commands.doctor.self_test"


def run_ranks(environ: Mapping[str, str], gpus: Sequence[int], limit_s: float = LIMIT_S) -> Seen[SelfTestFacts]:
    """Run one process on each of ``gpus`` at once, and put together what they say."""
    with tempfile.TemporaryDirectory(prefix="chitu-self-test-") as folder:
        common = [sys.executable, "-P", "-m", _MODULE]
        commands = [[*common, str(rank), str(gpu), folder] for rank, gpu in enumerate(gpus)]
        ended = run_together(commands, limit_s=limit_s, env=environ)
    return Seen(value=SelfTestFacts(tuple(gpus), together(ended)))


def together(ended: Sequence[Ended]) -> dict[str, str | None]:
    """Per step that was reached None, or the first reason why it did not work on all ranks; nothing after that."""
    answers = [_answers(rank.stdout) for rank in ended]
    problems: dict[str, str | None] = {}
    for step in STEPS:
        said = [answer.get(step, rank.how) for answer, rank in zip(answers, ended, strict=True)]
        reasons: dict[str, str] = {}
        for rank, text in enumerate(said):
            if text:
                reasons.setdefault(text, f"rank {rank}: {text}")  # what all ranks say is said once
        problems[step] = "; ".join(reasons.values()) or None
        if problems[step]:
            break
    return problems


def _answers(stdout: str) -> dict[str, str | None]:
    answers = {}
    for line in stdout.splitlines():
        try:
            answer = json.loads(line)
            answers[answer["step"]] = answer["problem"]
        except (ValueError, KeyError, TypeError):
            break  # a line cut off by the end of the process
    return answers


def main(arguments: Sequence[str]) -> None:
    """One rank; it ends at once when its last line is written, since a peer may be gone."""
    rank, device, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    with own_stdout() as out:
        right = _run_steps(out, rank, device, folder)
        out.flush()
        os._exit(0 if right else 1)


def _run_steps(out: TextIO, rank: int, device_index: int, folder: Path) -> bool:
    fast: FastCP | None = None

    def start() -> None:
        nonlocal fast
        fast = _start(rank, device_index, folder)

    def with_fast(step: Callable[["FastCP"], None]) -> Callable[[], None]:
        def do() -> None:
            assert fast is not None
            step(fast)

        return do

    for name, do in zip(STEPS, (start, *map(with_fast, (_copy, _signal, _end))), strict=True):
        problem: str | None = None
        try:
            do()
        except Exception as error:  # CUDA, NVSHMEM and gloo raise what they like
            problem = str(error) if isinstance(error, CPError) else first_line(error)  # ours is one sentence
        print(json.dumps({"step": name, "problem": problem}), file=out)
        if problem is not None:
            return False
    return True


def _start(rank: int, device_index: int, folder: Path) -> "FastCP":
    import torch
    import torch.distributed as dist

    from chitu_diffusion.parallel.cp.fast.runtime import init_fast_cp

    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=len(_SEQ_LENS),
        timeout=timedelta(seconds=WAIT_S),
    )
    return init_fast_cp(device=device, pool_bytes=_POOL_BYTES, timeout_s=WAIT_S)


def _copy(fast: "FastCP") -> None:
    """Random bits that no earlier run has left in the memory; compared as bits, so that NaN equals itself."""
    import torch

    own = _random_bits(_SEQ_LENS[fast.rank]).to(fast.device)
    k, v = own.view(torch.bfloat16)
    gathered = extension.load().all_gather_kv_4d(k, v, _SEQ_LENS, tag="self_test")
    torch.cuda.synchronize(fast.device)
    fast.check()
    for name, window, expected in zip("kv", gathered, _of_all_ranks(own), strict=True):
        wrong = int((window.cpu().view(torch.int16) != expected).sum())
        if wrong:
            raise ValueError(f"{wrong} of {expected.numel()} numbers of {name} arrived wrong")


def _random_bits(rows: int) -> "torch.Tensor":
    """K and V (2, B, S, H, D) as 16-bit integers, from the system's source of random numbers."""
    import torch

    shape = (2, 1, rows, _HEADS, _HEAD_DIM)
    raw = bytearray(os.urandom(2 * torch.Size(shape).numel()))
    return torch.frombuffer(raw, dtype=torch.int16).view(shape)


def _of_all_ranks(own: "torch.Tensor") -> "torch.Tensor":
    """What must arrive, by way of gloo: (2, B, S, H, D)."""
    import torch
    import torch.distributed as dist

    longest = max(_SEQ_LENS)
    padded = torch.zeros(2, 1, longest, _HEADS, _HEAD_DIM, dtype=torch.int32)  # gloo has no 16-bit integers
    padded[:, :, : own.shape[2]] = own.cpu()
    everyone = [torch.empty_like(padded) for _ in _SEQ_LENS]
    dist.all_gather(everyone, padded)
    parts = [part[:, :, :rows] for part, rows in zip(everyone, _SEQ_LENS, strict=True)]
    return torch.cat(parts, 2).to(torch.int16)


def _signal(fast: "FastCP") -> None:
    import torch

    torch.ops.fast_ulysses.fast_cp_round_trip(1 - fast.rank, 1, "kernel")
    torch.cuda.synchronize(fast.device)
    fast.check()


def _end(fast: "FastCP") -> None:
    import torch.distributed as dist

    fast.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
