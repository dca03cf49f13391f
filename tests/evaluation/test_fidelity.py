"""The measures themselves, on random models whose states really travel."""

from __future__ import annotations

import math

import pytest
import torch
from models import VOCAB, tiny_model

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.context import linear_state
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.oracle import recompute
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation.fidelity import (
    attention_errors,
    compare,
    follow,
    greedy,
    kl_divergence,
    position_deviation,
    profile,
    recompute_reference,
    state_errors,
    watch_attention,
)
from hypic_rag.segments import Segment


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())


def test_kl_is_that_of_the_definition() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert kl_divergence(p.log() + 3, q.log()) == pytest.approx(expected)
    assert kl_divergence(p, p) == 0.0
    assert math.isnan(kl_divergence(p, q * math.nan))


def test_compare_finds_the_first_divergence() -> None:
    logits = torch.eye(5)[[3, 1, 4]]
    assert compare(logits[0], (3, 1, 4), logits).all_agree
    parted = compare(logits[0], (3, 2, 4), logits)
    assert parted.agreed == 1 and parted.first_agrees and not parted.all_agree
    assert compare(logits[0], (0, 1, 4), logits).agreed == 0
    with pytest.raises(ConfigError, match="aren't finite"):
        compare(logits[0], (3, 1, 4), logits * math.inf)
    with pytest.raises(ConfigError, match="for 2 tokens"):
        compare(logits[0], (3, 1), logits)


def test_following_equals_decoding() -> None:
    model = tiny_model("qwen3_5")
    reference = recompute_reference(model, tokens(50, 1), limit=12, stops=())
    assert len(reference.continuation) == 12
    before = linear_state(reference.context.cache, 0)[1].clone()
    logits = follow(model, reference.context, reference.continuation)
    assert compare(reference.context.logits, reference.continuation, logits).all_agree
    given = reference.continuation[:5]
    assert greedy(model, reference.context, 12, (), given) == reference.continuation
    stop = reference.continuation[3]
    place = reference.continuation.index(stop)
    assert greedy(model, reference.context, 12, (stop,)) == reference.continuation[: place + 1]
    torch.testing.assert_close(linear_state(reference.context.cache, 0)[1], before)


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid"])
def test_state_and_cache_errors(family: str) -> None:
    """True-context states show no error; isolated ones do, from the second layer on."""
    model = tiny_model(family)
    base = recompute(model, tokens(37, 9))[0]
    segments = tuple(Segment(tokens(length, length)) for length in (70, 90))
    seam = Seam(8, 0)
    question = tokens(5, 3)
    isolated = Request(segments, tuple(encode_segments(model, segments, seam)), question, base)
    second = recompute(model, base.token_ids + segments[0].token_ids)[0]
    exact_states = (
        *encode_segments(model, segments[:1], seam, base),
        *encode_segments(model, segments[1:], seam, second),
    )
    exact = Request(segments, exact_states, question, base)
    with watch_attention(model) as outputs:
        full = recompute(model, isolated.token_ids)[0]
        reference = dict(outputs)
    for request, worst in ((exact, 1e-3), (isolated, None)):
        with watch_attention(model) as outputs:
            context = assemble(model, [request], Mode.SEAM)[0].context
            attention = attention_errors(outputs, reference)
        states = state_errors(model, context, full)
        deviation = position_deviation(model, context, full)
        assert [error.layer for error in attention] == [2]
        assert deviation.shape == (len(isolated.token_ids),)
        if worst is not None:
            assert all(error.relative < worst for error in (*states, *attention))
            assert deviation.max() < worst
            continue
        # Layer 0 is exact behind a seam that covers the convolution; deeper ones aren't.
        assert states[0].relative < 1e-4 and states[0].angle < 0.01
        assert states[-1].relative > 1e-3 and attention[0].relative > 1e-3
        assert deviation[: base.length].max() < 1e-4 < deviation.max()
        around = profile([deviation], [(base.length, segments)], reach=80)
        assert around.counts[0] == 2 and around.counts[75] == 1 and len(around.counts) == 80
        assert around.from_start[0] < around.from_start[8]
