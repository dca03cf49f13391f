"""A pool of encoders on a Ray cluster, on one or many machines.

The weights are put into Ray's object store once; workers on one machine read them from the same
memory. States come back through the object store, so workers and this process share no files. Every
machine of the cluster needs this package in the same version.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hypic_rag import __version__
from hypic_rag.config import Seam
from hypic_rag.engine.context import Context
from hypic_rag.engine.engine import Engine
from hypic_rag.errors import ConfigError, WorkerError
from hypic_rag.families.model import HybridModel
from hypic_rag.families.quiet import quiet_library
from hypic_rag.ingest.pool import (
    Job,
    Result,
    Task,
    WorkerPool,
    Worklist,
    check_pool,
    encode_tasks,
)
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = ["RayPool", "connected"]

_CONNECT_S = 5.0
"""How long a machine may take to answer at all."""

_START_S = 300.0
"""How long no worker may start before that's an error."""


class RayPool(WorkerPool):
    """Encoders on a Ray cluster; use it as a context manager.

    A process that's connected to a cluster already stays connected, and its cluster is used;
    otherwise the pool connects, and disconnects when it's closed.

    Args:
        model: the model; on a CPU.
        address: the cluster, as ``ray.init`` takes it: ``"auto"`` for the one that runs on this
            machine, ``"local"`` for a new one on this machine, ``"HOST:PORT"``, or
            ``"ray://HOST:PORT"``.
        workers: how many; 0 for one per ``threads`` CPUs of the cluster.
        conditioning: token ids that segments are encoded behind; every worker prefills them once.
        threads: of each worker, which takes as many of the cluster's CPUs.
        start_s: seconds without any worker that has started after which to give up.

    Raises:
        ConfigError: Ray isn't installed, there's no cluster at the address or it has too few CPUs,
            the model isn't on a CPU.
        WorkerError: the cluster doesn't take the model.
    """

    def __init__(
        self,
        model: HybridModel,
        address: str,
        workers: int = 0,
        conditioning: Sequence[int] = (),
        *,
        threads: int = 1,
        start_s: float = _START_S,
    ) -> None:
        check_pool(model, workers or 1, threads)
        super().__init__(model)
        self._conditioning = tuple(conditioning)
        self._threads = threads
        self._start_s = start_s
        self._workers: list[_Worker] = []
        self._parts: Any = None
        self._owned = _connect(address)
        try:
            count = self._count(address, workers)
            self._actor = _remote(threads)
            self._parts = _send(model)
            self._workers = [self._start() for _ in range(count)]
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, each on its own machine; 0 while one is starting."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """Stop the workers, and disconnect if the pool has connected."""
        import ray

        for worker in self._workers:
            with suppress(ray.exceptions.RayError, ValueError):  # the cluster may be gone
                ray.kill(worker.actor)
        self._workers = []
        self._parts = None
        if self._owned:
            self._owned = False
            ray.shutdown()

    @property
    def _ready(self) -> bool:
        return all(worker.ready for worker in self._workers)

    def _turn(self, work: Worklist) -> Iterator[Result]:
        import ray

        for worker in self._workers:
            if work.queue and worker.ready and worker.job is None:
                worker.take(work.queue.popleft(), work.seam, work.overlap)
        by_reference = {each: worker for worker in self._workers for each in worker.pending}
        starting = not any(worker.job for worker in self._workers)
        finished, _ = ray.wait(
            list(by_reference), num_returns=1, timeout=self._start_s if starting else None
        )
        if not finished:
            raise WorkerError(self._nobody_started())
        for reference in finished:
            yield from self._listen(by_reference[reference], reference, work)

    def _listen(self, worker: _Worker, reference: Any, work: Worklist) -> Iterator[Result]:
        """What has come from a worker: its process id at its start, later a task's state."""
        import ray

        try:
            message = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            doing = "encode a segment" if worker.ready else "start"
            if worker.ready:  # it goes on; one that couldn't start says so again
                worker.job, worker.pending = None, {}
            raise WorkerError(f"A worker couldn't {doing}: {_reason(error.cause)}.") from error
        except ray.exceptions.RayError as error:
            self._bury(worker, work, error)
            return
        task = worker.pending.pop(reference)
        if task is None:
            worker.pid = message
            self._started()
            return
        metadata, data, seconds = message
        if not worker.pending:
            worker.job = None
        yield task, _unpack(metadata, data), seconds

    def _bury(self, worker: _Worker, work: Worklist, error: Exception) -> None:
        """Replace a dead worker and give what it was at to another."""
        self._replace(worker)
        if worker.job is not None:
            work.put_back(worker.job)
        elif not worker.ready:
            self._failed_to_start(
                f"every machine of the cluster needs hypic-rag {__version__} and enough memory: "
                f"{_reason(error)}."
            )

    def _recall(self) -> None:
        for worker in list(self._workers):
            if worker.job is not None:
                self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        import ray

        ray.kill(worker.actor)
        self._workers[self._workers.index(worker)] = self._start()

    def _start(self) -> _Worker:
        actor = self._actor.remote()
        started = actor.start.remote(self._parts, self._conditioning, self._threads, __version__)
        return _Worker(actor, {started: None})

    def _count(self, address: str, workers: int) -> int:
        """How many workers to start."""
        import ray

        cpus = int(ray.cluster_resources().get("CPU", 0))
        most = cpus // self._threads
        if most < max(workers, 1):
            raise ConfigError(
                f"The Ray cluster at {address!r} has {cpus} CPUs, which is too few for "
                f"{max(workers, 1)} workers with {self._threads} each: ask for fewer workers, or "
                "enlarge the cluster."
            )
        return workers or most

    def _nobody_started(self) -> str:
        import ray

        cpus = int(ray.cluster_resources().get("CPU", 0))
        free = int(ray.available_resources().get("CPU", 0))
        return (
            f"No worker has started within {self._start_s:g} s: {free} of the cluster's {cpus} "
            "CPUs are free; wait for others to finish, or ask for fewer workers."
        )


@dataclass(eq=False)
class _Worker:
    """An actor, and what's awaited of it: results by reference, its start under None."""

    actor: Any
    pending: dict[Any, Task | None]
    job: Job | None = None
    pid: int = 0

    @property
    def ready(self) -> bool:
        return self.pid > 0

    def take(self, job: Job, seam: Seam, overlap: int) -> None:
        """Send it a job."""
        self.job = job
        sent = [(task.segment, task.bounds) for task in job.tasks]
        # One object per task, so that no object is larger than a state.
        call = self.actor.encode.options(num_returns=len(sent))
        references = call.remote(sent, seam, overlap)
        if len(sent) == 1:
            references = [references]
        self.pending = dict(zip(references, job.tasks, strict=True))


class _Encoder:
    """What runs on the cluster."""

    _model: HybridModel
    _prefix: Context | None

    def start(
        self, parts: _Parts, conditioning: tuple[int, ...], threads: int, version: str
    ) -> int:
        """Put the model together and prefill the conditioning prefix; returns the process id.

        Raises:
            ConfigError: the package isn't here in the same version.
        """
        if version != __version__:
            raise ConfigError(
                f"its machine has hypic-rag {__version__}, but {version} is needed everywhere"
            )
        quiet_library()
        torch.set_num_threads(threads)
        self._model = put_together(parts)
        self._prefix = Engine(self._model).prefill(conditioning) if conditioning else None
        return os.getpid()

    def encode(
        self, tasks: Sequence[tuple[Segment, tuple[int, int] | None]], seam: Seam, overlap: int
    ) -> Any:
        """Per task in order its state, packed, and the processor time it took in seconds.

        One such triple is returned for one task, a list of them for several: that's how Ray makes
        objects of their own of them.
        """
        results: list[Any] = [None] * len(tasks)
        for place, state, seconds in encode_tasks(self._model, tasks, seam, overlap, self._prefix):
            results[place] = (*_pack(state), seconds)
        return results if len(results) > 1 else results[0]


def _remote(threads: int) -> Any:
    import ray

    # What becomes of a dead worker's job is decided by the pool.
    return ray.remote(num_cpus=threads, max_restarts=0, max_task_retries=0)(_Encoder)


def _pack(state: SegmentState) -> tuple[dict[str, str], bytes]:
    from safetensors.torch import save

    tensors = {name: tensor.contiguous().clone() for name, tensor in state.to_tensors().items()}
    return state.metadata(), save(tensors)


def _unpack(metadata: dict[str, str], data: bytes) -> SegmentState:
    from safetensors.torch import load

    return SegmentState.from_tensors(load(data), metadata)


# -- the model ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Parts:
    """A model without its tensors, and these as plain bytes, which Ray shares without copying.

    Attributes:
        skeleton: the pickled model; in the place of a tensor stands its number.
        kinds: per tensor its dtype, its shape, and whether it's a parameter.
        data: per tensor its bytes, a ``uint8`` array.
    """

    skeleton: bytes
    kinds: list[tuple[torch.dtype, tuple[int, ...], bool]] = field(default_factory=list)
    data: list[Any] = field(default_factory=list)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, thing: object) -> int | None:
        if not isinstance(thing, Tensor):
            return None
        if id(thing) not in self._numbers:  # tied weights stay tied
            self._numbers[id(thing)] = len(self.tensors)
            self.tensors.append(thing)
        return self._numbers[id(thing)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        tensor: Tensor = self._tensors[number]
        return tensor


def take_apart(model: HybridModel) -> _Parts:
    """A model as what Ray can share; its tokenizer stays behind."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(replace(model, tokenizer=None))
    parts = _Parts(file.getvalue())
    for tensor in pickler.tensors:
        plain = tensor.detach().contiguous()
        kind = (plain.dtype, tuple(plain.shape), isinstance(tensor, nn.Parameter))
        parts.kinds.append(kind)
        parts.data.append(plain.reshape(-1).view(torch.uint8).numpy())
    return parts


def put_together(parts: _Parts) -> HybridModel:
    """The inverse of :func:`take_apart`; the tensors lie in the parts' memory, for reading only."""
    tensors: list[Tensor] = []
    for (dtype, shape, is_parameter), data in zip(parts.kinds, parts.data, strict=True):
        with warnings.catch_warnings():
            # Ray's memory is for reading only, and nothing here writes to weights.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensor = torch.from_numpy(data).view(dtype).reshape(shape)
        tensors.append(nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
    model = _Unpickler(io.BytesIO(parts.skeleton), tensors).load()
    assert isinstance(model, HybridModel)
    return model


# -- the cluster -------------------------------------------------------------------------------


@contextmanager
def connected(address: str) -> Iterator[str]:
    """Connect this process to a cluster for a while, unless it's connected to it already.

    Args:
        address: as for :class:`RayPool`.

    Returns:
        The address under which pools in this process find it.

    Raises:
        ConfigError: Ray isn't installed, there's no cluster at the address, or the process is
            connected to another one.
    """
    owned = _connect(address)
    try:
        yield "auto"
    finally:
        if owned:
            import ray

            ray.shutdown()


def _connect(address: str) -> bool:
    """Connect to a cluster; whether it's done just now."""
    import logging

    _check_address(address)
    import ray

    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in ("auto", "local") and not _same(address, here):
            raise ConfigError(
                f"This process is connected to the Ray cluster at {here!r} already, not to "
                f"{address!r}: disconnect with ray.shutdown(), or use 'auto'."
            )
        return False
    # Ray reports its use to its makers unless told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **own)
    except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        raise _no_cluster(address, error) from error
    return True


def _check_address(address: str) -> None:
    """See to it that Ray is installed and that something listens at a cluster's address."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Encoding on a Ray cluster needs Ray: install it with pip install 'hypic-rag[ray]'."
        ) from None
    if address in ("auto", "local"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not host or not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            "The address of a Ray cluster is auto, local, HOST:PORT or ray://HOST:PORT, not "
            f"{address!r}."
        )
    # Ray itself tries for minutes.
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise _no_cluster(address, error) from None


def _same(address: str, here: str) -> bool:
    """Whether an address is that of the cluster that Ray calls ``here``, or its loopback name."""
    host, _, port = address.rpartition(":")
    return address == here or (
        host in ("localhost", "127.0.0.1", "[::1]") and port == here.rpartition(":")[2]
    )


def _send(model: HybridModel) -> Any:
    """Put a model into the object store; returns the reference to it.

    Raises:
        WorkerError: it's too large.
    """
    import ray

    parts = take_apart(model)
    try:
        return ray.put(parts)
    except (ray.exceptions.RayError, OSError) as error:
        size = sum(data.nbytes for data in parts.data)
        raise WorkerError(
            f"The model's {size >> 20} MiB don't fit Ray's object store ({_reason(error)}): start "
            "the cluster with a larger --object-store-memory."
        ) from error


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"There's no Ray cluster at {address!r} ({_reason(error).partition('. ')[0]}): start one "
        "with 'ray start --head', or give the address of one that runs, or 'local'; one that wants "
        "a token, at an address other than 'auto', needs RAY_AUTH_MODE=token here too."
    )


def _reason(error: BaseException) -> str:
    """An error in one line, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else "no reason given"
    if not isinstance(error, ConfigError) and type(error).__name__ not in text:
        text = f"{type(error).__name__}: {text}"
    return text.rstrip(".")
