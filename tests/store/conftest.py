from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypic_rag.store import SegmentStore, StoreSettings

DIMENSION = 8


@pytest.fixture
def settings() -> StoreSettings:
    return StoreSettings(
        dimension=DIMENSION, conditioning="You answer from documents.", model="some/model"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kb"


@pytest.fixture
def store(folder: Path, settings: StoreSettings) -> Iterator[SegmentStore]:
    with SegmentStore.create(folder, settings) as made:
        yield made
