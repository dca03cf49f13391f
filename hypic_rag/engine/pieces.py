"""Segments in pieces: operators with checkpoints, so that any seam or inner run can be had later.

A segment that is encoded piece by piece, each behind the ones before it, gives one state per piece.
Neighbouring pieces join exactly (equation 1 composes), so one encoding serves every seam whose
widths are cuts, and a request may recompute any piece while the others stay cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from hypic_rag.config import Seam
from hypic_rag.engine.context import Context
from hypic_rag.engine.layout import build_layout
from hypic_rag.engine.packed import Wanted, run_packed
from hypic_rag.engine.plan import Computed, Part, RequestPlan
from hypic_rag.errors import ConfigError
from hypic_rag.families.model import HybridModel
from hypic_rag.operators import compose
from hypic_rag.segments import Segment
from hypic_rag.states import AttentionState, LayerState, LinearState, SegmentState

__all__ = ["encode_pieces", "join_pieces", "seam_cuts", "state_from_pieces"]


def seam_cuts(length: int, seams: Iterable[Seam]) -> tuple[int, ...]:
    """Cuts of a segment of ``length`` tokens where the interiors of ``seams`` start and end."""
    places = {place for seam in seams for place in seam.interior(length)}
    return tuple(sorted(place for place in places if 0 < place < length))


def encode_pieces(
    model: HybridModel,
    segments: Sequence[Segment],
    cuts: Sequence[Sequence[int]],
    bases: Sequence[Context | None],
) -> list[tuple[SegmentState, ...]]:
    """States of the pieces that ``cuts`` make of ``segments``, each segment behind its base.

    Args:
        model: the model.
        segments: what to encode.
        cuts: per segment increasing places between 0 and its length; none gives one piece.
        bases: per segment the finished prefix it's encoded behind, or None.

    Returns:
        Per segment the states of its pieces in order, all without seams.

    Raises:
        ConfigError: cuts aren't increasing places inside their segment.
    """
    bounds = []
    for segment, places in zip(segments, cuts, strict=True):
        edges = (0, *places, len(segment))
        if any(first >= second for first, second in pairwise(edges)):
            raise ConfigError(
                f"Cuts of a segment of {len(segment)} tokens must be increasing places inside it, "
                f"but are {tuple(places)}."
            )
        bounds.append(edges)
    states: list[list[SegmentState]] = [[] for _ in segments]
    contexts = list(bases)
    for level in range(max((len(edges) for edges in bounds), default=1) - 1):
        active = [index for index, edges in enumerate(bounds) if len(edges) > level + 1]
        plans = []
        for index in active:
            base = contexts[index]
            start, end = bounds[index][level : level + 2]
            at = base.length if base else 0
            ids = segments[index].token_ids[start:end]
            plans.append(RequestPlan(at, (Computed(Part.INTERIOR, at, ids, 0, capture=True),)))
        layout = build_layout(plans, model.kernel, model.device)
        # The caches are what later pieces are encoded behind.
        ends = all(len(bounds[index]) == level + 2 for index in active)
        wanted = Wanted.NONE if ends else Wanted.LAST
        behind = [contexts[index] for index in active]
        result = run_packed(model, layout, behind, [], wanted=wanted)
        for place, index in enumerate(active):
            plan = plans[place]
            piece = plan.pieces[0]
            assert isinstance(piece, Computed)
            states[index].append(
                SegmentState(piece.length, Seam(0, 0), plan.base, result.captured[place])
            )
            if ends:
                continue
            before = contexts[index]
            ids = (before.token_ids if before else ()) + piece.token_ids
            contexts[index] = Context(ids, result.caches[place], result.logits[place])
    return [tuple(of_segment) for of_segment in states]


def join_pieces(pieces: Sequence[SegmentState], kernel: int) -> SegmentState:
    """The state of neighbouring pieces as one, exact up to rounding.

    ``kernel`` is how many tokens the model's convolutions look at.

    Raises:
        ConfigError: there are no pieces, or they don't follow one another.
    """
    if not pieces:
        raise ConfigError("There are no pieces to join.")
    for first, second in pairwise(pieces):
        if first.seam != Seam(0, 0) or first.offset + first.length != second.offset:
            raise ConfigError("Only pieces without seams that follow one another can be joined.")
    by_layer = zip(*(piece.layers for piece in pieces), strict=True)
    layers = tuple(_join_layer(parts, kernel) for parts in by_layer)
    return SegmentState(sum(piece.length for piece in pieces), Seam(0, 0), pieces[0].offset, layers)


def _join_layer(parts: Sequence[LayerState], kernel: int) -> LayerState:
    if len(parts) == 1:
        return parts[0]
    attention = [part for part in parts if isinstance(part, AttentionState)]
    if attention:
        return AttentionState(
            torch.cat([part.keys for part in attention], dim=1),
            torch.cat([part.values for part in attention], dim=1),
        )
    linear = [part for part in parts if isinstance(part, LinearState)]
    tail = torch.cat([part.conv_tail for part in linear], dim=-1)
    past = min(kernel - 1, tail.shape[-1])
    return LinearState(
        compose(part.map for part in linear), tail[:, tail.shape[-1] - past :].contiguous()
    )


def state_from_pieces(
    pieces: Sequence[SegmentState],
    cuts: Sequence[int],
    length: int,
    seam: Seam,
    kernel: int,
) -> SegmentState | None:
    """The state of a whole segment with ``seam``, from pieces cut at the seam's edges.

    Returns None if the segment has no interior.

    Raises:
        ConfigError: the interior's edges aren't cuts.
    """
    start, end = seam.interior(length)
    if start == end:
        return None
    edges = (0, *cuts, length)
    if start not in edges or end not in edges:
        raise ConfigError(
            f"The seam {seam} needs cuts at {start} and {end} of {length} tokens, but they're at "
            f"{tuple(cuts)}."
        )
    joined = join_pieces(pieces[edges.index(start) : edges.index(end)], kernel)
    return SegmentState(length, seam, joined.offset - start, joined.layers)
