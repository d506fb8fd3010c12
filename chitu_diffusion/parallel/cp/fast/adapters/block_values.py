"""What goes into a block and comes out of it: tensors within tuples, lists and dicts, beside plain values."""

from collections.abc import Callable
from typing import Any

import torch

PLAIN = (bool, int, float, str, type(None))


class NotPlainError(TypeError):
    """A value that may be something else at the next call without being seen."""


def shape_of(value: Any) -> object:
    """Everything about ``value`` but the numbers in its tensors, hashable. Raises NotPlainError."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, list | tuple):
        return type(value), tuple(shape_of(item) for item in value)
    if isinstance(value, dict):
        return dict, tuple((key, shape_of(item)) for key, item in value.items())
    if isinstance(value, PLAIN):
        return type(value), value
    raise NotPlainError(f"an input is a {type(value).__name__}, which may change without being seen")


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in order."""
    found: list[torch.Tensor] = []
    mapped(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``change`` applied to its tensors, in order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a NamedTuple takes them apart
    return value
