"""A packed pass by Triton kernels: the tables they read, built once per pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hypic_rag.engine.chain import Tokens, Walked, Walker, walk
from hypic_rag.engine.layout import (
    BeginCapture,
    Chunk,
    EndCapture,
    ForkStep,
    Layout,
    ReuseStep,
)
from hypic_rag.operators import AffineMap, Dense
from hypic_rag.ops import triton_gated_delta as kernels
from hypic_rag.ops import triton_gather
from hypic_rag.ops.choice import KernelChoice
from hypic_rag.states import AttentionState, LinearState

if TYPE_CHECKING:
    from hypic_rag.engine.packed import Spans

__all__ = ["DeviceTables"]


class DeviceTables:
    """What the kernels read beside activations, on the model's device.

    Args:
        layout: of the pass.
        device: where the pass runs.
        choice: which kernels to use.
    """

    def __init__(self, layout: Layout, device: torch.device, choice: KernelChoice) -> None:
        self._choice = choice
        self._device = device
        self._blocks: dict[int, Tensor] = {}
        if choice.linear:
            self._build(layout)

    def _build(self, layout: Layout) -> None:
        rows: list[tuple[int, int, int]] = []
        first = [0]
        chunks: tuple[list[Chunk], list[Chunk]] = ([], [])
        slots = {capture.request: slot for slot, capture in enumerate(layout.captures)}
        for operations in layout.operations:
            for operation in operations:
                if isinstance(operation, Chunk):
                    long = operation.length > kernels.SHORT_CHUNK
                    chunks[long].append(operation)
                    kind = kernels.LONG if long else kernels.SHORT
                    rows.append((kind, operation.start, operation.length))
                elif isinstance(operation, ReuseStep):
                    rows.append((kernels.REUSE, operation.reuse, 0))
                elif isinstance(operation, BeginCapture):
                    rows.append((kernels.BEGIN, slots[operation.request], 0))
                elif isinstance(operation, EndCapture):
                    rows.append((kernels.END, slots[operation.request], 0))
                elif isinstance(operation, ForkStep):
                    rows.append((kernels.FORK, 0, 0))
                else:
                    rows.append((kernels.JOIN, 0, 0))
            first.append(len(rows))
        self._operations = (self._table(rows, torch.int32), self._table(first, torch.int32))
        short, long_ = (
            (
                self._table([chunk.start for chunk in some], torch.int32),
                self._table([chunk.length for chunk in some], torch.int32),
            )
            for some in chunks
        )
        self._chunks = (short, long_)

    def _table(self, values: object, dtype: torch.dtype) -> Tensor:
        built = torch.tensor(values, dtype=dtype)
        if self._device.type == "cuda":
            # From pinned memory the copy doesn't wait for the device.
            return built.pin_memory().to(self._device, non_blocking=True)
        return built

    def walker(self, interiors: Sequence[LinearState]) -> Walker:
        """The walk to use for a layer: by kernels if they serve all of its interiors."""
        fits = all(
            isinstance(held.map.transition, Dense)
            and held.map.transition.matrix.dtype == held.map.offset.dtype == torch.float32
            for held in interiors
        )
        return self._walk if self._choice.linear and fits else walk

    def _walk(
        self,
        layout: Layout,
        tokens: Tokens,
        initial: Sequence[Tensor | None],
        interiors: Sequence[LinearState],
        *,
        applies_transition: bool = True,
    ) -> Walked:
        q, k, v, g, beta = (
            part.contiguous() for part in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
        )
        heads, width, values = k.shape[1], k.shape[2], v.shape[2]
        states = torch.zeros(
            len(initial), heads, width, values, dtype=torch.float32, device=k.device
        )
        for request, state in enumerate(initial):
            if state is not None:
                states[request] = state
        matrices = []
        for held in interiors:
            assert isinstance(held.map.transition, Dense)
            matrices.append(held.map.transition.matrix.contiguous())
        offsets = [held.map.offset.contiguous() for held in interiors]
        factors = kernels.wy_factors((q, k, v, g, beta), self._chunks)
        out, (begun, ended, maps) = kernels.chain(
            self._operations,
            (self._addresses(matrices), self._addresses(offsets)),
            (q, k),
            factors,
            states,
            len(layout.captures),
            applies_transition=applies_transition,
        )
        captured: dict[int, AffineMap] = {}
        if layout.captures:
            written = ended - maps @ begun
            for slot, capture in enumerate(layout.captures):
                captured[capture.request] = AffineMap(Dense(maps[slot]), written[slot])
        return Walked(out, states, captured)

    def _addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._table([tensor.data_ptr() for tensor in tensors] or [0], torch.int64)

    def gathers(self, interiors: Sequence[AttentionState], keys: Tensor) -> bool:
        """Whether the kernel serves all of a layer's interiors, for keys like ``keys``."""
        return self._choice.gather and all(
            part.dtype == keys.dtype and part.stride(-1) == 1
            for held in interiors
            for part in (held.keys, held.values)
        )

    def gather(
        self,
        request: int,
        base: tuple[Tensor, Tensor] | None,
        spans: Spans,
        interiors: Sequence[AttentionState],
        computed: tuple[Tensor, Tensor],
        table: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """A request's keys (at their positions) and values, ``[Hkv, length, D]``."""
        keys, values = computed
        full_keys = keys.new_empty(keys.shape[0], spans.length, keys.shape[-1])
        full_values = values.new_empty(values.shape[0], spans.length, values.shape[-1])
        sources = [computed, *((held.keys, held.values) for held in interiors)]
        if base is not None:
            sources.append(base)
        described = [
            (k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
            for k, v in sources
        ]
        if request not in self._blocks:
            before = 0 if base is None else base[0].shape[1]
            self._blocks[request] = self._table(
                _blocks(spans, before, len(interiors) + 1), torch.int64
            )
        triton_gather.gather_kv(
            self._blocks[request],
            self._table(described, torch.int64),
            (table[0].contiguous(), table[1].contiguous()),
            full_keys,
            full_values,
        )
        return full_keys, full_values


def _blocks(spans: Spans, before: int, base: int) -> list[tuple[int, int, int, int, int]]:
    """Rows of the kernel's table; source 0 is the packed tokens, ``base`` the finished cache."""
    moves = [(base, 0, before, 0, -1)] if before else []
    for run in spans.runs:
        moves.append((0, run.start, run.end - run.start, run.position, run.position))
    for cached in spans.cached:
        turn = cached.position if cached.stays is None else cached.stays
        moves.append((cached.interior + 1, cached.first, cached.length, cached.position, turn))
    size = triton_gather.BLOCK
    return [
        (
            source,
            first + done,
            min(size, count - done),
            place + done,
            turn if turn < 0 else turn + done,
        )
        for source, first, count, place, turn in moves
        for done in range(0, count, size)
    ]
