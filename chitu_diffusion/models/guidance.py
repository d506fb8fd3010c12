"""CFG parallelism: of the two predictions in each step, one half of a lane makes that with the prompt, one the other.

Both then have both, so that every rank goes on with the same latents, the same as one process would have.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

Output = tuple[Any, ...]


class SplitGuidance(ABC):
    """Stands in for a transformer's ``forward`` between ``attach`` and ``detach``.

    ``group`` connects this rank with the one of equal position in the other half of its lane; ``index`` is 0 in the
    half that takes the prompt, 1 in the one that takes the negative prompt. Pipelines call with ``return_dict=False``.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, index: int) -> None:
        self._model, self._group, self._index = model, group, index
        self._inner: Callable[..., Output] = model.forward
        self._calls = 0  # of the transformer in this request

    def attach(self) -> None:
        """Begin."""
        self._model.forward = self._forward

    def detach(self) -> None:
        """Give the transformer back as it was."""
        del self._model.forward  # the class's is behind it

    def begin(self) -> None:
        """A request begins; one that was broken off must not have left its turn to it."""
        self._calls = 0

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Output:
        """The output of the transformer for the inputs of both predictions, or of one after the other."""

    def _exchange(self, prediction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The predictions with the prompt and with the negative prompt. Collective."""
        both = prediction.new_empty(2, *prediction.shape)
        # as bytes: gloo's collectives know no bfloat16
        dist.all_gather_into_tensor(_bytes(both), _bytes(prediction.contiguous()), self._group)
        return both[0], both[1]


class InTurn(SplitGuidance):
    """For pipelines that call twice in each step, first with the prompt, and look at neither output in between.

    The half that makes the second prediction answers the first call with memory that the exchange fills.
    """

    _first: torch.Tensor
    _own: torch.Tensor

    def _forward(self, *args: Any, **kwargs: Any) -> Output:
        turn = self._calls % 2
        self._calls += 1
        if turn == self._index:
            self._own = self._inner(*args, **kwargs)[0]
        if turn == 0:
            # a prediction has the shape of what it denoises
            self._first = self._own if self._index == 0 else torch.empty_like(kwargs["hidden_states"])
            return (self._first,)
        first, second = self._exchange(self._own)
        if self._index == 1:
            self._first.copy_(first)
        return (second,)


class Together(SplitGuidance):
    """For pipelines that call once in each step, with a list that has the prompt's half first.

    Each picture goes through the transformer by itself, also where nothing is split: prompts of different lengths
    would else be padded and masked, which rounds differently and keeps the fastest kernels away.
    """

    def _forward(self, *args: Any, **kwargs: Any) -> Output:
        latents, timesteps, captions, *others = args

        def predict(index: int) -> torch.Tensor:
            one = slice(index, index + 1)
            prediction: torch.Tensor = self._inner(latents[one], timesteps[one], captions[one], *others, **kwargs)[0][0]
            return prediction

        if self._group is None or len(latents) == 1:
            return ([predict(index) for index in range(len(latents))],)
        assert len(latents) == 2, "requests have one picture"
        return (list(self._exchange(predict(self._index))),)


KINDS: dict[Literal["in turn", "together"], type[SplitGuidance]] = {"in turn": InTurn, "together": Together}


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
