"""``enable_fast_cp``: what the handle says, which path a block takes, what is prepared, and what is given back."""

import logging
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from chitu_diffusion.parallel.cp.config import Choice, CPConfig
from chitu_diffusion.parallel.cp.errors import DisagreementError
from chitu_diffusion.parallel.cp.fast import wrapper
from chitu_diffusion.parallel.cp.fast.adapters.paths import Paths, SessionPath
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall
from chitu_diffusion.parallel.cp.fast.adapters.table import adapter_class
from chitu_diffusion.parallel.cp.fast.wrapper import enable_fast_cp
from tests.gloo.adapter_runs import one_process, traces
from tests.gloo.checks import error
from tests.gloo.wrapper_runs import CASE, UNKNOWN, unknown_hardware_on_rank_1
from tests.support.pool import Worker, pool
from tests.support.tiny_models import inputs_for, model_for, output


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


def on_unknown_hardware(worker: Worker) -> tuple[float, Choice]:
    model, wanted = model_for(CASE), one_process(CASE)
    with unknown_hardware_on_rank_1(worker), enable_fast_cp(model, worker.group) as handle:
        return error(output(model, inputs_for(CASE)), wanted), handle.choice


def test_unknown_hardware_on_one_rank_sends_all_to_torch_distributed_with_the_reason() -> None:
    for wrong, choice in pool().run(2, on_unknown_hardware):
        assert wrong <= 1e-6
        assert choice.used == "gloo"
        assert choice.reason == f"backend fast was asked for, but on rank 1 {UNKNOWN}"


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


def within_torch_compile(worker: Worker, model_name: str) -> tuple[list[float], bool]:
    """Errors of a pipeline's compiled transformer before it is wrapped, twice while it is, and afterwards; whether
    attention was shared meanwhile.
    """
    torch._dynamo.reset()
    case = replace(CASE, model=model_name)
    model, wanted, inputs = model_for(case), one_process(case), inputs_for(case)
    pipeline = SimpleNamespace(transformer=torch.compile(model, backend="eager"))
    errors = [error(output(pipeline.transformer, inputs), wanted)]
    with enable_fast_cp(pipeline, worker.group, backend="nccl", timeout_s=60) as handle:
        errors += [error(output(pipeline.transformer, inputs), wanted) for _ in range(2)]
        shared = len(handle.session.calls) > 0
    errors.append(error(output(pipeline.transformer, inputs), wanted))
    return errors, shared


@pytest.mark.parametrize("model_name", ["wan", "qwen-image", "z-image"])
def test_a_compiled_transformer_is_wrapped_like_any_other(model_name: str) -> None:
    for errors, shared in pool().run(2, within_torch_compile, model_name, timeout=110):
        assert max(errors) <= 1e-6
        assert shared


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
