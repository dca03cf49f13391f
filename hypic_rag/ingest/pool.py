"""What all pools of encoders share: the work, and what becomes of a dead worker's job.

Segments go to whichever worker is idle, the longest first, and each state is handed over as soon as
it's finished. A worker that dies loses nothing: what it was at is given to another, unless several
died over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from time import process_time
from types import TracebackType
from typing import Self

from hypic_rag.config import Seam
from hypic_rag.engine.context import Context
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.splitting import OVERLAP, encode_piece, join_split, piece_bounds
from hypic_rag.errors import ConfigError, WorkerError
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.scheduling import group_jobs
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = [
    "Encoded",
    "Job",
    "Result",
    "Task",
    "WorkerPool",
    "Worklist",
    "check_pool",
    "encode_tasks",
]

_ATTEMPTS = 3
"""Workers that may die over one job, or in a row at their start, before it's given up."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """A finished segment.

    Attributes:
        index: which of the segments that were given.
        state: its state; None if it's too short to have an interior.
        seconds: processor time that its worker took, shared evenly within a job.
    """

    index: int
    state: SegmentState | None
    seconds: float


@dataclass(frozen=True, eq=False)
class Task:
    """One segment, or tokens ``start`` to ``end`` of it, on its way through a pool."""

    index: int
    segment: Segment
    bounds: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        """Tokens to encode."""
        return len(self.segment) if self.bounds is None else self.bounds[1] - self.bounds[0]


@dataclass(eq=False)
class Job:
    """Tasks that one worker gets at once, and how many have died over them."""

    tasks: tuple[Task, ...]
    attempts: int = 0


Result = tuple[Task, SegmentState, float]
"""A finished task, its state, and the processor time it took in seconds."""


@dataclass(eq=False)
class _Split:
    """A segment in pieces: how many are missing, and the states of the others by their bounds."""

    missing: int
    states: dict[tuple[int, int], SegmentState] = field(default_factory=dict)
    seconds: float = 0.0


class Worklist:
    """The segments of one call: jobs that wait, the longest first, and pieces that came back.

    Args:
        segments: what to encode.
        seam: widths that the states leave out.
        workers: how many take jobs from it.
        kernel: tokens that the model's convolutions look at.
        piece_tokens: split longer interiors into pieces; None not to.
        overlap: tokens in front of a piece that run for its context's sake.

    Attributes:
        queue: jobs that nobody is at.
        without_interior: indices of segments that have no state.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        seam: Seam,
        workers: int,
        kernel: int,
        piece_tokens: int | None = None,
        overlap: int = OVERLAP,
    ) -> None:
        self.seam = seam
        self.overlap = overlap
        self.without_interior: list[int] = []
        self._kernel = kernel
        self._splits: dict[int, _Split] = {}
        tasks: list[Task] = []
        for index, segment in enumerate(segments):
            bounds = piece_bounds(segment, seam, piece_tokens or max(1, len(segment)))
            if not bounds:
                self.without_interior.append(index)
            elif len(bounds) == 1:
                tasks.append(Task(index, segment))
            else:
                tasks.extend(Task(index, segment, each) for each in bounds)
                self._splits[index] = _Split(len(bounds))
        groups = group_jobs([task.tokens for task in tasks], max(1, workers))
        self.queue = deque(Job(tuple(tasks[i] for i in group)) for group in groups)
        self._waiting = set(tasks)

    @property
    def unfinished(self) -> bool:
        """Whether a task has yet to come back."""
        return bool(self._waiting)

    def finish(self, result: Result) -> Encoded | None:
        """Take a task's state; what's returned is the segment that's whole with it."""
        task, state, seconds = result
        if task not in self._waiting:
            return None
        self._waiting.discard(task)
        if task.bounds is None:
            return Encoded(task.index, state, seconds)
        split = self._splits[task.index]
        split.states[task.bounds] = state
        split.seconds += seconds
        split.missing -= 1
        if split.missing:
            return None
        del self._splits[task.index]
        parts = [split.states[bounds] for bounds in sorted(split.states)]
        whole = join_split(parts, task.segment, self.seam, self._kernel)
        return Encoded(task.index, whole, split.seconds)

    def put_back(self, job: Job) -> None:
        """Queue what is left of a dead worker's job once more, before everything else.

        Raises:
            WorkerError: several workers have died over it.
        """
        left = tuple(task for task in job.tasks if task in self._waiting)
        if not left:
            return
        attempts = job.attempts + 1
        if attempts >= _ATTEMPTS:
            raise WorkerError(
                f"{attempts} workers died over a job with {sum(t.tokens for t in left)} tokens; "
                "is there enough memory? Use fewer workers or shorter chunks."
            )
        self.queue.appendleft(Job(left, attempts))


class WorkerPool(ABC):
    """Workers that encode side by side; use it as a context manager.

    Not safe to use from several threads at a time.

    Args:
        model: what they encode with.
    """

    def __init__(self, model: HybridModel) -> None:
        self._kernel = model.kernel
        self._failed_starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and remove what they left."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids of the workers, each on its own machine."""

    @property
    @abstractmethod
    def _ready(self) -> bool:
        """Whether every worker has loaded the model and prefilled the conditioning prefix."""

    @abstractmethod
    def _turn(self, work: Worklist) -> Iterator[Result]:
        """Give idle workers their jobs, wait for news, and yield what was finished."""

    @abstractmethod
    def _recall(self) -> None:
        """Make workers that are at a job idle again, whatever becomes of the job."""

    def wait_until_ready(self) -> None:
        """Return when every worker has loaded the model and prefilled the conditioning prefix.

        Raises:
            WorkerError: one can't.
        """
        nothing = Worklist([], Seam(), 1, self._kernel)
        while not self._ready:
            for _ in self._turn(nothing):
                pass

    def encode(
        self,
        segments: Sequence[Segment],
        seam: Seam,
        *,
        piece_tokens: int | None = None,
        overlap: int = OVERLAP,
    ) -> Generator[Encoded]:
        """Encode ``segments`` and yield each as soon as it's finished, in any order.

        Args:
            segments: what to encode.
            seam: widths that the states leave out.
            piece_tokens: split longer interiors into pieces that several workers encode; an
                approximation (:mod:`hypic_rag.engine.splitting`), so the default is not to.
            overlap: tokens in front of a piece that run for its context's sake.

        Raises:
            ConfigError: the pool has been closed, or ``piece_tokens`` is less than 1.
            WorkerError: a segment can't be encoded.
        """
        if not self.pids:
            raise ConfigError("The pool has been closed: make a new one.")
        work = Worklist(segments, seam, len(self.pids), self._kernel, piece_tokens, overlap)
        for index in work.without_interior:
            yield Encoded(index, None, 0.0)
        try:
            while work.unfinished:
                for result in self._turn(work):
                    done = work.finish(result)
                    if done is not None:
                        yield done
        finally:
            # A caller that stops early leaves workers at jobs whose results nobody wants.
            self._recall()

    def _started(self) -> None:
        """Note that a worker has started."""
        self._failed_starts = 0

    def _failed_to_start(self, reason: str) -> None:
        """Note that a worker died before it was ready.

        Raises:
            WorkerError: it's not the first in a row.
        """
        self._failed_starts += 1
        if self._failed_starts >= _ATTEMPTS:
            raise WorkerError(
                f"{self._failed_starts} workers died while they were loading the model; {reason}"
            )


def check_pool(model: HybridModel, workers: int, threads: int) -> None:
    """See to it that a pool can be made.

    Raises:
        ConfigError: there's no worker or no thread, or the model isn't on a CPU.
    """
    if workers < 1 or threads < 1:
        raise ConfigError(f"A pool needs workers and threads, not {workers} and {threads}.")
    if model.device.type != "cpu":
        raise ConfigError(
            "Workers encode on the CPU, but the model is on a GPU: load it with device='cpu', or "
            "encode without workers, which keeps a GPU busy by itself."
        )


def encode_tasks(
    model: HybridModel,
    tasks: Sequence[tuple[Segment, tuple[int, int] | None]],
    seam: Seam,
    overlap: int,
    prefix: Context | None,
) -> Iterator[tuple[int, SegmentState, float]]:
    """What a worker does: encode segments and pieces (segments with bounds).

    Returns:
        Per task its place, its state, and the processor time it took in seconds.
    """
    whole = [place for place, (_, bounds) in enumerate(tasks) if bounds is None]
    started = process_time()
    states = encode_segments(model, [tasks[place][0] for place in whole], seam, prefix)
    spent = (process_time() - started) / max(1, len(whole))
    for place, state in zip(whole, states, strict=True):
        assert state is not None
        yield place, state, spent
    for place, (segment, bounds) in enumerate(tasks):
        if bounds is not None:
            started = process_time()
            state = encode_piece(model, segment, *bounds, prefix, overlap)
            yield place, state, process_time() - started
