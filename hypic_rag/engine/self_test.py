"""The check at load: a model must give in pieces what it gives as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypic_rag.config import Seam
from hypic_rag.engine.assemble import Request, plan_of
from hypic_rag.engine.context import Context, attention_kv, linear_state
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.layout import build_layout
from hypic_rag.engine.oracle import recompute
from hypic_rag.engine.packed import PassResult, run_packed
from hypic_rag.engine.plan import Computed
from hypic_rag.errors import SelfTestError
from hypic_rag.families.base import LinearSpec
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment

__all__ = ["TOLERANCE", "self_test"]

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest relative error (root mean square over root mean square) that a layer may show."""

_LENGTHS = (37, 70, 131, 20)
"""Tokens of the prefix, of two segments and of the question."""


def self_test(model: HybridModel) -> float:
    """Compare a prompt in pieces through this engine with the whole through the library.

    The segments are encoded in their true context, so the two must agree to rounding error, layer
    by layer: hidden states of the computed tokens, recurrent states, keys and values.

    Returns:
        The largest relative error found.

    Raises:
        SelfTestError: naming the first layer that deviates, and in what.
    """
    prefix, first, second, question = _tokens(model)
    whole = prefix + first + second + question
    base, _ = recompute(model, prefix)
    middle, _ = recompute(model, prefix + first)
    segments = (Segment(first), Segment(second))
    states = [
        *encode_segments(model, segments[:1], Seam(4, 2), base),
        *encode_segments(model, segments[1:], Seam(4, 2), middle),
    ]
    request = Request(segments, tuple(states), question, base)
    plan = plan_of(request)
    layout = build_layout([plan], model.kernel, model.device)
    ours = run_packed(model, layout, [base], [s for s in states if s], keep_hidden=True)
    theirs, hidden = _library_layers(model, whole)
    where = [
        position
        for piece in plan.pieces
        if isinstance(piece, Computed)
        for position in range(piece.start, piece.start + piece.length)
    ]
    return _compare(model, ours, theirs, hidden, where)


def _tokens(model: HybridModel) -> tuple[tuple[int, ...], ...]:
    """Fixed pseudo-random token ids, the same in every process."""
    vocabulary = model.module.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, vocabulary, (sum(_LENGTHS),), generator=generator).tolist()
    parts, start = [], 0
    for length in _LENGTHS:
        parts.append(tuple(drawn[start : start + length]))
        start += length
    return tuple(parts)


def _library_layers(model: HybridModel, ids: tuple[int, ...]) -> tuple[Context, list[Tensor]]:
    """The library's own forward, and the hidden states ``[n, hidden]`` behind each layer."""
    hidden: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        hidden.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [layer.register_forward_hook(keep) for layer in model.decoder_layers]
    try:
        context, _ = recompute(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return context, hidden


def _compare(
    model: HybridModel,
    ours: PassResult,
    theirs: Context,
    hidden: list[Tensor],
    where: list[int],
) -> float:
    tolerance = TOLERANCE[model.dtype]
    worst = 0.0
    for index, spec in enumerate(model.layers):
        pairs = {"hidden states": (ours.hidden[index], hidden[index][where])}
        if isinstance(spec, LinearSpec):
            pairs["recurrent state"] = (
                linear_state(ours.caches[0], index)[1],
                linear_state(theirs.cache, index)[1],
            )
        else:
            mine, yours = (attention_kv(c, index) for c in (ours.caches[0], theirs.cache))
            pairs["keys"] = (mine[0], yours[0])
            pairs["values"] = (mine[1], yours[1])
        for what, (got, expected) in pairs.items():
            error = _relative_error(got, expected)
            worst = max(worst, error)
            if not error <= tolerance:
                kind = "linear-attention" if isinstance(spec, LinearSpec) else "full-attention"
                raise SelfTestError(
                    f"{model.name or 'The model'} fails the self-test at layer {index} "
                    f"({kind}): the {what} in pieces differ from the library's by a relative "
                    f"error of {error:.2g} (allowed: {tolerance:g}). Its answers from cached "
                    "states would be wrong, so it's refused; check that it's an unmodified "
                    "checkpoint of its model type."
                )
    return worst


def _relative_error(got: Tensor, expected: Tensor) -> float:
    got, expected = got.double(), expected.double()
    scale = expected.square().mean().sqrt().clamp_min(1e-12)
    return float((got - expected).square().mean().sqrt() / scale)
