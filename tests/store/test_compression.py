"""Compressed states: the measured error never exceeds the recorded bound."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from models import VOCAB, tiny_model

from hypic_rag.config import Seam
from hypic_rag.engine.encode import encode_segments
from hypic_rag.errors import ConfigError, StateMismatchError
from hypic_rag.operators import AffineMap, Dense, Elementwise
from hypic_rag.segments import Segment
from hypic_rag.states import AttentionState, LinearState, SegmentState
from hypic_rag.store.compression import LEVELS, Precision, compress, measured_errors

FORMATS = [
    *LEVELS.values(),
    Precision(0.0, "float8"),
    Precision(0.01, "float32", "int8"),
    Precision(1.0, "float8", "int8"),
]


def encoded(length: int, seed: int = 3) -> SegmentState:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
    state = encode_segments(tiny_model("qwen3_5"), [Segment(ids)], Seam(4, 1))[0]
    assert state is not None
    return state


def hard_state(dtype: torch.dtype = torch.float32) -> SegmentState:
    """Transitions that decay, that hardly change anything, and that are neither; wild values."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads, size, width = 7, 12, 20
    eye = torch.eye(size)
    matrix = torch.stack(
        [
            1e-3 * draw(size, size),
            0.9 * (eye - 0.5 * torch.outer(eye[0], eye[0])),
            eye,
            torch.linalg.qr(draw(size, size))[0],
            torch.zeros(size, size),
            0.97 * eye - 0.05 * draw(size, 2) @ draw(2, size),
            0.2 * draw(size, 1) @ draw(1, size),
        ]
    )
    offset = draw(heads, size, width) * torch.logspace(-6, 3, size).unsqueeze(-1)
    linear = LinearState(AffineMap(Dense(matrix), offset), draw(9, 3).to(dtype))
    keys = (draw(2, 15, 8) * torch.logspace(-3, 2, 8)).to(dtype)
    attention = AttentionState(keys, draw(2, 15, 8).to(dtype))
    scalar = LinearState(
        AffineMap(Elementwise(draw(heads, 1, 1)), draw(heads, size, width)), draw(9, 3).to(dtype)
    )
    return SegmentState(20, Seam(4, 1), 7, (linear, attention, scalar))


@pytest.mark.parametrize("precision", FORMATS, ids=str)
@pytest.mark.parametrize("kind", ["encoded", "hard", "hard bfloat16"])
def test_errors_stay_within_their_bounds(precision: Precision, kind: str) -> None:
    state = encoded(90) if kind == "encoded" else hard_state()
    if kind == "hard bfloat16":
        state = hard_state(torch.bfloat16)
    packed = compress(state, precision)
    expanded = packed.expand()
    assert expanded.metadata() == state.metadata()
    assert {n: (t.shape, t.dtype) for n, t in expanded.to_tensors().items()} == {
        n: (t.shape, t.dtype) for n, t in state.to_tensors().items()
    }
    generator = torch.Generator().manual_seed(2)
    errors = measured_errors(state, expanded)
    for layer, other, bound, error in zip(
        state.layers, expanded.layers, packed.bounds, errors, strict=True
    ):
        for name in ("transition", "offset", "keys", "values"):
            assert getattr(error, name) <= getattr(bound, name) + 1e-12, name
        if isinstance(layer, LinearState):
            h = torch.randn(layer.map.offset.shape, generator=generator)
            off = (other.map.apply(h) - layer.map.apply(h)).norm()
            size = h.norm() * (1 + 1e-5)
            assert off <= bound.transition * size + bound.offset + 1e-3 * layer.map.offset.norm()


def test_bounds_are_no_looser_than_they_need_be() -> None:
    """A bound that's far above every error would prove nothing."""
    state = encoded(90)
    for precision in (LEVELS["half"], LEVELS["low rank"], LEVELS["compact"]):
        packed = compress(state, precision)
        errors = measured_errors(state, packed.expand())
        for name in ("transition", "offset"):
            bound = max(getattr(bound, name) for bound in packed.bounds)
            error = max(getattr(error, name) for error in errors)
            assert error <= bound < 40 * error, (precision, name)


def test_exact_is_exact_and_levels_shrink() -> None:
    state = encoded(300)
    exact = compress(state, LEVELS["exact"])
    for name, tensor in exact.expand().to_tensors().items():
        assert torch.equal(tensor, state.to_tensors()[name])
    assert all(dataclasses.astuple(bound) == (0.0, 0.0, 0.0, 0.0) for bound in exact.bounds)
    sizes = [compress(state, precision).nbytes for precision in LEVELS.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.35 * sizes[0]


def test_wrong_settings_and_torn_states_are_refused() -> None:
    for wrong in ({"tolerance": -0.1}, {"operators": "int3"}, {"kv": "float1"}):
        with pytest.raises(ConfigError):
            Precision(**wrong)  # type: ignore[arg-type]
    packed = compress(encoded(40), LEVELS["compact"])
    torn = {name: tensor for name, tensor in packed.tensors.items() if name != "0.gamma"}
    with pytest.raises(StateMismatchError, match="lacks a part"):
        dataclasses.replace(packed, tensors=torn).expand()
