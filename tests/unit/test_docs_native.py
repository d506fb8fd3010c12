"""Sentences of the extension that the documentation quotes: what stands around their numbers and names is in csrc."""

import re
from pathlib import Path

import pytest

from tests.unit.test_doctor_extension import HOST_MISSING, MAJOR_DIFFERS

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# By source file; a value, and what one value moves to another place, in «».
MARKED = (
    (
        "runtime/heap.cpp",
        "rank «0» cannot reach the memory of rank «1»: their GPUs have no peer access; use backend nccl, or GPUs "
        "connected by NVLink or one PCIe root",
    ),
    (
        "runtime/nvshmem.cpp",
        "NVSHMEM could not allocate «2147483648» bytes on every GPU; free GPU memory or pass a smaller pool_bytes to "
        "init_fast_cp",
    ),
    (
        "include/fast_cp/window_plan.hpp",
        "the symmetric pool of «2147483648» bytes has no room for window '«in»' of «1548288000» bytes; pass "
        "pool_bytes=«3096576000» or more to init_fast_cp",
    ),
    (
        "runtime/runtime.cpp",
        "rank «0» waited «10» s for «»chunk «0» of «»window '«in»' (slot «2»)«» from rank «1»: it has announced use "
        "«7» and use «8» was expected«»; look at what that rank does: an error there, another call order or shape, or "
        "a pause longer than timeout_s",
    ),
    (
        "runtime/runtime.cpp",
        "rank «0» waited «10» s for «»rank «1» to start use «8» of «»window '«in»' (slot «2»)«»: it has started use "
        "«7»«»; look at what that rank does: an error there, another call order or shape, or a pause longer than "
        "timeout_s",
    ),
    (
        "runtime/runtime.cpp",
        "this process has a Fast CP runtime already« »(rank «0» of «2»)«»; finalize it first, or use backend nccl for "
        "the second group",
    ),
    (
        "runtime/nvshmem.cpp",
        HOST_MISSING.replace("; /x/lib/libnvshmem_host.so.3: cannot open shared object file", "«»"),
    ),
    ("runtime/nvshmem.cpp", re.sub(r"3\.4\.5|2\.11\.0|/x|(?<= )3(?=\.x)", "«»", MAJOR_DIFFERS)),
)
NATIVE = [re.sub("[«»]", "", sentence) for _, sentence in MARKED[:6]]


@pytest.mark.parametrize(("source", "sentence"), MARKED)
def test_the_extensions_sentences_are_those_of_its_source(source: str, sentence: str) -> None:
    text = (CSRC / source).read_text().replace(", kLibrary,", '"libnvshmem_host.so.3"').replace(", kLibrary)", "")
    said = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', text))
    for piece in re.split("«[^»]*»", sentence):
        assert piece.removesuffix("libnvshmem_host.so.3") in said, piece
