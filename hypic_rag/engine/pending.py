"""States that a request needs but that nobody has encoded yet."""

from __future__ import annotations

from dataclasses import dataclass

from hypic_rag.config import Seam
from hypic_rag.engine.context import LazyContext
from hypic_rag.segments import Segment

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
