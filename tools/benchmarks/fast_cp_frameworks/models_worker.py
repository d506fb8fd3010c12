"""One rank of the whole-model benchmark; ``models`` starts it under ``torch.distributed.run``."""

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chitu_diffusion.commands.children import end_with
from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from chitu_diffusion.parallel.cp.fast.test.case import LIMITS, SLACK, TIMEOUT_S, relative
from chitu_diffusion.parallel.cp.fast.test.models import Inputs, build, inputs_for, output
from chitu_diffusion.parallel.cp.fast.test.rows import ROWS, Row
from chitu_diffusion.parallel.cp.fast.wrapper import enable_fast_cp
from chitu_diffusion.parallel.cp.session import CPSession

PATIENCE_S = 500.0  # for rank 0, which computes alone
WARM_STEPS = 2  # behind the first step: blocks are captured as CUDA graphs in the third


@dataclass(frozen=True)
class Bench:
    """One model on this rank."""

    row: Row
    model: nn.Module
    inputs: Inputs
    device: torch.device
    iterations: int
    control: ControlChannel

    @property
    def pool_bytes(self) -> int:
        """Two generations of the region's windows, and of the session's."""
        itemsize = next(self.model.parameters()).element_size()
        return 8 * (self.row.tokens + self.row.text) * self.row.heads * self.row.head_dim * itemsize + SLACK

    def steps(self, together: bool) -> tuple[list[float], torch.Tensor]:
        """Milliseconds of single steps, behind those that warm up, and the output of the last."""
        taken = []
        for _ in range(WARM_STEPS + self.iterations):
            if together:
                dist.barrier()
            self._wait()
            begun = time.perf_counter()
            made = output(self.model, self.inputs)
            self._wait()
            taken.append((time.perf_counter() - begun) * 1e3)
        return taken[WARM_STEPS:], made

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main(job: dict[str, Any]) -> None:
    """Run the job; rank 0 writes the answer."""
    device, dtype = join(job["device"])
    row = ROWS[job["name"]] if device.type == "cuda" else ROWS[job["name"]].reduced()
    model = build(row, job["layers"], device, dtype)
    whole = dist.group.WORLD
    assert whole is not None
    control = ControlChannel(whole, TIMEOUT_S)
    bench = Bench(row, model, inputs_for(row, device, dtype), device, job["iterations"], control)
    answer, wanted = alone(bench)
    for backend in ("nccl", "fast"):
        answer[backend] = together(bench, job["method"], backend, wanted)
    if dist.get_rank() == 0:
        Path(job["answer"]).write_text(json.dumps(judged(answer, dtype, device)))
    dist.destroy_process_group()


def join(device_type: str) -> tuple[torch.device, torch.dtype]:
    """The process group that torch.distributed.run has prepared."""
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu"), torch.float32
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device, torch.bfloat16


def alone(bench: Bench) -> tuple[dict[str, Any], torch.Tensor]:
    """One rank with the best kernel here, while the others wait on the host; and the output of diffusers' own."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    wanted = output(bench.model, bench.inputs)
    told: dict[str, Any] | None = None
    if dist.get_rank() == 0:
        with CPSession(CPConfig(), groups[0], bench.device) as session:
            adapter = adapter_class(bench.model)(bench.model, session)
            adapter.attach()
            try:
                taken, made = bench.steps(together=False)
                error = relative(made, wanted)
            finally:
                adapter.detach()
            kernels = sorted({call.plan.kernel for call in session.calls.values()})
        told = {"step_ms": statistics.median(taken), "steps_ms": taken, "error": error, "kernels": kernels}
    return {"one_gpu": bench.control.gather(told, PATIENCE_S)[0], "reason": ""}, wanted


def together(bench: Bench, method: str, backend: str, wanted: torch.Tensor) -> dict[str, Any] | None:
    """All ranks; None where ``fast`` is not there."""
    with enable_fast_cp(bench.model, None, method, backend, pool_bytes=bench.pool_bytes, timeout_s=TIMEOUT_S) as handle:
        if backend == "fast" and handle.choice.used != "fast":
            return None
        error = relative(output(bench.model, bench.inputs), wanted)  # the first call plans too
        taken, made = bench.steps(together=True)
        ranks = bench.control.gather((taken, max(error, relative(made, wanted))), PATIENCE_S)
        slowest = [max(steps) for steps in zip(*(steps for steps, _ in ranks), strict=True)]
        return {
            "step_ms": statistics.median(slowest),
            "steps_ms": slowest,
            "error": max(error for _, error in ranks),
            "used": handle.choice.used,
            "blocks": [asdict(choice) for choice in handle.block_choices],
            "regions": {shape: asdict(choice) for shape, choice in handle.region_choices.items()},
            "block_graphs": list(handle.block_graphs),
            "peak_bytes": torch.cuda.max_memory_allocated(bench.device) if bench.device.type == "cuda" else None,
        }


def judged(answer: dict[str, Any], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """With the exit code, and what it is for. Errors grow with the depth, and are compared with one rank's own."""
    limit = max(LIMITS[dtype], 2 * answer["one_gpu"]["error"])
    off = [name for name in ("nccl", "fast") if answer[name] and not answer[name]["error"] <= limit]
    code, reason = 0, ""
    if off:
        code, reason = 1, f"the output of {' and '.join(off)} is off by more than {limit:.1e}"
    elif answer["fast"] is None and device.type == "cuda":
        code, reason = 3, "Fast was not run: the extension cannot serve here"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, small shapes"
    return answer | {"exit_code": code, "reason": reason, "device": name, "torch": torch.__version__}


if __name__ == "__main__":
    end_with(str(os.getppid()))  # where the launcher is killed, no rank stays
    main(json.loads(sys.argv[1]))
