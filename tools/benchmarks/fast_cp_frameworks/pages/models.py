"""Blocks, regions and whole steps of the models, from wrapper/*/*.json and models/*.json."""

from typing import Any

from chitu_diffusion.parallel.cp.fast.test.report import Record, read
from chitu_diffusion.parallel.cp.fast.test.rows import Case
from tools.benchmarks.fast_cp_frameworks.pages.files import Files, milliseconds, table, times
from tools.benchmarks.fast_cp_frameworks.render import NOTHING

KERNELS = {"cudnn": "cuDNN, in an earlier run", "cute": "CuTe"}
STEPS = ("models/two-gpus-wan-14b-720p.json", "models/two-gpus-images.json")


def regions(files: Files) -> str:
    """Every case of the acceptance test, a table for each folder."""
    parts = []
    for folder, kernel in KERNELS.items():
        cases = acceptance(files, folder)
        reached = sum(_reached(record, goal) for record, goal in cases)
        columns = (
            "case", "status", "one GPU", "NCCL", "Fast", "speed-up", "queued", "goal", "block: one GPU", "NCCL", "Fast",
            "speed-up", "blocks are",
        )  # fmt: skip
        rows = table(columns, [_region(record, goal) for record, goal in cases], words=2)
        parts.append(f"With {kernel}, {reached} of {len(cases)} goals reached:\n\n{rows}")
    return "\n\n".join(parts)


def steps(files: Files) -> str:
    """One forward of each whole transformer."""
    rows = [_step(step) for name in STEPS for step in files.json(name)["results"]]
    columns = ("model", "blocks", "one GPU ms", "NCCL ms", "Fast ms", "NCCL, speed-up", "Fast, speed-up", "peak GB")
    return table(columns, rows)


def acceptance(files: Files, folder: str) -> list[tuple[Record, float]]:
    """(case, its goal when it ran), in the order of the files' names."""
    found = []
    for path in sorted((files.folder / "wrapper" / folder).glob("*.json")):
        data = files.json(f"wrapper/{folder}/{path.name}")
        record = read(path.parent, Case(**data["case"]))
        assert record is not None
        found.append((record, float(data["goal"])))
    return found


def _reached(record: Record, goal: float) -> bool:
    return record.judged_speed_up is not None and record.judged_speed_up >= goal


def _region(record: Record, goal: float) -> list[str]:
    sides = (record.one_gpu, record.origin, record.fast)
    return [
        record.case.name.removesuffix(f"-cp{record.case.cp}"),
        record.status,
        *(milliseconds(side.region_ms if side else None) for side in sides),
        times(record.speed_up),
        times(record.queued_speed_up),
        f"{goal:g}{'' if _reached(record, goal) else ', missed'}",
        *(milliseconds(side.block_ms if side else None) for side in sides),
        times(record.block_speed_up),
        "graphs" if record.graphs else "eager",
    ]


def _step(step: dict[str, Any]) -> list[str]:
    one, nccl, fast = (step[side]["step_ms"] for side in ("one_gpu", "nccl", "fast"))
    blocks = f"{step['layers']} of {step['layers_of_the_model']}"
    peak = step["fast"]["peak_bytes"]
    return [
        f"{step['model']}, {step['method']}",
        blocks,
        *(f"{ms:.1f}" for ms in (one, nccl, fast)),
        times(one / nccl),
        times(one / fast),
        f"{peak / 1e9:.1f}" if peak else NOTHING,
    ]
