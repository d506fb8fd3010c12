"""What docs/troubleshooting.md says of ranks that differ, one that is silent, and one that cannot take part."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp import config, signature
from chitu_diffusion.parallel.cp import session as session_module
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import CPError, UnavailableError
from chitu_diffusion.parallel.cp.fast import backend, runtime
from chitu_diffusion.parallel.cp.fast.adapters import shares
from chitu_diffusion.parallel.cp.fast.adapters.overlapped import OverlappedPath
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.transport import TransportFacts, choose


def raised(do: Any, kind: type[Exception] = CPError) -> str:
    with pytest.raises(kind) as caught:
        do()
    return str(caught.value)


def answers(*of_ranks: Any) -> Any:
    """A control channel on which the ranks have said this."""
    return SimpleNamespace(gather=lambda mine, patience_s=0.0: [told(mine) for told in of_ranks])


def same(mine: Any) -> Any:
    return mine


def of_ranks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """What is said where ranks differ, or one is silent, or cannot take part."""
    silent: Any = object.__new__(ControlChannel)
    vars(silent).update(rank=0, world=2, timeout_s=10.0, _round=0, _number=1, _broken=None, _store=Silence())
    yield raised(lambda: silent.gather(None))
    fast: Any = object.__new__(runtime.FastCP)
    fast.pool_bytes, fast._introduce = 2 << 30, lambda: (None, "")
    yield raised(lambda: fast._meet(answers(same, lambda _: (None, "", 4 << 30))))
    yield raised(lambda: fast._meet(answers(same, lambda _: ("the extension fast_ulysses is not installed", "", 0))))
    of_one_gpu = TransportFacts("cuda", None, None, None, "GPU-1")
    yield raised(lambda: choose("nccl", [of_one_gpu] * 2))
    session: Any = object.__new__(CPSession)
    first, other = (session_module._Ballot(None, of_tokens(tokens)) for tokens in (6889, 6890))
    session._control = answers(same, lambda _: other)
    yield raised(lambda: session._agree(first))
    monkeypatch.setattr(
        shares, "ControlChannel", lambda *_: answers(same, lambda mine: (mine[0], [(s, -x) for s, x in mine[1]]))
    )
    group = SimpleNamespace(group=None, config=config.CPConfig())
    yield raised(lambda: shares.require_same_tokens(torch.ones(1, 64, 8), group))  # type: ignore[arg-type]
    path: Any = object.__new__(OverlappedPath)
    path._pool_bytes = 2 << 30
    long = of_tokens(75600)
    yield path._session_fits(long, long.layout(2, 1))
    origin = SimpleNamespace(choice=config.Choice("nccl", "nccl", ""), rank=0, transport=SimpleNamespace(name="nccl"))
    monkeypatch.setattr(backend, "CPSession", lambda *_: nullcontext(origin))
    monkeypatch.setattr(backend, "_open_fast", cannot)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        backend.open_backend(config.CPConfig(backend="fast"), None, False, 1, ExitStack())
    yield caplog.messages[0]


class Silence(dict[str, bytes]):
    """A store in which nobody but this rank writes."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def wait(self, keys: list[str], _limit: object) -> None:
        if keys[0] not in self:
            raise RuntimeError("wait timeout")


def cannot(*_: object) -> None:
    raise UnavailableError(
        "backend fast was asked for, but on rank 0 the extension fast_ulysses is not installed (needed: fast_ulysses "
        "with Fast CP's operators); run tools/install/setup_fast_cp.sh"
    )


def of_tokens(tokens: int) -> signature.Signature:
    scale = 128**-0.5
    return signature.Signature(1, tokens, 40, 40, 128, torch.bfloat16, 0, True, False, True, False, scale)


def test_a_rank_that_differs_or_is_silent_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That the page has each of them is test_docs_troubleshooting.py's."""
    said = list(of_ranks(monkeypatch, caplog))
    assert len(said) == len(set(said)) == 8
