"""Triton's kernels against their twins in torch: odd sizes, K ≠ V, low-precision inputs."""

from __future__ import annotations

import os

import pytest
import torch
from models import tiny_model
from torch import Tensor

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.assemble import Request, assemble, plan_of
from hypic_rag.engine.chain import Tokens, walk
from hypic_rag.engine.context import LazyContext, attention_kv, linear_state
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.layout import Layout, Write, build_layout
from hypic_rag.engine.oracle import recompute
from hypic_rag.engine.packed import Cached, Spans
from hypic_rag.engine.pending import PendingState
from hypic_rag.engine.plan import plan_encoding, plan_request
from hypic_rag.operators import AffineMap, Dense, Elementwise
from hypic_rag.ops.choice import KernelChoice, best_kernels
from hypic_rag.ops.gated_delta_rule import l2_normalize, scan
from hypic_rag.ops.rope import rotate
from hypic_rag.segments import Segment
from hypic_rag.states import AttentionState, LinearState

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 1e-4 if DEVICE.type == "cuda" else 2e-5


def tables(layout: Layout):  # type: ignore[no-untyped-def]
    from hypic_rag.engine.device_walk import DeviceTables

    return DeviceTables(layout, DEVICE, KernelChoice.triton())


def random_tokens(count: int, heads: int, keys: int, values: int, dtype: torch.dtype) -> Tokens:
    generator = torch.Generator().manual_seed(count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Tokens(
        q=(l2_normalize(normal(count, heads, keys)) * keys**-0.5).to(DEVICE, dtype),
        k=l2_normalize(normal(count, heads, keys)).to(DEVICE, dtype),
        v=normal(count, heads, values).to(DEVICE, dtype),
        g=(-0.05 * torch.rand(count, heads, generator=generator)).to(DEVICE),
        beta=torch.rand(count, heads, generator=generator).to(DEVICE),
    )


def widened(tokens: Tokens) -> Tokens:
    return Tokens(tokens.q.float(), tokens.k.float(), tokens.v.float(), tokens.g, tokens.beta)


def random_interiors(count: int, heads: int, keys: int, values: int) -> list[LinearState]:
    generator = torch.Generator().manual_seed(count)
    states = []
    for _ in range(count):
        matrix = torch.randn(heads, keys, keys, generator=generator) * keys**-0.5
        offset = torch.randn(heads, keys, values, generator=generator)
        tail = torch.zeros(3, 3)
        states.append(
            LinearState(AffineMap(Dense(matrix.to(DEVICE)), offset.to(DEVICE)), tail.to(DEVICE))
        )
    return states


def request_layout() -> Layout:
    """Three requests with hits, misses, seams of several widths, and none."""
    segments = [Segment(tuple(range(length))) for length in (30, 9, 70, 5)]
    seams = [Seam(4, 0), None, Seam(17, 3), None]
    plans = [
        plan_request(3, segments, seams, range(7), renewed=(9, 0, 20, 0)),
        plan_request(0, segments[:1], seams[:1], range(65)),
        plan_request(0, [], [], range(1)),
    ]
    return build_layout(plans, 4, DEVICE)


SIZES = [(2, 16, 24), (1, 20, 12), (1, 5, 40)]


@pytest.mark.parametrize(
    ("heads", "keys", "values", "dtype"),
    [(*sizes, torch.float32) for sizes in SIZES]
    + [(*SIZES[0], torch.bfloat16), (*SIZES[1], torch.float16)],
)
def test_walk_over_hits_and_rows(heads: int, keys: int, values: int, dtype: torch.dtype) -> None:
    layout = request_layout()
    tokens = random_tokens(layout.token_ids.shape[0], heads, keys, values, dtype)
    interiors = random_interiors(len(layout.interiors), heads, keys, values)
    initial = [torch.randn(heads, keys, values, device=DEVICE), None, None]
    expected = walk(layout, widened(tokens), initial, interiors)
    got = tables(layout).walker(interiors)(layout, tokens, initial, interiors)
    assert got.out.dtype == got.states.dtype == torch.float32
    torch.testing.assert_close(got.out, expected.out, rtol=1e-4, atol=TOLERANCE)
    torch.testing.assert_close(got.states, expected.states, rtol=1e-4, atol=TOLERANCE)


def test_walk_without_transitions() -> None:
    layout = request_layout()
    tokens = random_tokens(layout.token_ids.shape[0], 2, 16, 24, torch.float32)
    interiors = random_interiors(len(layout.interiors), 2, 16, 24)
    initial = [torch.randn(2, 16, 24, device=DEVICE)] * 3
    both = [
        walker(layout, tokens, initial, interiors, applies_transition=False)
        for walker in (walk, tables(layout).walker(interiors))
    ]
    torch.testing.assert_close(both[1].out, both[0].out, rtol=1e-4, atol=TOLERANCE)
    torch.testing.assert_close(both[1].states, both[0].states, rtol=1e-4, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "keys", "values", "dtype"),
    [(*SIZES[0], torch.float32), (*SIZES[1], torch.bfloat16)],
)
def test_transitions_and_end_states_of_a_batch(
    heads: int, keys: int, values: int, dtype: torch.dtype
) -> None:
    lengths = (1, 17, 64, 67)
    plans = [plan_encoding(2, Segment(tuple(range(n + 3))), Seam(2, 1)) for n in lengths]
    layout = build_layout([plan for plan in plans if plan], 4, DEVICE)
    tokens = random_tokens(layout.token_ids.shape[0], heads, keys, values, dtype)
    initial = [torch.randn(heads, keys, values, device=DEVICE) for _ in plans]
    got = tables(layout).walker([])(layout, tokens, initial, [])
    expected = walk(layout, widened(tokens), initial, [])
    wide = widened(tokens)
    for capture in layout.captures:
        part = slice(capture.start, capture.end)
        q, k, v = (x[part].transpose(0, 1).double() for x in (wide.q, wide.k, wide.v))
        g, beta = (x[part].t().double() for x in (wide.g, wide.beta))
        zero = torch.zeros(heads, keys, values, device=DEVICE).double()
        _, written = scan(q, k, v, g, beta, zero)
        eye = torch.eye(keys, device=DEVICE).double().expand(heads, -1, -1)
        _, moved = scan(q, k, torch.zeros_like(k), g, beta, eye)
        for found in (got.maps[capture.request], expected.maps[capture.request]):
            assert isinstance(found.transition, Dense)
            matrix = found.transition.matrix
            torch.testing.assert_close(matrix, moved.float(), rtol=1e-4, atol=TOLERANCE)
            torch.testing.assert_close(found.offset, written.float(), rtol=1e-4, atol=TOLERANCE)
    torch.testing.assert_close(got.out, expected.out, rtol=1e-4, atol=TOLERANCE)


def test_other_transitions_take_the_walk_in_torch() -> None:
    layout = request_layout()
    held = random_interiors(1, 2, 16, 24)[0]
    scaled = LinearState(
        AffineMap(Elementwise(torch.ones(2, 16, 1)), held.map.offset), held.conv_tail
    )
    halved = LinearState(
        AffineMap(Dense(held.map.transition.matrix.half()), held.map.offset), held.conv_tail
    )
    assert tables(layout).walker([held]) is not walk
    assert tables(layout).walker([held, scaled]) is walk
    assert tables(layout).walker([halved]) is walk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotary", [0, 8, 24])
def test_gather(dtype: torch.dtype, rotary: int) -> None:
    torch.manual_seed(rotary)
    groups, width = 3, 24
    angle = torch.randn(200, rotary // 2)
    cos, sin = (torch.cat((f(angle), f(angle)), -1).to(DEVICE) for f in (torch.cos, torch.sin))

    def random(tokens: int) -> tuple[Tensor, Tensor]:
        # As projections leave them: heads are not the outermost dimension in memory.
        return tuple(
            torch.randn(tokens, groups, width).transpose(0, 1).to(DEVICE, dtype) for _ in range(2)
        )  # type: ignore[return-value]

    base, computed = random(37), random(11)
    interiors = [AttentionState(*random(70)), AttentionState(*random(40))]
    spans = Spans(
        149,
        (Write(2, 6, 37), Write(6, 9, 111), Write(9, 11, 147)),
        (Cached(0, 41, 70), Cached(1, 114, 33, stays=9, first=7)),
    )
    layout = request_layout()
    keys, values = tables(layout).gather(0, base, spans, interiors, computed, (cos, sin))

    def turned(x: Tensor, position: int) -> Tensor:
        where = slice(position, position + x.shape[1])
        return rotate(x.float(), cos[where], sin[where]).to(dtype)

    expected = torch.cat(
        (
            base[0],
            turned(computed[0][:, 2:6], 37),
            turned(interiors[0].keys, 41),
            turned(computed[0][:, 6:9], 111),
            turned(interiors[1].keys[:, 7:], 9),
            turned(computed[0][:, 9:11], 147),
        ),
        dim=1,
    )
    plain = torch.cat(
        (
            base[1],
            computed[1][:, 2:6],
            interiors[0].values,
            computed[1][:, 6:9],
            interiors[1].values[:, 7:],
            computed[1][:, 9:11],
        ),
        dim=1,
    )
    assert torch.equal(values, plain)
    precision = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(keys, expected, rtol=precision, atol=precision)


def test_a_whole_pass() -> None:
    model = tiny_model("qwen3_5")
    base = recompute(model, tuple(range(20, 30)))[0]
    segments = tuple(Segment(tuple(range(i, i + n))) for i, n in enumerate((34, 3, 13)))
    torch_states, triton_states = (
        encode_segments(model, segments, Seam(4, 1), base, kernels=kernels)
        for kernels in (KernelChoice.torch(), KernelChoice.triton())
    )
    for mine, yours in zip(triton_states, torch_states, strict=True):
        if mine is None or yours is None:
            assert mine is yours
            continue
        for name, tensor in yours.to_tensors().items():
            torch.testing.assert_close(mine.to_tensors()[name], tensor, rtol=1e-4, atol=5e-5)
    requests = [
        Request(segments, tuple(torch_states), (5, 6, 7), base, renewed=(17, 0, 2)),
        Request(segments[1:], (None, torch_states[2]), (1,)),
    ]
    assert plan_of(requests[0]).reused > base.length
    expected, got = (
        assemble(model, requests, Mode.SEAM, kernels=kernels)
        for kernels in (KernelChoice.torch(), KernelChoice.triton())
    )
    for mine, yours in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.context.logits, yours.context.logits, rtol=0, atol=2e-4)
        for index, spec in enumerate(model.layers):
            read = linear_state if hasattr(spec, "key_dim") else attention_kv
            for x, y in zip(
                read(mine.context.cache, index), read(yours.context.cache, index), strict=True
            ):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("mode", [Mode.TRANSITION, Mode.TRANSITION_ROPE])
def test_keys_turn_to_the_same_place(mode: Mode) -> None:
    """To where a segment stands now or, in modes that don't move keys, to where it stood."""
    model = tiny_model("qwen3_5")
    base = recompute(model, tuple(range(20, 30)))[0]
    segments = tuple(Segment(tuple(range(i, i + n))) for i, n in enumerate((34, 13)))
    states = tuple(encode_segments(model, segments, Seam(0, 0), base))
    full = next(i for i, spec in enumerate(model.layers) if not hasattr(spec, "key_dim"))
    held = states[1]
    assert held is not None and isinstance(held.layers[full], AttentionState)
    request = Request(segments, states, (5, 6), base)
    plain, got = (
        attention_kv(assemble(model, [request], mode, kernels=kernels)[0].context.cache, full)
        for kernels in (KernelChoice.torch(), KernelChoice(gather=True))
    )
    position = 10 if mode is Mode.TRANSITION else 10 + 34
    table = model.family.rotary(
        model.decoder, model.embedding_like(), torch.arange(position, position + 13, device=DEVICE)
    )
    expected = rotate(held.layers[full].keys, *table)
    for keys, _ in (plain, got):
        torch.testing.assert_close(keys[:, 44:57], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0], plain[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], plain[1])


def test_what_is_missing_in_the_same_pass() -> None:
    model = tiny_model("qwen3_5")
    base = recompute(model, tuple(range(20, 30)))[0]
    pending = [
        PendingState(Segment(tuple(range(i, i + n))), Seam(4, 1), LazyContext.of(base))
        for i, n in enumerate((34, 7))
    ]
    segments = (pending[0].segment, pending[1].segment, pending[0].segment)
    request = Request(segments, (*pending, pending[0]), (5, 6, 7), base, renewed=(0, 1, 20))
    expected, got = (
        assemble(model, [request], kernels=kernels)[0]
        for kernels in (KernelChoice.torch(), KernelChoice.triton())
    )
    torch.testing.assert_close(got.context.logits, expected.context.logits, rtol=0, atol=2e-4)
    for mine, yours in zip(got.states, expected.states, strict=True):
        assert mine is not None and yours is not None
        for name, tensor in yours.to_tensors().items():
            torch.testing.assert_close(mine.to_tensors()[name], tensor, rtol=1e-4, atol=1e-4)


def test_the_best_choice_is_torch_on_a_cpu() -> None:
    assert best_kernels(torch.device("cpu")) == KernelChoice.torch()
    assert best_kernels(torch.device("cuda")) == KernelChoice.triton()


def test_the_interpreter_is_on() -> None:
    """Without a GPU these tests would otherwise not run the kernels at all."""
    if DEVICE.type == "cpu":
        assert os.environ["TRITON_INTERPRET"] == "1"
