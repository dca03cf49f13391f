"""A store whose states are compressed on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import VOCAB, tiny_model
from safetensors import safe_open

from hypic_rag.config import STATE_PRECISIONS, Seam
from hypic_rag.engine.encode import encode_segments
from hypic_rag.errors import ConfigError
from hypic_rag.segments import Segment, SegmentKey
from hypic_rag.states import SegmentState
from hypic_rag.store import SegmentStore, StoreSettings
from hypic_rag.store.compression import LEVELS, LayerBound, measured_errors


def sample() -> tuple[SegmentKey, SegmentState]:
    generator = torch.Generator().manual_seed(2)
    ids = tuple(torch.randint(0, VOCAB, (90,), generator=generator).tolist())
    state = encode_segments(tiny_model("qwen3_5"), [Segment(ids)], Seam())[0]
    assert state is not None
    return SegmentKey("model", "tokenizer", "", Seam(), ids), state


def test_names_are_the_levels() -> None:
    assert tuple(LEVELS) == STATE_PRECISIONS
    with pytest.raises(ConfigError, match="state precision 'tiny'"):
        StoreSettings(dimension=4, state_precision="tiny")
    older = StoreSettings(dimension=4).to_json()
    del older["state_precision"]
    assert StoreSettings.from_json(older).state_precision == "exact"


@pytest.mark.parametrize("precision", STATE_PRECISIONS)
def test_states_come_back_within_the_bounds_in_their_file(precision: str, tmp_path: Path) -> None:
    key, state = sample()
    settings = StoreSettings(dimension=4, state_precision=precision)
    with SegmentStore.create(tmp_path / "kb", settings) as store:
        store.save_state(key, state)
    with SegmentStore.open(tmp_path / "kb") as store:
        assert store.settings == settings
        loaded = store.load_state(key)
        assert store.repair().problems == ()
        assert loaded is not None
        (path,) = (tmp_path / "kb" / "states").rglob("*.safetensors")
        with safe_open(path, framework="pt") as file:
            (text,) = file.metadata().values()
        bounds = json.loads(text)["state"].get("bounds")
    assert loaded.metadata() == state.metadata()
    errors = measured_errors(state, loaded)
    if precision == "exact":
        assert bounds is None
        assert all(error == LayerBound() for error in errors)
        return
    assert path.stat().st_size < 0.9 * state.nbytes  # with all its descriptions
    for error, bound in zip(errors, bounds, strict=True):
        assert error != LayerBound() or not any(bound.values())
        for name, most in bound.items():
            assert getattr(error, name) <= most + 1e-12
