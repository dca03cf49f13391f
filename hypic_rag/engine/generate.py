"""Decoding on a finished cache with the library's own forward."""

from __future__ import annotations

from collections.abc import Collection, Generator

import torch
from torch import Tensor

from hypic_rag.config import Sampling
from hypic_rag.engine.context import Context, forward
from hypic_rag.families.model import HybridModel

__all__ = ["Chooser", "generate_tokens", "stop_tokens"]


def stop_tokens(model: HybridModel) -> frozenset[int]:
    """Tokens that end an answer: those of the generation settings and of the tokenizer."""
    found: set[int] = set()
    for holder in (getattr(model.module, "generation_config", None), model.config, model.tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(token) for token in value)
    return frozenset(found)


def generate_tokens(
    model: HybridModel,
    context: Context,
    sampling: Sampling,
    stops: Collection[int] | None = None,
) -> Generator[int]:
    """Yield answer tokens one by one, the stop token excluded.

    The context's cache grows in place: behind the last yielded token it holds everything but that
    token. Clone a context that others share.

    Args:
        model: the model.
        context: a finished prompt.
        sampling: how tokens are chosen, and how many at most.
        stops: tokens that end the answer; default :func:`stop_tokens`.
    """
    chooser = Chooser(model, context, sampling, stops)
    logits, position = context.logits, context.length
    while (token := chooser.next(logits)) is not None:
        yield token
        if chooser.wants_more:
            logits = forward(model.module, [token], position, context.cache)[-1]
            position += 1


class Chooser:
    """Chooses the tokens of one answer, until it ends.

    Arguments as in :func:`generate_tokens`.
    """

    def __init__(
        self,
        model: HybridModel,
        context: Context,
        sampling: Sampling,
        stops: Collection[int] | None = None,
    ) -> None:
        self._ends = stop_tokens(model) if stops is None else stops
        self._sampling = sampling
        self._generator: torch.Generator | None = None
        if sampling.seed is not None:
            self._generator = torch.Generator(device=model.device).manual_seed(sampling.seed)
        self._left = min(sampling.max_tokens, model.context_length - context.length)
        self.ended = False

    @property
    def wants_more(self) -> bool:
        """Whether another token may be chosen."""
        return self._left > 0 and not self.ended

    def next(self, logits: Tensor) -> int | None:
        """The token for ``logits [vocab]``, or None if the answer ends here."""
        token = choose(logits, self._sampling, self._generator) if self.wants_more else None
        if token is None or token in self._ends:
            self.ended = True
            return None
        self._left -= 1
        return token


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """One token from ``logits [vocab]``."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    probabilities = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1.0:
        ordered, indices = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        probabilities = torch.zeros_like(probabilities).scatter(
            0, indices, ordered.masked_fill(beyond, 0.0)
        )
    return int(torch.multinomial(probabilities, 1, generator=generator))
