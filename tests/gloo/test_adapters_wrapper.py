"""``enable_fast_cp``: what the handle says, what is refused on every rank, and what is given back."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from chitu_diffusion.parallel.cp.config import Choice, CPConfig
from chitu_diffusion.parallel.cp.errors import DisagreementError
from chitu_diffusion.parallel.cp.fast import backend, wrapper
from chitu_diffusion.parallel.cp.fast.adapters.paths import Paths, SessionPath
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from chitu_diffusion.parallel.cp.fast.profiles import PROFILES
from chitu_diffusion.parallel.cp.fast.wrapper import enable_fast_cp
from tests.gloo.adapter_runs import one_process, traces
from tests.gloo.checks import error
from tests.support.pool import RankError, Worker, pool
from tests.support.tiny_models import Case, inputs_for, model_for, output

CASE = Case("qwen-image", 49, (13,))


class Log(logging.Handler):
    """Keeps what is logged while it is in place."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger(wrapper.__package__).addHandler(self)
        return self.told

    def __exit__(self, *_: object) -> None:
        logging.getLogger(wrapper.__package__).removeHandler(self)


def without_a_gpu(worker: Worker) -> tuple[float, Choice, list[str]]:
    """The defaults, which ask for the CUDA extension."""
    model, wanted = model_for(CASE), one_process(CASE)
    with Log() as told, enable_fast_cp(model, worker.group) as handle:
        wrong = error(output(model, inputs_for(CASE)), wanted)
        output(model, inputs_for(CASE))
    return wrong, handle.choice, told


def test_runs_over_torch_distributed_and_says_so_once_where_fast_is_not_there() -> None:
    for rank, (wrong, choice, told) in enumerate(pool().run(2, without_a_gpu)):
        assert wrong <= 1e-6
        assert (choice.requested, choice.used) == ("fast", "gloo")
        assert "backend fast was asked for, but on rank 0" in choice.reason
        assert [other.name for other in choice.rejected] == ["fast"]
        assert told == ([f"context parallelism runs over gloo: {choice.reason}"] if rank == 0 else [])


UNKNOWN = "the GPU is NVIDIA B200 (SM100), which has no hardware profile"


def unknown_hardware_on_rank_1(worker: Worker) -> Any:
    """What a rank finds when it looks at its GPU."""
    return mock.patch.object(backend, "_look", return_value=UNKNOWN if worker.rank == 1 else PROFILES[2])


def on_unknown_hardware(worker: Worker) -> tuple[float, Choice]:
    model, wanted = model_for(CASE), one_process(CASE)
    with unknown_hardware_on_rank_1(worker), enable_fast_cp(model, worker.group) as handle:
        return error(output(model, inputs_for(CASE)), wanted), handle.choice


def test_unknown_hardware_on_one_rank_sends_all_to_torch_distributed_with_the_reason() -> None:
    for wrong, choice in pool().run(2, on_unknown_hardware):
        assert wrong <= 1e-6
        assert choice.used == "gloo"
        assert choice.reason == f"backend fast was asked for, but on rank 1 {UNKNOWN}"


def strict_on_unknown_hardware(worker: Worker) -> None:
    with unknown_hardware_on_rank_1(worker):
        enable_fast_cp(model_for(CASE), worker.group, strict=True)


@dataclass(frozen=True)
class Picky(SessionPath):
    """A path whose contract excludes masks."""

    name = "picky"  # type: ignore[assignment]  # a property of its base

    def why_not(self, call: RegionCall) -> str | None:
        return None if call.key_mask is None else "the call has a key mask"


def block_by_block(worker: Worker) -> tuple[float, tuple[Choice, ...], list[str]]:
    """Two calls of one model: the first is served by the first path, the second, with a mask, is not."""
    session = worker.session(CPConfig(timeout_s=30))
    model, masked = model_for(CASE), replace(CASE, text_lens=(13, 6), mask=True)
    paths = Paths([Picky(session), SessionPath(session)], quiet=worker.rank != 0)
    adapter = adapter_class(model)(model, session, paths)
    wanted = {case: one_process(case) for case in (CASE, masked)}
    adapter.attach()
    with Log() as told:
        errors = [error(output(model, inputs_for(case)), wanted[case]) for case in (CASE, masked, CASE)]
    adapter.detach()
    return max(errors), paths.choices, told


def test_a_block_outside_the_contract_takes_the_next_path_and_the_reason_is_kept() -> None:
    for rank, (wrong, choices, told) in enumerate(pool().run(2, block_by_block)):
        assert wrong <= 1e-6
        assert [(choice.requested, choice.used) for choice in choices] == [("picky", "picky"), ("picky", "gloo")]
        assert choices[1].reason == "not picky: the call has a key mask"
        assert told == (["attention runs over gloo, not picky: the call has a key mask"] if rank == 0 else [])


def gives_back(worker: Worker) -> tuple[bool, bool]:
    """Whether a model is itself again after an error within a forward, and after a second ``close``."""
    model = model_for(CASE)
    before, wanted = traces(model), one_process(CASE)
    broken = {**inputs_for(CASE), "encoder_hidden_states": torch.zeros(1, 13, 7)}
    handle = enable_fast_cp(model, worker.group, backend="nccl")
    with pytest.raises(RuntimeError), handle:
        output(model, broken)
    handle.close()
    return traces(model) == before, torch.equal(output(model, inputs_for(CASE)), wanted)


def test_a_failing_forward_leaves_the_model_as_it_was() -> None:
    assert pool().run(2, gives_back) == [(True, True)] * 2


def prepared(worker: Worker) -> tuple[list[float], int, int]:
    """Prepared for one shape, called with it and with two others: the errors, and the kinds of call agreed on."""
    others = [replace(CASE, text_lens=(6,)), replace(CASE, seq_len=75)]
    model, wanted = model_for(CASE), {case: one_process(case) for case in (CASE, *others)}
    with enable_fast_cp(model, worker.group, backend="nccl", timeout_s=20) as handle:
        handle.prepare(**inputs_for(CASE))
        kinds = len(handle.session.calls)
        errors = [error(output(model, inputs_for(case)), wanted[case]) for case in (CASE, *others, CASE)]
        return errors, kinds, len(handle.session.calls)


def test_a_call_with_another_shape_than_the_prepared_one_prepares_itself() -> None:
    for errors, before, after in pool().run(2, prepared):
        assert max(errors) <= 1e-6
        assert (before, after) == (1, 3)


def prepares_on_rank_0_only(worker: Worker) -> tuple[str, float]:
    """The other rank waits until the first has its error, as a rank that is busy elsewhere does."""
    with enable_fast_cp(model_for(CASE), worker.group, backend="nccl", timeout_s=1) as handle:
        begun = time.monotonic()
        told = ""
        if worker.rank == 0:
            with pytest.raises(DisagreementError) as raised:
                handle.prepare(**inputs_for(CASE))
            told = str(raised.value)
        took = time.monotonic() - begun
        torch.distributed.barrier(worker.group)
        return told, took


def test_prepare_on_one_rank_alone_ends_in_a_named_error_within_the_limit() -> None:
    (told, took), _ = pool().run(2, prepares_on_rank_0_only)
    assert told.startswith("rank 0 of 2 waited 1 s for rank 1 to agree on a call and got no answer")
    assert 1 <= took < 10


def prepares_for_different_inputs(worker: Worker) -> None:
    with enable_fast_cp(model_for(CASE), worker.group, backend="nccl") as handle:
        handle.prepare(**inputs_for(replace(CASE, text_lens=(13 - worker.rank,))))


def unknown_model(worker: Worker) -> None:
    enable_fast_cp(torch.nn.Linear(2, 2), worker.group)


def without_transformer(worker: Worker) -> None:
    enable_fast_cp(SimpleNamespace(unet=torch.nn.Linear(2, 2)), worker.group)


def wrapped_twice(worker: Worker) -> None:
    with enable_fast_cp(model_for(CASE), worker.group, backend="nccl"):
        enable_fast_cp(model_for(CASE), worker.group, "ulysses", "nccl")


def second_transformer_is_wrapped(worker: Worker) -> None:
    first, second = model_for(CASE), model_for(replace(CASE, heads=3))
    before = traces(first)
    with enable_fast_cp(second, worker.group, backend="nccl"):
        try:
            enable_fast_cp(SimpleNamespace(transformer=first, transformer_2=second), worker.group)
        finally:
            assert traces(first) == before


def strict_without_a_gpu(worker: Worker) -> None:
    enable_fast_cp(model_for(CASE), worker.group, strict=True)


def unknown_method(worker: Worker) -> None:
    enable_fast_cp(model_for(CASE), worker.group, "ring")


def call(worker: Worker, case: Case, seed: int = 1) -> None:
    with enable_fast_cp(model_for(case), worker.group, backend="nccl"):
        output(model_for(case), inputs_for(case, seed))


def other_sizes(worker: Worker) -> None:
    call(worker, replace(CASE, seq_len=49 if worker.rank else 75))


def other_seeds(worker: Worker) -> None:
    call(worker, CASE, seed=worker.rank)


def other_prompt_lengths(worker: Worker) -> None:
    call(worker, replace(CASE, text_lens=(13 - worker.rank,)), seed=1)


def only_one_rank_has_a_mask(worker: Worker) -> None:
    call(worker, replace(CASE, mask=worker.rank == 1))


def double_precision(worker: Worker) -> None:
    model = model_for(replace(CASE, heads=2)).double()
    inputs = inputs_for(CASE)
    with enable_fast_cp(model, worker.group, backend="nccl"):
        output(model, {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()})


REFUSED: list[tuple[Callable[[Worker], None], str, str]] = [
    (unknown_model, "ConfigError", "there is no adapter for Linear; there is one for WanTransformer3DModel"),
    (without_transformer, "ConfigError", "SimpleNamespace has no transformer or transformer_2"),
    (wrapped_twice, "ConfigError", "is wrapped already; close() the handle"),
    (second_transformer_is_wrapped, "ConfigError", "is wrapped already; close() the handle"),
    (strict_without_a_gpu, "UnavailableError", "backend fast was asked for, but on rank 0"),
    (strict_on_unknown_hardware, "UnavailableError", "but on rank 1 the GPU is NVIDIA B200"),
    (unknown_method, "ConfigError", "method 'ring' is unknown"),
    (other_sizes, "DisagreementError", "rank 0 on tokens (1, 75, 64) torch.float32, rank 1 on (1, 49, 64)"),
    (other_seeds, "DisagreementError", "rank 1 starts from other values than rank 0"),
    (other_prompt_lengths, "DisagreementError", "12 text rows in front"),
    (only_one_rank_has_a_mask, "DisagreementError", "key mask"),
    (prepares_for_different_inputs, "DisagreementError", "the ranks prepare for different inputs"),
    (double_precision, "InputError", "the transformer computes in torch.float64"),
]


@pytest.mark.parametrize(("function", "kind", "told"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_is_refused_on_every_rank_with_one_message(function: Callable[[Worker], None], kind: str, told: str) -> None:
    workers = pool()
    started = time.monotonic()
    results = workers.results(2, function)
    assert time.monotonic() - started < 10
    assert all(isinstance(result, RankError) and result.kind == kind for result in results), results
    messages = {result.message for result in results}
    assert len(messages) == 1, messages
    assert told in messages.pop()
