"""What all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hypic_rag.families.model import HybridModel
    from hypic_rag.ingest.embedder import MiniLmEmbedder

# Nothing may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The models are tiny: threads would wait for one another more than they'd compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def small_model() -> HybridModel:
    """The model that ships, loaded once."""
    from hypic_rag.engine.engine import load_model

    return load_model("small", check=False)


@pytest.fixture(scope="session")
def embedder() -> MiniLmEmbedder:
    """The default embedder, loaded once."""
    from hypic_rag.ingest.embedder import MiniLmEmbedder

    return MiniLmEmbedder()


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder with three documents of several formats."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "ferry.md").write_text(
        "# The ferry of Talmir\n\nThe ferry of Talmir leaves at nine. Its captain is Orla Venn.\n"
        "\n## Fares\n\nA ticket costs four crowns. Children travel free of charge.\n"
    )
    (folder / "mill.txt").write_text(
        "The mill of Dorvak stands by the river. It was built by Rudo Hessel in 1843.\n"
    )
    (folder / "prices.csv").write_text("item,price\nrope,12\nlantern,30\n")
    return folder
