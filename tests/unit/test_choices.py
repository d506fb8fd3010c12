"""The pure decisions: configuration, transport and plan, on machines that are made up."""

import re
from dataclasses import replace

import pytest

from chitu_diffusion.parallel.cp.config import Choice, CPConfig, Rejected
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate, choose_kernel, make_plan
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT
from chitu_diffusion.parallel.cp.transport import TransportFacts, choose

CPU = TransportFacts("cpu", nccl="there is no GPU", gloo=None, fast="the extension is not built")
GPU = TransportFacts("cuda", nccl=None, gloo="the group runs over nccl", fast="the extension is not built")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"method": "ring"}, "method 'ring' is unknown; choose one of agkv, ulysses"),
        ({"backend": "gloo"}, "backend 'gloo' is unknown; choose one of nccl, fast"),
        ({"method": "agkv", "ulysses_degree": 2}, "ulysses_degree=2 belongs to method ulysses"),
        ({"timeout_s": 0}, "timeout_s=0 is not a time limit"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        CPConfig(**settings)  # type: ignore[arg-type]


def test_nccl_on_cpus_is_gloo_and_says_so() -> None:
    choice = choose("nccl", [CPU, CPU])
    assert (choice.requested, choice.used) == ("nccl", "gloo")
    assert "gloo" in choice.reason
    assert choice.rejected == (Rejected("nccl", "the ranks run on CPUs"),)


def test_nccl_on_gpus_is_nccl() -> None:
    assert choose("nccl", [GPU, GPU]) == Choice("nccl", "nccl", "asked for")


def test_fast_is_never_replaced_in_silence() -> None:
    with pytest.raises(UnavailableError, match="fast was asked for, but on rank 0 the extension is not built"):
        choose("fast", [GPU, GPU])


def test_ranks_on_different_devices_are_refused() -> None:
    with pytest.raises(UnavailableError, match=r"different types \(cpu, cuda\)"):
        choose("nccl", [GPU, CPU])


def test_the_rank_that_lacks_nccl_is_named() -> None:
    lacking = TransportFacts("cuda", nccl="NCCL is not built in", gloo=None, fast=None)
    with pytest.raises(UnavailableError, match="on rank 1 NCCL is not built in"):
        choose("nccl", [GPU, lacking])


def test_ranks_on_one_gpu_are_told_before_nccl_is_asked() -> None:
    first, other = replace(GPU, gpu="GPU-a"), replace(GPU, gpu="GPU-b")
    assert choose("nccl", [first, other]).used == "nccl"
    with pytest.raises(UnavailableError, match=r"^ranks 0 and 2 run on one GPU, which NCCL refuses; begin with"):
        choose("nccl", [first, other, first])


def test_over_fast_ranks_may_share_a_gpu_and_the_reason_says_so() -> None:
    alone, shared = (replace(GPU, fast=None, gpu=gpu) for gpu in ("GPU-a", "GPU-b"))
    assert choose("fast", [alone, shared]).reason == "asked for"
    assert choose("fast", [shared, alone, shared]).reason == "asked for; ranks 0 and 2 run on one GPU and take turns"


def test_auto_takes_the_first_kernel_that_every_rank_has() -> None:
    choice = choose_kernel("auto", [{"a": None, "b": None, "c": None}, {"a": "no GPU", "b": None, "c": None}])
    assert choice.used == "b"
    assert choice.rejected == (Rejected("a", "on rank 1 no GPU"),)


def test_a_reason_that_all_ranks_share_names_no_rank() -> None:
    assert choose_kernel("auto", [{"a": "no GPU", "b": None}] * 2).rejected == (Rejected("a", "no GPU"),)


def test_a_forced_kernel_that_some_rank_lacks_is_refused() -> None:
    with pytest.raises(UnavailableError, match="kernel a was asked for, but on rank 1 no GPU"):
        choose_kernel("a", [{"a": None, "b": None}, {"a": "no GPU", "b": None}])


def test_no_kernel_at_all_lists_every_reason() -> None:
    with pytest.raises(UnavailableError, match=r"a: no GPU; b: no mask"):
        choose_kernel("auto", [{"a": "no GPU", "b": "no mask"}])


@pytest.mark.parametrize(
    ("method", "degree", "world", "told"),
    [
        ("agkv", 1, 4, "gathered from 4 ranks"),
        ("ulysses", 4, 4, "split over 4 ranks"),
        ("ulysses", 2, 4, "hybrid: the heads are split over 2 ranks, K and V are gathered across 2 such groups"),
        ("ulysses", 1, 1, "nothing travels"),
    ],
)
def test_a_plan_says_what_travels_and_why(method: str, degree: int, world: int, told: str) -> None:
    kernel = choose_kernel("auto", [{"a": "no", "b": None}])
    plan = make_plan(Candidate(method, degree, "gloo", ONE_SHOT, kernel.used), world=world, kernel=kernel)
    assert (plan.method, plan.ulysses_degree, plan.schedule, plan.kernel) == (method, degree, ONE_SHOT, "b")
    assert told in plan.reason
    assert plan.rejected == (Rejected("a", "no"),)
