"""``python -m tools.benchmarks.fast_cp_frameworks.scaling --write``: the tables of docs/scaling.md by the cost model.

With ``--check`` it ends with 1 where the page says something else. Needs no GPU.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from chitu_diffusion.commands.plan.estimate import works
from chitu_diffusion.commands.plan.model import MethodRow, ModelReport, report
from chitu_diffusion.commands.plan.question import Question
from chitu_diffusion.parallel.cp.errors import ExitCode
from chitu_diffusion.parallel.cp.fast.attention.cost import attention_s, estimate_s
from chitu_diffusion.parallel.cp.fast.attention.hardware import H200, Hardware
from chitu_diffusion.parallel.cp.fast.attention.schedule import parse
from tools.benchmarks.fast_cp_frameworks.render import results_of
from tools.benchmarks.fast_cp_frameworks.result import Result
from tools.benchmarks.fast_cp_frameworks.result_file import read

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/scaling.md"
MEASURED = ("two-gpus-dit", "two-gpus-qwen-image", "two-gpus-z-image", "two-gpus-wan-1.3b")
WORLDS, SEQUENCES, HEADS = (2, 4, 8), (4096, 8192, 16384, 32760, 75600), 40
LENGTHS = tuple(256 * round(8 * 2 ** (step / 2)) for step in range(13))  # 2048 to 131072, two to an octave
_ON = tuple(f"{world} GPUs" for world in WORLDS)
LEAD = 1.02  # less is a tie
PEAK_SHARE = 660 / 989  # of the dense BF16 peak, that the kernel reaches on H200


@dataclass(frozen=True)
class Gpu:
    """One row of the assumptions; a source says "measured" or "assumed", and what the number comes from."""

    hardware: Hardware
    link: str
    kernel: str
    rest: str


def _assumed(name: str, link_gbs: float, peak_tflops: float, num_sms: int, memory_tbs: float) -> Hardware:
    """An H200 with another link, peak, number of SMs and memory; what is reached of a peak is what H200 reaches."""
    return replace(
        H200.steady,
        name=name,
        link_bytes_per_s=1e9 * link_gbs,
        kernel_flops=1e12 * round(PEAK_SHARE * peak_tflops),
        num_sms=num_sms,
        copy_bytes_per_s=H200.copy_bytes_per_s * memory_tbs / 4.8,
    )


_NVLINK = "assumed: NVLink 900 GB/s both ways together, as H200's, so what was measured there"
GPUS = (
    Gpu(
        replace(H200.steady, name="H200"),
        "measured on two: a flat copy reaches 386 GB/s",
        "measured: CuTe 650–680 under lasting load (peak 989)",
        "132 SMs, memory 4.8 TB/s; a merge measured at 3.5 TB/s",
    ),
    Gpu(
        _assumed("H100 SXM", 385, 989, 132, 3.35),
        _NVLINK,
        "assumed equal to H200's: the same SMs and clocks (peak 989)",
        "132 SMs, memory 3.35 TB/s, by its data sheet",
    ),
    Gpu(
        _assumed("H20", 385, 148, 78, 4.0),
        _NVLINK,
        "assumed: the share of its peak (148) that H200 reaches",
        "78 SMs, memory 4.0 TB/s, by public reports",
    ),
    Gpu(
        replace(_assumed("RTX PRO 5000 Blackwell", 50, 258, 110, 1.344), fuses=False),  # SM120
        "assumed: PCIe 5.0 x16 is 63 GB/s each way, about 50 of them for data",
        "assumed: the same share of its peak (258: an eighth of 2064 sparse FP4 TOPS)",
        "110 SMs, memory 1.344 TB/s, by its data sheet",
    ),
)


@cache
def modelled(hardware: Hardware, sequence: int, world: int, heads: int = HEADS) -> ModelReport:
    """What `chitu plan` says of D128, batch 1."""
    return report(_question(sequence, heads), world, hardware)


def _question(sequence: int, heads: int) -> Question:
    return Question(sequence, heads, heads, 128, 1, "bfloat16", "auto")


def with_tables(page: str) -> str:
    """``page`` with its tables as the model has them now: each stands between two comments with its name."""
    for name, lines in _tables().items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        assert closed, f"the page has no place for the table {name}"
        page = "".join([before, start, "\n", *(f"{line}\n" for line in lines), end, after])
    return page


def _tables() -> dict[str, list[str]]:
    numbers = [_row("GPU", "link, GB/s", "", "kernel, TFLOP/s", "", "others"), _rule(6), *map(_numbers, GPUS)]
    speedups = [_row("GPU", "S", "one GPU, ms", *_ON), _rule(6), *_speedups()]
    ranges = [_row("GPU", *_ON), _rule(4), *map(_ranges, GPUS)]
    measured = [
        _row("H", "S", "one GPU, ms", "AGKV, ms", "Ulysses, ms", "speed-up of the better"),
        _rule(6),
        *(line for name in MEASURED for line in _measured(results_of(read(ROOT / f"docs/results/{name}.json")))),
    ]
    return {"assumptions": numbers, "speed-ups": speedups, "ranges": ranges, "measured": measured}


def _numbers(gpu: Gpu) -> str:
    link, rate = gpu.hardware.link_bytes_per_s / 1e9, gpu.hardware.kernel_flops / 1e12
    return _row(gpu.hardware.name, f"{link:g}", gpu.link, f"{rate:g}", gpu.kernel, gpu.rest)


def _speedups() -> Iterator[str]:
    for gpu in GPUS:
        for sequence in SEQUENCES:
            found = [modelled(gpu.hardware, sequence, world) for world in WORLDS]
            best = (f"{told.rows[0].speedup:.2f} {told.rows[0].method}" for told in found)
            yield _row(gpu.hardware.name, str(sequence), f"{found[0].single_ms:.2f}", *best)


def _ranges(gpu: Gpu) -> str:
    return _row(gpu.hardware.name, *(_range(gpu.hardware, world) for world in WORLDS))


def _range(hardware: Hardware, world: int) -> str:
    """Up to where splitting heads leads at every length, and from where on it leads at none."""
    behind = [_lead(modelled(hardware, length, world).rows) < 1 / LEAD for length in LENGTHS]
    first = behind.index(False)
    last = len(behind) - behind[::-1].index(True) if True in behind else 0
    heads = f"Ulysses or hybrid to {LENGTHS[first - 1]}" if first else ""
    agkv = f"AGKV from {LENGTHS[last]}" if last else "AGKV"
    return ", ".join(part for part in (heads, agkv) if part)


def _lead(rows: Sequence[MethodRow]) -> float:
    """The time of the best way to split heads over that of AGKV."""
    agkv = next(row.total_ms for row in rows if row.ulysses_degree == 1)
    return min(row.total_ms for row in rows if row.ulysses_degree > 1) / agkv


def _measured(results: Sequence[Result]) -> Iterator[str]:
    """One line for every shape at which all three ran by CuTe: calls in a row, and the model of what ran."""
    shapes: dict[tuple[int, int], dict[str, Result]] = {}
    for result in results:
        if result.implementation and result.implementation.attention_plan.kernel == "cute":
            shapes.setdefault((result.case.heads, result.case.sequence), {})[result.case.method] = result
    for (heads, sequence), found in shapes.items():
        if not {"single", "fast_agkv", "fast_ulysses"} <= found.keys():
            continue
        ours = [found[name] for name in ("single", "fast_agkv", "fast_ulysses")]
        took = max(result.speedup_back_to_back or 0.0 for result in ours)
        foretold = modelled(GPUS[0].hardware, sequence, 2, heads).rows[0].speedup
        yield _row(str(heads), str(sequence), *map(_against, ours), f"{took:.2f}, table {foretold:.2f}")


def _against(result: Result) -> str:
    assert result.timing is not None
    took_ms, model_ms = result.timing.back_to_back_ms, _model_ms(result)
    return f"{took_ms:.3f}, model {model_ms:.3f} ({round(100 * (model_ms / took_ms - 1)):+d} %)"


def _model_ms(result: Result) -> float:
    """By the model of H200, boost included, since a benchmark's calls are few."""
    assert result.implementation is not None
    plan, question = result.implementation.attention_plan, _question(result.case.sequence, result.case.heads)
    if result.case.method == "single":
        return 1e3 * attention_s(works(question, 1)["agkv"])
    return 1e3 * estimate_s(works(question, result.case.world_size)[plan.method], parse(plan.schedule))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return _row(*["---"] * columns)


def main(arguments: Sequence[str]) -> ExitCode:
    """Writes or checks the tables of the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.fast_cp_frameworks.scaling", description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", action="store_true", help="write the tables into docs/scaling.md")
    group.add_argument("--check", action="store_true", help="end with 1 where docs/scaling.md has others")
    asked, page = parser.parse_args(arguments), PAGE.read_text()
    new = with_tables(page)
    if asked.write:
        PAGE.write_text(new)
    elif new != page:
        print("docs/scaling.md has other tables than the model now; write them anew with --write", file=sys.stderr)
        return ExitCode.CHECK_FAILED
    return ExitCode.RIGHT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
