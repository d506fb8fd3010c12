"""What the doctor says about CuTe FlashAttention: the judgement, and the stage of the child that looks at it."""

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch as real_torch

from chitu_diffusion.commands.doctor import child_kernels
from chitu_diffusion.commands.doctor.facts import CuteFacts, Seen
from chitu_diffusion.commands.doctor.judge import judge
from chitu_diffusion.commands.doctor.probe import ask_child
from chitu_diffusion.parallel.cp.fast.attention import cute, cute_load
from chitu_diffusion.parallel.cp.fast.attention.cute_source import COMMIT, PACKAGE, ROOT_VARIABLE, CuteSource
from tests.support.fake_cute import VERSIONS, write_cute, write_site
from tests.unit.test_doctor import CUTE, bare_machine, check, facts, states

NOT_INSTALLED = CuteSource(PACKAGE, problem="flash-attn-4 is not installed")
UNTRIED = replace(CUTE, tried=None, problem="quack-kernels 0.6.5 found, 0.6.4 wanted", next_step="uv sync")


def test_what_is_right_is_told() -> None:
    line = check(judge(facts()), "cute")
    assert line.required_by == ("cute",)
    assert line.found == (
        "flash-attn-4 4.0.0b29, nvidia-cutlass-dsl 4.6.2, quack-kernels 0.6.4 "
        "(tried: ran on SM90, compiles for SM120); its first result is right here"
    )


@pytest.mark.parametrize(
    ("seen", "state", "code", "found", "step"),
    [
        (Seen(absent="flash-attn-4 is not installed"), "missing", 3, "not installed", "uv sync --inexact --extra cute"),
        (Seen(value=UNTRIED), "wrong", 1, "0.6.4: quack-kernels 0.6.5 found, 0.6.4 wanted", "uv sync"),
        (Seen(value=replace(CUTE, problem="its import fails: x")), "wrong", 1, "import fails", "see what it says"),
        (Seen(broken="it did not finish within 120 s"), "wrong", 1, "did not finish", "see what it says"),
        (Seen(value=replace(CUTE, no_gpu="it is for SM90")), "missing", 3, "it imports, but it is for", "run on a GPU"),
    ],
)
def test_each_state_is_one_line_that_stops_cute_alone(
    seen: Seen[CuteFacts], state: str, code: int, found: str, step: str
) -> None:
    what = facts(cute=seen)
    assert states(what) == {"cute": state}
    line = check(judge(what), "cute")
    assert found in line.found
    assert (line.next_step or "").startswith(step)
    assert judge(what, ("cute",)).exit_code == code
    assert judge(what, ("nccl", "fast")).exit_code == 0


def test_a_source_that_the_reason_names_is_not_named_twice() -> None:
    value = CuteFacts("FLASH_ATTENTION_ROOT=/x", {}, None, problem="FLASH_ATTENTION_ROOT=/x holds no flash_attn/cute")
    assert check(judge(facts(cute=Seen(value=value))), "cute").found == value.problem


def test_cute_needs_a_driver_and_no_second_gpu() -> None:
    assert judge(bare_machine(), ("cute",)).verdict.startswith("cute is not ready (missing: driver, cute).")


def look(monkeypatch: pytest.MonkeyPatch, source: CuteSource) -> Any:
    monkeypatch.setattr(cute_load, "source", lambda: source)
    return child_kernels.look_at_cute()


def test_a_package_that_was_removed_is_noticed_by_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    monkeypatch.setenv(cute_load.KEEP_IN, str(tmp_path / "kept"))
    assert look(monkeypatch, NOT_INSTALLED) == Seen(absent="flash-attn-4 is not installed")
    (tmp_path / "kept").mkdir()
    assert "it was used before" in look(monkeypatch, NOT_INSTALLED).absent


def test_a_wrong_root_is_a_fault_and_not_an_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, "/nowhere")
    seen = look(monkeypatch, CuteSource("FLASH…", problem="it holds no flash_attn/cute", next_step="unset it"))
    assert (seen.problem, seen.next_step) == ("it holds no flash_attn/cute", "unset it")


def test_a_gpu_that_it_is_for_lets_it_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_load, "load_problem", lambda: None)
    monkeypatch.setattr(real_torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(real_torch.cuda, "get_device_capability", lambda: (9, 0))
    source = CuteSource("here", Path("/site"))
    for reason in (None, "its first call is wrong: relative error inf"):
        monkeypatch.setattr(cute, "why_not", lambda needs, reason=reason: reason)
        assert look(monkeypatch, source) == CuteFacts("here", {}, None, problem=reason)
    monkeypatch.setattr(real_torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(cute, "why_not", lambda needs: "it is for SM90")
    assert look(monkeypatch, source) == CuteFacts("here", {}, None, no_gpu="it is for SM90")


def test_the_kernels_line_does_not_wait_for_cute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_load, "source", lambda: pytest.fail("looked for"))
    monkeypatch.setattr(real_torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(real_torch.cuda, "get_device_capability", lambda: (9, 0))
    looked = child_kernels.look_at_kernels()
    assert "cudnn" in looked.why_not
    assert "cute" not in looked.why_not


def test_the_child_answers_for_a_site_and_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_site(tmp_path / "site", {**VERSIONS, PACKAGE: "4.0.0b31"}, without="typing_extensions")  # torch needs its own
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    write_cute(tmp_path / "root")
    (tmp_path / "root" / ".git").mkdir()
    (tmp_path / "root" / ".git" / "HEAD").write_text("ref: refs/heads/main")
    limits = {"torch": 60.0, "cute": 60.0}
    environ = {name: text for name, text in os.environ.items() if name != ROOT_VARIABLE}
    installed = ask_child(environ, limits)["cute"].value
    assert isinstance(installed, CuteFacts)
    assert asdict(installed)["problem"] == "flash-attn-4 4.0.0b31 found, 4.0.0b29 wanted"
    named = ask_child({**environ, ROOT_VARIABLE: str(tmp_path / "root")}, limits)["cute"].value
    assert isinstance(named, CuteFacts)
    assert (named.problem or "").endswith(f"is at an unknown commit, {COMMIT} wanted")
