"""Whether blocks can be kept as CUDA graphs, and whether what is kept is still what the blocks are.

A graph runs what its block did when it was captured, on the memory that its weights had then. Whatever could change
that without being seen stands in the way.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn

# their modules compute the same at every call; one of peft scales its LoRA by a number that may change
PACKAGES = ("torch", "diffusers")
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)  # quantised ones are others, and have no address of their own


def why_not(blocks: Sequence[nn.Module]) -> str | None:
    """Why these blocks have to run anew at every call, or None."""
    return next((reason for block in blocks for reason in _obstacles(block)), None)


def _obstacles(block: nn.Module) -> Iterator[str]:
    if block._compiled_call_impl is not None:
        yield "the blocks are compiled by torch"
    for module in block.modules():
        kind = type(module)
        if kind.__module__.split(".")[0] not in PACKAGES:
            yield f"a {kind.__module__}.{kind.__name__} in a block may change without being seen"
        if module is not block and (module._forward_hooks or module._forward_pre_hooks):
            yield f"a {kind.__name__} in a block has a hook, which must see every call"
        if module is not block and "forward" in vars(module):
            yield f"a {kind.__name__} in a block has a forward of its own"
        for weight in chain(module._parameters.values(), module._buffers.values()):
            if weight is not None and type(weight) not in PLAIN:
                yield f"a weight in a block is a {type(weight).__name__}, which may change without being seen"


class Kept:
    """Modules, hooks and parameters of blocks as they were when this was made. Takes milliseconds to make."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        inner = [module for block in blocks for module in block.modules() if module is not block]
        modules = [*blocks, *inner]
        self._attributes = [vars(module) for module in inner]
        self._hooks = [hooks for module in inner for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._children = [(module._modules, tuple(module._modules.items())) for module in modules if module._modules]
        self._tensors = [
            (held, name, tensor, tensor.data_ptr())
            for module in modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]

    def unchanged(self) -> bool:
        """Whether they are the same, in the same places, and still without hooks. Takes tenths of a millisecond."""
        return (
            not any(self._hooks)
            and not any("forward" in attributes for attributes in self._attributes)
            and all(
                len(now) == len(then) and all(now.get(name) is child for name, child in then)
                for now, then in self._children
            )
            and all(
                held.get(name) is tensor and tensor.data_ptr() == address
                for held, name, tensor, address in self._tensors
            )
        )
