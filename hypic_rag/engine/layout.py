"""Index tensors of a packed pass, built once per batch of plans and shared by all layers.

The computed tokens of all rows of all requests lie behind one another in one packed sequence of
``N`` tokens. This module says, for that sequence, which history each row's convolution sees, how
rows are cut into chunks, in which order chunks and cached interiors act on each request's state,
and where keys and values go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hypic_rag.engine.plan import Computed, RequestPlan
from hypic_rag.ops.gated_delta_rule import CHUNK

__all__ = [
    "BeginCapture",
    "Bucket",
    "Capture",
    "Chunk",
    "ChunkStep",
    "EndCapture",
    "ForkStep",
    "Interior",
    "JoinStep",
    "Layout",
    "ReuseStep",
    "Write",
    "build_layout",
]

SIZES = (4, 8, 16, 32, 48, 64)
"""Lengths that chunks are padded to."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Chunks of one padded length: packed indices ``[R, L]`` and which of them are tokens.

    ``valid`` is None where no chunk is padded.
    """

    tokens: Tensor
    valid: Tensor | None


@dataclass(frozen=True, eq=False)
class ChunkStep:
    """Chunks ``rows`` of a bucket act on ``requests``, one each, in order."""

    bucket: int
    rows: slice
    requests: slice | Tensor


@dataclass(frozen=True)
class ReuseStep:
    """The cached interior ``reuse`` acts on one request."""

    request: int
    reuse: int


@dataclass(frozen=True)
class BeginCapture:
    """From here on the operators of ``request`` are followed."""

    request: int


@dataclass(frozen=True)
class EndCapture:
    """The operators of ``request`` since :class:`BeginCapture` are kept."""

    request: int


@dataclass(frozen=True)
class ForkStep:
    """What acts on ``request`` from here to :class:`JoinStep` leaves its state as it is here."""

    request: int


@dataclass(frozen=True)
class JoinStep:
    """The state of ``request`` goes on from its :class:`ForkStep`."""

    request: int


@dataclass(frozen=True)
class Chunk:
    """Packed tokens from ``start`` act on one request as one chunk."""

    start: int
    length: int


Step = ChunkStep | ReuseStep | BeginCapture | EndCapture | ForkStep | JoinStep
Operation = Chunk | ReuseStep | BeginCapture | EndCapture | ForkStep | JoinStep


@dataclass(frozen=True)
class Interior:
    """A cached interior: segment ``segment`` of ``request`` at positions from ``start``.

    Its first ``renewed`` tokens run in the pass as well.
    """

    request: int
    segment: int
    start: int
    length: int
    renewed: int = 0


@dataclass(frozen=True)
class Capture:
    """Packed tokens ``start`` to ``end`` of ``request`` whose state is kept."""

    request: int
    start: int
    end: int


@dataclass(frozen=True)
class Write:
    """Packed tokens ``start`` to ``end`` go to positions from ``position``."""

    start: int
    end: int
    position: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Everything that a packed pass has to know beside the weights and the states.

    Attributes:
        plans: the requests.
        token_ids: packed tokens ``[N]``.
        positions: their true positions ``[N]``.
        edges: packed tokens whose raw inputs are looked at across a run's start or behind the
            pass ``[E]``. The convolution's source is one row of zeros, ``kernel - 1`` rows per
            request's base, the tails of the cached interiors, and the inputs of the edges.
        openings: packed tokens whose convolution looks back across their run's start ``[M]``.
        windows: rows of the source that each opening sees ``[M, kernel]``.
        conv_end: rows of the source that are each request's last inputs ``[B, kernel]``.
        buckets: chunks by padded length.
        scatter: where in the buckets' flattened outputs each packed token is ``[N]``.
        steps: what acts on the recurrent states, in order, chunks of one size together.
        operations: the same, per request and one by one.
        interiors: the cached interiors, in the order of ``ReuseStep.reuse``.
        captures: what is kept, at most one per request.
        writes: per request where its packed tokens go: its runs.
        last: packed index of each request's last token ``[B]``.
    """

    plans: tuple[RequestPlan, ...]
    token_ids: Tensor
    positions: Tensor
    edges: Tensor
    openings: Tensor
    windows: Tensor
    conv_end: Tensor
    buckets: tuple[Bucket, ...]
    scatter: Tensor
    steps: tuple[Step, ...]
    operations: tuple[tuple[Operation, ...], ...]
    interiors: tuple[Interior, ...]
    captures: tuple[Capture, ...]
    writes: tuple[tuple[Write, ...], ...]
    last: Tensor


def build_layout(
    plans: Sequence[RequestPlan], kernel: int, device: torch.device, chunk: int = CHUNK
) -> Layout:
    """Lay out ``plans`` for a model whose convolutions look at ``kernel`` tokens."""
    return _Builder(plans, kernel, chunk).build(device)


@dataclass
class _Builder:
    plans: Sequence[RequestPlan]
    kernel: int
    chunk: int
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    interiors: list[Interior] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    operations: list[list[Operation]] = field(default_factory=list)
    writes: list[list[Write]] = field(default_factory=list)
    renewed: list[dict[int, int]] = field(default_factory=list)
    """Per request, by run: how many of its last tokens are an interior's renewed ones."""

    def build(self, device: torch.device) -> Layout:
        for request, plan in enumerate(self.plans):
            self._add(request, plan)
        edges, openings, windows, conv_end = self._convolution()
        buckets, scatter, steps = self._chain(device)

        def index(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        return Layout(
            plans=tuple(self.plans),
            token_ids=index(self.token_ids),
            positions=index(self.positions),
            edges=index(edges),
            openings=index(openings),
            windows=index(windows).view(-1, self.kernel),
            conv_end=index(conv_end),
            buckets=buckets,
            scatter=scatter,
            steps=steps,
            operations=tuple(tuple(operations) for operations in self.operations),
            interiors=tuple(self.interiors),
            captures=tuple(self.captures),
            writes=tuple(tuple(writes) for writes in self.writes),
            last=index([writes[-1].end - 1 for writes in self.writes]),
        )

    def _add(self, request: int, plan: RequestPlan) -> None:
        """Pack one request's computed tokens and list what acts on its state."""
        operations: list[Operation] = []
        writes: list[Write] = []
        renewed: dict[int, int] = {}
        pending = 0  # computed tokens that no operation covers yet

        def flush() -> None:
            nonlocal pending
            end = len(self.token_ids)
            for start in range(end - pending, end, self.chunk):
                operations.append(Chunk(start, min(self.chunk, end - start)))
            pending = 0

        def run(token_ids: Sequence[int], position: int) -> None:
            nonlocal pending
            start = len(self.token_ids)
            self.token_ids.extend(token_ids)
            self.positions.extend(range(position, position + len(token_ids)))
            pending += len(token_ids)
            if writes and writes[-1].position + writes[-1].end - writes[-1].start == position:
                writes[-1] = Write(writes[-1].start, len(self.token_ids), writes[-1].position)
            else:
                writes.append(Write(start, len(self.token_ids), position))

        for piece in plan.pieces:
            if isinstance(piece, Computed):
                start = len(self.token_ids)
                if piece.capture:
                    flush()
                    operations.append(BeginCapture(request))
                run(piece.token_ids, piece.start)
                if piece.capture:
                    flush()
                    operations.append(EndCapture(request))
                    self.captures.append(Capture(request, start, start + piece.length))
                continue
            flush()
            count = len(piece.renewed)
            if count:
                operations.append(ForkStep(request))
                run(piece.renewed, piece.start)
                flush()
                operations.append(JoinStep(request))
                renewed[len(writes) - 1] = count
            operations.append(ReuseStep(request, len(self.interiors)))
            self.interiors.append(
                Interior(request, piece.segment, piece.start, piece.length, count)
            )
        flush()
        self.operations.append(operations)
        self.writes.append(writes)
        self.renewed.append(renewed)

    def _convolution(self) -> tuple[list[int], list[int], list[list[int]], list[list[int]]]:
        """Edges, openings, their windows, and the final inputs of each request."""
        past = self.kernel - 1
        tails: list[range] = []
        offset = 1 + past * len(self.plans)
        for interior in self.interiors:
            tails.append(range(offset, offset + min(past, interior.length)))
            offset += len(tails[-1])
        edges: list[int] = []
        openings: list[int] = []
        windows: list[list[int]] = []
        conv_end: list[list[int]] = []
        reused = iter(tails)
        for request, plan in enumerate(self.plans):
            base = 1 + past * request
            seen = [0] * self.kernel + list(range(base, base + past))
            writes = iter(enumerate(self.writes[request]))
            in_run = False
            for piece in plan.pieces:
                if not in_run and (isinstance(piece, Computed) or piece.renewed):
                    number, write = next(writes)
                    length = write.end - write.start
                    # What follows a renewed run looks back at the cached interior, not at it.
                    lasting = range(length - self.renewed[request].get(number, 0))[-self.kernel :]
                    near = sorted({*range(min(past, length)), *lasting})
                    rows = {place: offset + len(edges) + i for i, place in enumerate(near)}
                    edges.extend(write.start + place for place in near)
                    for place in range(min(past, length)):
                        openings.append(write.start + place)
                        own = [rows[earlier] for earlier in range(place + 1)]
                        windows.append((seen + own)[-self.kernel :])
                    seen = (seen + [rows[place] for place in lasting])[-self.kernel :]
                    in_run = True
                if not isinstance(piece, Computed):
                    seen = (seen + list(next(reused)))[-self.kernel :]
                    in_run = False
            conv_end.append(seen[-self.kernel :])
        return edges, openings, windows, conv_end

    def _chain(self, device: torch.device) -> tuple[tuple[Bucket, ...], Tensor, tuple[Step, ...]]:
        """Walk all requests in lockstep, so that chunks of one size act together."""
        rows: dict[int, list[Chunk]] = defaultdict(list)
        planned: list[tuple[int, slice, list[int]] | Step] = []
        for level in range(max(len(operations) for operations in self.operations)):
            together: dict[int, list[tuple[int, Chunk]]] = defaultdict(list)
            for request, operations in enumerate(self.operations):
                if level >= len(operations):
                    continue
                operation = operations[level]
                if isinstance(operation, Chunk):
                    padded = next(size for size in SIZES if size >= operation.length)
                    together[padded].append((request, operation))
                else:
                    planned.append(operation)
            for padded, members in together.items():
                first = len(rows[padded])
                rows[padded].extend(operation for _, operation in members)
                where = slice(first, len(rows[padded]))
                planned.append((padded, where, [request for request, _ in members]))
        sizes = sorted(rows)
        steps: list[Step] = []
        for item in planned:
            if not isinstance(item, tuple):
                steps.append(item)
                continue
            padded, where, requests = item
            consecutive = requests == list(range(requests[0], requests[0] + len(requests)))
            chosen = (
                slice(requests[0], requests[-1] + 1)
                if consecutive
                else torch.tensor(requests, device=device)
            )
            steps.append(ChunkStep(sizes.index(padded), where, chosen))
        buckets, scatter = self._buckets(rows, sizes, device)
        return buckets, scatter, tuple(steps)

    def _buckets(
        self, rows: dict[int, list[Chunk]], sizes: list[int], device: torch.device
    ) -> tuple[tuple[Bucket, ...], Tensor]:
        buckets = []
        scatter = torch.empty(len(self.token_ids), dtype=torch.long)
        flat = 0
        for size in sizes:
            start = torch.tensor([operation.start for operation in rows[size]])
            length = torch.tensor([operation.length for operation in rows[size]])
            place = torch.arange(size).expand(len(rows[size]), -1)
            valid = place < length[:, None]
            tokens = torch.where(valid, start[:, None] + place, start[:, None])
            scatter[tokens[valid]] = flat + valid.flatten().nonzero().squeeze(-1)
            flat += valid.numel()
            mask = None if bool(valid.all()) else valid.to(device)
            buckets.append(Bucket(tokens.to(device), mask))
        return tuple(buckets), scatter.to(device)
