"""Honest timings: alternating, warmed up, with their spread, and only of results that agree."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hypic_rag.errors import HypicError

__all__ = ["Sample", "Timed", "WrongResultError", "alternate", "peak_memory", "require_equal"]

_LONG_S = 20.0
"""What takes longer isn't repeated."""


class WrongResultError(HypicError):
    """Two ways to compute the same thing gave different results, so no speed is reported."""


@dataclass(frozen=True)
class Sample:
    """Seconds of one thing that was timed several times."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """Median, extremes and count."""
        return {
            "median": self.median,
            "min": min(self.seconds),
            "max": max(self.seconds),
            "runs": len(self.seconds),
        }


Timed = Callable[[], Callable[[], object]]
"""Prepares one run and returns what is to be timed."""


def alternate(
    ways: Mapping[str, Timed],
    repeats: int,
    *,
    device: torch.device,
    compare: Callable[[Mapping[str, object]], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """Time each of ``ways`` ``repeats`` times, taking turns, after one run of each as a warm-up.

    ``compare`` gets the results of the warm-ups and raises if they don't agree. What takes longer
    than 20 seconds runs only once, with its warm-up as its run. With ``time.process_time`` as the
    ``clock``, processor time is measured, which other programs on the machine disturb less.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}

    def run(name: str) -> tuple[object, float]:
        timed = ways[name]()
        _wait(device)
        started = clock()
        result = timed()
        _wait(device)
        return result, clock() - started

    results: dict[str, object] = {}
    for name in ways:
        results[name], first = run(name)
        if first > _LONG_S:
            seconds[name].append(first)
    if compare is not None:
        compare(results)
    results.clear()
    limits = {name: 1 if seconds[name] else repeats for name in ways}
    while any(len(seconds[name]) < limits[name] for name in ways):
        for name in ways:
            if len(seconds[name]) < limits[name]:
                seconds[name].append(run(name)[1])
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def require_equal(what: str, got: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest difference of logits; it mustn't exceed ``tolerance`` times their largest.

    Raises:
        WrongResultError: it does.
    """
    scale = float(expected.abs().max())
    difference = float((got.float() - expected.float()).abs().max())
    if not difference <= tolerance * scale:
        raise WrongResultError(
            f"{what}: the results differ by {difference:.3g} at values up to {scale:.3g}, so no "
            "speed is reported; please report this as a bug."
        )
    return difference / scale


def peak_memory(call: Callable[[], object], device: torch.device) -> tuple[object, int]:
    """What ``call`` returns, and the bytes that it takes at its peak beyond those held before.

    On a CPU the process's resident memory is looked at every two milliseconds: a shorter peak may
    be missed.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    # Freed memory that the allocator keeps would hide what the call takes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    status = Path("/proc/self/status")
    before = _resident(status, "VmRSS:")
    highest = before
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, _resident(status, "VmRSS:"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result = call()
        highest = max(highest, _resident(status, "VmRSS:"))
    finally:
        done.set()
        watcher.join()
    return result, highest - before


def _resident(status: Path, name: str) -> int:
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0
