"""The paths that can run a block's attention region, and the choice between them.

``SessionPath`` projects, then attends, then projects. A path that overlaps these steps has the same shape and stands
before it in ``Paths``.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.transport import Text

logger = logging.getLogger(__name__)


class Path(Protocol):
    """One way to run a region, under a contract."""

    @property
    def name(self) -> str:
        """What a ``Choice`` calls it."""

    def why_not(self, call: RegionCall) -> str | None:
        """Why the contract does not hold, or None. Every rank comes to the same answer from its own call."""

    def run(self, call: RegionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs (B, S_local, C) of the tokens and (B, T, C) of the text."""


@dataclass(frozen=True)
class SessionPath:
    """Projects this rank's rows, attends over ``session``, projects the output."""

    session: CPSession

    @property
    def name(self) -> str:
        """What carries the data."""
        return self.session.transport.name

    def why_not(self, call: RegionCall) -> str | None:
        """Collectives serve everything; the CUDA extension sends heads in units of 16 bytes."""
        head_bytes = call.tokens.head_bytes
        if self.name != "fast" or head_bytes % 16 == 0:
            return None
        return f"heads of {head_bytes} bytes are no multiple of 16 bytes"

    def run(self, call: RegionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``Path``."""
        q, k, v = call.tokens.qkv()
        text = None
        if call.text is not None:
            text_q, text_k, text_v = call.text.qkv()
            text = Text(text_k, text_v, text_q)
        out, text_out = cp_attention(self.session, q, k, v, seq_len=call.seq_len, text=text, key_mask=call.key_mask)
        if call.text is None or text_out is None:
            return call.tokens.project_out(out), None
        return call.tokens.project_out(out), call.text.project_out(text_out)


class Paths:
    """A region run by the first of ``paths`` whose contract holds; the last one serves every call.

    What ran, and why no earlier path did, is kept in ``choices`` and, unless ``quiet``, logged once. With ``strict`` a
    call that only the last path serves, behind others, is an UnavailableError, the same on every rank.
    """

    def __init__(self, paths: Sequence[Path], *, strict: bool = False, quiet: bool = False) -> None:
        self._paths, self._strict, self._quiet = tuple(paths), strict, quiet
        self._noted: dict[Choice, None] = {}

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every choice made so far, in the order in which it was first made."""
        return tuple(self._noted)

    def __call__(self, call: RegionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the region of one block."""
        rejected: list[Rejected] = []
        for path in self._paths:
            if self._strict and rejected and path is self._paths[-1]:
                raise UnavailableError(
                    f"strict=True asks for the path {rejected[-1].name} in every block, but {rejected[-1].reason}; "
                    "leave strict out to run such blocks over torch.distributed"
                )
            reason = path.why_not(call)
            if reason is None:
                self._note(path.name, rejected)
                return path.run(call)
            rejected.append(Rejected(path.name, reason))
        raise AssertionError("the last path serves every call")

    def _note(self, used: str, rejected: list[Rejected]) -> None:
        reason = "; ".join(f"not {other.name}: {other.reason}" for other in rejected) or "its contract holds"
        choice = Choice(self._paths[0].name, used, reason, tuple(rejected))
        if choice not in self._noted:
            self._noted[choice] = None
            if rejected and not self._quiet:
                logger.warning("attention runs over %s, %s", used, reason)
