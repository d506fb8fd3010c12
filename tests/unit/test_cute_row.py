"""The row of CuTe FlashAttention on a CPU: what it refuses, what it tries first, and how it calls a compiled kernel."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.attention import cute, cute_launch, cute_load
from chitu_diffusion.parallel.cp.fast.attention.cute_source import TRIED, CuteSource
from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds
from tests.support.fake_cute import FakeForward
from tests.support.reference import reference_attention, relative_error

H200 = KernelNeeds("cuda", (9, 0), torch.bfloat16, head_dim=128, num_heads=40, num_kv_heads=40)
PACKAGE = CuteSource("flash-attn-4 4.0.0b29", tried=TRIED[2])
CHECKOUT = CuteSource("a checkout", tried=TRIED[0])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    cute._prepare.cache_clear()
    cute._launchers.clear()
    yield
    cute._prepare.cache_clear()
    cute._launchers.clear()


def use(monkeypatch: pytest.MonkeyPatch, forward: FakeForward, source: CuteSource = PACKAGE) -> FakeForward:
    """``forward`` is what is installed, and computes on this machine."""
    monkeypatch.setattr(cute, "_DEVICE", "cpu")
    monkeypatch.setattr(cute, "load_cute_flash_attn_fwd", lambda: forward)
    monkeypatch.setattr(cute_load, "source", lambda: source)
    monkeypatch.setattr(cute_load, "load_problem", lambda: None)
    return forward


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu", "capability": None}, "it needs a CUDA GPU and the tensors are on cpu"),
        ({"capability": (7, 5)}, "it needs compute capability 8.0 and this GPU has 7.5"),
        ({"capability": (8, 0)}, "it is for SM90 and SM120, and this GPU is SM80"),
        ({"capability": (10, 0)}, "it is for SM90 and SM120, and this GPU is SM100"),
        ({"dtype": torch.float32}, "it takes float16, bfloat16 and not float32"),
        ({"head_dim": 256}, "it takes head dimensions in steps of 8 up to 128, not 256"),
        ({"head_dim": 100}, "it takes head dimensions in steps of 8 up to 128, not 100"),
        ({"num_kv_heads": 16}, "40 heads are no multiple of 16 K/V heads"),
        ({"key_mask": True}, "it takes no key mask here"),
    ],
)
def test_a_refusal_says_what_stands_in_the_way_and_tries_nothing(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(cute_load, "source", lambda: pytest.fail("looked for"))
    assert cute.why_not(dataclasses.replace(H200, **changes)) == reason


def test_a_version_that_was_not_tried_is_the_reason_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = use(monkeypatch, FakeForward(), CuteSource("x", problem="quack-kernels 0.6.5 found, 0.6.4 wanted"))
    assert cute.why_not(H200) == "quack-kernels 0.6.5 found, 0.6.4 wanted"
    assert forward.wrapped == 0


def test_without_a_gpu_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_load, "source", lambda: PACKAGE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cute_load, "load_problem", lambda: pytest.fail("imported"))
    assert cute.why_not(H200) == "torch can use no GPU here"


def test_a_failed_import_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeForward())
    monkeypatch.setattr(cute_load, "load_problem", lambda: "its import fails: OSError: x")
    assert cute.why_not(H200) == "its import fails: OSError: x"


@pytest.mark.parametrize("capability", cute.CAPABILITIES)
def test_a_class_is_compiled_and_tried_once(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    forward = use(monkeypatch, FakeForward())
    asked = dataclasses.replace(H200, capability=capability)
    assert [cute.why_not(asked) for _ in range(3)] == [None] * 3
    assert (forward.wrapped, len(forward.compile_cache)) == (1, 1)
    assert cute.why_not(dataclasses.replace(asked, num_heads=8, num_kv_heads=8)) is None
    assert len(forward.compile_cache) == 1
    for changes in ({"lse": True}, {"num_kv_heads": 8}, {"head_dim": 64}, {"dtype": torch.float16}):
        assert cute.prepare(dataclasses.replace(asked, **changes)) is None
    assert (forward.wrapped, len(forward.compile_cache)) == (5, 5)


@pytest.mark.parametrize("lse", [False, True])
def test_a_first_result_that_is_wrong_is_remembered_as_the_reason(monkeypatch: pytest.MonkeyPatch, lse: bool) -> None:
    forward = use(monkeypatch, FakeForward(error=0.03))
    asked = dataclasses.replace(H200, lse=lse)
    assert cute.why_not(asked) == cute.why_not(asked) == "its first call is wrong: relative error 3.0e-02"
    assert forward.wrapped == 1


def test_a_first_log_sum_exp_that_is_wrong_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, forward := FakeForward())
    monkeypatch.setattr(forward, "lse_error", 0.5)
    assert cute.why_not(H200) is None
    assert "is wrong" in str(cute.why_not(dataclasses.replace(H200, lse=True)))


def test_a_first_result_that_is_not_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeForward(error=float("nan")))
    assert cute.why_not(H200) == "its first call is wrong: relative error inf"


def test_a_first_call_that_fails_is_remembered_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeForward(raises=RuntimeError("\n\x1b[91m\x1b[1m[Error] no ptxas\x1b[0m\nlong story")))
    assert cute.why_not(H200) == "its first call fails: RuntimeError: [Error] no ptxas"


def test_trying_leaves_the_random_numbers_of_the_caller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeForward())
    state = torch.get_rng_state()
    assert cute.prepare(H200) is None
    assert torch.equal(torch.get_rng_state(), state)


def class_of(ratio: int, lse: bool = False) -> KernelNeeds:
    return dataclasses.replace(H200, head_dim=64, num_heads=6, num_kv_heads=6 // ratio, lse=lse)


def qkv(heads: int = 6, kv_heads: int = 2, seq_q: int = 33, seq_k: int = 47) -> tuple[torch.Tensor, ...]:
    q = torch.randn(2, seq_q, heads, 64).bfloat16()
    return q, *torch.randn(2, 2, seq_k, kv_heads, 64).bfloat16()


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out, lse = cute.ROW.run(q, k, v, scale=0.1, **options)
    expected, expected_lse = reference_attention(q, k, v, scale=0.1)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert relative_error(out, expected) < 5e-3
    if options.get("return_lse"):
        assert lse is not None
        assert (lse.shape, lse.dtype) == (expected_lse.shape, torch.float32)
        torch.testing.assert_close(lse, expected_lse.float())
    else:
        assert lse is None
    return out


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_the_row_computes_attention_into_a_slice_of_heads(
    monkeypatch: pytest.MonkeyPatch, return_lse: bool, prepared: bool
) -> None:
    forward = use(monkeypatch, FakeForward())
    if prepared:
        assert cute.prepare(class_of(3, return_lse)) is None
    whole = torch.zeros(2, 33, 10, 64, dtype=torch.bfloat16)
    q, k, v = qkv()
    out = check(q, k, v, return_lse=return_lse, out=whole[:, :, 2:8])
    assert out.data_ptr() == whole[:, :, 2:8].data_ptr()
    assert whole[:, :, :2].eq(0).all()
    assert whole[:, :, 8:].eq(0).all()
    assert cute.ROW.in_place
    assert forward.launched > 0


def test_views_are_passed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeForward())
    q, k, v = torch.randn(2, 31, 3, 4, 64).bfloat16().unbind(2)
    for x in (q, q[:, 3:20], q[:, :, 1:3], q.transpose(1, 2).contiguous().transpose(1, 2)):
        assert cute.readable(x) is x
    check(q[:, 3:20], k[:, 5:], v[:, 5:])


def test_what_the_kernel_cannot_read_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeForward())
    q, k, v = qkv(4, 4)
    shifted = torch.randn(q.numel() + 1).bfloat16()[1:].view(q.shape)
    odd = torch.randn(2, 33, 4, 68).bfloat16()[..., :64]
    every_other = torch.randn(2, 33, 4, 128).bfloat16()[..., ::2]
    same_for_all_heads = torch.randn(2, 33, 1, 64).bfloat16().expand(2, 33, 4, 64)
    batch_of_one = torch.randn(33, 4, 64).bfloat16().as_strided((1, 33, 4, 64), (0, 256, 64, 1))
    for x in (shifted, odd, every_other, same_for_all_heads):
        check(x, k, v)
        check(q, x, x)
    check(batch_of_one, k[:1], v[:1])


def test_an_output_that_the_kernel_cannot_write_is_written_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeForward())
    storage = torch.zeros(2, 33, 6, 68, dtype=torch.bfloat16)
    out = check(*qkv(), out=storage[..., :64])
    assert out.data_ptr() == storage.data_ptr()
    assert storage[..., 64:].eq(0).all()


def test_after_preparation_the_wrapper_is_not_called_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = use(monkeypatch, FakeForward())
    assert cute.prepare(class_of(3)) is None
    forward.compile_cache["another"] = None
    wrapped, launched = forward.wrapped, forward.launched
    for _ in range(4):
        check(*qkv())
    assert (forward.wrapped, forward.launched) == (wrapped, launched + 4)
    assert isinstance(forward.compile_cache, dict)


def test_only_a_combination_whose_kernels_were_called_directly_is(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = use(monkeypatch, FakeForward(), CHECKOUT)
    assert cute.prepare(class_of(3)) is None
    wrapped = forward.wrapped
    check(*qkv())
    assert forward.wrapped == wrapped + 1


@pytest.mark.parametrize("calls", [0, 2])
def test_a_wrapper_that_does_more_than_one_launch_is_called_itself(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    forward = FakeForward()
    forward.calls_per_call = calls
    q, k, v = qkv()
    assert cute_launch.direct(forward, q, k, v, torch.empty_like(q), None, 0.1) is None
    assert isinstance(forward.compile_cache, dict)


def test_a_wrapper_that_passes_other_tensors_is_called_itself() -> None:
    class Copies(FakeForward):
        def __call__(self, *, q: torch.Tensor, **others: Any) -> Any:  # type: ignore[override]
            return super().__call__(q=q.clone(), **others)

    class PassesMore(FakeForward):
        def compiled(self, *args: Any) -> None:
            super().compiled(*args[:6], None, (None,))

        def __call__(self, **named: Any) -> Any:
            key = "key"
            self.compile_cache[key] = self.compiled
            args = (named["q"], named["k"], named["v"], named["out"], named["lse"], named["softmax_scale"])
            self.compile_cache[key](*args, torch.zeros(1))

    q, k, v = qkv()
    out = torch.empty_like(q)
    assert cute_launch.direct(FakeForward(), q, k, v, out, None, 0.1) is not None
    for other in (Copies(), PassesMore()):
        assert cute_launch.direct(other, q, k, v, out, None, 0.1) is None


def test_a_just_compiled_function_is_called_without_its_keyword_wrapper() -> None:
    class WithKeywords:
        def __init__(self, forward: FakeForward) -> None:
            self.forward = forward

        def __call__(self, *args: Any) -> None:
            self.forward.compiled(*args)

        def __tvm_ffi_object__(self) -> Any:
            return lambda *args: seen.append(len(args))

    seen: list[int] = []
    forward = FakeForward()
    q, k, v = qkv()
    forward.compile_cache[q.dtype, 64, 3, True] = WithKeywords(forward)
    launch = cute_launch.direct(forward, q, k, v, out := torch.empty_like(q), None, 0.1)
    assert launch is not None
    launch(q, k, v, out, None, 0.1)
    assert seen == [8]


def test_a_failing_wrapper_gives_the_cache_back() -> None:
    forward = FakeForward(raises=RuntimeError("x"))
    cache = forward.compile_cache
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="x"):
        cute_launch.direct(forward, q, k, v, torch.empty_like(q), None, 0.1)
    assert forward.compile_cache is cache


@pytest.mark.parametrize("return_lse", [False, True])
def test_torch_compile_sees_one_operator(monkeypatch: pytest.MonkeyPatch, return_lse: bool) -> None:
    use(monkeypatch, FakeForward())
    assert cute.prepare(class_of(3, return_lse)) is None
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, lse = cute.ROW.run(q * 2, k, v, scale=0.1, return_lse=return_lse)
        return out + 1, lse

    q, k, v = qkv()
    out, lse = torch.compile(call, backend=keep, fullgraph=True)(q, k, v)
    expected, expected_lse = call(q, k, v)
    assert torch.equal(out, expected)
    assert lse is None or torch.equal(lse, expected_lse)
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len([name for name in names if "cute_attention" in name]) == 1


def test_the_operator_says_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeForward())
    q, k, v = qkv()
    lse = torch.empty(2, 6, 33)
    args = (q, k, v, torch.empty_like(q), lse, 0.1)
    torch.library.opcheck(cute._operator, args, test_utils=("test_schema", "test_faketensor"))
