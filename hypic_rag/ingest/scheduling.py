"""Who encodes what: jobs of one or several segments, longest first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["group_jobs", "makespan"]

JOB_TOKENS = 1024
"""Tokens up to which short segments share a job: enough for efficient matrix products."""

_JOBS_PER_WORKER = 4


def group_jobs(
    lengths: Sequence[int], workers: int, job_tokens: int = JOB_TOKENS
) -> list[tuple[int, ...]]:
    """Indices of ``lengths`` as jobs, longest job first (Longest Processing Time).

    A segment of at least ``job_tokens`` is a job of its own. Shorter ones share jobs, unless that
    would leave fewer than a few jobs per worker.
    """
    total = sum(lengths)
    limit = min(job_tokens, max(1, total // (workers * _JOBS_PER_WORKER)))
    jobs: list[tuple[int, ...]] = []
    current: list[int] = []
    size = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if current and size + lengths[index] > limit:
            jobs.append(tuple(current))
            current, size = [], 0
        current.append(index)
        size += lengths[index]
    if current:
        jobs.append(tuple(current))
    return sorted(jobs, key=lambda job: -sum(lengths[i] for i in job))


def makespan(seconds: Sequence[float], workers: int) -> float:
    """When the last of the jobs ends if each idle worker takes the longest that waits."""
    busy = [0.0] * workers
    heapq.heapify(busy)
    for job in sorted(seconds, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + job)
    return max(busy)
