"""widths.py: several numbers of GPUs side by side, and nothing left of a command that hangs; the packed all-to-all."""

import importlib
import random
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.multigpu import widths

PYTHON = [sys.executable, "-S", "-c"]


@pytest.mark.parametrize(
    ("asked", "gpus", "wanted"),
    [
        (range(2, 9), 8, [(8,), (7,), (6, 2), (5, 3), (4,)]),
        (range(2, 9), 4, [(4,), (3,), (2,)]),
        ((2, 4, 8), 8, [(8,), (4, 2)]),
        ((4, 8), 2, []),
    ],
)
def test_widths_share_the_machine_where_they_fit(asked: range, gpus: int, wanted: list[tuple[int, ...]]) -> None:
    assert widths.rounds(asked, gpus) == wanted


def test_each_width_of_a_round_has_gpus_of_its_own() -> None:
    assert widths.devices_of((4, 2), list("01234567")) == ["0,1,2,3", "4,5"]
    assert widths.devices_of((2, 1), ["7", "5", "3"]) == ["7,5", "3"]


def test_a_command_is_told_its_width_its_seconds_and_its_gpus(tmp_path: Path) -> None:
    code = f"import os; open(r'{tmp_path}/{{width}}', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'] + ' {{seconds}}')"
    assert widths.run_all([(4, 2)], [*PYTHON, code], 20.0) == 0
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"4": "0,1,2,3 17", "2": "4,5 17"}


@pytest.mark.parametrize(("codes", "wanted"), [((0, 0), 0), ((0, 3), 3), ((3, 1), 1), ((0, 124), 1), ((-9, 3), 1)])
def test_the_worst_width_decides(codes: tuple[int, int], wanted: int) -> None:
    assert widths.exit_code(dict(zip((4, 2), codes, strict=True))) == wanted


def test_a_width_that_hangs_is_ended_with_what_it_started_and_the_next_round_runs(tmp_path: Path) -> None:
    child = f"import os, time; open(r'{tmp_path}/child', 'w').write(str(os.getpid())); time.sleep(60)"
    hang = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}], start_new_session=True)"
    code = f"import os\nopen(r'{tmp_path}/{{width}}', 'w')\nif {{width}} == 3: exec({hang!r})"
    began = time.monotonic()
    assert widths.run_all([(3,), (2,)], [*PYTHON, code], 4.0) == 1
    assert time.monotonic() - began < 10
    assert (tmp_path / "2").exists()
    child_pid = (tmp_path / "child").read_text()
    assert not Path(f"/proc/{child_pid}").exists() or "Z" in Path(f"/proc/{child_pid}/stat").read_text().split()[2]


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program of tests/multigpu, whose modules find each other by its folder, without the extension."""
    folder = Path(widths.__file__).parent
    monkeypatch.syspath_prepend(str(folder))
    extension = ModuleType("fast_ulysses")
    extension.__spec__ = ModuleSpec("fast_ulysses", None)
    extension.__dict__.update(Split=tuple, TextRows=lambda *_: None)
    monkeypatch.setitem(sys.modules, "fast_ulysses", extension)
    try:
        return importlib.import_module(name)
    finally:  # they hold the stand-in, and have names that others may have
        for loaded in {path.stem for path in folder.glob("*.py")} & set(sys.modules):
            del sys.modules[loaded]


@pytest.mark.parametrize("world", [2, 3, 7, 8])
def test_torchs_way_gives_every_rank_its_heads_of_all_tokens(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = imported("extension_packed", monkeypatch)
    monkeypatch.setattr(packed, "TOKENS", 61)
    whole = torch.arange(61 * 3 * 40 * 2).view(1, 61, 3, 40, 2)
    every = [packed.parts_of(rank, world) for rank in range(world)]
    shards = whole.split(every[0].seq, 1)
    messages = [parts.sent(shard).split([shard.shape[1] * 6 * h for h in parts.heads])
                for parts, shard in zip(every, shards, strict=True)]  # fmt: skip
    heads = whole.split(every[0].heads, 3)
    for rank, parts in enumerate(every):
        from_each = [message[rank] for message in messages]

        def exchange(out: torch.Tensor, sent: torch.Tensor, from_each: Any = from_each, **sizes: list[int]) -> None:
            assert sizes["output_split_sizes"] == [piece.numel() for piece in from_each]
            assert sum(sizes["input_split_sizes"]) == sent.numel()
            out.copy_(torch.cat(from_each))

        got = parts.through_torch(shards[rank], exchange)
        assert all(torch.equal(x, want) for x, want in zip(got, heads[rank].unbind(2), strict=True))


def test_the_first_calls_are_one_of_each_way_at_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    program = imported("fast_attention", monkeypatch)
    for world in range(2, 9):
        rng, ways = random.Random(world), program.ways_of(world)
        assert [program.way_of(program.next_case(rng, seed, world), world) for seed in range(len(ways))] == ways
        assert ("by the hybrid" in ways) == (world in (4, 6, 8))


@pytest.mark.parametrize(
    ("world", "milliseconds", "wrong", "right"),
    [(8, 0.8, 0, True), (8, 0.9, 0, False), (8, 0.8, 1, False), (4, 0.9, 0, True), (3, 0.1, 1, False)],
)
def test_the_packed_exchange_is_right_at_any_width_and_fast_at_eight(
    world: int, milliseconds: float, wrong: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = imported("extension_probe", monkeypatch)
    found = {"ce_ms": milliseconds, "sm_ms": 2.0, "tma_ms": 2.0, "wrong": wrong, "torch_over_best": 1.9}
    assert all(probe.packed_verdict(found, world).values()) == right
