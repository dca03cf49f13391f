"""A pool of encoder processes on one machine.

Segments go to whichever worker is idle, the longest first, and each state is handed over as soon as
it's finished. A worker that dies loses nothing: what it was at is given to another. The model's
weights lie in shared memory once, however many workers there are.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hypic_rag.config import Seam
from hypic_rag.engine.context import Context
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.engine import Engine
from hypic_rag.engine.splitting import OVERLAP, encode_piece, join_split, piece_bounds
from hypic_rag.errors import ConfigError, WorkerError
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.scheduling import group_jobs
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = ["Encoded", "EncoderPool"]

_ATTEMPTS = 3
"""Workers that may die over one job before it's given up."""


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


@dataclass(frozen=True)
class _Task:
    """One segment, or tokens ``start`` to ``end`` of it, on its way through the pool."""

    index: int
    segment: Segment
    bounds: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        return len(self.segment) if self.bounds is None else self.bounds[1] - self.bounds[0]


@dataclass(eq=False)
class _Job:
    tasks: tuple[_Task, ...]
    attempts: int = 0


@dataclass(eq=False)
class _Worker:
    process: Any
    connection: Connection
    job: _Job | None = None
    ready: bool = False
    done: list[int] = field(default_factory=list)


class EncoderPool:
    """Encoder processes; use it as a context manager.

    Args:
        model: the model; on a CPU. Its weights are moved into shared memory.
        workers: how many processes.
        conditioning: token ids that segments are encoded behind; every worker prefills them once.
        threads: of each worker.

    Raises:
        ConfigError: there's no worker, the model isn't on a CPU, or shared memory is too small.
    """

    def __init__(
        self,
        model: HybridModel,
        workers: int,
        conditioning: Sequence[int] = (),
        *,
        threads: int = 1,
    ) -> None:
        import torch.multiprocessing

        if workers < 1 or threads < 1:
            raise ConfigError(f"A pool needs workers and threads, not {workers} and {threads}.")
        if model.device.type != "cpu":
            raise ConfigError(
                "Worker processes encode on the CPU, but the model is on a GPU: load it with "
                "device='cpu', or encode without workers, which keeps a GPU busy by itself."
            )
        _share_weights(model)
        self._model = replace(model, tokenizer=None)
        self._conditioning = tuple(conditioning)
        self._threads = threads
        self._context = torch.multiprocessing.get_context("spawn")
        self._spool = Path(tempfile.mkdtemp(prefix="hypic-states-", dir=_shared_folder()))
        self._failed_starts = 0
        self._workers: list[_Worker] = []
        try:
            self._workers = [self._start() for _ in range(workers)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Stop the workers and remove what they left."""
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send(None)
        for worker in self._workers:
            worker.process.join(timeout=0.5 if worker.job is None else 0)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join()
            worker.connection.close()
        self._workers = []
        shutil.rmtree(self._spool, ignore_errors=True)

    def wait_until_ready(self) -> None:
        """Return when every worker has loaded the model and prefilled the conditioning prefix."""
        while any(not worker.ready for worker in self._workers):
            for _ in self._collect([], deque()):
                pass

    def encode(
        self,
        segments: Sequence[Segment],
        seam: Seam,
        *,
        piece_tokens: int | None = None,
        overlap: int = OVERLAP,
    ) -> Iterator[Encoded]:
        """Encode ``segments`` and yield each as soon as it's finished, in any order.

        Args:
            segments: what to encode.
            seam: widths that the states leave out.
            piece_tokens: split longer interiors into pieces that several workers encode; an
                approximation (:mod:`hypic_rag.engine.splitting`), so the default is not to.
            overlap: tokens in front of a piece that run for its context's sake.

        Raises:
            WorkerError: a segment can't be encoded.
        """
        tasks: list[_Task] = []
        for index, segment in enumerate(segments):
            bounds = piece_bounds(segment, seam, piece_tokens or max(1, len(segment)))
            if not bounds:
                yield Encoded(index, None, 0.0)
            elif len(bounds) == 1:
                tasks.append(_Task(index, segment))
            else:
                tasks.extend(_Task(index, segment, each) for each in bounds)
        groups = group_jobs([task.tokens for task in tasks], len(self._workers))
        queue = deque(_Job(tuple(tasks[i] for i in group)) for group in groups)
        waiting = dict.fromkeys(tasks)
        pieces: dict[int, dict[tuple[int, int], SegmentState]] = {}
        seconds: dict[int, float] = {}
        try:
            while waiting:
                for task, state, spent in self._collect([seam, overlap], queue):
                    if task not in waiting:
                        continue
                    del waiting[task]
                    seconds[task.index] = seconds.get(task.index, 0.0) + spent
                    if task.bounds is None:
                        yield Encoded(task.index, state, seconds[task.index])
                        continue
                    pieces.setdefault(task.index, {})[task.bounds] = state
                    if any(other.index == task.index for other in waiting):
                        continue
                    parts = pieces.pop(task.index)
                    whole = join_split(
                        [parts[bounds] for bounds in sorted(parts)],
                        task.segment,
                        seam,
                        self._model.kernel,
                    )
                    yield Encoded(task.index, whole, seconds[task.index])
        finally:
            # A caller that stops early leaves workers at jobs whose results nobody wants.
            for worker in list(self._workers):
                if worker.job is not None:
                    self._replace(worker)

    # -- one turn ------------------------------------------------------------------------------

    def _collect(
        self, settings: list[Any], queue: deque[_Job]
    ) -> Iterator[tuple[_Task, SegmentState, float]]:
        """Give idle workers their jobs, wait for news, and yield what was finished."""
        for worker in self._workers:
            if queue and worker.ready and worker.job is None:
                worker.job, worker.done = queue.popleft(), []
                sent = [(task.segment, task.bounds) for task in worker.job.tasks]
                with suppress(OSError):  # a dead worker's sentinel tells below
                    worker.connection.send((sent, *settings))
        by_source: dict[Any, _Worker] = {}
        for worker in self._workers:
            by_source[worker.connection] = by_source[worker.process.sentinel] = worker
        heard = {id(by_source[source]): by_source[source] for source in wait(list(by_source))}
        for worker in heard.values():
            finished, dead = self._listen(worker)
            yield from finished
            if dead:
                self._reschedule(worker, queue)

    def _listen(self, worker: _Worker) -> tuple[list[tuple[_Task, SegmentState, float]], bool]:
        """What a worker has sent, and whether it's dead."""
        finished = []
        dead = not worker.process.is_alive()
        try:
            while worker.connection.poll():
                message = worker.connection.recv()
                if message == "ready":
                    worker.ready = True
                    self._failed_starts = 0
                elif message == "idle":
                    worker.job = None
                elif isinstance(message, BaseException):
                    raise WorkerError(
                        f"A worker couldn't encode a segment ({message}); encode without workers "
                        "to see where."
                    ) from message
                else:
                    place, path, seconds = message
                    assert worker.job is not None
                    worker.done.append(place)
                    finished.append((worker.job.tasks[place], _take(Path(path)), seconds))
        except (EOFError, OSError):
            dead = True
        return finished, dead

    def _reschedule(self, worker: _Worker, queue: deque[_Job]) -> None:
        """Replace a dead worker and give what it was at to another."""
        job, done, was_ready = worker.job, worker.done, worker.ready
        self._replace(worker)
        if job is None:
            self._failed_starts += not was_ready
            if self._failed_starts >= _ATTEMPTS:
                raise WorkerError(
                    f"{self._failed_starts} workers died while they were loading the model; is "
                    "there enough memory?"
                )
            return
        left = tuple(task for place, task in enumerate(job.tasks) if place not in done)
        attempts = job.attempts + 1
        if left and attempts >= _ATTEMPTS:
            raise WorkerError(
                f"{attempts} workers died over a job with {sum(t.tokens for t in left)} tokens; "
                "is there enough memory? Use fewer workers or shorter chunks."
            )
        if left:
            queue.appendleft(_Job(left, attempts))

    def _replace(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
        self._workers[self._workers.index(worker)] = self._start()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work,
            args=(self._model, self._conditioning, self._threads, theirs, str(self._spool)),
            name="hypic-encoder",
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Worker(process, ours)


def _work(
    model: HybridModel,
    conditioning: tuple[int, ...],
    threads: int,
    connection: Connection,
    spool: str,
) -> None:
    """A worker's life: jobs come, states go, until None comes or the other end is gone."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    torch.set_num_threads(threads)
    prefix = Engine(model).prefill(conditioning) if conditioning else None
    connection.send("ready")
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        if message is None:
            return
        tasks, seam, overlap = message
        try:
            for place, state, seconds in _encode(model, tasks, seam, overlap, prefix):
                path = f"{spool}/{os.getpid()}-{time.monotonic_ns()}.safetensors"
                _put(Path(path), state)
                connection.send((place, path, seconds))
            connection.send("idle")
        except Exception as error:  # whatever it is, the parent has to hear of it
            connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
            return


def _encode(
    model: HybridModel,
    tasks: Sequence[tuple[Segment, tuple[int, int] | None]],
    seam: Seam,
    overlap: int,
    prefix: Context | None,
) -> Iterator[tuple[int, SegmentState, float]]:
    whole = [place for place, (_, bounds) in enumerate(tasks) if bounds is None]
    started = time.process_time()
    states = encode_segments(model, [tasks[place][0] for place in whole], seam, prefix)
    spent = (time.process_time() - started) / max(1, len(whole))
    for place, state in zip(whole, states, strict=True):
        assert state is not None
        yield place, state, spent
    for place, (segment, bounds) in enumerate(tasks):
        if bounds is not None:
            started = time.process_time()
            state = encode_piece(model, segment, *bounds, prefix, overlap)
            yield place, state, time.process_time() - started


def _put(path: Path, state: SegmentState) -> None:
    """Write a state for the parent; the name appears when it's complete."""
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous().clone() for name, tensor in state.to_tensors().items()}
    partial = path.with_suffix(".tmp")
    save_file(tensors, partial, metadata=state.metadata())
    partial.rename(path)


def _take(path: Path) -> SegmentState:
    """Map a worker's state into memory; its name is gone at once, its memory with the state."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = SegmentState.from_tensors(tensors, file.metadata())
    path.unlink()
    return state


def _shared_folder() -> str | None:
    """A folder in memory if there's one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _share_weights(model: HybridModel) -> None:
    size = sum(tensor.nbytes for tensor in model.module.state_dict().values())
    folder = _shared_folder()
    first = next(iter(model.module.parameters()))
    if folder and not first.is_shared() and shutil.disk_usage(folder).free < 1.2 * size:
        raise ConfigError(
            f"The workers share the model's {size >> 20} MiB through {folder}, which has only "
            f"{shutil.disk_usage(folder).free >> 20} MiB free: enlarge it, or encode without "
            "workers."
        )
    model.module.share_memory()
