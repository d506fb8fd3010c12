"""Which method and backend run: command line over environment over stage file over default, with two sets of names."""

from itertools import product

import pytest

from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError
from chitu_diffusion.parallel.selection import (
    DEFAULT,
    VARIABLE_OF,
    Setting,
    choose_backend,
    resolve_parallel_config,
)

Given = dict[str, object]
AGKV, ULYSSES = VARIABLE_OF["agkv"], VARIABLE_OF["ulysses"]


def backend(options: Given, environ: dict[str, str] | None = None, stage: Given | None = None) -> tuple[str, str]:
    found = resolve_parallel_config(options, environ or {}, stage).backend
    return found.value, found.origin


def test_nothing_said_is_agkv_over_nccl_by_default() -> None:
    found = resolve_parallel_config({"method": None, "cp_size": None}, {AGKV: ""})
    assert found.method == Setting("agkv", DEFAULT)
    assert found.backend == Setting("nccl", DEFAULT)
    assert found.cp_size == Setting(None, DEFAULT)
    assert found.cfg_parallel == Setting(None, DEFAULT)


@pytest.mark.parametrize(("typed", "variable", "stage"), list(product([None, "nccl"], ["", "auto"], [None, "fast"])))
def test_the_backend_of_the_more_important_place_is_used(typed: str | None, variable: str, stage: str | None) -> None:
    wanted = next(
        pair
        for pair in (
            (typed, "--cp-backend"),
            (variable, AGKV),
            (stage, "parallelism.cp.backend"),
            ("nccl", DEFAULT),
        )
        if pair[0]
    )
    assert backend({"backend": typed}, {AGKV: variable}, {"backend": stage}) == wanted


def test_a_variable_counts_for_its_own_method_only() -> None:
    environ = {AGKV: "fast_agkv", ULYSSES: "torch"}
    assert backend({"method": "agkv"}, environ) == ("fast", AGKV)
    assert backend({"method": "ulysses"}, environ) == ("nccl", ULYSSES)
    assert backend({"method": "ulysses"}, {AGKV: "fast"}) == ("nccl", DEFAULT)


@pytest.mark.parametrize("place", ["options", "stage"])
def test_older_names_work_alone_and_beside_a_new_name_that_agrees(place: str) -> None:
    given: Given = {"attention_mode": "ulysses", "ulysses_transport": "fast-ulysses"}
    for more in ({}, {"method": "ulysses", "backend": "fast"}):
        both = given | more
        found = resolve_parallel_config(both if place == "options" else {}, {}, both if place == "stage" else None)
        assert (found.method.value, found.backend.value) == ("ulysses", "fast")


def test_other_settings_come_from_the_same_places() -> None:
    stage: Given = {"cp_size": 4, "cfg_parallel": True, "method": "ulysses"}
    found = resolve_parallel_config({"cp_size": 2, "method": "agkv"}, {}, stage)
    assert found.cp_size == Setting(2, "--cp-size")
    assert found.cfg_parallel == Setting(True, "parallelism.cfg")
    assert found.method == Setting("agkv", "--cp-method")


@pytest.mark.parametrize(
    ("options", "environ", "stage", "told"),
    [
        ({"method": "ring"}, {}, {}, ["--cp-method 'ring'", "agkv, ulysses"]),
        ({"backend": "rdma"}, {}, {}, ["--cp-backend 'rdma'", "nccl, fast"]),
        ({"backend": "auto"}, {}, {}, ["--cp-backend 'auto'"]),
        ({}, {AGKV: "warp"}, {}, [f"{AGKV} 'warp'", "auto, torch"]),
        ({}, {AGKV: "fast_ulysses"}, {}, [f"{AGKV} 'fast_ulysses'", "fast_agkv"]),
        ({}, {}, {"attention_mode": "usp"}, ["attention_mode 'usp'"]),
        ({"cp_size": 0}, {}, {}, ["--cp-size 0"]),
        ({}, {}, {"cp_size": "four"}, ["parallelism.cp.world_size 'four' is no int"]),
        ({"method": "agkv", "attention_mode": "ulysses"}, {}, {}, ["--cp-method says agkv", "--attention-mode says"]),
        ({"backend": "fast", "agkv_transport": "torch"}, {}, {}, ["--cp-backend says fast", "--agkv-transport says"]),
        ({}, {}, {"backend": "nccl", "agkv_transport": "auto"}, ["parallelism.cp.backend says", "agkv_transport says"]),
        ({"ulysses_transport": "torch"}, {}, {}, ["--ulysses-transport torch", "method is agkv (default)"]),
        ({"method": "ulysses"}, {}, {"agkv_transport": "fast"}, ["agkv_transport fast", "ulysses (--cp-method)"]),
        ({"agkv_transport": "fast"}, {}, {"method": "ulysses"}, ["--agkv-transport", "(parallelism.cp.method)"]),
    ],
)
def test_what_cannot_be_meant_is_one_sentence_that_names_its_sources(
    options: Given, environ: dict[str, str], stage: Given, told: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_parallel_config(options, environ, stage)
    for words in told:
        assert words in str(error.value)


LACKS = [None, "there is no extension"]


@pytest.mark.parametrize(
    ("wanted", "lacking", "used", "reason"),
    [
        (Setting("nccl", DEFAULT), LACKS, "nccl", "the default"),
        (Setting("nccl", "--cp-backend"), [], "nccl", "asked for by --cp-backend"),
        (Setting("fast", "--cp-backend"), [None, None], "fast", "asked for by --cp-backend"),
        (Setting("auto", AGKV), [None, None], "fast", f"asked for by {AGKV}"),
        (Setting("auto", AGKV), LACKS, "nccl", f"{AGKV} is auto, and on rank 1 there is no extension"),
    ],
)
def test_the_backend_that_runs_comes_with_its_reason(
    wanted: Setting[str], lacking: list[str | None], used: str, reason: str
) -> None:
    choice = choose_backend(wanted, lacking)
    assert (choice.requested, choice.used, choice.reason) == (wanted.value, used, reason)
    assert [entry.name for entry in choice.rejected] == (["fast"] if wanted.value == "auto" and used == "nccl" else [])


def test_fast_by_name_where_it_cannot_run_is_an_error() -> None:
    with pytest.raises(UnavailableError, match="--cp-backend asks for backend fast, but on rank 1 there is no ext"):
        choose_backend(Setting("fast", "--cp-backend"), LACKS)
