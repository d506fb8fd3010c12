"""Results for people: a table in the terminal, with a sentence for each that failed. The cells serve Markdown too."""

from rich.console import Console
from rich.table import Table

from tools.benchmarks.fast_cp_frameworks.cases import label
from tools.benchmarks.fast_cp_frameworks.paired import sentence
from tools.benchmarks.fast_cp_frameworks.result import CaseRecord, PlanRecord, Report, ReportSet, Result

COLUMNS = (
    "Method",
    "Transport",
    "Kernel",
    "Plan that ran",
    "S",
    "H x D",
    "Error / limit",
    "Time ms",
    "Spread",
    "TFLOP/s per rank",
    "Exposed ms",
    "Hidden",
    "Speed-up",
    "in a row",
)
WORDS = 4  # columns of words, which come first
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
        label(case.method, case.plan),
        ran.transport.used if ran else NOTHING,
        ran.attention_plan.kernel if ran else case.kernel,
        short_plan(case, ran.attention_plan) if ran else NOTHING,
        str(case.sequence),
        f"{heads} x {case.head_dim}",
        f"{result.accuracy.error:.1e} / {result.accuracy.limit:.1e}" if result.accuracy else NOTHING,
        f"{timed.median_ms:.3f}" if timed else result.status,
        f"{100 * timed.relative_spread:.1f} %" if timed else NOTHING,
        rate,
        f"{result.exposed_ms:.3f}" if result.exposed_ms is not None else NOTHING,
        f"{100 * result.hidden_share:.0f} %" if result.hidden_share is not None else NOTHING,
        f"{result.speedup_over_single:.2f}" if result.speedup_over_single is not None else NOTHING,
        f"{result.speedup_back_to_back:.2f}" if result.speedup_back_to_back is not None else NOTHING,
    )


def short_plan(case: CaseRecord, plan: PlanRecord) -> str:
    """How kernel and transfer interleave: ``pipe(1:4)+local(2) graph``; behind the method where that was open."""
    schedule = plan.schedule.replace("head_pipeline", "pipe").replace("+local_first", "+local")
    method = plan.method if case.method.endswith("_auto") else ""
    return " ".join(word for word in (method, schedule, "graph" if plan.graph else "") if word)


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
    told = (f"{label(r.case.method, r.case.plan)} at S={r.case.sequence}: {r.reason}" for r in failed)
    return list(dict.fromkeys(told))


def comparisons(report: Report | ReportSet) -> list[str]:
    """A sentence for each comparison of two plans."""
    return [sentence(told) for told in report.comparisons] if isinstance(report, ReportSet) else []


def show(report: Report | ReportSet) -> None:
    """Print the table, and why rows failed."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=190)  # a log file has no width, and 80 columns would break every row in two
    table = Table()
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < WORDS else "right", no_wrap=number < WORDS)
    for result in results_of(report):
        table.add_row(*cells(result), style="red" if result.status == "failed" else None)
    console.print(caption(report), markup=False, highlight=False)
    console.print(table)
    for line in comparisons(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in failures(report):
        Console(stderr=True, soft_wrap=True).print(f"error: {line}", markup=False, highlight=False)
