"""Decoding on a finished cache with the library's own forward."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from hypic_rag.config import Sampling
from hypic_rag.engine.context import Context, forward
from hypic_rag.families.model import HybridModel

__all__ = ["generate_tokens", "stop_tokens"]


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
) -> Iterator[int]:
    """Yield answer tokens one by one, the stop token excluded.

    The context's cache grows in place: behind the last yielded token it holds everything but that
    token. Clone a context that others share.

    Args:
        model: the model.
        context: a finished prompt.
        sampling: how tokens are chosen, and how many at most.
        stops: tokens that end the answer; default :func:`stop_tokens`.
    """
    ends = stop_tokens(model) if stops is None else stops
    generator = None
    if sampling.seed is not None:
        generator = torch.Generator(device=model.device).manual_seed(sampling.seed)
    logits, position = context.logits, context.length
    limit = min(sampling.max_tokens, model.context_length - context.length)
    for count in range(limit):
        token = choose(logits, sampling, generator)
        if token in ends:
            return
        yield token
        if count + 1 < limit:
            logits = forward(model.module, [token], position, context.cache)[-1]
            position += 1


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
