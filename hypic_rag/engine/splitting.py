"""Long segments split up: their pieces are encoded at the same time and joined to one state.

Transitions compose exactly, and keys carry no position, so the pieces' states join to the state of
the whole (:mod:`hypic_rag.engine.pieces`). What is approximate is what a piece's hidden states have
seen: the conditioning prefix and ``overlap`` tokens in front of it, not the whole segment up to
there. So a segment is only ever split when that's asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypic_rag.config import Seam
from hypic_rag.engine.context import Context
from hypic_rag.engine.layout import build_layout
from hypic_rag.engine.packed import Wanted, run_packed
from hypic_rag.engine.pieces import join_pieces
from hypic_rag.engine.plan import Computed, Part, RequestPlan
from hypic_rag.errors import ConfigError
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = ["OVERLAP", "encode_piece", "join_split", "piece_bounds"]

OVERLAP = 64
"""Tokens in front of a piece that run for its context's sake."""


def piece_bounds(segment: Segment, seam: Seam, piece_tokens: int) -> list[tuple[int, int]]:
    """Cut a segment's interior into as few even pieces of at most ``piece_tokens`` as possible.

    Empty if it has no interior.

    Raises:
        ConfigError: ``piece_tokens`` is less than 1.
    """
    if piece_tokens < 1:
        raise ConfigError(f"A piece needs at least one token, not {piece_tokens}.")
    start, end = seam.interior(len(segment))
    count = -(-(end - start) // piece_tokens)
    edges = [start + (end - start) * i // count for i in range(count + 1)] if count else []
    return list(itertools.pairwise(edges))


def encode_piece(
    model: HybridModel,
    segment: Segment,
    start: int,
    end: int,
    conditioning: Context | None = None,
    overlap: int = OVERLAP,
) -> SegmentState:
    """The state of tokens ``start`` to ``end`` of a segment, as one of a segment without seams."""
    base = conditioning.length if conditioning else 0
    lead = max(0, start - overlap)
    pieces = []
    if lead < start:
        pieces.append(Computed(Part.HEAD, base, segment.token_ids[lead:start], 0))
    captured = segment.token_ids[start:end]
    pieces.append(Computed(Part.INTERIOR, base + start - lead, captured, 0, capture=True))
    layout = build_layout([RequestPlan(base, tuple(pieces))], model.kernel, model.device)
    result = run_packed(model, layout, [conditioning], [], wanted=Wanted.NONE)
    return SegmentState(end - start, Seam(0, 0), base + start, result.captured[0])


def join_split(
    pieces: Sequence[SegmentState], segment: Segment, seam: Seam, kernel: int
) -> SegmentState:
    """The state of a whole segment from those of its pieces, in order.

    Args:
        pieces: states of all of its interior, without gaps.
        segment: the whole segment.
        seam: the widths that its interior leaves out.
        kernel: tokens that the model's convolutions look at.

    Raises:
        ConfigError: the pieces don't make up the interior.
    """
    start, end = seam.interior(len(segment))
    joined = join_pieces(pieces, kernel)
    if joined.length != end - start:
        raise ConfigError(
            f"The pieces have {joined.length} tokens, but the segment's interior has {end - start}."
        )
    return SegmentState(len(segment), seam, joined.offset - start, joined.layers)
