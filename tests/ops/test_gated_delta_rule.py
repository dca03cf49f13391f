"""The chunked form, its affine map and the walk, against the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hypic_rag.ops import gated_delta_rule
from hypic_rag.ops.gated_delta_rule import (
    advance_,
    chunk_factors,
    chunk_map,
    l2_normalize,
    scan,
    step,
)


def random_tokens(
    rows: int, heads: int, length: int, keys: int, values: int, seed: int = 0
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q = l2_normalize(normal(rows, heads, length, keys)) * keys**-0.5
    k = l2_normalize(normal(rows, heads, length, keys))
    v = normal(rows, heads, length, values)
    g = -0.05 * torch.rand(rows, heads, length, generator=generator)
    beta = torch.rand(rows, heads, length, generator=generator)
    return q, k, v, g, beta


@pytest.mark.parametrize("length", [1, 2, 3, 4, 17, 48, 63, 64])
@pytest.mark.parametrize(("keys", "values"), [(16, 24), (24, 8), (5, 7)])
def test_a_chunk_equals_its_tokens(length: int, keys: int, values: int) -> None:
    tokens = random_tokens(2, 3, length, keys, values)
    before = torch.randn(2, 3, keys, values)
    expected, after = scan(*tokens, before)
    state, out = before.clone(), torch.empty_like(expected)
    factors = chunk_factors(*tokens)
    advance_(factors, state, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=0, atol=1e-5)
    torch.testing.assert_close(chunk_map(factors).apply(before), after, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 64])
def test_further_columns_carry_the_transition(length: int) -> None:
    keys, values = 12, 20
    q, k, v, g, beta = random_tokens(2, 3, length, keys, values)
    eye = torch.eye(keys).expand(2, 3, keys, keys)
    _, transition = scan(q, k, torch.zeros(2, 3, length, keys), g, beta, eye)
    before = torch.randn(2, 3, keys, values)
    columns = torch.cat((before, eye), dim=-1).contiguous()
    out = torch.empty(2, 3, length, values)
    advance_(chunk_factors(q, k, v, g, beta), columns, out)
    expected, after = scan(q, k, v, g, beta, before)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(columns[..., :values], after, rtol=0, atol=1e-5)
    torch.testing.assert_close(columns[..., values:], transition, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows_at_once", [1, 2, 99])
def test_a_step_is_one_token(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta_rule, "_STEP_BYTES", rows_at_once * 3 * 12 * 20 * 4)
    q, k, v, g, beta = random_tokens(5, 3, 4, 12, 20)
    before = torch.randn(5, 3, 12, 20)
    expected, after = scan(q, k, v, g, beta, before)
    state, outputs = before.clone(), []
    for t in range(4):
        given = state.clone()
        out, following = step(q[:, :, t], k[:, :, t], v[:, :, t], g[:, :, t], beta[:, :, t], state)
        assert torch.equal(state, given)
        state = following
        outputs.append(out)
    torch.testing.assert_close(torch.stack(outputs, -2), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=0, atol=1e-5)


def test_padding_changes_nothing() -> None:
    tokens = random_tokens(1, 2, 8, 6, 9)
    padded = [part.clone() for part in tokens]
    padded[3][..., 5:] = 0
    padded[4][..., 5:] = 0
    before = torch.randn(1, 2, 6, 9)
    state, out = before.clone(), torch.empty(1, 2, 8, 9)
    advance_(chunk_factors(*padded), state, out)
    expected, after = scan(*(part[:, :, :5] for part in tokens), before)
    torch.testing.assert_close(out[:, :, :5], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=0, atol=1e-5)


def test_identical_keys_at_full_strength() -> None:
    """The hardest triangular system: every key the same, every write at full strength."""
    q, k, v, g, beta = random_tokens(1, 1, 64, 16, 8)
    k = k[:, :, :1].expand_as(k).contiguous()
    beta = torch.ones_like(beta)
    before = torch.randn(1, 1, 16, 8)
    expected, after = scan(q, k, v, g, beta, before)
    state, out = before.clone(), torch.empty_like(expected)
    advance_(chunk_factors(q, k, v, g, beta), state, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(state, after, rtol=0, atol=1e-4)
