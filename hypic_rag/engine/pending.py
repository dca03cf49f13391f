"""States that a request needs but that nobody has encoded yet."""

from __future__ import annotations

from dataclasses import dataclass

from hypic_rag.config import Seam
from hypic_rag.engine.context import Context, LazyContext
from hypic_rag.segments import Segment
from hypic_rag.states import LayerState, SegmentState

__all__ = ["PendingState"]


@dataclass(frozen=True)
class PendingState:
    """The state of ``segment``, to be encoded behind ``conditioning``.

    Two of them are equal if they'd be encoded to the same state.

    Attributes:
        segment: has an interior.
        seam: widths that the state leaves out.
        conditioning: the prefix in front, or None to encode in isolation.
    """

    segment: Segment
    seam: Seam
    conditioning: LazyContext | None

    @property
    def length(self) -> int:
        """Tokens of the whole segment, seams included."""
        return len(self.segment)

    @property
    def interior(self) -> tuple[int, int]:
        """Start and end of the interior within the segment."""
        return self.seam.interior(self.length)

    @property
    def offset(self) -> int:
        """Position at which the segment's first token will stand while it's encoded."""
        return self.conditioning.length if self.conditioning else 0

    def context(self) -> Context | None:
        """What it's encoded behind."""
        return self.conditioning.get()[0] if self.conditioning else None

    def of(self, layers: tuple[LayerState, ...]) -> SegmentState:
        """The state, now that its layers are there."""
        return SegmentState(self.length, self.seam, self.offset, layers)
