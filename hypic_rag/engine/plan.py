"""The plan of a request: which tokens run, which states stand in for the others, and where.

Planning is pure: token ids in, frozen dataclasses out, no tensors. Print a plan to see a request
as one table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypic_rag.config import Seam
from hypic_rag.errors import ConfigError
from hypic_rag.segments import Segment

__all__ = ["Computed", "Part", "Piece", "RequestPlan", "Reused", "plan_encoding", "plan_request"]


class Part(enum.StrEnum):
    """What a piece of a prompt is."""

    PREFIX = "prefix"
    HEAD = "head"
    INTERIOR = "interior"
    TAIL = "tail"
    SEGMENT = "segment"
    QUESTION = "question"


@dataclass(frozen=True)
class Computed:
    """Tokens that run through the model at positions ``start, start + 1, …``.

    With ``capture`` their operators, keys and values are kept.
    """

    part: Part
    start: int
    token_ids: tuple[int, ...] = field(repr=False)
    segment: int | None = None
    capture: bool = False

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Reused:
    """Tokens at ``start, start + 1, …`` whose cached interior stands in for them.

    The first of them may be ``renewed``: they run as well, behind what really stands in front of
    them, and their own keys and values take the place of cached ones. The recurrent states still
    go on from the interior's operators, which are of the whole interior and can't be cut.
    """

    start: int
    length: int
    segment: int
    part: Part = Part.INTERIOR
    renewed: tuple[int, ...] = field(default=(), repr=False)


Piece = Computed | Reused


@dataclass(frozen=True)
class RequestPlan:
    """One request: ``base`` tokens that a finished cache holds, then the pieces in order."""

    base: int
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        position = self.base
        for piece in self.pieces:
            if piece.start != position or piece.length < 1:
                raise ConfigError(
                    f"A plan's pieces must follow one another without gaps: expected one that "
                    f"starts at {position}, got {piece.part} at {piece.start} "
                    f"with {piece.length} tokens."
                )
            if isinstance(piece, Reused) and len(piece.renewed) >= piece.length:
                raise ConfigError(
                    f"An interior of {piece.length} tokens can't have {len(piece.renewed)} of them "
                    "renewed and be reused: compute it."
                )
            position += piece.length
        if not self.pieces or not isinstance(self.pieces[-1], Computed):
            raise ConfigError("A plan must end with computed tokens: the question can't be empty.")

    @property
    def length(self) -> int:
        """Tokens of the whole prompt, base included."""
        return self.pieces[-1].start + self.pieces[-1].length

    @property
    def computed(self) -> int:
        """Tokens that run through the model."""
        return sum(
            piece.length if isinstance(piece, Computed) else len(piece.renewed)
            for piece in self.pieces
        )

    @property
    def reused(self) -> int:
        """Tokens that don't: the base, and the cached interiors but for what's renewed."""
        return self.length - self.computed

    def runs(self) -> Iterator[list[Computed]]:
        """Computed pieces that follow one another directly, together."""
        run: list[Computed] = []
        for piece in self.pieces:
            if isinstance(piece, Computed):
                run.append(piece)
            elif run:
                yield run
                run = []
        if run:
            yield run

    def __str__(self) -> str:
        lines = [f"{'part':<10}{'segment':>8}{'start':>8}{'tokens':>8}  how"]
        if self.base:
            lines.append(f"{'base':<10}{'':>8}{0:>8}{self.base:>8}  ready cache")
        for piece in self.pieces:
            how = "computed" if isinstance(piece, Computed) else "cached state"
            if isinstance(piece, Reused) and piece.renewed:
                how += f", the first {len(piece.renewed)} renewed"
            segment = "" if piece.segment is None else piece.segment
            lines.append(f"{piece.part:<10}{segment:>8}{piece.start:>8}{piece.length:>8}  {how}")
        lines.append(f"{self.length} tokens: {self.reused} reused, {self.computed} computed")
        return "\n".join(lines)


def plan_request(
    base: int,
    segments: Sequence[Segment],
    seams: Sequence[Seam | None],
    question: Sequence[int],
    lead: Sequence[int] = (),
    renewed: Sequence[int] = (),
) -> RequestPlan:
    """Plan a prompt ``[base][lead][segment 1]…[segment n][question]``.

    Args:
        base: tokens of the finished cache in front (resident system prompt or session).
        lead: token ids between the base and the segments, such as the end of the last answer.
        segments: in prompt order.
        seams: per segment the seam of its cached state, or None if it has none (a miss is
            computed whole).
        question: token ids behind the segments; at least one.
        renewed: per segment how many of its interior's first tokens run as well
            (:class:`Reused`), fewer than the interior has; nothing by default. What a segment
            without a state has there doesn't matter.

    Raises:
        ConfigError: the question is empty, the sequences differ in length, or what's renewed is
            negative or not less than the interior.
    """
    if len(segments) != len(seams):
        raise ConfigError(f"Got {len(segments)} segments but {len(seams)} seams.")
    renewed = renewed or (0,) * len(segments)
    if len(segments) != len(renewed):
        raise ConfigError(f"Got {len(segments)} segments but {len(renewed)} counts to renew.")
    if min(renewed, default=0) < 0:
        raise ConfigError(f"Counts of tokens to renew must be >= 0, but are {tuple(renewed)}.")
    pieces: list[Piece] = [Computed(Part.PREFIX, base, tuple(lead))] if lead else []
    position = base + len(lead)
    for index, (segment, seam) in enumerate(zip(segments, seams, strict=True)):
        start, end = seam.interior(len(segment)) if seam else (0, 0)
        if start == end:
            pieces.append(Computed(Part.SEGMENT, position, segment.token_ids, index))
        else:
            if start:
                pieces.append(Computed(Part.HEAD, position, segment.token_ids[:start], index))
            fresh = segment.token_ids[start : start + renewed[index]]
            pieces.append(Reused(position + start, end - start, index, renewed=fresh))
            if end < len(segment):
                tail = segment.token_ids[end:]
                pieces.append(Computed(Part.TAIL, position + end, tail, index))
        position += len(segment)
    if question:
        pieces.append(Computed(Part.QUESTION, position, tuple(question)))
    return RequestPlan(base, tuple(pieces))


def plan_encoding(base: int, segment: Segment, seam: Seam) -> RequestPlan | None:
    """Plan the pass that captures the state of ``segment`` behind ``base`` tokens.

    Returns None if the segment has no interior, so there's nothing to keep. The tail doesn't run:
    nothing that is kept depends on it.
    """
    start, end = seam.interior(len(segment))
    if start == end:
        return None
    pieces = []
    if start:
        pieces.append(Computed(Part.HEAD, base, segment.token_ids[:start], 0))
    interior = segment.token_ids[start:end]
    pieces.append(Computed(Part.INTERIOR, base + start, interior, 0, capture=True))
    return RequestPlan(base, tuple(pieces))
