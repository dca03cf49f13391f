"""What's missing is encoded in the pass of the request: the results are those of two passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from models import BUILDERS, VOCAB, live_heads, tiny_model
from torch import Tensor

from hypic_rag.config import Mode, Seam
from hypic_rag.engine import assemble as assembling
from hypic_rag.engine import encode as encoding
from hypic_rag.engine.assemble import Assembly, Request, assemble
from hypic_rag.engine.context import Context, LazyContext, attention_kv, linear_state
from hypic_rag.engine.encode import encode_pending
from hypic_rag.engine.oracle import assemble_sequentially, recompute
from hypic_rag.engine.pending import PendingState
from hypic_rag.errors import ConfigError
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

TOLERANCE = 1e-5
MODES = [Mode.ADDITION, Mode.TRANSITION, Mode.TRANSITION_ROPE, Mode.SEAM]


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())


def context_of(model: HybridModel, length: int, seed: int) -> Context:
    return recompute(model, tokens(length, seed))[0]


def pending_of(
    lengths: Sequence[int], seam: Seam, conditioning: LazyContext | None
) -> list[PendingState]:
    return [
        PendingState(Segment(tokens(length, 7 + place)), seam, conditioning)
        for place, length in enumerate(lengths)
    ]


def batch(
    model: HybridModel, mode: Mode, conditioning: LazyContext | None
) -> tuple[list[Request], list[Request]]:
    """Requests with hits, misses (one of them in several places) and neither; all hits."""
    seam = mode.seam(Seam(4, 2))
    # The third has an interior shorter than what the convolution looks back at.
    one, two, short, four, five = pending_of((70, 133, 7, 64, 90), seam, conditioning)
    made = encode_pending(model, [one, two, short, four, five])
    assert live_heads(list(made.values())) > 0.25
    bare = Segment(tokens(5, 3))
    base = context_of(model, 37, 99)

    def request(
        states: Sequence[PendingState | SegmentState | None],
        segments: Sequence[Segment],
        base: Context | None,
        lead: tuple[int, ...] = (),
    ) -> Request:
        return Request(tuple(segments), tuple(states), tokens(6, len(states)), base, lead)

    segments = [state.segment for state in (one, two, short, two, four)]
    mixed = [
        request(
            [made[one], two, None, short, two, made[four]],
            [*segments[:2], bare, *segments[2:]],
            base,
            tokens(3, 1),
        ),
        request([two, five], [two.segment, five.segment], None),
        request([], [], base),
        request([made[four]], [four.segment], base),
    ]
    hits = [
        replace(
            each,
            states=tuple(made[s] if isinstance(s, PendingState) else s for s in each.states),
        )
        for each in mixed
    ]
    return mixed, hits


def require_close(what: str, mine: Tensor, yours: Tensor) -> None:
    assert mine.shape == yours.shape, what
    if not yours.numel():
        return
    error = float((mine - yours).abs().max() / yours.abs().max().clamp_min(1e-30))
    assert error < TOLERANCE, f"{what}: {error:.1e}"


def require_equal(model: HybridModel, mine: Assembly, yours: Assembly) -> None:
    assert mine.context.token_ids == yours.context.token_ids
    require_close("logits", mine.context.logits, yours.context.logits)
    for index, spec in enumerate(model.layers):
        read = linear_state if hasattr(spec, "key_dim") else attention_kv
        for x, y in zip(
            read(mine.context.cache, index), read(yours.context.cache, index), strict=True
        ):
            require_close(f"layer {index}", x, y)
    for state, expected in zip(mine.states, yours.states, strict=True):
        if expected is None or state is None:
            assert state is expected
            continue
        assert state.metadata() == expected.metadata()
        for name, tensor in expected.to_tensors().items():
            require_close(name, state.to_tensors()[name], tensor)


@pytest.mark.parametrize("family", sorted(BUILDERS))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("conditioned", [True, False], ids=["conditioned", "isolated"])
def test_one_pass_equals_two(family: str, mode: Mode, conditioned: bool) -> None:
    model = tiny_model(family)
    conditioning = LazyContext.of(context_of(model, 21, 50)) if conditioned else None
    mixed, hits = batch(model, mode, conditioning)
    assert any(state.offset for state in hits[1].states if state) == conditioned
    expected = assemble(model, hits, mode)
    for one, two in zip(assemble(model, mixed, mode), expected, strict=True):
        require_equal(model, one, two)
    for one, two in zip(mixed, expected, strict=True):
        require_equal(model, assemble(model, [one], mode)[0], two)


def test_all_logits_and_counts() -> None:
    model = tiny_model("qwen3_5")
    conditioning = LazyContext.of(context_of(model, 21, 50))
    mixed, hits = batch(model, Mode.SEAM, conditioning)
    got = assemble(model, mixed, all_logits=True)
    for one, two, request in zip(got, assemble(model, hits, all_logits=True), hits, strict=True):
        assert one.logits is not None and two.logits is not None
        require_close("all logits", one.logits, two.logits)
        require_close("sequential", one.logits, assemble_sequentially(model, request)[1])
    # 133 twice and 7 once, each without its seam of 6.
    assert [each.encoded for each in got] == [127 + 1 + 127, 127 + 84, 0, 0]
    assert [each.computed - each.plan.computed for each in got] == [each.encoded for each in got]
    with pytest.raises(ConfigError, match="pending"):
        assemble_sequentially(model, mixed[0])


def test_how_many_passes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One, unless the missing tokens are too many; and each state is encoded once."""
    model = tiny_model("qwen3_5")
    mixed, _ = batch(model, Mode.SEAM, LazyContext.of(context_of(model, 21, 50)))
    run = assembling.run_packed
    assert run is encoding.run_packed
    ran: list[int] = []

    def count(*arguments, missing=None, **options):  # type: ignore[no-untyped-def]
        ran.append(0 if missing is None else len(missing.states))
        return run(*arguments, missing=missing, **options)

    monkeypatch.setattr(assembling, "run_packed", count)
    monkeypatch.setattr(encoding, "run_packed", count)
    tokens_missing = 133 + 7 + 90
    one = assemble(model, mixed, one_pass_tokens=tokens_missing)
    assert ran == [3]
    ran.clear()
    two = assemble(model, mixed, one_pass_tokens=tokens_missing - 1)
    assert ran == [0, 0]
    for mine, yours in zip(one, two, strict=True):
        require_equal(model, mine, yours)
    assert one[0].states[1] is one[0].states[4] is one[1].states[0]


def test_states_behind_different_prefixes_in_one_request() -> None:
    """As a request has them whose prefix changed between two of its segments."""
    model = tiny_model("qwen3_next")
    prefixes = [LazyContext.of(context_of(model, length, 50)) for length in (3, 21)]
    states = [*pending_of((40,), Seam(4, 0), prefixes[0]), *pending_of((40,), Seam(2, 1), None)]
    states += pending_of((40,), Seam(4, 0), prefixes[1])
    made = encode_pending(model, states)
    assert len(made) == 3
    request = Request(
        tuple(state.segment for state in states), tuple(states), tokens(3, 1), prefixes[0].get()[0]
    )
    filled = replace(request, states=tuple(made[state] for state in states))
    require_equal(model, assemble(model, [request])[0], assemble(model, [filled])[0])


def test_a_prefix_is_prefilled_when_its_needed_and_once() -> None:
    model = tiny_model("qwen3_5")
    made: list[Context] = []

    def make() -> tuple[Context, int]:
        made.append(context_of(model, 21, 50))
        return made[-1], 21

    lazy = LazyContext(tokens(21, 50), make)
    [state] = pending_of((40,), Seam(4, 0), lazy)
    assert state.offset == 21 and not made
    request = Request((state.segment,), (state,), tokens(3, 1))
    assemble(model, [request, request])
    assert len(made) == 1
    assert lazy.get() == (made[0], 0)
