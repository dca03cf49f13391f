"""The algebra of affine maps, on random operators with K != V."""

from __future__ import annotations

import pytest
import torch

from hypic_rag.config import Seam
from hypic_rag.errors import ConfigError, StateMismatchError
from hypic_rag.operators import AffineMap, Dense, Elementwise, Transition, compose, identity_like
from hypic_rag.states import AttentionState, LinearState, SegmentState

H, K, V = 3, 5, 7


def transition(kind: str, generator: torch.Generator) -> Transition:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if kind == "dense":
        return Dense(draw(H, K, K))
    return Elementwise(draw(H, 1, 1) if kind == "scalar" else draw(H, K, 1))


def maps(kinds: list[str], seed: int = 0) -> list[AffineMap]:
    generator = torch.Generator().manual_seed(seed)
    return [
        AffineMap(
            transition(kind, generator),
            torch.randn(H, K, V, generator=generator, dtype=torch.float64),
        )
        for kind in kinds
    ]


KINDS = ["dense", "scalar", "diagonal"]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_composition_is_application(first: str, second: str) -> None:
    one, two = maps([first, second])
    h = torch.randn(H, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(two.after(one).apply(h), two.apply(one.apply(h)))
    assert not torch.allclose(two.after(one).apply(h), one.after(two).apply(h))


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1], ["diagonal", "dense", "scalar"]])
def test_composition_is_associative(kinds: list[str]) -> None:
    a, b, c = maps(kinds)
    left, right = c.after(b.after(a)), c.after(b).after(a)
    torch.testing.assert_close(left.offset, right.offset)
    h = torch.randn(H, K, V, dtype=torch.float64)
    torch.testing.assert_close(left.apply(h), right.apply(h))
    torch.testing.assert_close(compose([a, b, c]).apply(h), left.apply(h))


def test_identity() -> None:
    h = torch.randn(H, K, V)
    torch.testing.assert_close(identity_like(h).apply(h), h)


def test_composing_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        compose([])


def segment_state() -> SegmentState:
    one, two = maps(["dense", "diagonal"])
    return SegmentState(
        length=9,
        seam=Seam(2, 1),
        offset=5,
        layers=(
            LinearState(one, torch.randn(4, 3)),
            AttentionState(torch.randn(2, 6, 8), torch.randn(2, 6, 8)),
            LinearState(two, torch.randn(4, 3)),
        ),
    )


def test_states_survive_a_round_trip() -> None:
    state = segment_state()
    again = SegmentState.from_tensors(state.to_tensors(), state.metadata())
    assert (again.length, again.seam, again.offset) == (9, Seam(2, 1), 5)
    assert again.interior == (2, 8)
    assert again.nbytes == state.nbytes > 0
    for name, tensor in state.to_tensors().items():
        torch.testing.assert_close(again.to_tensors()[name], tensor)


@pytest.mark.parametrize("missing", ["1.keys", "0.matrix", "2.conv_tail", "2.factor"])
def test_states_with_missing_parts_are_refused(missing: str) -> None:
    state = segment_state()
    tensors = {name: t for name, t in state.to_tensors().items() if name != missing}
    with pytest.raises(StateMismatchError, match="encode the segment again"):
        SegmentState.from_tensors(tensors, state.metadata())


def test_states_with_missing_or_surplus_layers_are_refused() -> None:
    state = segment_state()
    tensors = {name: t for name, t in state.to_tensors().items() if not name.startswith("1.")}
    with pytest.raises(StateMismatchError, match="layers 0 to 2"):
        SegmentState.from_tensors(tensors, state.metadata())
    with pytest.raises(StateMismatchError, match="layers 0 to 1"):
        SegmentState.from_tensors(state.to_tensors(), {**state.metadata(), "layers": "2"})
    with pytest.raises(StateMismatchError, match="incomplete"):
        SegmentState.from_tensors(state.to_tensors(), {})
