"""README's table of what is verified, on which hardware, when, and in which file."""

from collections.abc import Sequence

from tools.benchmarks.fast_cp_frameworks.compare import merge
from tools.benchmarks.fast_cp_frameworks.pages.attention import MODELS
from tools.benchmarks.fast_cp_frameworks.pages.files import Files, table
from tools.benchmarks.fast_cp_frameworks.pages.libraries import NAME
from tools.benchmarks.fast_cp_frameworks.pages.models import STEPS, acceptance

TWO = "2 × H200, NVLink"
PICTURES, SERVED = "pictures/two-gpus.json", "pictures/two-gpus-serve.json"
DAY = "2026-11-30"  # of the programs whose files hold no date
# everything that has no file of results
BY_HAND = (
    ("all but speed: attention, adapters, generate, serve, installer", "CPUs, gloo", "every change", "`make check`"),
    ("RTX PRO 5000, 6000 (SM120)", "the wheel builds; nothing has run", "–", "–"),
    ("four and eight GPUs, each rank on its own; H20, H100", "not run", "–", "–"),
)  # fmt: skip
EXTENSION = tuple(
    f"extension/two-gpus-{name}.json"
    for name in ("extension", "attention", "endurance", "resolutions", "neighbours", "faults")
)

SHARED, SHARED_DAY = range(3, 9), "2026-12-01"  # ranks on one GPU
GRAPHS = ("graph_ce", "graph_sm", "graph_tma", "mixed")


def verified(files: Files) -> str:
    """The whole table; links are relative to the root of the repository."""
    columns = ("what", "hardware", "date", "result")
    return table(
        columns,
        [*_attention(files), _kernels(files), *_programs(files), _shared(files), _compared(files), *BY_HAND],
        words=4,
    )


def _attention(files: Files) -> list[tuple[str, ...]]:
    fast = [name for name in MODELS if _has_fast(files, name)]
    nccl = [name for name in MODELS if name not in fast]
    rows = [("attention: AGKV and Ulysses, over NCCL and Fast, right and timed", fast)]
    rows += [("attention: AGKV and Ulysses, over NCCL alone, right and timed", nccl)] if nccl else []
    return [(what, TWO, _dates(files, names), _links(names)) for what, names in rows]


def _has_fast(files: Files, name: str) -> bool:
    results = files.benchmark(name).results
    return any(result.case.method.startswith("fast_") and result.status == "complete" for result in results)


def _kernels(files: Files) -> tuple[str, ...]:
    name = "one-gpu-dit.json"
    link = f"{_links([name])} and `one-gpu-*.json` beside it"
    return ("attention kernels, one process", "1 × H200", _dates(files, [name]), link)


def _programs(files: Files) -> list[tuple[str, ...]]:
    calls = files.json("extension/two-gpus-endurance.json")["calls"]["calls"]
    extension = f"the extension: bit-exact against what was sent and against NCCL, graphs, {calls:,} calls, lost ranks"
    (cudnn, of_cudnn), (cute, of_cute) = (_right(files, folder) for folder in ("cudnn", "cute"))
    wrapper = (
        f"the wrapper's acceptance test: {cute} of {of_cute} cases right with CuTe, and in an earlier run {cudnn} of "
        f"{of_cudnn} with cuDNN"
    )
    summaries = "[cuDNN](docs/results/wrapper/cudnn/summary.md), [CuTe](docs/results/wrapper/cute/summary.md)"
    steps = [step["model"] for name in STEPS for step in files.json(name)["results"]]
    commands = f"[generate](docs/results/{PICTURES}), [serve](docs/results/{SERVED})"
    pictures = "pictures and videos of tiny pipelines: one rank, NCCL and Fast agree; NCCL and Fast in every bit"
    return [
        (extension, TWO, DAY, _links(EXTENSION)),
        (wrapper, TWO, DAY, summaries),
        (f"whole denoising steps with random weights: {', '.join(steps)}", TWO, DAY, _links(STEPS)),
        (f"{pictures} with one kernel", TWO, DAY, f"[pictures](docs/results/{PICTURES})"),
        (f"commands on tiny pipelines, over NCCL and Fast: {_commands(files)}", TWO, DAY, commands),
    ]


def _shared(files: Files) -> tuple[str, ...]:
    """How much is right where more ranks than there are GPUs take turns on one."""
    exact = [files.json(f"widths/one-gpu-extension-{world}.json") for world in SHARED]
    attention = [files.json(f"widths/one-gpu-attention-{world}.json")["calls"] for world in SHARED]
    shapes = sum(found["shapes"]["shapes"] for found in exact)
    wrong = sum(found[part]["wrong"] for found in exact for part in ("shapes", *GRAPHS))
    calls, inexact = (sum(found[name] for found in attention) for name in ("exact", "inexact"))
    what = (
        f"{SHARED[0]} to {SHARED[-1]} ranks that share one GPU, so nothing about speed: the extension, {shapes} shapes "
        f"and replayed graphs, {wrong} wrong; {calls} calls of attention by AGKV, Ulysses and the hybrid, "
        f"{inexact} wrong"
    )
    return (what, "1 × H200", SHARED_DAY, "[widths](docs/results/widths)")


def _commands(files: Files) -> str:
    """How many of the commands did what was asked of them, in both runs."""
    first, second = files.json(PICTURES)["commands"], files.json(SERVED)
    made = [told["good"] for name, told in first.items() if name.startswith("generate")]
    failed = [told["good"] for name, told in first.items() if name.startswith("serve")]
    served = [told["good"] for told in second.values()]
    told = f"`chitu generate` {sum(made)} of {len(made)} times, `chitu serve` {sum(failed)} of {len(failed)}"
    return f"{told} and, in a second run, {sum(served)} of {len(served)}"


def _right(files: Files, folder: str) -> tuple[int, int]:
    """Cases of the acceptance test that are right, of how many."""
    cases = acceptance(files, folder)
    return sum(record.status == "right" for record, _ in cases), len(cases)


def _compared(files: Files) -> tuple[str, ...]:
    rows = merge.rows([files.benchmark(NAME)])
    timed = {row.at for row in rows if row.milliseconds is not None}
    what = f"public libraries beside ours, {len(timed)} shapes"
    return (what, TWO, _dates(files, [NAME]), "[compare](docs/results/compare/compare.md)")


def _dates(files: Files, names: Sequence[str]) -> str:
    return ", ".join(sorted({files.benchmark(name).created[:10] for name in names}))


def _links(names: Sequence[str]) -> str:
    texts = (name.rpartition("/")[2].removesuffix(".json").removeprefix("two-gpus-") for name in names)
    return ", ".join(f"[{text}](docs/results/{name})" for text, name in zip(texts, names, strict=True))
