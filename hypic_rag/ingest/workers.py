"""A pool of encoder processes on one machine; their weights lie in shared memory once."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hypic_rag.engine.engine import Engine
from hypic_rag.errors import ConfigError, WorkerError
from hypic_rag.families.model import HybridModel
from hypic_rag.families.quiet import quiet_library
from hypic_rag.ingest.pool import (
    Encoded,
    Job,
    Result,
    WorkerPool,
    Worklist,
    check_pool,
    encode_tasks,
)
from hypic_rag.states import SegmentState

__all__ = ["Encoded", "EncoderPool"]


@dataclass(eq=False)
class _Worker:
    process: Any
    connection: Connection
    handover: threading.Thread
    job: Job | None = None
    ready: bool = False


class EncoderPool(WorkerPool):
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

        check_pool(model, workers, threads)
        super().__init__(model)
        _share_weights(model)
        self._model = replace(model, tokenizer=None)
        self._conditioning = tuple(conditioning)
        self._threads = threads
        self._context = torch.multiprocessing.get_context("spawn")
        self._spool = Path(tempfile.mkdtemp(prefix="hypic-states-", dir=_shared_folder()))
        self._workers: list[_Worker] = []
        try:
            self._workers = [self._start() for _ in range(workers)]
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Stop the workers and remove what they left."""
        for worker in self._workers:
            if worker.ready:
                with suppress(OSError):
                    worker.connection.send(None)
            else:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(timeout=0.5 if worker.job is None else 0)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join()
            worker.handover.join()
            worker.connection.close()
        self._workers = []
        shutil.rmtree(self._spool, ignore_errors=True)

    @property
    def _ready(self) -> bool:
        return all(worker.ready for worker in self._workers)

    def _turn(self, work: Worklist) -> Iterator[Result]:
        for worker in self._workers:
            if work.queue and worker.ready and worker.job is None:
                worker.job = work.queue.popleft()
                sent = [(task.segment, task.bounds) for task in worker.job.tasks]
                with suppress(OSError):  # a dead worker's sentinel tells below
                    worker.connection.send((sent, work.seam, work.overlap))
        by_source: dict[Any, _Worker] = {}
        for worker in self._workers:
            by_source[worker.connection] = by_source[worker.process.sentinel] = worker
        heard = {id(by_source[source]): by_source[source] for source in wait(list(by_source))}
        for worker in heard.values():
            finished, dead = self._listen(worker)
            yield from finished
            if dead:
                self._bury(worker, work)

    def _recall(self) -> None:
        for worker in list(self._workers):
            if worker.job is not None:
                self._replace(worker)

    def _listen(self, worker: _Worker) -> tuple[list[Result], bool]:
        """What a worker has sent, and whether it's dead."""
        finished: list[Result] = []
        dead = not worker.process.is_alive()
        try:
            while worker.connection.poll():
                message = worker.connection.recv()
                if message == "ready":
                    worker.ready = True
                    self._started()
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
                    finished.append((worker.job.tasks[place], _take(Path(path)), seconds))
        except (EOFError, OSError):
            dead = True
        return finished, dead

    def _bury(self, worker: _Worker, work: Worklist) -> None:
        """Replace a dead worker and give what it was at to another."""
        self._replace(worker)
        if worker.job is not None:
            work.put_back(worker.job)
        elif not worker.ready:
            self._failed_to_start(
                "is there enough memory? And a script must start workers under "
                "if __name__ == '__main__': only"
            )

    def _replace(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.handover.join()
        worker.connection.close()
        self._workers[self._workers.index(worker)] = self._start()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work,
            args=(theirs, str(self._spool)),
            name="hypic-encoder",
            daemon=True,
        )
        process.start()
        theirs.close()
        # As an argument of the process, what doesn't fit a pipe would keep us waiting for ever for
        # one that dies before it reads; and workers shall read side by side.
        given = (self._model, self._conditioning, self._threads)
        handover = threading.Thread(target=_hand_over, args=(ours, given), daemon=True)
        handover.start()
        return _Worker(process, ours, handover)


def _hand_over(connection: Connection, given: object) -> None:
    with suppress(OSError):  # a dead worker's sentinel tells
        connection.send(given)


def _work(connection: Connection, spool: str) -> None:
    """A worker's life: jobs come, states go, until None comes or the other end is gone."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    try:
        model, conditioning, threads = connection.recv()
    except (EOFError, OSError):
        return
    quiet_library()
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
            for place, state, seconds in encode_tasks(model, tasks, seam, overlap, prefix):
                path = f"{spool}/{os.getpid()}-{time.monotonic_ns()}.safetensors"
                _put(Path(path), state)
                connection.send((place, path, seconds))
            connection.send("idle")
        except Exception as error:  # whatever it is, the parent has to hear of it
            connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
            return


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
