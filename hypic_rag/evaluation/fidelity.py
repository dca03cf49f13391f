"""What assembling cached states changes, against full recompute of the identical token ids.

A :class:`Reference` is the library's own forward of a prompt and its greedy continuation. Every
other way of prefilling the same prompt leaves a cache and logits, and those are compared with it:
the next token's distribution, the continuation, the final states, keys and values by position.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypic_rag.engine.context import Context, attention_kv, forward, linear_state, new_cache
from hypic_rag.engine.generate import stop_tokens
from hypic_rag.engine.probe import kl_divergence
from hypic_rag.errors import ConfigError
from hypic_rag.families.base import LinearSpec
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment

__all__ = [
    "AttentionError",
    "Comparison",
    "Profile",
    "Reference",
    "StateError",
    "attention_errors",
    "compare",
    "follow",
    "greedy",
    "kl_divergence",
    "position_deviation",
    "profile",
    "recompute_reference",
    "state_errors",
    "watch_attention",
]


@dataclass(frozen=True, eq=False)
class Reference:
    """Full recompute of one prompt.

    Attributes:
        context: its cache and next-token logits; shared, so clone before decoding.
        continuation: what greedy decoding goes on with, the stop token included if it came.
    """

    context: Context
    continuation: tuple[int, ...]


def recompute_reference(
    model: HybridModel,
    token_ids: tuple[int, ...],
    limit: int = 32,
    stops: Collection[int] | None = None,
) -> Reference:
    """Run the library's own forward of a prompt and decode up to ``limit`` tokens greedily."""
    if not token_ids:
        raise ConfigError("There's nothing to recompute: the prompt has no tokens.")
    cache = new_cache(model.config)
    logits = forward(model.module, token_ids, 0, cache)
    context = Context(token_ids, cache, logits[-1])
    ends = stop_tokens(model) if stops is None else stops
    return Reference(context, greedy(model, context, limit, ends))


def greedy(
    model: HybridModel,
    context: Context,
    limit: int,
    stops: Collection[int],
    given: Sequence[int] = (),
) -> tuple[int, ...]:
    """The greedy continuation of at most ``limit`` tokens, a stop token included.

    ``given`` are its first tokens, already known. The context isn't changed.
    """
    context = context.clone()
    found = list(given)
    logits = context.logits
    position = context.length
    if found:
        logits = forward(model.module, found, position, context.cache)[-1]
        position += len(found)
    while len(found) < limit:
        token = int(logits.argmax())
        found.append(token)
        if token in stops or len(found) == limit:
            break
        logits = forward(model.module, [token], position, context.cache)[-1]
        position += 1
    return tuple(found)


def follow(model: HybridModel, context: Context, continuation: Sequence[int]) -> Tensor:
    """Logits ``[m, vocab]`` that predict each of ``continuation``'s m tokens, given those before.

    The context isn't changed.
    """
    if len(continuation) == 1:
        return context.logits.unsqueeze(0)
    copy = context.clone()
    behind = forward(
        model.module, list(continuation[:-1]), copy.length, copy.cache, all_logits=True
    )
    return torch.cat([context.logits.unsqueeze(0), behind])


@dataclass(frozen=True)
class Comparison:
    """How one prefill's predictions compare with full recompute's.

    Attributes:
        kl: KL divergence of the next token's distribution, in nats.
        agreed: how many tokens of the reference's continuation greedy decoding repeats.
        length: tokens of that continuation.
    """

    kl: float
    agreed: int
    length: int

    @property
    def first_agrees(self) -> bool:
        """Whether the first token is the same."""
        return self.agreed > 0

    @property
    def all_agree(self) -> bool:
        """Whether the whole continuation is the same."""
        return self.agreed == self.length


def compare(reference_logits: Tensor, continuation: Sequence[int], logits: Tensor) -> Comparison:
    """Compare predictions along the reference's continuation.

    Args:
        reference_logits: of the next token, ``[vocab]``.
        continuation: the reference's greedy tokens.
        logits: the other way's, ``[m, vocab]``, as :func:`follow` gives them.

    Raises:
        ConfigError: the shapes don't belong together, or a logit isn't finite.
    """
    if logits.shape[0] != len(continuation) or not continuation:
        raise ConfigError(f"Expected logits for {len(continuation)} tokens, got {logits.shape[0]}.")
    if not bool(torch.isfinite(logits).all()):
        raise ConfigError("The logits aren't finite, so there's nothing to compare.")
    same = logits.argmax(-1).cpu() == torch.tensor(list(continuation))
    agreed = int(same.long().cumprod(0).sum())
    return Comparison(kl_divergence(reference_logits, logits[0]), agreed, len(continuation))


@dataclass(frozen=True)
class StateError:
    """How far a linear layer's final state is off, over all heads together.

    Attributes:
        layer: its index.
        angle: between the two states as vectors, in degrees.
        norm_ratio: the norm of the assembled state over that of the recomputed one.
        relative: norm of the difference over the norm of the recomputed one.
    """

    layer: int
    angle: float
    norm_ratio: float
    relative: float


def state_errors(model: HybridModel, context: Context, reference: Context) -> list[StateError]:
    """Errors of the recurrent states behind the same prompt, per linear layer."""
    errors = []
    for index, spec in enumerate(model.layers):
        if not isinstance(spec, LinearSpec):
            continue
        mine = linear_state(context.cache, index)[1].double().flatten()
        yours = linear_state(reference.cache, index)[1].double().flatten()
        errors.append(StateError(index, *_vector_error(mine, yours)))
    return errors


def _vector_error(mine: Tensor, yours: Tensor) -> tuple[float, float, float]:
    """Angle in degrees, ratio of norms, relative error."""
    first, second = float(mine.norm()), float(yours.norm())
    if second == 0.0 or first == 0.0:
        return (0.0 if first == second else 90.0), math.nan, float(first != second)
    # The chord is accurate for small angles, where the cosine isn't.
    chord = float((mine / first - yours / second).norm())
    angle = math.degrees(2 * math.asin(min(1.0, chord / 2)))
    return angle, first / second, float((mine - yours).norm()) / second


def position_deviation(model: HybridModel, context: Context, reference: Context) -> Tensor:
    """Relative error of keys and values by position ``[n]``, averaged over full-attention layers.

    Per position and layer: the norm of the difference over the norm of the recomputed keys and
    values of all heads.
    """
    total = torch.zeros(reference.length, dtype=torch.float64)
    layers = 0
    for index, spec in enumerate(model.layers):
        if isinstance(spec, LinearSpec):
            continue
        pairs = zip(
            attention_kv(context.cache, index), attention_kv(reference.cache, index), strict=True
        )
        for mine, yours in pairs:
            a, b = mine.double(), yours.double()[:, : reference.length]
            off = (a[:, : reference.length] - b).square().sum((0, 2)).sqrt()
            total += (off / b.square().sum((0, 2)).sqrt().clamp_min(1e-12)).cpu() / 2
        layers += 1
    return total / max(layers, 1)


@dataclass(frozen=True)
class Profile:
    """Mean deviation by distance from a segment's first token and from its last.

    ``from_start[i]`` is the mean over all segments' tokens i (0-based); ``from_end[i]`` over the
    i-th tokens from the end. ``counts`` says how many segments reach that far.
    """

    from_start: tuple[float, ...]
    from_end: tuple[float, ...]
    counts: tuple[int, ...]


def profile(
    deviations: Sequence[Tensor], layouts: Sequence[tuple[int, Sequence[Segment]]], reach: int = 64
) -> Profile:
    """Average deviations around segments' edges.

    Args:
        deviations: per prompt the deviation by position ``[n]``.
        layouts: per prompt where its first segment starts, and its segments.
        reach: how many tokens from each edge.
    """
    sums = torch.zeros(2, reach, dtype=torch.float64)
    counts = torch.zeros(reach, dtype=torch.long)
    for deviation, (start, segments) in zip(deviations, layouts, strict=True):
        for segment in segments:
            part = deviation[start : start + len(segment)]
            width = min(reach, len(segment))
            sums[0, :width] += part[:width]
            sums[1, :width] += part.flip(0)[:width]
            counts[:width] += 1
            start += len(segment)
    seen = int((counts > 0).sum())
    means = (sums[:, :seen] / counts[:seen]).tolist()
    return Profile(tuple(means[0]), tuple(means[1]), tuple(counts[:seen].tolist()))


@dataclass(frozen=True)
class AttentionError:
    """Relative error of a full-attention layer's output at the prompt's last token."""

    layer: int
    relative: float


@contextmanager
def watch_attention(model: HybridModel) -> Iterator[dict[int, Tensor]]:
    """Collect the last token's output ``[hidden]`` of every full-attention layer that runs.

    Works for the library's forward of one prompt and for a packed pass of one request: both end in
    the layer's own output projection.
    """
    found: dict[int, Tensor] = {}
    hooks = []

    def keep(index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            found[index] = output.reshape(-1, output.shape[-1])[-1].detach()

        return hook

    for index, layer in enumerate(model.decoder_layers):
        projection = getattr(getattr(layer, "self_attn", None), "o_proj", None)
        if projection is not None and not isinstance(model.layers[index], LinearSpec):
            hooks.append(projection.register_forward_hook(keep(index)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def attention_errors(
    outputs: dict[int, Tensor], reference: dict[int, Tensor]
) -> list[AttentionError]:
    """Relative errors of what :func:`watch_attention` collected."""
    errors = []
    for layer in sorted(outputs.keys() & reference.keys()):
        mine, yours = outputs[layer].double(), reference[layer].double()
        off = float((mine - yours).norm() / yours.norm().clamp_min(1e-12))
        errors.append(AttentionError(layer, off))
    return errors
