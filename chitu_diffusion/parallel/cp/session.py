"""One context-parallel group at work: its transport, its time-limited control channel, and the calls it agreed on."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp import signature, transport
from chitu_diffusion.parallel.cp.call import Call
from chitu_diffusion.parallel.cp.collective import CollectiveTransport, library_for
from chitu_diffusion.parallel.cp.config import Choice, CPConfig
from chitu_diffusion.parallel.cp.control import ControlChannel, require_member
from chitu_diffusion.parallel.cp.environment import with_defaults
from chitu_diffusion.parallel.cp.errors import ConfigError, CPError, DisagreementError, InputError
from chitu_diffusion.parallel.cp.fast import extension
from chitu_diffusion.parallel.cp.fast.attention.wanted import Wanted, parse_wanted
from chitu_diffusion.parallel.cp.fast.runtime import FastCP, init_fast_cp
from chitu_diffusion.parallel.cp.fast.transport import FastTransport
from chitu_diffusion.parallel.cp.graphs import CallGraphs
from chitu_diffusion.parallel.cp.planning import CallPlanner
from chitu_diffusion.parallel.cp.signature import Signature
from chitu_diffusion.parallel.cp.transport import Inputs, Transport, TransportFacts


@dataclass(frozen=True)
class _Ballot:
    """What a rank tells the others before a new kind of call: its signature, or why it refuses."""

    refusal: str | None
    signature: Signature | None


class CPSession:
    """Context-parallel attention over ``group`` (default: all ranks).

    Creating one is collective, and so are the first call of each signature and ``close()``. With backend ``fast`` it
    uses the runtime ``fast``, or starts one of its own, which ``close()`` ends. ``handle`` is its number in this
    process. Raises ConfigError or
    UnavailableError, with the same message on every rank, where ``config`` cannot be served.
    """

    by_handle: ClassVar[WeakValueDictionary[int, "CPSession"]] = WeakValueDictionary()
    _handles: ClassVar[Iterator[int]] = count()

    def __init__(
        self,
        config: CPConfig,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        fast: FastCP | None = None,
    ) -> None:
        self.group = group if group is not None else _whole_job()
        require_member(self.group)
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = device if device is not None else _default_device(self.group)
        self._control = ControlChannel(self.group, config.timeout_s)
        self.config = config = self._agreed_config(config)
        wanted = parse_wanted(config.plan) if config.plan else Wanted()
        facts = _transport_facts(self.group, self.device, config.backend)
        self.choice: Choice = transport.choose(config.backend, self._control.gather(facts))
        self._own_fast: FastCP | None = None
        self.transport: Transport = self._make_transport(fast)
        self._planner = CallPlanner(self.config, wanted, self.transport, self._control, self.device)
        self.graphs = CallGraphs(self.transport) if isinstance(self.transport, FastTransport) else None
        self.calls: dict[Signature, Call] = {}
        self._admitted: dict[tuple[object, ...], Call] = {}
        self.handle = next(self._handles)
        self.by_handle[self.handle] = self

    def close(self) -> None:
        """End what the session has started; the group that it was given stays."""
        if self.graphs is not None:
            self.graphs.close()
        if self._own_fast is not None:
            self._own_fast.close()

    def __enter__(self) -> "CPSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.graphs is not None:
            self.graphs.close()
        if self._own_fast is not None:
            self._own_fast.close(collective=error is None)

    def _make_transport(self, fast: FastCP | None) -> Transport:
        if self.choice.used != "fast":
            return CollectiveTransport(self.group, self.device)
        if fast is None:
            fast = self._own_fast = init_fast_cp(self.group, device=self.device, timeout_s=self.config.timeout_s)
        return FastTransport(fast)

    def admit(self, inputs: Inputs, seq_len: int | None, key_mask: torch.Tensor | None, scale: float | None) -> Call:
        """The agreed call for these inputs. Collective the first time; without any communication after that.

        Raises InputError, with one message on every rank, where some rank's inputs do not fit, DisagreementError
        where ranks differ or one does not answer in time, and UnavailableError where no kernel serves the call.
        """
        key = signature.quick_key(inputs, seq_len, key_mask, scale)
        known = self._admitted.get(key)
        if known is None:
            known = self._admitted[key] = self._admit(inputs, seq_len, key_mask, scale)
        return known

    def _admit(self, inputs: Inputs, seq_len: int | None, key_mask: torch.Tensor | None, scale: float | None) -> Call:
        try:
            mine = signature.of(inputs, seq_len, key_mask, scale, self.device, self.world, self.rank)
        except CPError as error:
            self._agree(_Ballot(str(error), None))
            raise AssertionError("a refusal ends in an error on every rank") from error
        call = self.calls.get(mine)
        if call is None:
            self._agree(_Ballot(None, mine))
            call = self._planner.plan(mine, inputs, key_mask)
            self.calls[mine] = call
        return call

    def _agree(self, ballot: _Ballot) -> None:
        """All ranks ask for the same; or the same error on every rank."""
        ballots = self._control.gather(ballot)
        for rank, other in enumerate(ballots):
            if other.refusal is not None:
                raise InputError(f"rank {rank}: {other.refusal}")
        for rank, other in enumerate(ballots):
            if other.signature != ballots[0].signature:
                raise DisagreementError(
                    f"the ranks call attention with different inputs: rank 0 with {ballots[0].signature}, "
                    f"rank {rank} with {other.signature}; every rank must make the same call"
                )

    def _agreed_config(self, config: CPConfig) -> CPConfig:
        """The configuration with its defaults, if it is the same on every rank; else the same error on every rank."""
        refusal: str | None = None
        try:
            config = with_defaults(config, os.environ)
        except ConfigError as error:  # a launcher may give each rank an environment of its own
            refusal = str(error)
        answers = self._control.gather((refusal, config))
        for rank, (told, _) in enumerate(answers):
            if told is not None:
                raise ConfigError(f"rank {rank}: {told}")
        first = answers[0][1]
        for rank, (_, other) in enumerate(answers):
            if other != first:
                raise DisagreementError(
                    f"the ranks were set up differently: rank 0 with {first}, rank {rank} with {other}; "
                    "give every rank the same configuration"
                )
        return config


def _whole_job() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ConfigError(
            "context parallelism needs a process group and none is there; "
            "call torch.distributed.init_process_group first, or start with torch.distributed.run"
        )
    whole = dist.group.WORLD
    assert whole is not None
    return whole


def _default_device(group: dist.ProcessGroup) -> torch.device:
    on_gpus = library_for(group, "cuda") == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def _transport_facts(group: dist.ProcessGroup, device: torch.device, requested: str) -> TransportFacts:
    library = library_for(group, device.type)
    carries = f"the process group carries {device.type} tensors {f'over {library}' if library else 'by nothing'}"
    lacking = {name: None if library == name else carries for name in ("nccl", "gloo")}
    fast = extension.why_not(device) if requested == "fast" else "it was not asked for"  # do not load it for nothing
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    gpu = repr(torch.cuda.get_device_properties(device)) if on_gpu else None
    return TransportFacts(device.type, lacking["nccl"], lacking["gloo"], fast, gpu)
