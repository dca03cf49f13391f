from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
import torch
from models import VOCAB, tiny_model

from hypic_rag.engine.context import Context
from hypic_rag.engine.engine import Engine
from hypic_rag.engine.oracle import recompute
from hypic_rag.engine.probe import FidelityProbe, ProbeStatus
from hypic_rag.errors import ConfigError


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def contexts(off: float) -> list[Context]:
    """Prompts whose next-token logits are as recomputed, plus ``off`` times noise."""
    model = tiny_model("qwen3_5")
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in (5, 9, 12, 20, 33, 40):
        ids = tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
        context = recompute(model, ids)[0]
        noise = torch.randn(context.logits.shape, generator=generator)
        found.append(Context(ids, context.cache, context.logits + off * noise))
    return found


def offer_all(probe: FidelityProbe, found: list[Context]) -> None:
    for count, context in enumerate(found, 1):
        assert probe.offer(context)
        wait_for(lambda count=count: probe.status.compared + probe.status.failed == count)


def test_sound_requests_raise_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    with FidelityProbe(Engine(tiny_model("qwen3_5")), 1e-3, share=1.0) as probe:
        assert probe.status.compared == 0 and probe.status.mean_kl != probe.status.mean_kl
        offer_all(probe, contexts(0.0))
        assert probe.status.mean_kl < 1e-6 and probe.status.first_agrees == 1.0
        assert not probe.status.drifting
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING
                and "drift" in record.message]  # fmt: skip


def test_drift_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    told: list[ProbeStatus] = []
    engine = Engine(tiny_model("qwen3_5"))
    with FidelityProbe(engine, 1e-3, share=1.0, window=50, on_drift=told.append) as probe:
        offer_all(probe, contexts(1.0))
        assert probe.status.drifting and probe.status.mean_kl > 1e-3
    drifts = [record for record in caplog.records if "Caching drifts" in record.message]
    assert len(drifts) == 1 and len(told) == 1
    assert told[0].compared == 5


def test_logits_that_are_no_numbers_count_as_drift() -> None:
    with FidelityProbe(Engine(tiny_model("qwen3_5")), 1e-3, share=1.0, window=3) as probe:
        offer_all(probe, contexts(float("nan"))[:3])
        assert probe.status.drifting


def test_sampling_and_pressure() -> None:
    engine = Engine(tiny_model("qwen3_5"))
    context = contexts(0.0)[0]
    with FidelityProbe(engine, 1e-3, share=0.0) as probe:
        assert not any(probe.offer(context) for _ in range(20))
        assert probe.status.offered == 20 and probe.status.compared == 0
    with FidelityProbe(engine, 1e-3, share=1.0) as probe:
        taken = sum(probe.offer(context) for _ in range(50))
        wait_for(lambda: probe.status.compared == taken)
        assert probe.status.dropped == 50 - taken
    probe.close()


def test_a_failed_comparison_is_counted() -> None:
    context = contexts(0.0)[0]
    broken = Context((), context.cache, context.logits)
    with FidelityProbe(Engine(tiny_model("qwen3_5")), 1e-3, share=1.0) as probe:
        offer_all(probe, [broken, context])
        assert probe.status.failed == 1 and probe.status.compared == 1


@pytest.mark.parametrize(("max_kl", "share"), [(0.0, 0.1), (1e-3, 1.1), (float("nan"), 0.1)])
def test_wrong_numbers_are_refused(max_kl: float, share: float) -> None:
    with pytest.raises(ConfigError, match="max_kl > 0"):
        FidelityProbe(Engine(tiny_model("qwen3_5")), max_kl, share=share)
