"""Bad input is one sentence, the same on every rank, before anything is sent."""

import os
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.collective import CollectiveTransport
from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.fast.attention import table
from chitu_diffusion.parallel.cp.fast.attention.kernels import Kernel
from chitu_diffusion.parallel.cp.fast.runtime import init_fast_cp
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.transport import Text
from tests.support.pool import SIZE, RankError, Worker, pool

CONFIG = CPConfig(timeout_s=3)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def usual(worker: Worker) -> list[torch.Tensor]:
    return [draw(1, 16, 4, 8) for _ in range(3)]


def seq_len_zero(worker: Worker) -> None:
    q, k, v = (draw(1, 0, 4, 8) for _ in range(3))
    cp_attention(worker.session(CONFIG), q, k, v, seq_len=0)


def wrong_share(worker: Worker) -> None:
    cp_attention(worker.session(CONFIG), *usual(worker), seq_len=40)


def unsupported_dtype(worker: Worker) -> None:
    q, k, v = (x.double() for x in usual(worker))
    cp_attention(worker.session(CONFIG), q, k, v)


def one_rank_in_half_precision(worker: Worker) -> None:
    q, k, v = (x.half() if worker.rank else x for x in usual(worker))
    cp_attention(worker.session(CONFIG), q, k, v)


def another_device(worker: Worker) -> None:
    q, k, v = usual(worker)
    cp_attention(worker.session(CONFIG), q, k.to("meta"), v)


def head_dimension_not_contiguous(worker: Worker) -> None:
    _, k, v = usual(worker)
    cp_attention(worker.session(CONFIG), draw(1, 16, 8, 4).transpose(2, 3), k, v)


def three_dimensions(worker: Worker) -> None:
    q, k, v = usual(worker)
    cp_attention(worker.session(CONFIG), q[0], k, v)


def heads_that_are_no_multiple(worker: Worker) -> None:
    q, k, v = usual(worker)
    cp_attention(worker.session(CONFIG), q, k[:, :, :3], v[:, :, :3])


def keys_without_values(worker: Worker) -> None:
    q, k, _ = usual(worker)
    cp_attention(worker.session(CONFIG), q, k, None)


def nothing_to_attend(worker: Worker) -> None:
    cp_attention(worker.session(CONFIG), usual(worker)[0], None, None)


def text_of_other_width(worker: Worker) -> None:
    text = Text(draw(1, 5, 4, 8), draw(1, 6, 4, 8))
    cp_attention(worker.session(CONFIG), *usual(worker), text=text)


def mask_without_the_text(worker: Worker) -> None:
    text = Text(draw(1, 5, 4, 8), draw(1, 5, 4, 8))
    mask = torch.ones(1, 16 * worker.world, dtype=torch.bool)
    cp_attention(worker.session(CONFIG), *usual(worker), text=text, key_mask=mask)


def only_one_rank_is_wrong(worker: Worker) -> None:
    q, k, v = usual(worker)
    cp_attention(worker.session(CONFIG), q if worker.rank != 1 else q[:, :7], k, v)


def other_shapes(worker: Worker) -> None:
    heads = 4 + worker.rank
    cp_attention(worker.session(CONFIG), *(draw(1, 16, heads, 8) for _ in range(3)))


def degree_that_does_not_fit(worker: Worker) -> None:
    cp_attention(worker.session(CPConfig("ulysses", ulysses_degree=2)), *usual(worker))


def kernel_for_gpus(worker: Worker) -> None:
    cp_attention(worker.session(CPConfig(kernel="cudnn")), *usual(worker))


def unknown_kernel(worker: Worker) -> None:
    cp_attention(worker.session(CPConfig(kernel="flsh")), *usual(worker))


def fast_backend(worker: Worker) -> None:
    CPSession(CPConfig(backend="fast"), worker.group)


def different_methods(worker: Worker) -> None:
    CPSession(CPConfig("agkv" if worker.rank else "ulysses", timeout_s=3), worker.group)


def fast_with_transfer_of_rank_1(worker: Worker, transfer: str) -> None:
    with patch.dict(os.environ, {"CHITU_FAST_ULYSSES_TRANSFER": transfer} if worker.rank == 1 else {}):
        CPSession(CPConfig(backend="fast", timeout_s=3), worker.group)


def unknown_transfer_in_one_environment(worker: Worker) -> None:
    fast_with_transfer_of_rank_1(worker, "warp")


def different_transfers_in_the_environments(worker: Worker) -> None:
    fast_with_transfer_of_rank_1(worker, "sm")


REFUSED: list[tuple[Callable[[Worker], None], str, str]] = [
    (seq_len_zero, "InputError", "the sequence has 0 tokens"),
    (wrong_share, "InputError", "holds 14 of 40"),
    (unsupported_dtype, "InputError", "q is torch.float64"),
    (one_rank_in_half_precision, "DisagreementError", "float16"),
    (another_device, "InputError", "k lies on meta"),
    (head_dimension_not_contiguous, "InputError", "call .contiguous()"),
    (three_dimensions, "InputError", "q has shape (16, 4, 8)"),
    (heads_that_are_no_multiple, "InputError", "q has 4 heads and k has 3"),
    (keys_without_values, "InputError", "k and v go together"),
    (nothing_to_attend, "InputError", "nothing to attend to"),
    (text_of_other_width, "InputError", "text.v has shape (1, 6, 4, 8)"),
    (mask_without_the_text, "InputError", "text included"),
    (only_one_rank_is_wrong, "InputError", "rank 1: k has shape (1, 16, 4, 8)"),
    (other_shapes, "DisagreementError", "rank 1 with [batch 1, 48 tokens, 5/5 heads of 8"),
    (degree_that_does_not_fit, "ConfigError", "choose one of 1, 3"),
    (kernel_for_gpus, "UnavailableError", "kernel cudnn was asked for"),
    (unknown_kernel, "ConfigError", "kernel 'flsh' is unknown; choose auto or one of"),
    (fast_backend, "UnavailableError", "backend fast was asked for"),
    (different_methods, "DisagreementError", "set up differently"),
    (unknown_transfer_in_one_environment, "ConfigError", "rank 1: the environment variable CHITU_FAST_ULYSSES"),
    (different_transfers_in_the_environments, "DisagreementError", "set up differently"),
]


@pytest.mark.parametrize(("call", "kind", "told"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_is_refused_on_every_rank_with_one_message(call: Callable[[Worker], None], kind: str, told: str) -> None:
    workers = pool()
    started = time.monotonic()
    results = workers.results(3, call)
    assert time.monotonic() - started < 10
    assert all(isinstance(result, RankError) and result.kind == kind for result in results), results
    messages = {result.message for result in results}
    assert len(messages) == 1, messages
    assert told in messages.pop()


def only_rank_0_calls(worker: Worker) -> None:
    session = CPSession(CPConfig(timeout_s=2), worker.group)
    if worker.rank == 0:
        cp_attention(session, *usual(worker))


def test_a_rank_that_does_not_call_is_named_within_the_time_limit() -> None:
    workers = pool()
    started = time.monotonic()
    results = workers.results(3, only_rank_0_calls)
    assert time.monotonic() - started < 10
    assert isinstance(results[0], RankError)
    assert results[0].kind == "DisagreementError"
    assert "waited 2 s for rank 1" in results[0].message


def a_kernel_that_fails_on_rank_1(worker: Worker, requested: str) -> str:
    flaky = Kernel(
        "flaky", lambda needs: "its library is missing" if worker.rank == 1 else None, table.KERNELS["sdpa"].run
    )
    usual_rows = dict(table.KERNELS)
    table.KERNELS.clear()
    table.KERNELS.update({"flaky": flaky, **usual_rows})
    try:
        session = CPSession(CPConfig(kernel=requested, timeout_s=3), worker.group)
        q, k, v = usual(worker)
        cp_attention(session, q, k, v)
        (call,) = session.calls.values()
        return f"{call.plan.kernel}: {call.plan.rejected[0].reason}"
    finally:
        table.KERNELS.clear()
        table.KERNELS.update(usual_rows)


def test_a_kernel_missing_on_one_rank_is_passed_over_by_all_with_the_reason() -> None:
    told = pool().run(3, a_kernel_that_fails_on_rank_1, "auto")
    assert told == ["sdpa: on rank 1 its library is missing"] * 3


def test_a_forced_kernel_missing_on_one_rank_fails_on_all() -> None:
    results = pool().results(3, a_kernel_that_fails_on_rank_1, "flaky")
    assert all(isinstance(r, RankError) and "on rank 1 its library is missing" in r.message for r in results)


def views(worker: Worker, method: str, batch: int) -> list[bool]:
    """Slices of a packed QKV and (B, H, S, D) storage give the bits of contiguous clones; inputs stay as they were."""
    session = worker.session(CPConfig(method))
    packed = draw(batch, 16, 3, 4, 8)
    other = [draw(batch, 4, 16, 8).transpose(1, 2) for _ in range(3)]
    equal = []
    for q, k, v in (packed.unbind(2), other):
        clones = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
        got, wanted = cp_attention(session, q, k, v)[0], cp_attention(session, *clones)[0]
        equal += [torch.equal(got, wanted), all(torch.equal(a, b) for a, b in zip((q, k, v), clones, strict=True))]
    return equal


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", ["agkv", "ulysses"])
def test_views_are_as_good_as_contiguous_clones(method: str, batch: int) -> None:
    assert pool().run(2, views, method, batch) == [[True] * 4] * 2


def group_of_two_libraries(worker: Worker) -> tuple[str, str, bool]:
    """As ``init_process_group()`` makes it without a name, and "cpu:gloo,cuda:nccl" on a machine with GPUs."""
    group = dist.new_group(list(range(worker.world)), backend="cpu:gloo,cuda:gloo")
    inputs = usual(worker)
    with CPSession(CONFIG, group) as session:
        got = cp_attention(session, *inputs)[0]
    return (
        session.choice.used,
        session.transport.name,
        torch.equal(got, cp_attention(worker.session(CONFIG), *inputs)[0]),
    )


def test_a_group_of_two_libraries_is_as_good_as_one_of_gloo() -> None:
    assert pool().run(SIZE, group_of_two_libraries) == [("gloo", "gloo", True)] * SIZE


def group_without_the_last_rank(worker: Worker, begin: Callable[[dist.ProcessGroup], object]) -> str | None:
    group = dist.new_group(list(range(worker.world - 1)))
    if worker.rank < worker.world - 1:
        return None
    with pytest.raises(ConfigError) as told:
        begin(group)
    return str(told.value)


def session_over(group: dist.ProcessGroup) -> object:
    return CPSession(CONFIG, group)


@pytest.mark.parametrize("begin", [session_over, init_fast_cp])
def test_a_rank_that_is_left_out_of_a_group_is_told(begin: Callable[[dist.ProcessGroup], object]) -> None:
    *members, left_out = pool().run(SIZE, group_without_the_last_rank, begin)
    assert members == [None] * (SIZE - 1)
    assert str(left_out).startswith(f"rank {SIZE - 1} does not belong to the process group that it was given; make")


def session_on_a_gpu(worker: Worker) -> None:
    CPSession(CONFIG, worker.group, torch.device("cuda", 0))


def test_a_group_that_carries_nothing_between_gpus_is_refused() -> None:
    for result in pool().results(2, session_on_a_gpu):
        assert isinstance(result, RankError)
        assert result.kind == "UnavailableError"
        assert "on rank 0 the process group carries cuda tensors over gloo" in result.message


def send_is_called(worker: Worker) -> None:
    """A refused call must not have begun a transfer."""
    session = worker.session(CONFIG)
    right, session.transport = session.transport, _NoSend(worker.group, session.device)
    try:
        only_one_rank_is_wrong(worker)
    finally:
        session.transport = right


class _NoSend(CollectiveTransport):
    def send(self, *_: object, **__: object) -> object:  # type: ignore[override]
        raise AssertionError("a transfer was begun")


def test_nothing_is_sent_where_one_rank_refuses() -> None:
    results = pool().results(3, send_is_called)
    assert all(isinstance(result, RankError) and result.kind == "InputError" for result in results), results
