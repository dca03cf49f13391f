"""Encoding: the states of segments, many segments of any lengths in one pass."""

from __future__ import annotations

from collections.abc import Sequence

from hypic_rag.config import Seam
from hypic_rag.engine.context import Context, LazyContext
from hypic_rag.engine.layout import build_layout
from hypic_rag.engine.packed import Wanted, run_packed
from hypic_rag.engine.pending import PendingState
from hypic_rag.engine.plan import RequestPlan, plan_encoding
from hypic_rag.families.model import HybridModel
from hypic_rag.ops.choice import KernelChoice
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = ["encode_pending", "encode_segments"]


def encode_segments(
    model: HybridModel,
    segments: Sequence[Segment],
    seam: Seam,
    conditioning: Context | None = None,
    *,
    batch_tokens: int = 4096,
    kernels: KernelChoice | None = None,
) -> list[SegmentState | None]:
    """States of ``segments``, each encoded by itself behind ``conditioning``.

    ``T`` and ``e`` start from identity and zero at the interior; the conditioning prefix only
    shapes the hidden states they're made of. Segments are packed, so none is padded by another and
    a result doesn't depend on its batch.

    Args:
        model: the model.
        segments: what to encode.
        seam: widths that the states leave out.
        conditioning: a finished prefix, or None to encode in isolation (the paper's way).
        batch_tokens: tokens of one pass; a longer segment gets a pass of its own.
        kernels: which implementations the pass uses; by default the best for the device.

    Returns:
        One state per segment; None for a segment that is too short to have an interior.
    """
    base = conditioning.length if conditioning else 0
    plans = [plan_encoding(base, segment, seam) for segment in segments]
    order = sorted(
        (index for index, plan in enumerate(plans) if plan is not None),
        key=lambda index: len(segments[index]),
    )
    states: list[SegmentState | None] = [None] * len(segments)
    batch: list[int] = []
    size = 0
    for index in order:
        length = len(segments[index])
        if batch and size + length > batch_tokens:
            _encode_batch(model, batch, segments, plans, seam, conditioning, states, kernels)
            batch, size = [], 0
        batch.append(index)
        size += length
    if batch:
        _encode_batch(model, batch, segments, plans, seam, conditioning, states, kernels)
    return states


def encode_pending(
    model: HybridModel, pending: Sequence[PendingState], *, kernels: KernelChoice | None = None
) -> dict[PendingState, SegmentState]:
    """What's pending, encoded as :func:`encode_segments` does, in passes without any request."""
    alike: dict[tuple[Seam, LazyContext | None], list[PendingState]] = {}
    for state in pending:
        alike.setdefault((state.seam, state.conditioning), []).append(state)
    made: dict[PendingState, SegmentState] = {}
    for (seam, conditioning), some in alike.items():
        context = conditioning.get()[0] if conditioning else None
        segments = [state.segment for state in some]
        encoded = encode_segments(model, segments, seam, context, kernels=kernels)
        made |= {one: state for one, state in zip(some, encoded, strict=True) if state is not None}
    return made


def _encode_batch(
    model: HybridModel,
    batch: Sequence[int],
    segments: Sequence[Segment],
    plans: Sequence[RequestPlan | None],
    seam: Seam,
    conditioning: Context | None,
    states: list[SegmentState | None],
    kernels: KernelChoice | None,
) -> None:
    chosen = [plan for index in batch if (plan := plans[index]) is not None]
    layout = build_layout(chosen, model.kernel, model.device)
    bases = [conditioning] * len(chosen)
    result = run_packed(model, layout, bases, [], wanted=Wanted.NONE, kernels=kernels)
    offset = conditioning.length if conditioning else 0
    for index, layers in zip(batch, result.captured, strict=True):
        states[index] = SegmentState(len(segments[index]), seam, offset, layers)
