"""What ``enable_fast_cp`` and its handle refuse, with one message on every rank."""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from chitu_diffusion.parallel.cp.fast.wrapper import enable_fast_cp
from tests.gloo.adapter_runs import traces
from tests.gloo.wrapper_runs import CASE, unknown_hardware_on_rank_1
from tests.support.pool import RankError, Worker, pool
from tests.support.tiny_models import Case, inputs_for, model_for, output


def strict_on_unknown_hardware(worker: Worker) -> None:
    with unknown_hardware_on_rank_1(worker):
        enable_fast_cp(model_for(CASE), worker.group, strict=True)


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


def other_prompt(worker: Worker, model: str, name: str) -> None:
    """Prompts of one length that say different things."""
    case = replace(CASE, model=model)
    inputs = inputs_for(case)
    if worker.rank:
        prompt = inputs[name]
        inputs[name] = [-x for x in prompt] if isinstance(prompt, list) else -prompt
    with enable_fast_cp(model_for(case), worker.group, backend="nccl"):
        output(model_for(case), inputs)


def other_caption_of_z_image(worker: Worker) -> None:
    other_prompt(worker, "z-image", "cap_feats")


def other_prompt_of_wan(worker: Worker) -> None:
    other_prompt(worker, "wan", "encoder_hidden_states")


def other_prompt_of_qwen_image(worker: Worker) -> None:
    other_prompt(worker, "qwen-image", "encoder_hidden_states")


def cache_that_came_later(worker: Worker) -> None:
    """Its hooks skip blocks by what the tokens of one rank say: another rank would wait in them for ever."""
    model = model_for(CASE)
    with enable_fast_cp(model, worker.group, backend="nccl"):
        model.enable_cache(FirstBlockCacheConfig())
        try:
            output(model, inputs_for(CASE))
        finally:
            model.disable_cache()


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
    (other_caption_of_z_image, "DisagreementError", "rank 1 starts from other values than rank 0"),
    (other_prompt_of_wan, "DisagreementError", "rank 1 starts from other values than rank 0"),
    (other_prompt_of_qwen_image, "DisagreementError", "rank 1 starts from other values than rank 0"),
    (other_prompt_lengths, "DisagreementError", "12 text rows in front"),
    (only_one_rank_has_a_mask, "DisagreementError", "key mask"),
    (prepares_for_different_inputs, "DisagreementError", "the ranks prepare for different inputs"),
    (cache_that_came_later, "ConfigError", "its cache decides by the tokens of one rank; call disable_cache() first"),
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
