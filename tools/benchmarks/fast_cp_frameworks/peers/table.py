"""The table of peers, by the name of the method that a result names. A new library is one file and one entry here."""

from tools.benchmarks.fast_cp_frameworks.peers import (
    cache_dit,
    diffusers_cp,
    fast_ulysses,
    flashinfer,
    para_attn,
    ring_flash_attn,
    torch_cp,
    xdit,
    yunchang,
)
from tools.benchmarks.fast_cp_frameworks.peers.base import Peer

LIBRARIES = (
    torch_cp, diffusers_cp, yunchang, xdit, para_attn, cache_dit, ring_flash_attn, flashinfer, fast_ulysses
)  # fmt: skip
PEERS: dict[str, Peer] = {row.name: row for library in LIBRARIES for row in library.ROWS}
