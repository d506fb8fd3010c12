"""Attention on two GPUs by shape, from two-gpus-*.json."""

from tools.benchmarks.fast_cp_frameworks.pages.files import Files, milliseconds, span, table, times
from tools.benchmarks.fast_cp_frameworks.render import NOTHING, short_plan
from tools.benchmarks.fast_cp_frameworks.result import ReportSet, Result

METHODS = {
    "nccl_agkv": "NCCL AGKV",
    "nccl_ulysses": "NCCL Ulysses",
    "fast_agkv": "Fast AGKV",
    "fast_ulysses": "Fast Ulysses",
}
MODELS = {
    "two-gpus-dit.json": "DiT",
    "two-gpus-qwen-image.json": "Qwen-Image",
    "two-gpus-z-image.json": "Z-Image",
    "two-gpus-wan-1.3b.json": "Wan 1.3B",
    "two-gpus-wan-14b.json": "Wan 14B",
}
KERNEL = "cute"
DIT, QWEN = "two-gpus-dit.json", "two-gpus-qwen-image.json"


def front(files: Files) -> str:
    """README: 40 heads by length, with CuTe, and how Qwen-Image does."""
    report = files.benchmark(DIT)
    rows = [
        (str(tokens), milliseconds(_time(report, "single", tokens)), *_methods(report, tokens))
        for tokens in _tokens(report)
    ]
    return f"{table(('tokens', 'one GPU', *METHODS.values()), rows, words=0)}\n\n{_image_sentence(files)}"


def by_shape(files: Files) -> str:
    """Every shape of every file, with CuTe."""
    return table(_columns(), [row for name, model in MODELS.items() for row in _rows(files.benchmark(name), model)])


def plans(files: Files) -> str:
    """What the planner took, and what was exposed, at each shape."""
    rows = [
        (f"{model}, {result.case.sequence}", *_planned(result))
        for name, model in MODELS.items()
        for result in files.benchmark(name).results
        if result.case.method in ("fast_agkv", "fast_ulysses") and result.case.kernel == "auto"
    ]
    return table(("shape", "method", "plan that ran", "attention ms", "exposed ms", "spread"), rows, words=3)


def runs(files: Files) -> str:
    """Which commit and which versions made the tables."""
    rows = []
    for name in MODELS:
        report = files.benchmark(name)
        versions = (f"{what} {report.versions[what]}" for what in ("torch", "nccl", "cudnn") if report.versions[what])
        rows.append(
            (f"[{name}](results/{name})", report.created[:10], (report.commit or NOTHING)[:7], ", ".join(versions))
        )
    return table(("file", "date", "commit", "versions"), rows, words=4)


def _columns() -> tuple[str, ...]:
    return ("model", "heads", "tokens", "one GPU", *METHODS.values())


def _rows(report: ReportSet, model: str) -> list[tuple[str, ...]]:
    heads = str(report.results[0].case.heads)
    return [
        (model, heads, str(tokens), milliseconds(_time(report, "single", tokens)), *_methods(report, tokens))
        for tokens in _tokens(report)
    ]


def _tokens(report: ReportSet) -> list[int]:
    return sorted({result.case.sequence for result in report.results})


def _found(report: ReportSet, method: str, tokens: int) -> Result | None:
    for result in report.results:
        ran = result.implementation
        same = (result.case.method, result.case.sequence) == (method, tokens)
        if same and result.timing is not None and ran is not None and ran.attention_plan.kernel == KERNEL:
            return result
    return None


def _time(report: ReportSet, method: str, tokens: int) -> float | None:
    found = _found(report, method, tokens)
    return found.timing.median_ms if found is not None and found.timing is not None else None


def _methods(report: ReportSet, tokens: int) -> list[str]:
    return [_cell(_found(report, method, tokens)) for method in METHODS]


def _cell(result: Result | None) -> str:
    if result is None or result.timing is None:
        return NOTHING
    in_a_row = result.speedup_back_to_back
    behind = f" ({times(in_a_row)})" if in_a_row is not None else ""
    return f"{milliseconds(result.timing.median_ms)}, {times(result.speedup_over_single)}{behind}"


def _planned(result: Result) -> tuple[str, ...]:
    ran, timed = result.implementation, result.timing
    plan = short_plan(result.case, ran.attention_plan) if ran is not None else NOTHING
    spread = f"{100 * timed.relative_spread:.1f} %" if timed is not None else NOTHING
    parts = (result.attention_ms, result.exposed_ms)
    return (METHODS[result.case.method], plan, *(f"{ms:.3f}" if ms is not None else NOTHING for ms in parts), spread)


def _image_sentence(files: Files) -> str:
    report = files.benchmark(QWEN)
    tokens = _tokens(report)
    fast, nccl = ([_best(report, transport, at) for at in tokens] for transport in ("fast", "nccl"))
    return (
        f"Qwen-Image ({report.results[0].case.heads} heads, {span(tokens, 'd')} tokens): by the better method at each "
        f"length Fast is {span(fast, '.1f')} times as fast as one GPU, NCCL {span(nccl, '.1f')} times."
    )


def _best(report: ReportSet, transport: str, tokens: int) -> float:
    """The speed-up of the better of AGKV and Ulysses."""
    told = (_found(report, f"{transport}_{method}", tokens) for method in ("agkv", "ulysses"))
    return max(result.speedup_over_single or 0.0 for result in told if result is not None)
