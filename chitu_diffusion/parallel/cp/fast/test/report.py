"""Results of the acceptance test: one record per case, its line in the table, and the summary. Imports no torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chitu_diffusion.parallel.cp.errors import ExitCode
from chitu_diffusion.parallel.cp.fast.test.rows import ROWS, Case

SCHEMA = "chitu.fast_cp.wrapper/1"
RIGHT, WRONG, FAILED, PARTLY, NOT_RUN = "right", "wrong", "failed", "partly run", "not run"
COLUMNS = (
    "case",
    "status",
    "1 GPU ms",
    "NCCL ms",
    "Fast ms",
    "speed-up",
    "exposed",
    "block 1 GPU/NCCL/Fast ms, speed-up",
    "error",
)


@dataclass(frozen=True)
class Side:
    """One way to run the blocks: milliseconds on the slowest rank, and how far it is from one GPU, relative."""

    used: str
    region_ms: float
    block_ms: float
    region_error: float
    output_error: float
    choice: dict[str, Any] = field(default_factory=dict)
    queued_ms: float | None = None  # the region's, of the device alone, where the host had a head start


@dataclass(frozen=True)
class Record:
    """What became of a case. ``one_gpu`` is the faster of diffusers' own attention and the best kernel here."""

    case: Case
    status: str
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    one_gpu: Side | None = None
    origin: Side | None = None
    fast: Side | None = None
    still_ms: float | None = None  # Fast's region where nothing travels
    still_queued_ms: float | None = None  # the same where the host had a head start

    @property
    def speed_up(self) -> float | None:
        """Of Fast over one GPU, from projection to projection."""
        return self.one_gpu.region_ms / self.fast.region_ms if self.one_gpu and self.fast else None

    @property
    def queued_speed_up(self) -> float | None:
        """The same of the device alone, where the host is never what is waited for."""
        one, fast = (side.queued_ms if side else None for side in (self.one_gpu, self.fast))
        return one / fast if one and fast else None

    @property
    def graphs(self) -> bool:
        """Whether Fast's blocks run as CUDA graphs, so that their launches are never what is waited for."""
        return self.fast is not None and "graphs" in self.fast.choice.get("block_graphs", ())

    @property
    def judged_speed_up(self) -> float | None:
        """What the goal is compared with: the device's alone where blocks are graphs."""
        return self.queued_speed_up if self.graphs and self.queued_speed_up is not None else self.speed_up

    @property
    def block_speed_up(self) -> float | None:
        """Of Fast over one GPU, whole blocks as they run."""
        return self.one_gpu.block_ms / self.fast.block_ms if self.one_gpu and self.fast else None

    @property
    def exposed(self) -> float | None:
        """The share of Fast's region that waits for other ranks; of the device alone where that was taken."""
        if self.fast is None or self.still_ms is None:
            return None
        if self.fast.queued_ms is not None and self.still_queued_ms is not None:
            return max(0.0, 1 - self.still_queued_ms / self.fast.queued_ms)
        return max(0.0, 1 - self.still_ms / self.fast.region_ms)

    @property
    def goal(self) -> float | None:
        """The speed-up that is hoped for; goals are for two GPUs."""
        return ROWS[self.case.row].goal if self.case.cp == 2 and self.fast is not None else None

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "speed_up": self.speed_up,
            "queued_speed_up": self.queued_speed_up,
            "block_speed_up": self.block_speed_up,
            "block_graphs": self.graphs,
            "exposed": self.exposed,
            "goal": self.goal,
            "slower_than_nccl": slower_than_nccl(self),
        }


def slower_than_nccl(record: Record) -> bool | None:
    """Whether Fast took longer, by more than two runs of one program differ; None where one of them did not run."""
    if record.fast is None or record.origin is None:
        return None
    return record.fast.block_ms > 1.02 * record.origin.block_ms


def cells(record: Record) -> list[str]:
    """The row of the table."""
    sides = (record.one_gpu, record.origin, record.fast)
    region = [f"{side.region_ms:.3f}" if side else "-" for side in sides]
    block = " / ".join(f"{side.block_ms:.2f}" if side else "-" for side in sides)
    speed = f"{record.speed_up:.2f}" if record.speed_up else "-"
    if record.queued_speed_up is not None:
        speed += f", queued {record.queued_speed_up:.2f}"
    if record.goal is not None and record.judged_speed_up is not None:
        speed += f" (goal {record.goal:g}{'' if record.judged_speed_up >= record.goal else ', missed'})"
    if record.block_speed_up is not None:
        block += f" {record.block_speed_up:.2f}{' graphs' if record.graphs else ''}"
    exposed = f"{record.exposed:.1%}" if record.exposed is not None else "-"
    errors = [side.region_error for side in sides[1:] if side]
    return [record.case.name, record.status, *region, speed, exposed, block, f"{max(errors):.1e}" if errors else "-"]


WIDTHS = (27, 10, 9, 9, 9, 38, 8, 38, 8)


def line(record: Record) -> str:
    """One line while the test runs."""
    told = " ".join(cell.ljust(width) for cell, width in zip(cells(record), WIDTHS, strict=True)).rstrip()
    return f"{told}\n    {record.reason}" if record.reason else told


def header() -> str:
    """The names over ``line``."""
    return " ".join(name.ljust(width) for name, width in zip(COLUMNS, WIDTHS, strict=True)).rstrip()


def write(outdir: Path, record: Record) -> None:
    """One JSON file per case, replaced in one step."""
    path = outdir / f"{record.case.name}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(record.to_json(), indent=1) + "\n")
    temporary.replace(path)


def read(outdir: Path, case: Case) -> Record | None:
    """What ``write`` wrote, if it did."""
    path = outdir / f"{case.name}.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    one_gpu, origin, fast = (Side(**data[name]) if data[name] else None for name in ("one_gpu", "origin", "fast"))
    return Record(
        case,
        data["status"],
        data["reason"],
        data["facts"],
        one_gpu,
        origin,
        fast,
        data["still_ms"],
        data["still_queued_ms"],
    )


def summary(records: Sequence[Record], command: str) -> str:
    """Markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(cells(record) for record in records)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = [f"- {record.case.name}: {record.status}: {record.reason}" for record in records if record.reason]
    slower = [record.case.name for record in records if slower_than_nccl(record)]
    if slower:
        notes.append(f"- slower than NCCL: {', '.join(slower)}")
    facts = "\n".join(f"- {name}: {value}" for name, value in common_facts(records).items())
    parts = [
        "# The fast wrapper: acceptance",
        f"`{command}`",
        facts,
        table,
        "Times are medians over blocks and calls on the slowest rank; regions go from the projections of Q, K and V to "
        "the output projection. Exposed is the share of Fast's region beyond the same region where nothing travels. "
        "Queued is the speed-up of the device alone, where the host had launched everything before; goals are compared "
        "with it where Fast's blocks run as CUDA graphs, which region times, taken by hooks, leave out. Blocks are "
        "timed as they run, diffusers' own on one GPU. "
        "Errors are relative, of the first block's attention, against diffusers on one GPU.",
        "\n".join(notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def common_facts(records: Sequence[Record]) -> dict[str, Any]:
    """What all records that ran have in common."""
    ran = [record.facts for record in records if record.facts]
    return (
        {name: value for name, value in ran[0].items() if all(facts.get(name) == value for facts in ran)} if ran else {}
    )


def exit_code(records: Iterable[Record]) -> ExitCode:
    """Something wrong weighs more than something that was not run; goals of speed are told and decide nothing."""
    statuses = {record.status for record in records}
    if statuses & {WRONG, FAILED}:
        return ExitCode.CHECK_FAILED
    return ExitCode.INCOMPLETE if statuses & {NOT_RUN, PARTLY} else ExitCode.RIGHT
