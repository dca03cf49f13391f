"""Encoder processes: same states as without them, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import tiny_model

from hypic_rag.config import Seam
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.oracle import recompute
from hypic_rag.engine.splitting import encode_piece, join_split, piece_bounds
from hypic_rag.errors import ConfigError, WorkerError
from hypic_rag.ingest.pool import Worklist
from hypic_rag.ingest.scheduling import group_jobs, makespan
from hypic_rag.ingest.workers import EncoderPool
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

PREFIX = tuple(range(40, 60))
SEAM = Seam(4, 1)


def segments_of(*lengths: int) -> list[Segment]:
    return [Segment(tuple((i * 31 + j * 7) % 320 for j in range(n))) for i, n in enumerate(lengths)]


def assert_same(mine: SegmentState | None, yours: SegmentState | None, atol: float = 5e-5) -> None:
    if mine is None or yours is None:
        assert mine is yours
        return
    assert mine.metadata() == yours.metadata()
    for name, tensor in yours.to_tensors().items():
        torch.testing.assert_close(mine.to_tensors()[name], tensor, rtol=1e-4, atol=atol)


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    with EncoderPool(tiny_model("qwen3_5"), 2, PREFIX) as made:
        made.wait_until_ready()
        yield made


def test_states_are_those_of_one_process(pool: EncoderPool) -> None:
    model = tiny_model("qwen3_5")
    segments = segments_of(70, 3, 5, 200, 64, 33)
    prefix = recompute(model, PREFIX)[0]
    expected = encode_segments(model, segments, SEAM, prefix)
    got = {done.index: done for done in pool.encode(segments, SEAM)}
    assert sorted(got) == list(range(len(segments)))
    for index, state in enumerate(expected):
        assert_same(got[index].state, state)
    assert got[1].state is None and got[1].seconds == 0
    assert got[3].seconds > 0


def test_a_killed_worker_loses_nothing(pool: EncoderPool) -> None:
    segments = segments_of(*[150] * 8)
    before = pool.pids
    seen: list[int] = []
    for done in pool.encode(segments, SEAM):
        if not seen:
            os.kill(before[0], signal.SIGKILL)
        seen.append(done.index)
        assert done.state is not None
    assert sorted(seen) == list(range(8))
    list(pool.encode(segments[:4], SEAM))
    assert before[0] not in pool.pids and len(pool.pids) == 2


def test_stopping_early_leaves_a_usable_pool(pool: EncoderPool) -> None:
    segments = segments_of(*[90] * 4)
    for _ in pool.encode(segments, SEAM):
        break
    got = [done.index for done in pool.encode(segments[:2], SEAM)]
    assert sorted(got) == [0, 1]


def test_pieces_are_joined(pool: EncoderPool) -> None:
    model = tiny_model("qwen3_5")
    segment = segments_of(150)[0]
    done = next(pool.encode([segment], SEAM, piece_tokens=60, overlap=10))
    prefix = recompute(model, PREFIX)[0]
    bounds = piece_bounds(segment, SEAM, 60)
    parts = [encode_piece(model, segment, *each, prefix, 10) for each in bounds]
    assert_same(done.state, join_split(parts, segment, SEAM, model.kernel))


def test_a_failure_is_told(pool: EncoderPool) -> None:
    # Token ids beyond the vocabulary make the embedding fail.
    with pytest.raises(WorkerError, match="couldn't encode"):
        list(pool.encode([Segment((1 << 40,) * 30)], SEAM))
    assert next(pool.encode(segments_of(40), SEAM)).state is not None


def test_pieces_with_the_whole_context_are_exact() -> None:
    model = tiny_model("qwen3_5")
    segment = segments_of(170)[0]
    prefix = recompute(model, PREFIX)[0]
    whole = encode_segments(model, [segment], SEAM, prefix)[0]
    bounds = piece_bounds(segment, SEAM, 60)
    assert bounds == [(4, 59), (59, 114), (114, 169)]
    parts = [encode_piece(model, segment, *each, prefix, overlap=1000) for each in bounds]
    joined = join_split(parts, segment, SEAM, model.kernel)
    assert_same(joined, whole, atol=1e-4)
    # A piece shorter than the convolution's past leaves its predecessor's inputs in the tail.
    parts = [
        encode_piece(model, segment, *each, prefix, overlap=1000) for each in ((4, 168), (168, 169))
    ]
    assert_same(join_split(parts, segment, SEAM, model.kernel), whole, atol=1e-4)
    with pytest.raises(ConfigError, match="interior has 165"):
        join_split(parts[:1], segment, SEAM, 4)


def test_piece_bounds() -> None:
    assert piece_bounds(Segment((1,) * 4), SEAM, 10) == []
    assert piece_bounds(Segment((1,) * 15), SEAM, 10) == [(4, 14)]
    assert piece_bounds(Segment((1,) * 16), SEAM, 10) == [(4, 9), (9, 15)]
    with pytest.raises(ConfigError):
        piece_bounds(Segment((1,)), SEAM, 0)


def test_jobs_are_longest_first_and_complete() -> None:
    lengths = [5, 2000, 30, 30, 30, 900, 400]
    jobs = group_jobs(lengths, 2, job_tokens=500)
    assert sorted(i for job in jobs for i in job) == list(range(7))
    sizes = [sum(lengths[i] for i in job) for job in jobs]
    assert sizes == sorted(sizes, reverse=True)
    assert jobs[0] == (1,) and jobs[1] == (5,)
    assert group_jobs([100] * 4, 2) == [(0,), (1,), (2,), (3,)]
    assert group_jobs([], 3) == []


def test_makespan() -> None:
    assert makespan([1.0] * 11, 8) == 2.0
    assert makespan([3, 3, 2, 2, 2], 2) == 7
    assert makespan([5.0], 4) == 5.0


def test_a_job_is_given_up_when_several_died_over_it() -> None:
    model = tiny_model("qwen3_5")
    segments = segments_of(*[10] * 12)
    work = Worklist(segments, SEAM, 1, model.kernel)
    job = work.queue.popleft()
    assert [task.index for task in job.tasks] == [0, 1, 2]
    state = encode_segments(model, segments[:1], SEAM)[0]
    assert state is not None
    done = work.finish((job.tasks[0], state, 0.5))
    assert done is not None and (done.index, done.seconds) == (0, 0.5)
    assert work.finish((job.tasks[0], state, 0.5)) is None  # it came twice
    for _ in range(2):
        work.put_back(job)
        job = work.queue.popleft()
        assert [task.index for task in job.tasks] == [1, 2]
    with pytest.raises(WorkerError, match="3 workers died over a job with 20 tokens"):
        work.put_back(job)


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    """Each worker runs the script again and fails; the script mustn't wait for them for ever."""
    script = tmp_path / "script.py"
    script.write_text(
        "from hypic_rag import Seam, load_model\n"
        "from hypic_rag.ingest.workers import EncoderPool\n"
        "from hypic_rag.segments import Segment\n"
        "with EncoderPool(load_model('small', check=False), 1) as pool:\n"
        "    list(pool.encode([Segment(tuple(range(9, 60)))], Seam()))\n",
        "utf-8",
    )
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "3 workers died" in last and "__name__ == '__main__'" in last


def test_a_closed_pool_says_so() -> None:
    made = EncoderPool(tiny_model("qwen3_5"), 1)
    made.close()
    with pytest.raises(ConfigError, match="closed"):
        list(made.encode(segments_of(20), SEAM))


@pytest.mark.parametrize(("workers", "threads"), [(0, 1), (1, 0)])
def test_a_pool_without_workers(workers: int, threads: int) -> None:
    with pytest.raises(ConfigError):
        EncoderPool(tiny_model("qwen3_5"), workers, threads=threads)
