"""The benchmark's --plan and --compare: what is typed becomes cases, or one sentence."""

import pytest

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError
from tools.benchmarks.fast_cp_frameworks import cases, request
from tools.benchmarks.fast_cp_frameworks.options import Options, parse

PLAN = "agkv/ce/head_pipeline(4)/cute/graph"


def parsed(line: str) -> Options:
    wanted = parse(line.split(), {})
    wanted.request.check()
    return wanted


def test_plans_multiply_the_fast_methods_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: True)
    wanted = parsed(f"--method single,nccl_agkv,fast_auto --plan {PLAN},sm/one_shot --sequence 8").request
    assert [(c.method, c.plan) for c in wanted.cases("cuda")] == [
        ("single", None),
        ("nccl_agkv", None),
        ("fast_auto", PLAN),
        ("fast_auto", "sm/one_shot"),
    ]
    assert len({case.workload for case in wanted.cases("cuda")}) == 1


def test_a_plan_that_names_a_kernel_runs_with_that_kernel_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: True)
    line = "--method single,fast_agkv --kernel cute,cudnn --transfer ce,sm --plan cute/sm,eager --sequence 8"
    assert [(c.method, c.kernel, c.transfer, c.plan) for c in parsed(line).request.cases("cuda")] == [
        ("single", "cute", None, None),
        ("fast_agkv", "cute", "sm", "cute/sm"),
        ("fast_agkv", "cute", "ce", "eager"),
        ("fast_agkv", "cute", "sm", "eager"),
        ("single", "cudnn", None, None),
        ("fast_agkv", "cudnn", "ce", "eager"),
        ("fast_agkv", "cudnn", "sm", "eager"),
    ]


def test_a_method_and_its_plan_become_the_settings_of_a_session() -> None:
    assert cases.METHODS["fast_auto"].config("auto", "auto", PLAN) == CPConfig(
        method="auto", backend="fast", kernel="auto", transfer="auto", plan=PLAN
    )
    assert cases.METHODS["nccl_agkv"].config("auto", "auto", None) == CPConfig(method="agkv", backend="nccl")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--method fast_agkv --plan agkv/dma", "'agkv/dma' cannot be read: schedule 'dma' is unknown"),
        ("--method fast_agkv --plan ce/sm", "names the transfer twice"),
        ("--method fast_agkv --plan ce,ce", "--plan ce,ce names one twice"),
        ("--method nccl_agkv,single --plan ce", "--plan belongs to the fast methods"),
        ("--method fast_agkv --kernel cudnn --plan cute", "'cute' names another kernel or transfer than --kernel"),
        ("--method fast_agkv --transfer ce --plan sm", "'sm' names another kernel or transfer than --kernel"),
        ("--method single --compare ce sm", "--compare names methods and plans itself, so --method cannot"),
        ("--plan ce --compare ce sm", "--compare names methods and plans itself, so --plan cannot"),
        ("--compare ce sm --kernel cute,cudnn", "--compare takes one --kernel for both"),
        ("--compare ce sm --transfer ce,sm", "--compare takes one --transfer for both"),
        ("--compare nccl_agkv:ce sm", "plan 'ce' belongs to the fast methods, and nccl_agkv is none"),
        ("--compare nccl_agvk sm", "'nccl_agvk' is neither a method nor a plan"),
        ("--compare nccl_agkv", "expected 2 arguments"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(line: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: True)
    with pytest.raises(ConfigError, match=told.replace("-", "[-]")) as error:
        parsed(f"{line} --sequence 8")
    assert "\n" not in str(error.value)


def test_both_sides_of_a_comparison_are_cases_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: True)
    wanted: dict[str, list[tuple[str, str | None]]] = {
        "nccl_agkv nccl_ulysses": [("nccl_agkv", None), ("nccl_ulysses", None)],
        "fast_agkv:head_pipeline(1:4) fast_auto": [("fast_agkv", "head_pipeline(1:4)"), ("fast_auto", None)],
        f"{PLAN} head_pipeline(1:4)": [("fast_auto", PLAN), ("fast_auto", "head_pipeline(1:4)")],
        "single single": [("single", None), ("single", None)],
    }
    for typed, sides in wanted.items():
        made = parsed(f"--compare {typed} --sequence 8,9").request.cases("cuda")
        assert [(c.method, c.plan) for c in made] == 2 * sides
        assert [c.sequence for c in made] == [8, 8, 9, 9]


def test_a_comparison_of_fast_methods_needs_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: None)
    assert not parsed("--compare nccl_agkv single --sequence 8").request.needs_extension
    with pytest.raises(UnavailableError, match="method fast_auto was asked for, but the CUDA extension"):
        parsed("--compare nccl_agkv ce --sequence 8")
