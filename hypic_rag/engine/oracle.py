"""The sequential oracle: the same request, one piece after another, by the library's own forward.

Slow and plain on purpose. Each computed piece runs through the library on the library's cache;
each cached interior is applied to that cache by hand. The packed pass has to equal this.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from hypic_rag.config import Mode
from hypic_rag.engine.assemble import Request, plan_of
from hypic_rag.engine.context import (
    Context,
    attention_kv,
    forward,
    linear_state,
    new_cache,
    set_linear_state,
)
from hypic_rag.engine.plan import Computed, RequestPlan, Reused
from hypic_rag.errors import ConfigError
from hypic_rag.families.model import HybridModel
from hypic_rag.ops.rope import rotate
from hypic_rag.states import AttentionState, SegmentState

__all__ = ["assemble_sequentially", "recompute"]


def recompute(model: HybridModel, token_ids: tuple[int, ...]) -> tuple[Context, Tensor]:
    """The library's own forward of a whole prompt: the context, and all logits ``[n, vocab]``."""
    cache = new_cache(model.config)
    logits = forward(model.module, token_ids, 0, cache, all_logits=True)
    return Context(token_ids, cache, logits[-1]), logits


def assemble_sequentially(
    model: HybridModel, request: Request, mode: Mode = Mode.SEAM
) -> tuple[Context, Tensor]:
    """A request piece by piece: the context, and the logits ``[computed, vocab]`` on the way."""
    plan: RequestPlan = plan_of(request)
    cache = request.base.clone().cache if request.base else new_cache(model.config)
    logits = []
    for piece in plan.pieces:
        if isinstance(piece, Computed):
            run = forward(model.module, piece.token_ids, piece.start, cache, all_logits=True)
            logits.append(run)
        else:
            state = request.states[piece.segment]
            if not isinstance(state, SegmentState):
                raise ConfigError(
                    f"Segment {piece.segment} has a pending state, but the oracle encodes nothing: "
                    "give it encoded ones."
                )
            branch = None
            if piece.renewed:
                branch = copy.deepcopy(cache)
                run = forward(model.module, piece.renewed, piece.start, branch, all_logits=True)
                logits.append(run)
            with torch.inference_mode():
                _apply_interior(model, cache, state, piece, mode, branch)
    computed = torch.cat(logits)
    return Context(request.token_ids, cache, computed[-1]), computed


def _apply_interior(
    model: HybridModel,
    cache: object,
    state: SegmentState,
    piece: Reused,
    mode: Mode,
    branch: object | None,
) -> None:
    """Let one cached interior act on the library's cache, layer by layer.

    ``branch`` is a cache in which the piece's renewed tokens ran: their keys and values are taken
    from there.
    """
    first, end = state.interior
    seen = piece.start if mode.moves_keys else state.offset + first
    renewed = slice(piece.start, piece.start + len(piece.renewed))
    where = torch.arange(seen, seen + end - first, device=model.device)
    cos, sin = model.family.rotary(model.decoder, model.embedding_like(), where)
    for index, (held, spec) in enumerate(zip(state.layers, model.layers, strict=True)):
        if isinstance(held, AttentionState):
            keys, values = rotate(held.keys, cos, sin).unsqueeze(0), held.values.unsqueeze(0)
            if branch is not None:
                fresh_keys, fresh_values = attention_kv(branch, index)
                keys[0, :, : len(piece.renewed)] = fresh_keys[:, renewed]
                values = values.clone()
                values[0, :, : len(piece.renewed)] = fresh_values[:, renewed]
            cache.layers[index].update(keys, values)  # type: ignore[attr-defined]
            continue
        layer = cache.layers[index]  # type: ignore[attr-defined]
        shape = (spec.heads, spec.key_dim, spec.value_dim)  # type: ignore[union-attr]
        if layer.has_previous_state[0]:
            conv, h = linear_state(cache, index)
        else:
            conv = held.conv_tail.new_zeros(held.conv_tail.shape[0], model.kernel)
            h = torch.zeros(shape, device=model.device)
        after = held.map.apply(h) if mode.applies_transition else h + held.map.offset
        tail = torch.cat((conv, held.conv_tail), dim=-1)[:, -model.kernel :]
        set_linear_state(cache, index, tail.contiguous(), after)
