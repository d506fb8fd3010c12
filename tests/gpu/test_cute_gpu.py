"""CuTe FlashAttention on a GPU against attention in float32: shapes, layouts, log-sum-exp, streams, graphs, host time.

Where it cannot be used, every test is skipped with the reason that a plan would give.
"""

import time
from itertools import count

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.attention import cute, cute_load
from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds
from tests.support.reference import reference_attention, relative_error, row_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]

# (whole output, worst row) relative L2: one rounding of the output and one of the weights
BOUNDS = {torch.bfloat16: (6e-3, 2e-2), torch.float16: (1e-3, 3e-3)}
HALF = [torch.bfloat16, torch.float16]
SCALE = 0.11
HOST_US = 25  # of one call; the wrapper alone takes 41 to 46
seeds = count(torch.initial_seed() % 2**31)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(next(seeds))
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def require(q: torch.Tensor, k: torch.Tensor, *, lse: bool = True) -> None:
    capability = torch.cuda.get_device_capability()
    needs = KernelNeeds("cuda", capability, q.dtype, q.shape[3], q.shape[2], k.shape[2], lse=lse)
    if (reason := cute.why_not(needs)) is not None:
        pytest.skip(f"cute: {reason}")


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """With and without the log-sum-exp, into ``out`` where it is given."""
    expected, expected_lse = reference_attention(q, k, v, scale=SCALE, dtype=torch.float32)
    whole, worst = BOUNDS[q.dtype]
    result = q
    for return_lse in (True, False):
        require(q, k, lse=return_lse)
        if out is not None:
            out.fill_(torch.nan)
        result, lse = cute.run(q, k, v, scale=SCALE, return_lse=return_lse, out=out)
        assert (result.shape, result.dtype, result.stride(3)) == (q.shape, q.dtype, 1)
        assert out is None or result is out
        assert relative_error(result, expected) <= whole
        assert float(row_errors(result, expected).max()) <= worst
        if return_lse:
            assert lse is not None
            assert (lse.shape, lse.dtype) == (expected_lse.shape, torch.float32)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=2e-4)
        else:
            assert lse is None
    return result


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=str)
def test_head_dimensions_dtypes_and_grouped_heads(dtype: torch.dtype, head_dim: int, heads: tuple[int, int]) -> None:
    q = randn(2, 333, heads[0], head_dim, dtype=dtype)
    check(q, *(randn(2, 401, heads[1], head_dim, dtype=dtype) for _ in range(2)))


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 112])
def test_unusual_head_dimensions(head_dim: int) -> None:
    check(*(randn(1, 200, 3, head_dim) for _ in range(3)))


@pytest.mark.parametrize("seq_k", [1, 2, 7, 63, 64, 65, 127, 128, 129, 255, 257, 383, 499, 500])
def test_every_length_of_keys(seq_k: int) -> None:
    for seq_q in (1, 63, 129, 500):
        check(randn(2, seq_q, 3, 128), *(randn(2, seq_k, 3, 128) for _ in range(2)))


def test_a_long_call() -> None:
    check(randn(1, 4095, 5, 128), *(randn(1, 8191, 5, 128) for _ in range(2)))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_slices_of_a_packed_buffer_are_read_where_they_lie(dtype: torch.dtype) -> None:
    q, k, v = randn(2, 300, 3, 6, 128, dtype=dtype).unbind(2)
    for x in (q[:, 17:, 2:4], k[:, 9:250, 2:4]):
        assert cute.readable(x) is x
    check(q, k, v)
    check(q[:, 17:, 2:4], k[:, 9:250, 2:4], v[:, 9:250, 2:4])
    k, v = randn(2, 2, 517, 6, 128, dtype=dtype)
    check(q, k[:, :516], v[:, :516])
    check(q[:1], *randn(2, 1, 6, 517, 128, dtype=dtype).transpose(2, 3))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_output_goes_into_a_slice_of_heads_and_nowhere_else(dtype: torch.dtype) -> None:
    whole = torch.full((2, 301, 10, 128), 7.0, dtype=dtype, device="cuda")
    q, k, v = (randn(2, 301, 4, 128, dtype=dtype) for _ in range(3))
    check(q, k, v, out=whole[:, :, 3:7])
    assert whole[:, :, :3].eq(7).all()
    assert whole[:, :, 7:].eq(7).all()
    rows = torch.full((2, 400, 4, 128), 7.0, dtype=dtype, device="cuda")
    check(q, k, v, out=rows[:, 50:351])
    assert rows[:, :50].eq(7).all()
    assert rows[:, 351:].eq(7).all()


def test_what_the_kernel_cannot_read_is_copied() -> None:
    q, k, v = (randn(2, 130, 4, 128) for _ in range(3))
    shifted = randn(q.numel() + 1)[1:].view(q.shape)
    same_for_all_heads = randn(2, 130, 1, 128).expand(2, 130, 4, 128)
    for x in (shifted, same_for_all_heads, randn(2, 130, 4, 132)[..., :128]):
        check(x, k, v)
        check(q, x, x)
    check(q, k, v, out=torch.zeros(2, 130, 4, 132, dtype=q.dtype, device="cuda")[..., :128])


def test_heads_in_groups_equal_the_whole_bit_by_bit() -> None:
    q, k, v = (randn(1, 1000, 10, 128) for _ in range(3))
    require(q, k, lse=False)
    whole, _ = cute.run(q, k, v, scale=SCALE)
    parts = torch.empty_like(whole)
    for heads in (slice(0, 3), slice(3, 10)):
        cute.run(q[:, :, heads], k[:, :, heads], v[:, :, heads], scale=SCALE, out=parts[:, :, heads])
    assert torch.equal(whole, parts)


def test_two_streams_at_once() -> None:
    inputs = [[randn(1, 1500, 8, 128) for _ in range(3)] for _ in range(2)]
    require(inputs[0][0], inputs[0][1], lse=False)
    expected = [reference_attention(*qkv, scale=SCALE, dtype=torch.float32)[0] for qkv in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    outputs: list[torch.Tensor] = []
    for _ in range(20):
        for stream, (q, k, v) in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(cute.run(q, k, v, scale=SCALE)[0])
    torch.cuda.synchronize()
    for number, out in enumerate(outputs):
        assert relative_error(out, expected[number % 2]) <= BOUNDS[torch.bfloat16][0]


def test_it_waits_for_the_stream_that_it_is_called_on() -> None:
    q, k, v = (randn(1, 600, 4, 128) for _ in range(3))
    require(q, k, lse=False)
    late, stream = torch.zeros_like(q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(q)
        out, _ = cute.run(late, k, v, scale=SCALE)
    torch.cuda.synchronize()
    assert torch.equal(out, cute.run(q, k, v, scale=SCALE)[0])


def test_a_graph_replays_it() -> None:
    q, k, v = (randn(1, 700, 4, 128) for _ in range(3))
    require(q, k, lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cute.run(q, k, v, scale=SCALE, return_lse=True)
    for x in (q, k, v):
        x.copy_(randn(*x.shape))
    graph.replay()
    eager, eager_lse = cute.run(q, k, v, scale=SCALE, return_lse=True)
    assert torch.equal(out, eager)
    assert lse is not None
    assert torch.equal(lse, eager_lse)


def test_torch_compile_calls_it() -> None:
    q, k, v = (randn(1, 300, 4, 128) for _ in range(3))
    require(q, k, lse=True)
    compiled = torch.compile(lambda q, k, v: cute.run(q * 2, k, v, scale=SCALE, return_lse=True), fullgraph=True)
    eager, eager_lse = cute.run(q * 2, k, v, scale=SCALE, return_lse=True)
    out, lse = compiled(q, k, v)
    assert torch.equal(out, eager)
    assert torch.equal(lse, eager_lse)


def test_a_prepared_call_costs_little_host_time() -> None:
    q, k, v = (randn(1, 128, 2, 128) for _ in range(3))
    require(q, k, lse=False)
    tried = cute_load.source().tried
    if tried is None or not tried.direct:
        pytest.skip("this combination is called through FlashAttention's wrapper")
    out, best = torch.empty_like(q), float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            cute.run(q, k, v, scale=SCALE, out=out)
        best = min(best, (time.perf_counter() - start) / 50)
    print(f"cute: {best * 1e6:.1f} us of host time per call")
    assert best * 1e6 < HOST_US
