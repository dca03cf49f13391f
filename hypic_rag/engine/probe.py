"""A probe of live requests: a random few are recomputed in the background and compared.

Caching is an approximation, and how good it is depends on the workload. A probe measures that on
the requests themselves and warns when the divergence drifts above a limit, without delaying
anyone: what can't be compared right away isn't.
"""

from __future__ import annotations

import logging
import queue
import random
import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hypic_rag.engine.context import Context
from hypic_rag.engine.engine import Engine
from hypic_rag.errors import ConfigError

__all__ = ["FidelityProbe", "ProbeStatus", "kl_divergence"]

_log = logging.getLogger(__name__)


def kl_divergence(reference: Tensor, logits: Tensor) -> float:
    """KL(reference || other) in nats of two next-token distributions, from logits ``[vocab]``."""
    log_p = reference.double().log_softmax(-1)
    log_q = logits.double().log_softmax(-1)
    found = float((log_p.exp() * (log_p - log_q)).sum())
    return 0.0 if found < 0.0 else found  # rounding may go below zero; NaN stays NaN


@dataclass(frozen=True)
class ProbeStatus:
    """What a probe has seen.

    Attributes:
        offered: requests that passed by.
        compared: requests that were recomputed and compared.
        dropped: requests that were drawn while another was still being recomputed.
        failed: recomputations that raised an error.
        mean_kl: mean KL in nats over the window of the last comparisons; NaN before the first.
        first_agrees: share of equal first tokens in the same window; NaN before the first.
        drifting: whether the window is full enough and its mean KL is above the limit.
    """

    offered: int
    compared: int
    dropped: int
    failed: int
    mean_kl: float
    first_agrees: float
    drifting: bool


class FidelityProbe:
    """Compares a random sample of assembled requests with full recompute, on a thread of its own.

    Safe to call from several threads. Close it, or use it as a context manager.

    Args:
        engine: recomputes; shares the model with those who answer.
        max_kl: mean KL, in nats, above which caching counts as drifting.
        share: the share of requests to compare, in [0, 1].
        window: how many of the last comparisons count; drifting needs a tenth of them, at least 5.
        on_drift: called with the status when drifting begins, beside the warning in the log.
        seed: makes the sample repeatable.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        engine: Engine,
        max_kl: float,
        *,
        share: float = 0.01,
        window: int = 100,
        on_drift: Callable[[ProbeStatus], None] | None = None,
        seed: int | None = None,
    ) -> None:
        if not max_kl > 0 or not 0.0 <= share <= 1.0 or window < 1:
            raise ConfigError(
                "A probe needs max_kl > 0, a share in [0, 1] and a window >= 1, but got "
                f"{max_kl!r}, {share!r} and {window!r}."
            )
        self.max_kl = max_kl
        self._engine = engine
        self._share = share
        self._enough = min(window, max(5, window // 10))
        self._on_drift = on_drift
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._found: deque[tuple[float, bool]] = deque(maxlen=window)
        self._offered = self._compared = self._dropped = self._failed = 0
        self._drifting = False
        self._jobs: queue.Queue[tuple[tuple[int, ...], Tensor] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._work, name="fidelity-probe", daemon=True)
        self._thread.start()

    def offer(self, context: Context) -> bool:
        """Maybe compare an assembled prompt; returns at once, and whether it was taken."""
        with self._lock:
            self._offered += 1
            if self._random.random() >= self._share:
                return False
        try:
            self._jobs.put_nowait((context.token_ids, context.logits))
        except queue.Full:
            with self._lock:
                self._dropped += 1
            return False
        return True

    @property
    def status(self) -> ProbeStatus:
        """What has been seen so far."""
        with self._lock:
            return self._status()

    def close(self) -> None:
        """Finish the comparison that's running and stop."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def __enter__(self) -> FidelityProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _status(self) -> ProbeStatus:
        kls = [kl for kl, _ in self._found]
        return ProbeStatus(
            self._offered,
            self._compared,
            self._dropped,
            self._failed,
            statistics.fmean(kls) if kls else float("nan"),
            statistics.fmean(same for _, same in self._found) if kls else float("nan"),
            self._drifting,
        )

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            token_ids, logits = job
            try:
                expected = self._engine.prefill(token_ids).logits
                found = kl_divergence(expected, logits), bool(expected.argmax() == logits.argmax())
            except Exception:
                with self._lock:
                    self._failed += 1
                _log.exception("A request couldn't be recomputed for comparison")
                continue
            self._record(*found)

    def _record(self, kl: float, same: bool) -> None:
        with self._lock:
            self._compared += 1
            self._found.append((kl, same))
            mean = statistics.fmean(value for value, _ in self._found)
            # Not "mean > limit": a mean that's no number must count as drift.
            above = len(self._found) >= self._enough and not mean <= self.max_kl
            began = above and not self._drifting
            self._drifting = above
            status = self._status()
        if began:
            _log.warning(
                "Caching drifts on this workload: the mean KL of the last %d compared requests is "
                "%.3g, above %.3g. Answer with exact=True, widen the seam, or encode the store "
                "behind another prefix.",
                len(self._found),
                status.mean_kl,
                self.max_kl,
            )
            if self._on_drift:
                self._on_drift(status)
