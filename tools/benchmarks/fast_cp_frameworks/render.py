"""Results for people: a table in the terminal, with a sentence for each that failed. The cells serve Markdown too."""

from rich.console import Console
from rich.table import Table

from tools.benchmarks.fast_cp_frameworks.result import Report, ReportSet, Result

COLUMNS = (
    "Method",
    "Transport",
    "Kernel",
    "S",
    "H x D",
    "Error / limit",
    "Time ms",
    "Spread",
    "TFLOP/s per rank",
    "Speed-up",
)
NOTHING = "-"


def results_of(report: Report | ReportSet) -> tuple[Result, ...]:
    """All measurements of a file."""
    return report.results if isinstance(report, ReportSet) else (report,)


def cells(result: Result) -> tuple[str, ...]:
    """One row under COLUMNS."""
    case, ran, timed = result.case, result.implementation, result.timing
    rate = f"{result.tflops_per_rank:.3g}" if result.tflops_per_rank is not None else NOTHING
    if result.received_gb_per_s is not None:
        rate = f"{result.received_gb_per_s:.3g} GB/s"
    heads = str(case.heads) if case.heads == case.kv_heads else f"{case.heads}/{case.kv_heads}"
    return (
        case.method,
        ran.transport.used if ran else NOTHING,
        ran.attention_plan.kernel if ran else case.kernel,
        str(case.sequence),
        f"{heads} x {case.head_dim}",
        f"{result.accuracy.error:.1e} / {result.accuracy.limit:.1e}" if result.accuracy else NOTHING,
        f"{timed.median_ms:.3f}" if timed else result.status,
        f"{100 * timed.relative_spread:.1f} %" if timed else NOTHING,
        rate,
        f"{result.speedup_over_single:.2f}" if result.speedup_over_single is not None else NOTHING,
    )


def caption(report: Report | ReportSet) -> str:
    """What all rows share."""
    where = ", ".join(dict.fromkeys(report.hardware.gpus)) or report.hardware.cpu
    results = results_of(report)
    if not results:
        return where
    case = results[0].case
    return f"{case.component}, {case.dtype}, batch {case.batch}, {case.world_size} ranks on {where}"


def failures(report: Report | ReportSet) -> list[str]:
    """A sentence for each measurement that failed; the same sentence once."""
    failed = [result for result in results_of(report) if result.status == "failed"]
    return list(dict.fromkeys(f"{r.case.method} at S={r.case.sequence}: {r.reason}" for r in failed))


def show(report: Report | ReportSet) -> None:
    """Print the table, and why rows failed."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)  # a log file has no width, and 80 columns would break every row in two
    table = Table()
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < 3 else "right", no_wrap=number < 3)
    for result in results_of(report):
        table.add_row(*cells(result), style="red" if result.status == "failed" else None)
    console.print(caption(report), markup=False, highlight=False)
    console.print(table)
    for sentence in failures(report):
        Console(stderr=True, soft_wrap=True).print(f"error: {sentence}", markup=False, highlight=False)
