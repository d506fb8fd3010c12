"""What adapters refuse, and how they replace inputs: with stand-ins for diffusers' classes, and no process group."""

import ast
import logging
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError
from chitu_diffusion.parallel.cp.fast.adapters.base import DIFFUSERS, input_names, replaced, require_tested_diffusers
from chitu_diffusion.parallel.cp.fast.adapters.paths import Paths
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall, Stream
from chitu_diffusion.parallel.cp.fast.adapters.wan import WanAdapter
from chitu_diffusion.parallel.cp.fast.wrapper import enable_fast_cp

ROOT = Path(__file__).resolve().parents[2]
FAST = ROOT / "chitu_diffusion/parallel/cp/fast"


class WanAttnProcessor: ...


class Custom: ...


class Attention(nn.Module):
    def __init__(self, processor: object) -> None:
        super().__init__()
        self.processor = processor


class Block(nn.Module):
    def __init__(self, processor: object) -> None:
        super().__init__()
        self.attn1 = Attention(processor)


class WanTransformer3DModel(nn.Module):
    """What an adapter looks at before it takes over."""

    def __init__(self, processor: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WanAttnProcessor()), Block(processor)])


@pytest.mark.parametrize("version", ["0.42.0", "0.42.1", "0.42.9.dev0"])
def test_a_tested_version_of_diffusers_is_taken(version: str) -> None:
    require_tested_diffusers(version)


@pytest.mark.parametrize("version", ["0.41.2", "0.43.0", "0.43.0.dev0", "1.0.0"])
def test_another_version_is_refused_by_the_wrapper(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    with pytest.raises(ConfigError, match=rf"^diffusers {re.escape(version)} is installed .* >=0\.42,<0\.43; install"):
        enable_fast_cp(WanTransformer3DModel(WanAttnProcessor()))


def test_the_range_is_that_of_the_package() -> None:
    lowest, beyond = (".".join(map(str, numbers)) for numbers in DIFFUSERS)
    assert f'"diffusers>={lowest},<{beyond}"' in (ROOT / "pyproject.toml").read_text()


def test_a_model_as_diffusers_makes_it_is_taken() -> None:
    WanAdapter.check(WanTransformer3DModel(WanAttnProcessor()))


@pytest.mark.parametrize(
    ("state", "told"),
    [("_parallel_config", "it already runs diffusers' own parallelism"), ("is_cache_enabled", "call disable_cache")],
)
def test_a_model_in_a_state_that_ranks_would_differ_in_is_refused(state: str, told: str) -> None:
    model = WanTransformer3DModel(WanAttnProcessor())
    setattr(model, state, True)
    with pytest.raises(ConfigError, match=told):
        WanAdapter.check(model)


def test_a_processor_that_is_not_diffusers_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="attends by Custom, which wrapping would undo; set WanAttnProcessor first"):
        WanAdapter.check(WanTransformer3DModel(Custom()))


def test_another_class_is_refused_by_an_adapter() -> None:
    with pytest.raises(ConfigError, match=r"^WanAdapter serves WanTransformer3DModel, not Block$"):
        WanAdapter.check(Block(None))


def test_no_process_group_is_told() -> None:
    with pytest.raises(ConfigError, match=r"needs a process group .*init_process_group"):
        enable_fast_cp(WanTransformer3DModel(WanAttnProcessor()))


def test_importing_the_wrapper_imports_no_diffusers() -> None:
    for path in [FAST / "wrapper.py", *(FAST / "adapters").glob("*.py")]:
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not any("diffusers" in ast.unparse(node) for node in nodes), path


def test_inputs_are_replaced_by_name_whether_given_by_position_or_by_name() -> None:
    names = input_names(nn.MultiheadAttention)[:2]
    assert names == ("query", "key")
    args, kwargs = replaced(dict(zip(names, (1, 2), strict=True)), {"value": 3}, {"key": 20, "value": 30, "other": 40})
    assert (args, kwargs) == ((1, 20), {"value": 30})


class Stub:
    """A path that serves or not, and says that it ran."""

    def __init__(self, name: str, reason: str | None) -> None:
        self.name, self.reason, self.ran = name, reason, 0

    def why_not(self, call: RegionCall) -> str | None:
        return self.reason

    def run(self, call: RegionCall) -> tuple[torch.Tensor, None]:
        self.ran += 1
        return call.tokens.hidden, None


def some_call() -> RegionCall:
    layer = nn.Identity()
    hidden = torch.zeros(1, 2, 4)
    return RegionCall(Stream(hidden, 1, layer, layer, layer, None, None, (layer,), None), None, 2, None)


def test_the_first_path_that_serves_runs_and_the_reason_is_kept_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, third = Stub("overlapped", "the batch is 2"), Stub("fast", None), Stub("nccl", None)
    paths = Paths([first, second, third])
    with caplog.at_level(logging.WARNING):
        paths(some_call())
        paths(some_call())
    assert (first.ran, second.ran, third.ran) == (0, 2, 0)
    reason = "not overlapped: the batch is 2"
    assert paths.choices == (Choice("overlapped", "fast", reason, (Rejected("overlapped", "the batch is 2"),)),)
    assert [record.message for record in caplog.records] == [f"attention runs over fast, {reason}"]
    first.reason = None
    paths(some_call())
    assert paths.choices[-1] == Choice("overlapped", "overlapped", "its contract holds")


def test_strict_makes_the_reason_an_error() -> None:
    paths = Paths([Stub("fast", "heads of 8 bytes are no multiple of 16 bytes"), Stub("nccl", None)], strict=True)
    with pytest.raises(
        UnavailableError, match=r"strict=True asks for the path fast .* heads of 8 bytes .* leave strict"
    ):
        paths(some_call())
