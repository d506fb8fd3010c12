"""The hardware that the fast wrapper is meant for: one row each, with what was verified, where and when.

What is in no row runs over torch.distributed, with the reason: symmetric memory may work there, and nobody has seen it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """What ran, on which machine, and when; ``when`` is "pending" until it did."""

    what: str
    where: str
    when: str

    @property
    def verified(self) -> bool:
        """Whether it has run."""
        return self.when != PENDING

    def __str__(self) -> str:
        return f"{self.what}: verified on {self.where}, {self.when}" if self.verified else f"{self.what}: {PENDING}"


PENDING = "pending"
# the machine and the day of a run of test/run_wrapper.sh that ended with exit code 0 (docs/results/wrapper)
H200_WRAPPER = Evidence("wrapper", where="two H200, NVLink 18x", when="2026-11-30")
NOBODY = Evidence("wrapper", where="", when=PENDING)


@dataclass(frozen=True)
class Profile:
    """One row: a family of GPUs by its name, its architecture (90 for 9.0) and the link between them."""

    name: str
    pattern: str  # of the name that the driver gives
    sm: int
    link: str
    wrapper: Evidence

    def __str__(self) -> str:
        return f"{self.name} (SM{self.sm}, {self.link}), {self.wrapper}"


PROFILES = (
    Profile("H20", r"\bH20\b", 90, "NVLink", NOBODY),
    Profile("H100", r"\bH100\b", 90, "NVLink", NOBODY),
    Profile("H200", r"\bH200\b", 90, "NVLink", H200_WRAPPER),
    Profile("RTX PRO 5000", r"\bRTX PRO 5000\b", 120, "PCIe", NOBODY),
    Profile("RTX PRO 6000", r"\bRTX PRO 6000\b", 120, "PCIe", NOBODY),
)


def find(info: Mapping[str, Any]) -> Profile | str:
    """The row of a GPU, or why there is none; ``info`` is what the extension's ``device_info`` says of it."""
    name, sm, link = str(info.get("name")), info.get("sm"), link_of(info)
    rows = [row for row in PROFILES if re.search(row.pattern, name) and row.sm == sm]
    if not rows:
        known = ", ".join(row.name for row in PROFILES)
        return f"the GPU is {name} (SM{sm}), which has no hardware profile; there is one for {known}"
    if link not in (None, rows[0].link):
        return f"the GPUs are {name} over {link}, and the profile is of {rows[0].name} over {rows[0].link}"
    return rows[0]


def link_of(info: Mapping[str, Any]) -> str | None:
    """The slowest link from this GPU to another one that is visible; None where it sees no other."""
    peers = info.get("peers") or ()
    if not peers:
        return None
    return "NVLink" if all(peer["nvlink"] for peer in peers) else "PCIe"
