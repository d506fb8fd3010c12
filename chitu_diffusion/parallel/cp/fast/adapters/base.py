"""What the adapters of all models share: taking over the blocks of a diffusers transformer, and giving them back."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, ClassVar

import torch
from torch import nn

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.fast.adapters.block_graphs import BlockGraphs
from chitu_diffusion.parallel.cp.fast.adapters.paths import SessionPath
from chitu_diffusion.parallel.cp.fast.adapters.region import Region, RegionCall, Stream
from chitu_diffusion.parallel.cp.fast.adapters.shares import gather, require_same_tokens, share_of
from chitu_diffusion.parallel.cp.session import CPSession

DIFFUSERS = ((0, 42), (0, 43))  # tested from here to before here
Inputs = dict[str, Any]  # inputs of a module by the names of its forward

# state of a transformer in which ranks would compute different things, or the same thing twice
STATES: dict[str, str] = {
    "_parallel_config": "it already runs diffusers' own parallelism; load it without parallel_config",
    "is_cache_enabled": "its cache decides by the tokens of one rank; call disable_cache() first",
}


def require_tested_diffusers(version: str) -> None:
    """Raise ConfigError for a version of diffusers that the adapters were not tested with."""
    lowest, beyond = DIFFUSERS
    if not lowest <= tuple(map(int, version.split(".")[:2])) < beyond:
        told = [".".join(map(str, numbers)) for numbers in DIFFUSERS]
        raise ConfigError(
            f"diffusers {version} is installed and the adapters are tested with >={told[0]},<{told[1]}; "
            f"install a version in that range"
        )


@dataclass(frozen=True)
class Forward:
    """Blocks of the transformer at work: their whole length, and what each of them gets in place of its inputs."""

    seq_len: int
    inputs: Inputs


class Processor:
    """An attention processor of ours. ``__call__`` names its inputs: diffusers drops what is not named there."""

    def __init__(self, adapter: "Adapter") -> None:
        self.adapter = adapter


class Adapter(ABC):
    """Context parallelism for one transformer over ``session``; ``attach()`` begins it, ``detach()`` ends it.

    The first block slices the tokens and everything else with a row per token, every attention layer runs ``region``,
    and the whole output is gathered behind the last layer. Of blocks that come before, over tokens of their own, each
    is sliced and gathered by itself: a ControlNet that shares them adds to what is between. For inference: there are
    no gradients. Every rank gives the same inputs.
    """

    model_class: ClassVar[str]  # of the transformer
    processor_class: ClassVar[str]  # of the attention layers, as diffusers makes them
    blocks: ClassVar[str]  # name of the transformer's list of blocks
    early_blocks: ClassVar[str | None] = None  # of a list that runs before them
    attention: ClassVar[str]  # name of a block's attention layer
    tokens: ClassVar[str]  # input of the first block that carries the tokens (B, S, C)
    alike: ClassVar[tuple[str, ...]] = ()  # other inputs of it that every rank has whole: compared in the first forward

    def __init__(self, model: nn.Module, session: CPSession, region: Region | None = None) -> None:
        self.model, self.session = model, session
        self.region: Region = region if region is not None else SessionPath(session).run
        self.graphs: BlockGraphs | None = None  # what may run the blocks; set before ``attach``
        self._undo = ExitStack()
        self._now: Forward | None = None
        self._compared = set[nn.Module]()  # the blocks whose tokens, first of all, all ranks were found to share

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise ConfigError where this adapter cannot take over ``model``."""
        require_tested_diffusers(metadata.version("diffusers"))
        if (found := type(model).__name__) != cls.model_class:
            raise ConfigError(f"{cls.__name__} serves {cls.model_class}, not {found}")
        cls._refuse_states(model)
        for block in (*cls._early(model), *getattr(model, cls.blocks)):
            processor = getattr(block, cls.attention).processor
            if isinstance(processor, Processor):
                raise ConfigError(
                    f"this {cls.model_class} is wrapped already; close() the handle that wrapped it first"
                )
            if (found := type(processor).__name__) != cls.processor_class:
                raise ConfigError(
                    f"this {cls.model_class} attends by {found}, which wrapping would undo; "
                    f"set {cls.processor_class} first"
                )

    @classmethod
    def _refuse_states(cls, model: nn.Module) -> None:
        for state, told in STATES.items():
            if getattr(model, state, None):
                raise ConfigError(f"this {cls.model_class} cannot run by context parallelism: {told}")

    @abstractmethod
    def processor(self) -> Processor:
        """A processor for one attention layer."""

    @abstractmethod
    def block_inputs(self, given: Inputs) -> Inputs:
        """What every block gets instead of what the first block was ``given``."""

    @abstractmethod
    def last_layers(self) -> Iterable[nn.Module]:
        """The layers whose output (B, S, C) is gathered; one of them runs in each forward."""

    def model_inputs(self, given: Inputs) -> Inputs:
        """What the transformer gets instead of what it was ``given``: inputs with a row per token."""
        return {}

    def attach(self) -> None:
        """Take over the blocks. Raises ConfigError where ``check`` does."""
        self.check(self.model)
        self._compared.clear()
        early, blocks = self._early(self.model), list(getattr(self.model, self.blocks))
        self._before(self.model, self._enter)
        for block in early:
            self._take_over([block])
            self._undo.callback(block.register_forward_hook(self._finish).remove)
        self._take_over(blocks)
        if self.graphs is not None:
            self._by_graphs(self.graphs, blocks)
        for layer in self.last_layers():
            self._before(layer, self._current_inputs)
            self._undo.callback(layer.register_forward_hook(self._finish).remove)

    def detach(self) -> None:
        """Give the blocks back as they were; the second time it does nothing."""
        self._undo.close()

    def attend(
        self, tokens: Stream, text: Stream | None = None, key_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one block's region; called by the processors."""
        assert self._now is not None, "attention runs within a forward, behind the first block's hook"
        return self.region(RegionCall(tokens, text, self._now.seq_len, key_mask))

    def share(self, value: Any, dim: int) -> Any:
        """The rows of this rank, of whatever has one per token along ``dim``."""
        return share_of(value, dim, self.session)

    @classmethod
    def _early(cls, model: nn.Module) -> list[nn.Module]:
        return list(getattr(model, cls.early_blocks)) if cls.early_blocks is not None else []

    def _take_over(self, blocks: list[nn.Module]) -> None:
        """The tokens of ``blocks`` are shared from the first one on, and their attention is ours."""
        self._before(blocks[0], partial(self._begin, blocks[0]))
        for block in blocks:
            attention = getattr(block, self.attention)
            self._undo.callback(attention.set_processor, attention.processor)
            attention.set_processor(self.processor())
            self._before(block, self._current_inputs)

    def _by_graphs(self, graphs: BlockGraphs, blocks: list[nn.Module]) -> None:
        """Let ``graphs`` run the blocks, behind their hooks."""

        def begin(given: Inputs) -> Inputs:
            graphs.begin()
            return {}

        def end(layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            graphs.end()

        self._before(blocks[0], begin)
        for layer in self.last_layers():
            self._undo.callback(layer.register_forward_hook(end).remove)
        for index, block in enumerate(blocks):
            block.forward = graphs.wrapped(index)
            self._undo.callback(vars(block).pop, "forward")
        self._undo.callback(graphs.close)

    def _enter(self, given: Inputs) -> Inputs:
        self._refuse_states(self.model)  # it may have come to be in one since
        return self.model_inputs(given)

    def _begin(self, block: nn.Module, given: Inputs) -> Inputs:
        tokens: torch.Tensor = given[self.tokens]
        if block not in self._compared:
            require_same_tokens(tokens, self.session, [given.get(name) for name in self.alike])
            self._compared.add(block)
        self._now = Forward(tokens.shape[1], self.block_inputs(given))
        return {self.tokens: self.share(tokens, 1)}

    def _current_inputs(self, given: Inputs) -> Inputs:
        assert self._now is not None, "blocks run within a forward, behind the first block's hook"
        return self._now.inputs

    def _finish(self, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        assert self._now is not None
        whole = gather(output, self._now.seq_len, self.session)
        self._now = None
        return whole

    def _before(self, module: nn.Module, change: Callable[[Inputs], Inputs]) -> None:
        """Let ``change`` replace inputs of ``module`` whenever it is called, until ``detach``."""
        names = input_names(type(module))

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[Any, ...], Inputs]:
            positional = dict(zip(names, args, strict=False))
            return replaced(positional, kwargs, change(positional | kwargs))

        self._undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def input_names(module_class: type[nn.Module]) -> tuple[str, ...]:
    """The names of a module's inputs, in their order."""
    return tuple(inspect.signature(module_class.forward).parameters)[1:]


def replaced(positional: Inputs, kwargs: Inputs, new: Mapping[str, Any]) -> tuple[tuple[Any, ...], Inputs]:
    """The inputs of a call with those in ``new`` put in place of what was given by that name; nothing is added."""
    args = tuple(new.get(name, value) for name, value in positional.items())
    return args, {name: new.get(name, value) for name, value in kwargs.items()}
