"""Which hardware has a profile, and what the others are told."""

import re
from pathlib import Path
from typing import Any

import pytest

from chitu_diffusion.parallel.cp.fast import profiles
from chitu_diffusion.parallel.cp.fast.profiles import PROFILES, Evidence, Profile, find

NAMES = {
    "H20": "NVIDIA H20",
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "RTX PRO 5000": "NVIDIA RTX PRO 5000 Blackwell",
    "RTX PRO 6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}


def gpu(name: str, sm: int, *nvlink: bool) -> dict[str, Any]:
    return {"name": name, "sm": sm, "peers": [{"device": i, "nvlink": there} for i, there in enumerate(nvlink)]}


@pytest.mark.parametrize("row", PROFILES, ids=lambda row: row.name)
def test_a_gpu_finds_its_row_alone_and_among_peers(row: Profile) -> None:
    over_nvlink = row.link == "NVLink"
    assert find(gpu(NAMES[row.name], row.sm)) is row
    assert find(gpu(NAMES[row.name], row.sm, over_nvlink, over_nvlink)) is row


@pytest.mark.parametrize(
    ("name", "sm"), [("NVIDIA A100-SXM4-80GB", 80), ("NVIDIA B200", 100), ("NVIDIA GeForce RTX 5090", 120)]
)
def test_an_unknown_gpu_is_told_so(name: str, sm: int) -> None:
    told = find(gpu(name, sm, True))
    assert told == (
        f"the GPU is {name} (SM{sm}), which has no hardware profile; "
        "there is one for H20, H100, H200, RTX PRO 5000, RTX PRO 6000"
    )


def test_another_link_than_the_rows_is_told() -> None:
    told = find(gpu("NVIDIA H100 PCIe", 90, True, False))
    assert told == "the GPUs are NVIDIA H100 PCIe over PCIe, and the profile is of H100 over NVLink"


def test_only_h200_may_be_verified() -> None:
    for row in PROFILES:
        assert row.name == "H200" or not row.wrapper.verified
        assert row.wrapper is profiles.H200_WRAPPER or row.wrapper is profiles.NOBODY


def test_the_readme_has_the_rows() -> None:
    readme = (Path(profiles.__file__).parent / "README.md").read_text()
    for row in PROFILES:
        told = f"verified, {row.wrapper.where}, {row.wrapper.when}" if row.wrapper.verified else row.wrapper.when
        assert f"| {row.name} | SM{row.sm} | {row.link} | {told} |" in readme


def test_evidence_says_where_and_when_or_that_it_is_pending() -> None:
    assert str(Evidence("wrapper", "two H200", "pending")) == "wrapper: pending"
    assert re.fullmatch(r"wrapper: verified on two H200, \S+", str(Evidence("wrapper", "two H200", "2026-12-01")))
