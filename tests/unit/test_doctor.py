"""The doctor's judgement and its two outputs, on machines that are not here."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest

from chitu_diffusion.commands.doctor.checks import Check, Report
from chitu_diffusion.commands.doctor.facts import (
    CuteFacts,
    DoctorFacts,
    ExtensionFacts,
    HomeFacts,
    KernelFacts,
    NvshmemFacts,
    Seen,
    ToolFacts,
    TorchFacts,
)
from chitu_diffusion.commands.doctor.judge import judge, parse_required
from chitu_diffusion.commands.doctor.render import to_json, to_lines, write
from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.fast.device import GpuFacts, LinkFacts, MachineFacts

LOADED = "/env/nvidia/nvshmem/lib/libnvshmem_host.so.3"
INFO: dict[str, Any] = {
    "cuda_driver": "13.0",
    "cuda_runtime": "13.0",
    "images": ["sm_90a", "sm_120"],
    "nvshmem": {"built": "3.4.5", "loaded": "3.4.5", "path": LOADED},
}
EXTENSION = ExtensionFacts("/env/fast_ulysses/__init__.py", "0.1.0", (), "/env/fast_ulysses/libfast_cp.so", INFO)
CUTE = CuteFacts(
    "flash-attn-4 4.0.0b29",
    {"nvidia-cutlass-dsl": "4.6.2", "quack-kernels": "0.6.4"},
    "ran on SM90, compiles for SM120",
)
NO_TORCH: Seen[Any] = Seen(absent="it needs torch, which does not import")


def machine(count: int = 2, **changes: Any) -> Seen[MachineFacts]:
    gpus = tuple(GpuFacts(i, "NVIDIA H200", (9, 0), 140 * 2**30, f"GPU-{i}") for i in range(count))
    links = tuple(LinkFacts(a, b, True, 18, 478.1) for a in range(count) for b in range(a + 1, count))
    facts = MachineFacts(gpus=gpus, links=links, driver="580.159.04", driver_cuda=(13, 0))
    return Seen(value=replace(facts, **changes))


def torch(count: int = 2, **changes: Any) -> Seen[TorchFacts]:
    uuids = tuple(f"GPU-{i}" for i in range(count))
    return Seen(value=replace(TorchFacts("2.11.0+cu130", (13, 0), count, uuids, None, (2, 28, 9)), **changes))


def facts(**changes: Any) -> DoctorFacts:
    """Two H200 on which everything is right, but for the changes."""
    tools = {name: Seen(value=ToolFacts(f"/bin/{name}", "PATH", (13, 0, 88))) for name in ("nvcc", "cuobjdump", "g++")}
    right = DoctorFacts(
        python=(3, 12, 1),
        machine=machine(),
        torch=torch(),
        nvshmem=Seen(value=NvshmemFacts(LOADED, (3, 4, 5))),
        kernels=Seen(value=KernelFacts({"cudnn": None, "sdpa": None}, "cuda")),
        cute=Seen(value=CUTE),
        extension=Seen(value=EXTENSION),
        tools=tools,
    )
    return replace(right, **changes)


def bare_machine() -> DoctorFacts:
    """A machine without a GPU, with torch, before the build."""
    return facts(
        machine=Seen(value=MachineFacts(reason="the NVIDIA driver does not answer (not found)")),
        torch=torch(0, cuda_problem="RuntimeError: no driver"),
        kernels=Seen(value=KernelFacts({"cudnn": "it needs a GPU", "flash": "it needs a GPU", "sdpa": None}, "cpu")),
        cute=Seen(absent="flash-attn-4 is not installed"),
        extension=Seen(absent="there is no Python module fast_ulysses"),
    )


def check(report: Report, name: str) -> Check:
    (found,) = [check for check in report.checks if check.name == name]
    return found


def states(what: DoctorFacts) -> dict[str, str]:
    """The checks that are not ok."""
    return {check.name: check.state for check in judge(what).checks if check.state != "ok"}


def test_two_right_h200_are_ready_for_everything() -> None:
    report = judge(facts(), ("nccl", "fast", "cute"))
    assert states(facts()) == {}
    assert (report.exit_code, report.verdict) == (0, "nccl and fast and cute are ready.")


def test_every_gap_names_what_is_needed_and_the_next_step() -> None:
    without = {"torch": Seen[Any](broken="x"), **dict.fromkeys(("nvshmem", "kernels", "cute", "extension"), NO_TORCH)}
    for what in (bare_machine(), facts(**without)):
        for line in judge(what).checks:
            assert (line.state == "ok") == (line.next_step is None) == (line.needed is None), line


def test_a_machine_without_gpu_is_not_wrong_but_not_ready() -> None:
    assert states(bare_machine()) == {"driver": "missing", "gpus": "missing", "cute": "missing", "extension": "missing"}
    assert judge(bare_machine()).exit_code == 0
    report = judge(bare_machine(), ("fast",))
    assert report.exit_code == 3
    assert report.verdict.startswith("fast is not ready (missing: driver, gpus, extension). First (driver): install")


def test_an_extension_that_is_not_built_sends_to_the_setup_and_leaves_nccl_ready() -> None:
    what = facts(extension=Seen(absent="there is no Python module fast_ulysses"))
    assert check(judge(what), "extension").next_step == "run tools/install/setup_fast_cp.sh"
    assert judge(what, ("nccl",)).exit_code == 0
    assert judge(what, ("fast",)).exit_code == 3


def test_a_missing_peer_access_stops_fast_and_not_nccl() -> None:
    what = facts(machine=machine(links=(LinkFacts(0, 1, False, reason="the PCIe topology does not support it"),)))
    assert states(what) == {"link 0-1": "missing"}
    assert "the PCIe topology" in check(judge(what), "link 0-1").found
    assert judge(what, ("nccl",)).exit_code == 0
    assert judge(what, ("fast",)).exit_code == 3


def test_a_gap_between_gpus_that_torch_does_not_see_stops_nothing() -> None:
    gap = (LinkFacts(0, 1, True, 18), LinkFacts(0, 2, False), LinkFacts(1, 2, False))
    what = facts(machine=machine(3, links=gap), torch=torch(2), visible_devices="0,1")
    assert judge(what, ("fast",)).exit_code == 0
    assert check(judge(what), "gpus").found == "torch can use 2 of 3 (CUDA_VISIBLE_DEVICES=0,1)"
    hidden = replace(what, torch=torch(2, gpu_uuids=("GPU-0", "GPU-2")))
    assert judge(hidden, ("fast",)).exit_code == 3


def test_a_driver_that_is_too_old_is_wrong() -> None:
    what = facts(machine=machine(driver="550.54", driver_cuda=(12, 4)), torch=torch(0, cuda_problem="too old"))
    assert states(what) == {"driver": "wrong", "gpus": "wrong"}
    assert "too old for CUDA 13.0" in check(judge(what), "driver").found
    assert judge(what).exit_code == judge(what, ("nccl",)).exit_code == 1


def test_wrong_outweighs_missing() -> None:
    what = facts(machine=machine(driver="550.54", driver_cuda=(12, 4)), extension=Seen(absent="not there"))
    assert judge(what, ("fast",)).exit_code == 1


def test_one_visible_gpu_is_not_enough() -> None:
    what = facts(torch=torch(1), visible_devices="0")
    assert states(what) == {"gpus": "missing"}
    assert check(judge(what), "gpus").next_step == "make more GPUs visible in CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize("change", [{"capability": (8, 0)}, {"mig": True}])
def test_gpus_without_native_images_or_cut_by_mig_stop_fast_only(change: dict[str, Any]) -> None:
    value = machine().value
    assert value is not None
    what = facts(machine=machine(gpus=(value.gpus[0], replace(value.gpus[1], **change))))
    assert states(what) == {"gpu 1": "missing"}
    assert (judge(what, ("nccl",)).exit_code, judge(what, ("fast",)).exit_code) == (0, 3)


def test_a_cpu_build_of_torch_has_neither_gpus_nor_nccl() -> None:
    what = facts(torch=torch(0, version="2.13.0+cpu", cuda=None, nccl=None), nvshmem=Seen(absent="maps none"))
    assert states(what) == {"gpus": "missing", "nccl": "missing", "nvshmem": "missing"}


@pytest.mark.parametrize("version", ["2.9.1+cu128", "1.13.0"])
def test_a_torch_before_the_stable_abi_is_wrong(version: str) -> None:
    assert states(facts(torch=torch(version=version))) == {"torch": "wrong"}


@pytest.mark.parametrize(("version", "right"), [((3, 11, 9), False), ((3, 13, 0), True), ((3, 14, 0), False)])
def test_python_is_3_12_or_3_13(version: tuple[int, ...], right: bool) -> None:
    assert states(facts(python=version)) == ({} if right else {"python": "wrong"})


@pytest.mark.parametrize(
    ("home", "state"),
    [
        (HomeFacts("/other", "/other/lib/libnvshmem_host.so.3", (3, 7, 2)), "wrong"),
        (HomeFacts("/other", "/other/lib/libnvshmem_host.so.3", (2, 11, 0)), "wrong"),
        (HomeFacts("/other", "/other/lib/libnvshmem_host.so.3", (3, 3, 9)), "ok"),
        (HomeFacts("/other", None, None), "wrong"),
    ],
)
def test_another_nvshmem_is_named_and_is_wrong_where_it_is_newer_than_what_torch_loads(
    home: HomeFacts, state: str
) -> None:
    line = check(judge(facts(nvshmem_home=home)), "nvshmem")
    assert line.state == state
    assert line.found.startswith(f"3.4.5, the one that torch loads: {LOADED}; NVSHMEM_HOME names")
    assert "/other" in line.found


def test_an_nvshmem_home_that_is_torchs_own_needs_no_words() -> None:
    line = check(judge(facts(nvshmem_home=HomeFacts("/env/nvidia/nvshmem", LOADED, (3, 4, 5)))), "nvshmem")
    assert (line.state, "NVSHMEM_HOME" in line.found) == ("ok", False)


def test_an_extension_without_our_operators_is_another_build() -> None:
    value = ExtensionFacts("/env/fast_ulysses/__init__.py", "0.2.0", ("all_gather_kv_4d",))
    line = check(judge(facts(extension=Seen(value=value))), "extension")
    assert (line.state, "all_gather_kv_4d" in line.found) == ("wrong", True)


def test_tools_are_judged_but_running_does_not_need_them() -> None:
    tools = {"nvcc": Seen(value=ToolFacts("/old/nvcc", "PATH", (12, 4, 131))), "g++": Seen[ToolFacts](absent="no g++")}
    what = facts(tools=tools)
    assert states(what) == {"nvcc": "wrong", "g++": "missing"}
    assert (judge(what).exit_code, judge(what, ("fast",)).exit_code) == (1, 0)


@pytest.mark.parametrize("values", [["fast,nccl"], ["nccl", "fast"], ["fast", "nccl", "fast"]])
def test_requirements_are_repeated_or_separated_by_commas(values: list[str]) -> None:
    assert parse_required(values) == ("nccl", "fast")


@pytest.mark.parametrize("values", [["ulysses"], ["nccl,"], [""]])
def test_unknown_requirements_are_refused(values: list[str]) -> None:
    with pytest.raises(ConfigError, match="choose from nccl, fast, cute"):
        parse_required(values)


def test_the_json_has_its_schema() -> None:
    data = json.loads(to_json(judge(bare_machine(), ("fast",))))
    assert {key: data[key] for key in ("schema", "required", "exit_code")} == {
        "schema": "chitu.doctor/1",
        "required": ["fast"],
        "exit_code": 3,
    }
    keys = {"name", "state", "found", "needed", "next_step", "required_by"}
    assert all(set(line) == keys and line["state"] in ("ok", "missing", "wrong") for line in data["checks"])


def test_piped_output_is_plain_and_whole() -> None:
    report, out = judge(bare_machine(), ("fast",)), io.StringIO()
    write(report, out)
    assert "\x1b" not in out.getvalue()
    for line in report.checks:
        assert line.found in out.getvalue()
        assert (line.next_step or "") in out.getvalue()
    assert out.getvalue().endswith(f"\n{report.verdict}\n")


def test_a_terminal_gets_a_table_with_every_word_and_no_markup_read_from_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    write(judge(facts(extension=Seen(broken="cannot open /opt/[bold]x.so"))), out)
    assert "…" not in out.getvalue()
    letters = "".join(char for char in out.getvalue() if char.isalnum() or char in "[]/.")
    assert "[bold]" in letters


def test_links_of_which_the_same_is_said_share_a_line() -> None:
    lines = to_lines(judge(facts(machine=machine(8), torch=torch(8)))).splitlines()
    assert [line.split()[1:5] for line in lines if "link" in line] == [["link", "0-1", "…", "6-7"]]
