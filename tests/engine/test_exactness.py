"""The laws: what assembly must reproduce, for every family.

Random weights with slow decay, so that states really travel. ``TOLERANCE`` is absolute, on logits
of order 5.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import BUILDERS, VOCAB, live_heads, tiny_model

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.context import Context, attention_kv
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.oracle import assemble_sequentially, recompute
from hypic_rag.engine.plan import Computed, RequestPlan
from hypic_rag.errors import ConfigError
from hypic_rag.families.base import AttentionSpec
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

TOLERANCE = 2e-4
SEAMS = [Seam(0, 0), Seam(4, 0), Seam(8, 8), Seam(0, 3), Seam(2, 0), Seam(64, 64)]
PARTS_MODES = [Mode.ADDITION, Mode.TRANSITION, Mode.TRANSITION_ROPE]

families = pytest.mark.parametrize("family", sorted(BUILDERS))


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())


def segments_of(*lengths: int, seed: int = 7) -> tuple[Segment, ...]:
    return tuple(Segment(tokens(length, seed + i)) for i, length in enumerate(lengths))


def true_states(
    model: HybridModel, prefix: tuple[int, ...], segments: tuple[Segment, ...], seam: Seam
) -> tuple[SegmentState | None, ...]:
    """States encoded behind everything that stands in front of them in the prompt."""
    states: list[SegmentState | None] = []
    before = prefix
    for segment in segments:
        states += encode_segments(model, [segment], seam, recompute(model, before)[0])
        before += segment.token_ids
    return tuple(states)


def computed_positions(plan: RequestPlan) -> list[int]:
    return [
        position
        for piece in plan.pieces
        if isinstance(piece, Computed)
        for position in range(piece.start, piece.start + piece.length)
    ]


def prefix_of(model: HybridModel, length: int = 37) -> Context:
    return recompute(model, tokens(length, 99))[0]


@families
@pytest.mark.parametrize("seam", SEAMS, ids=str)
def test_true_context_states_reproduce_the_library(family: str, seam: Seam) -> None:
    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(3, 129, 70, 200, 64)
    states = true_states(model, base.token_ids, segments, seam)
    request = Request(segments, states, tokens(9, 5), base)
    assembly = assemble(model, [request], all_logits=True)[0]
    _, whole = recompute(model, request.token_ids)
    assert whole.abs().max() > 4
    assert assembly.logits is not None
    torch.testing.assert_close(
        assembly.logits, whole[computed_positions(assembly.plan)], rtol=0, atol=TOLERANCE
    )


@families
def test_every_length_and_residue(family: str) -> None:
    """One segment of each length 1…200, conditioned on the served prefix, is exact."""
    model = tiny_model(family)
    base = prefix_of(model)
    question = tokens(2, 3)
    text = tokens(200, 11)
    segments = [Segment(text[:length]) for length in range(1, 201)]
    for seam in (Seam(4, 0), Seam(0, 1)):
        states = encode_segments(model, segments, seam, base)
        assert states[-1] is not None
        assert live_heads([states[-1]]) >= 0.25
        for start in range(0, 200, 50):
            requests = [
                Request((segment,), (state,), question, base)
                for segment, state in zip(
                    segments[start : start + 50], states[start : start + 50], strict=True
                )
            ]
            for request, assembly in zip(requests, assemble(model, requests), strict=True):
                _, logits = recompute(model, request.token_ids)
                torch.testing.assert_close(
                    assembly.context.logits, logits[-1], rtol=0, atol=TOLERANCE
                )


@families
@pytest.mark.parametrize("seam", SEAMS, ids=str)
def test_packed_equals_sequential_on_isolated_states(family: str, seam: Seam) -> None:
    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(70, 3, 133, 20, 1, 64)
    states = tuple(encode_segments(model, segments, seam))
    request = Request(segments, states, tokens(7, 5), base)
    packed = assemble(model, [request], all_logits=True)[0]
    context, logits = assemble_sequentially(model, request)
    torch.testing.assert_close(packed.logits, logits, rtol=0, atol=TOLERANCE)
    _, whole = recompute(model, request.token_ids)
    if packed.plan.reused > base.length:
        # Isolated states are an approximation: were they exact here, this test would prove nothing.
        assert (packed.context.logits - whole[-1]).abs().max() > 100 * TOLERANCE
    assert packed.context.token_ids == context.token_ids == request.token_ids


@families
@pytest.mark.parametrize("mode", PARTS_MODES)
def test_packed_equals_sequential_in_every_mode(family: str, mode: Mode) -> None:
    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(70, 3, 133, 20, 64)
    states = tuple(encode_segments(model, segments, Seam(0, 0)))
    for renewed in ((), renewed_of(states, 0.3)):
        request = Request(segments, states, tokens(7, 5), base, renewed=renewed)
        packed = assemble(model, [request], mode, all_logits=True)[0]
        _, logits = assemble_sequentially(model, request, mode)
        torch.testing.assert_close(packed.logits, logits, rtol=0, atol=TOLERANCE)


def renewed_of(states: tuple[SegmentState | None, ...], share: float) -> tuple[int, ...]:
    """That share of each interior, from one token up to all but one."""
    counts = []
    for state in states:
        start, end = (0, 0) if state is None else state.interior
        counts.append(max(0, min(end - start - 1, max(1, round(share * (end - start))))))
    return tuple(counts)


@families
@pytest.mark.parametrize("seam", [Seam(4, 0), Seam(8, 8), Seam(0, 0), Seam(2, 1)], ids=str)
@pytest.mark.parametrize("share", [0.01, 0.6, 1.0])
def test_renewed_tokens_equal_a_branch_of_the_library(
    family: str, seam: Seam, share: float
) -> None:
    """Also interiors shorter than a convolution's history, and renewed runs of several chunks."""
    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(70, 3, 6, 133, 20, 1, 64)
    states = tuple(encode_segments(model, segments, seam))
    counts = renewed_of(states, share)
    plain = Request(segments, states, tokens(7, 5), base)
    request = replace(plain, renewed=counts)
    packed = assemble(model, [request], all_logits=True)[0]
    context, logits = assemble_sequentially(model, request)
    torch.testing.assert_close(packed.logits, logits, rtol=0, atol=TOLERANCE)
    for index, spec in enumerate(model.layers):
        if isinstance(spec, AttentionSpec):
            for mine, theirs in zip(
                attention_kv(packed.context.cache, index),
                attention_kv(context.cache, index),
                strict=True,
            ):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)
    without = assemble(model, [plain])[0]
    assert packed.plan.computed == without.plan.computed + sum(counts)
    assert packed.plan.length == packed.plan.reused + packed.plan.computed
    off = (packed.context.logits - without.context.logits).abs().max()
    assert off > TOLERANCE


@families
def test_renewed_tokens_of_true_states_change_nothing(family: str) -> None:
    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(3, 129, 70, 200, 64)
    states = true_states(model, base.token_ids, segments, Seam(4, 0))
    request = Request(segments, states, tokens(9, 5), base, renewed=renewed_of(states, 0.5))
    beside = Request(segments[:2], states[:2], tokens(20, 6), base)
    assembly, other = assemble(model, [request, beside])
    for each in (assembly, other):
        _, whole = recompute(model, each.context.token_ids)
        torch.testing.assert_close(each.context.logits, whole[-1], rtol=0, atol=TOLERANCE)


def test_an_interior_is_not_renewed_as_a_whole() -> None:
    model = tiny_model(sorted(BUILDERS)[0])
    segments = segments_of(20)
    states = tuple(encode_segments(model, segments, Seam(4, 0)))
    for counts, message in (
        ((16,), "16 tokens can't have 16"),
        ((1, 1), "2 counts to renew"),
        ((-1,), "must be >= 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            assemble(model, [Request(segments, states, tokens(2, 1), renewed=counts)])


@families
def test_modes_differ(family: str) -> None:
    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(70, 133)
    states = tuple(encode_segments(model, segments, Seam(0, 0)))
    request = Request(segments, states, tokens(7, 5), base)
    results = [assemble(model, [request], mode)[0].context.logits for mode in PARTS_MODES]
    assert (results[0] - results[1]).abs().max() > 100 * TOLERANCE
    if any(getattr(spec, "rotary_dim", 0) for spec in model.layers):
        assert (results[1] - results[2]).abs().max() > TOLERANCE
    else:
        torch.testing.assert_close(results[1], results[2])


@families
@pytest.mark.parametrize("seam", SEAMS, ids=str)
def test_conditioned_segment_behind_its_prompt_is_exact(family: str, seam: Seam) -> None:
    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(150)
    states = tuple(encode_segments(model, segments, seam, base))
    if states[0]:
        assert live_heads([states[0]]) >= 0.25
    assembly = assemble(model, [Request(segments, states, tokens(9, 5), base)])[0]
    _, whole = recompute(model, assembly.context.token_ids)
    torch.testing.assert_close(assembly.context.logits, whole[-1], rtol=0, atol=TOLERANCE)


@families
def test_batching_changes_nothing(family: str) -> None:
    """States don't depend on what was encoded beside them, nor requests on their batch."""
    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(5, 64, 65, 1, 190, 4, 128)
    seam = Seam(4, 0)
    together = encode_segments(model, segments, seam, base)
    alone = [encode_segments(model, [segment], seam, base)[0] for segment in segments]
    assert [state is None for state in together] == [False, False, False, True, False, True, False]
    for one, other in zip(alone, together, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        mine, yours = one.to_tensors(), other.to_tensors()
        assert mine.keys() == yours.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, yours[name], rtol=1e-4, atol=2e-5)
    states = tuple(alone)
    requests = [
        Request(segments, states, tokens(9, 5), base),
        Request(segments[:2], states[:2], tokens(70, 6), None),
        Request(segments[::-1], states[::-1], tokens(1, 7), base),
        Request((), (), tokens(3, 8), base),
        Request(segments[4:], (None, *states[5:]), tokens(4, 8), prefix_of(model, 2)),
    ]
    batched = assemble(model, requests)
    for request, assembly in zip(requests, batched, strict=True):
        single = assemble(model, [request])[0]
        torch.testing.assert_close(
            assembly.context.logits, single.context.logits, rtol=0, atol=TOLERANCE
        )


@families
def test_whole_equals_composition_of_parts(family: str) -> None:
    model = tiny_model(family)
    base = prefix_of(model)
    ids = tokens(170, 21)
    none = Seam(0, 0)
    whole = encode_segments(model, [Segment(ids)], none, base)[0]
    first = encode_segments(model, [Segment(ids[:83])], none, base)[0]
    behind = recompute(model, base.token_ids + ids[:83])[0]
    second = encode_segments(model, [Segment(ids[83:])], none, behind)[0]
    assert whole and first and second
    assert live_heads([whole]) >= 0.25
    for index, spec in enumerate(model.layers):
        if not hasattr(spec, "key_dim"):
            continue
        composed = second.layers[index].map.after(first.layers[index].map)
        expected = whole.layers[index].map
        torch.testing.assert_close(
            composed.transition.matrix, expected.transition.matrix, rtol=0, atol=2e-5
        )
        torch.testing.assert_close(composed.offset, expected.offset, rtol=0, atol=1e-4)


@families
def test_decoding_continues_as_the_library_would(family: str) -> None:
    """64 tokens, from the assembled cache and from the sequential oracle's."""
    from hypic_rag.engine.context import forward

    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(70, 133)
    states = tuple(encode_segments(model, segments, Seam(4, 0)))
    request = Request(segments, states, tokens(7, 5), base)
    packed = assemble(model, [request])[0].context
    oracle, _ = assemble_sequentially(model, request)
    mine, yours = packed.logits, oracle.logits
    for step in range(64):
        torch.testing.assert_close(mine, yours, rtol=0, atol=TOLERANCE)
        token = [int(yours.argmax())]
        mine = forward(model.module, token, packed.length + step, packed.cache)[-1]
        yours = forward(model.module, token, oracle.length + step, oracle.cache)[-1]


@families
def test_next_turn_behind_a_finished_cache(family: str) -> None:
    """A second turn with new segments, behind the first turn's cache, is exact in true context."""
    model = tiny_model(family)
    base = prefix_of(model)
    segments = segments_of(70, 90)
    states = true_states(model, base.token_ids, segments, Seam(4, 0))
    first = assemble(model, [Request(segments, states, tokens(9, 5), base)])[0].context
    more = segments_of(100, 33, seed=70)
    later = true_states(model, first.token_ids, more, Seam(4, 0))
    before = first.clone()
    second = assemble(model, [Request(more, later, tokens(5, 6), first)])[0].context
    _, whole = recompute(model, second.token_ids)
    torch.testing.assert_close(second.logits, whole[-1], rtol=0, atol=TOLERANCE)
    # The first turn's cache is as it was.
    for held, kept in zip(first.cache.layers, before.cache.layers, strict=True):
        for name in ("keys", "values"):
            if hasattr(held, name):
                torch.testing.assert_close(getattr(held, name), getattr(kept, name))
