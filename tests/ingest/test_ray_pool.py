"""Encoders on a real Ray cluster, a small one on this machine."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from safetensors.torch import load_file
from typer.testing import CliRunner

from hypic_rag import cli
from hypic_rag.config import Seam
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.oracle import recompute
from hypic_rag.errors import ConfigError, HypicError, WorkerError
from hypic_rag.ingest import ray_pool
from hypic_rag.ingest.ray_pool import RayPool, put_together, take_apart
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

PREFIX = tuple(range(40, 60))
SEAM = Seam(4, 1)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, connected to a cluster with three CPUs."""
    try:
        import ray
    except ImportError:
        # Where everything has to run, missing Ray is a failure.
        (pytest.fail if "CI" in os.environ else pytest.skip)("Ray isn't installed.")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=3,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def pool(ray: Any) -> Iterator[RayPool]:
    """Two workers; what they're given by one test is finished before the next."""
    with RayPool(tiny_model("qwen3_5"), "auto", 2, PREFIX) as made:
        made.wait_until_ready()
        yield made


def segments_of(*lengths: int) -> list[Segment]:
    return [Segment(tuple((i * 31 + j * 7) % 320 for j in range(n))) for i, n in enumerate(lengths)]


def assert_same(mine: SegmentState | None, yours: SegmentState | None) -> None:
    if mine is None or yours is None:
        assert mine is yours
        return
    assert mine.metadata() == yours.metadata()
    for name, tensor in yours.to_tensors().items():
        torch.testing.assert_close(mine.to_tensors()[name], tensor, rtol=1e-4, atol=5e-5)


def test_states_are_those_of_one_process(pool: RayPool) -> None:
    model = tiny_model("qwen3_5")
    # One job each for the long ones, one for several of the short ones.
    segments = segments_of(400, 3, 5, 300, *[20] * 12)
    prefix = recompute(model, PREFIX)[0]
    expected = encode_segments(model, segments, SEAM, prefix)
    got = {done.index: done for done in pool.encode(segments, SEAM)}
    assert sorted(got) == list(range(len(segments)))
    for index, state in enumerate(expected):
        assert_same(got[index].state, state)
    assert got[1].state is None
    assert got[3].seconds > 0


def test_a_killed_worker_loses_nothing(pool: RayPool) -> None:
    before = pool.pids
    seen = []
    for done in pool.encode(segments_of(*[300] * 8), SEAM):
        if not seen:
            os.kill(before[0], signal.SIGKILL)
        seen.append(done.index)
        assert done.state is not None
    assert sorted(seen) == list(range(8))
    pool.wait_until_ready()
    assert before[0] not in pool.pids and len(pool.pids) == 2


def test_stopping_early_leaves_a_usable_pool(pool: RayPool) -> None:
    segments = segments_of(*[90] * 4)
    for _ in pool.encode(segments, SEAM):
        break
    assert sorted(done.index for done in pool.encode(segments[:2], SEAM)) == [0, 1]


def test_a_failure_is_told_and_the_pool_goes_on(pool: RayPool) -> None:
    before = pool.pids
    # Token ids beyond the vocabulary make the embedding fail.
    with pytest.raises(WorkerError, match=r"couldn't encode a segment: IndexError"):
        list(pool.encode([Segment((1 << 40,) * 30)], SEAM))
    assert next(pool.encode(segments_of(40), SEAM)).state is not None
    assert pool.pids == before


def test_ingesting_through_the_command(
    ray: Any, pool: RayPool, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states on the disk are those of ingesting without Ray."""
    encoded = []
    encode = RayPool.encode
    monkeypatch.setattr(
        RayPool,
        "encode",
        lambda self, what, *rest: (encoded.extend(what), encode(self, what, *rest))[1],
    )
    here = ray.get_runtime_context().gcs_address
    files = {}
    for name, options in (("plain", []), ("ray", ["--ray", here, "--workers", "1"])):
        store = tmp_path / name
        result = CliRunner().invoke(
            cli.app, ["ingest", str(documents), "--store", str(store), "--json", *options]
        )
        assert result.exit_code == 0, result.output
        assert len(json.loads(result.stdout)["added"]) == 3
        files[name] = {path.name: load_file(path) for path in store.glob("states/*/*.safetensors")}
    assert files["plain"].keys() == files["ray"].keys()
    assert len(encoded) == len(files["ray"]) > 2
    for name, tensors in files["plain"].items():
        for part, tensor in tensors.items():
            torch.testing.assert_close(files["ray"][name][part], tensor, rtol=1e-3, atol=5e-4)
    assert ray.is_initialized()


def test_there_is_a_worker_per_cpu(ray: Any) -> None:
    with RayPool(tiny_model("qwen3_5"), "auto") as made:
        assert len(made.pids) == 3


def test_a_worker_of_another_version(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pool, "__version__", "0.0.9")
    with (
        RayPool(tiny_model("qwen3_5"), "auto", 1) as made,
        pytest.raises(
            WorkerError, match=r"couldn't start: its machine has .* but 0\.0\.9 is needed"
        ),
    ):
        made.wait_until_ready()


class Exit:
    """What ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return os._exit, (1,)


def test_workers_that_die_at_their_start(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pool, "take_apart", lambda model: ray_pool._Parts(pickle.dumps(Exit())))
    with (
        RayPool(tiny_model("qwen3_5"), "auto", 1) as made,
        pytest.raises(WorkerError, match="3 workers died while they were loading") as raised,
    ):
        made.wait_until_ready()
    assert "\n" not in str(raised.value)


def test_no_free_cpu(ray: Any, pool: RayPool) -> None:
    with (
        RayPool(tiny_model("qwen3_5"), "auto", 1, threads=2, start_s=0.5) as made,
        pytest.raises(WorkerError, match=r"within 0\.5 s: [01] of the cluster's 3 CPUs"),
    ):
        made.wait_until_ready()


@pytest.mark.parametrize(
    ("address", "workers", "message"),
    [
        ("local", 4, "has 3 CPUs, which is too few for 4 workers"),
        ("auto", -1, "A pool needs workers"),
    ],
)
def test_too_much_is_asked_of_a_cluster(ray: Any, address: str, workers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayPool(tiny_model("qwen3_5"), address, workers)


def test_another_cluster_than_the_one_connected_to(ray: Any, listener: str) -> None:
    here = ray.get_runtime_context().gcs_address
    for same in (here, f"127.0.0.1:{here.rpartition(':')[2]}"):
        RayPool(tiny_model("qwen3_5"), same, 1).close()
    assert ray.is_initialized()
    with pytest.raises(ConfigError, match="connected to the Ray cluster at"):
        RayPool(tiny_model("qwen3_5"), listener, 1)


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of something that listens and isn't Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refused(documents: Path, store: Path, address: str) -> HypicError:
    arguments = ["ingest", str(documents), "--store", str(store), "--ray", address]
    result = CliRunner().invoke(cli.app, arguments)
    assert isinstance(result.exception, ConfigError), result.output
    assert result.exception.exit_code == 2
    assert "\n" not in str(result.exception)
    assert not store.exists()
    return result.exception


def test_no_cluster_at_the_address(ray: Any, documents: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        error = refused(documents, tmp_path / "kb", address)
        assert "There's no Ray cluster at" in str(error) and "ray start" in str(error)
    for address in ("somewhere", "ray://", "host:port", ":6379", "127.0.0.1:99999"):
        assert "auto, local, HOST:PORT" in str(refused(documents, tmp_path / "kb", address))


def test_without_ray(documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "hypic-rag[ray]" in str(refused(documents, tmp_path / "kb", "auto"))
    with pytest.raises(ConfigError, match="hypic-rag"):
        RayPool(tiny_model("qwen3_5"), "auto")


def test_a_model_in_parts_is_the_same_model() -> None:
    model = tiny_model("qwen3_5")
    model.module.lm_head.weight = model.module.model.embed_tokens.weight
    parts = take_apart(model)
    for data in parts.data:
        data.flags.writeable = False  # as in Ray's memory
    copy = put_together(pickle.loads(pickle.dumps(parts)))
    assert copy.fingerprint == model.fingerprint
    assert copy.module.lm_head.weight is copy.module.model.embed_tokens.weight
    assert copy.tokenizer is None
    segment = segments_of(80)[0]
    assert_same(
        encode_segments(copy, [segment], SEAM)[0], encode_segments(model, [segment], SEAM)[0]
    )
