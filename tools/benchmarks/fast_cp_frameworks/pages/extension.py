"""Transfers and robustness of the CUDA extension, from extension/*.json and pictures/*.json."""

from typing import Any

from tools.benchmarks.fast_cp_frameworks.pages.files import Files, held, table

PROBE = "extension/two-gpus-extension.json"
RATES = {
    "flat_ce": "flat copy",
    "in_place_ce": "in place",
    "gather_ce": "gather, CE",
    "gather_sm": "SM",
    "gather_tma": "TMA",
    "nccl": "NCCL",
}
LOST = {"killed": "killed", "stopped": "stopped", "raising": "raises an exception"}
PICTURES = {"wan": "Wan", "qwen-image": "Qwen-Image", "zimage": "Z-Image"}
WAYS = ("agkv over nccl", "agkv over fast", "ulysses over nccl", "ulysses over fast")


def rates(files: Files) -> str:
    """GB/s by size, beside a flat copy and NCCL."""
    found = files.json(PROBE)
    rows = [_rate(f"{row['megabytes']} MB", row) for row in found["rates"]]
    rows += [_rate(f"{row['megabytes']} MB, in a row", row) for row in found["back_to_back"]]
    return table(("per peer, GB/s", *RATES.values(), "in place / flat copy", "in place / NCCL"), rows)


def costs(files: Files) -> str:
    """Round trip, one small exchange, and what copies cost a GEMM."""
    found = files.json(PROBE)
    trip, gemm, calls = found["round_trips"], found["gemm"], found["calls"]
    return "\n".join(
        (
            f"- Round trip of a flag: {trip['kernel']:.1f} µs by kernel, {trip['ce']:.1f} µs by copy engine.",
            f"- One gather of 1 MB: {calls['gather_1mb_us']:.0f} µs on the GPU, "
            f"{calls['gather_1mb_host_included_us']:.0f} µs with the host's part.",
            f"- A GEMM of {gemm['alone_ms']:.2f} ms takes {gemm['in_place_ce_percent']:.1f} % longer beside copies in "
            f"place, {gemm['flat_ce_percent']:.1f} % beside a flat copy, {gemm['ce_percent']:.1f} % where the rank's "
            f"own rows are copied too, {gemm['sm_percent']:.0f} % by SM, {gemm['tma_percent']:.0f} % by TMA.",
            f"- {held(found['checks'])}",
        )
    )


def lost_ranks(files: Files) -> str:
    """What the other rank does when one is gone, with the limit of the test's waits in its sentence."""
    found = files.json("extension/two-gpus-faults.json")
    rows = [
        (
            how,
            f"{found[name]['seconds_to_sentence']:.1f}",
            f"{found[name]['seconds_to_exit']:.1f}",
            str(found[name]["exit_code"]),
            str(len(found[name]["processes_left"])),
        )
        for name, how in LOST.items()
    ]
    columns = ("one rank is", "the other says so after s", "ends after s", "exit code", "processes left")
    return f"{table(columns, rows)}\n\n{held(found['checks'])} It says: `{found['killed']['sentence']}`."


def endurance(files: Files) -> str:
    """Long runs, many shapes, other users of the GPUs."""
    exact = files.json(PROBE)
    attention = files.json("extension/two-gpus-attention.json")["calls"]
    calls = files.json("extension/two-gpus-endurance.json")["calls"]
    many = files.json("extension/two-gpus-resolutions.json")["resolutions"]
    beside = files.json("extension/two-gpus-neighbours.json")["neighbours"]
    grown, later = calls["growth_percent"], many["last_100_growth_percent"]
    replays = sum(exact[f"graph_{way}"]["replays"] for way in ("ce", "sm", "tma"))
    unequal = sum(exact[f"graph_{way}"]["wrong"] for way in ("ce", "sm", "tma"))
    rows = (
        ("random shapes, bit by bit", f"{exact['shapes']['shapes']} shapes", f"{exact['shapes']['wrong']} wrong"),
        ("replays of graphs", f"{replays}", f"{unequal} wrong"),
        (
            "`cp_attention` against the exact result and NCCL",
            f"{attention['exact']} and {attention['compared_with_nccl']} calls",
            f"{attention['inexact']} beyond the limit, {attention['unlike_nccl']} unlike NCCL's bits",
        ),
        (
            "calls in one life",
            f"{calls['calls']} calls, {calls['checked']} checked",
            f"{calls['wrong']} wrong; memory of the GPU +{grown['gpu']:g} %, of the host +{grown['host']:g} %",
        ),
        (
            "resolutions in one session",
            f"{many['resolutions']}, the first {many['again']} again",
            f"{many['unlike']} unlike; {many['timed_again']} plans measured again; over the last 100 GPU memory "
            f"+{later['gpu']:g} %, the host's +{later['host']:g} %",
        ),
        (
            "lives beside NCCL and torch's symmetric memory",
            f"{beside['times']}",
            f"{beside['wrong']} wrong; {beside['left_mb']:g} MB of GPU memory left",
        ),
    )
    return table(("what", "how many", "found"), rows, words=3)


def pictures(files: Files) -> str:
    """Tiny pipelines: how far pixels are from one rank's in float32 (root mean square), and from each other."""
    found = files.json("pictures/two-gpus.json")
    rows = [
        (
            model,
            f"{found[name]['own_error']:.5f}",
            *(f"{found[name][way]['error']:.5f}" for way in WAYS),
            str(found[name]["agkv, bits apart"] + found[name]["ulysses, bits apart"]),
        )
        for name, model in PICTURES.items()
    ]
    columns = ("pipeline", "one rank", *(way.replace("nccl", "NCCL").replace("fast", "Fast") for way in WAYS))
    return f"{table((*columns, 'NCCL and Fast: values apart'), rows)}\n\n{held(found['checks'])}"


def _rate(label: str, row: dict[str, Any]) -> list[str]:
    cells = [f"{row[name]:.0f}" if name in row else "-" for name in RATES]
    by_flat, by_nccl = row["in_place_ce"] / row["flat_ce"], row["in_place_ce"] / row["nccl"]
    return [label, *cells, f"{100 * by_flat:.1f} %", f"{by_nccl:.2f}"]
