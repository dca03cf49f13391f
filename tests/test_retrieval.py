"""Retrieval: what's found for a question, and what its best passages lead to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from demos.check_retrieval import index, missed
from hypic_rag.answers import Source
from hypic_rag.families.model import HybridModel
from hypic_rag.following import statements
from hypic_rag.ingest.embedder import MiniLmEmbedder
from hypic_rag.retrieval import Retriever
from hypic_rag.store import Filter

DEMOS = Path(__file__).parent.parent / "demos"
FILLER = (
    "The bread was warm in the morning.",
    "On Friday the hall stays closed.",
    "Rain fell on the roofs for three days.",
    "A cart brought apples and rope.",
    "Nobody remembers who painted the door.",
    "The clock strikes every quarter of an hour.",
)

AddFolder = Callable[[Path], Retriever]
AddTexts = Callable[[Mapping[str, str]], Retriever]


@pytest.fixture(scope="module")
def add_folder(
    tmp_path_factory: pytest.TempPathFactory, small_model: HybridModel, embedder: MiniLmEmbedder
) -> Iterator[AddFolder]:
    """Stores with the chunks and vectors of a folder's files, but without states."""
    stores = []

    def add(folder: Path) -> Retriever:
        place = tmp_path_factory.mktemp("retrieval") / "store"
        stores.append(index(folder, place, small_model, embedder))
        return Retriever(stores[-1], embedder)

    yield add
    for store in stores:
        store.close()


@pytest.fixture
def add_texts(tmp_path: Path, add_folder: AddFolder) -> AddTexts:
    """As ``add_folder``, for texts by file name, among twelve that have nothing to do with them."""

    def add(texts: Mapping[str, str]) -> Retriever:
        folder = tmp_path / "texts"
        folder.mkdir()
        for number in range(12):
            lines = [FILLER[(number + i) % len(FILLER)] for i in range(3)]
            (folder / f"filler{number}.txt").write_text(" ".join(lines), "utf-8")
        for name, text in texts.items():
            (folder / name).write_text(text, "utf-8")
        return add_folder(folder)

    return add


def names(sources: list[Source]) -> list[str]:
    return [source.document for source in sources]


def test_five_chunks_hold_what_the_bundled_questions_need(add_folder: AddFolder) -> None:
    retriever = add_folder(DEMOS / "documents")
    questions = json.loads((DEMOS / "questions.json").read_text("utf-8"))
    asked = [question for question in questions if question["document"]]
    assert len(asked) >= 90
    lost = missed(retriever, asked)
    assert len(lost) <= 0.01 * len(asked), lost


def test_a_name_leads_on_from_prose(add_texts: AddTexts) -> None:
    retriever = add_texts(
        {
            "mill.md": "# The mill of Odo Brask\n\nIt stands in Ferrowick. Flour is sold.",
            "town.md": "# A walk round the green town\n\nIn the valley lies Ferrowick, "
            "whose mayor is Una Tarn. The inn is old.",
            "other.md": "# Dunmere\n\nThe mayor of Dunmere is Per Holt. The inn is new.",
            "third.md": "# Ashby\n\nThe mayor of Ashby is Ida Lund. The inn is shut.",
        }
    )
    found = retriever.retrieve("Who is mayor of the place where the mill of Odo Brask stands?", 3)
    assert names(found)[0] == "mill.md"
    assert "town.md" in names(found)
    scores = [source.score for source in found]
    assert scores == sorted(scores, reverse=True)
    assert len({source.id for source in found}) == 3


def test_a_name_leads_on_from_the_right_record(add_texts: AddTexts) -> None:
    rows = [("Amber", "Norwell"), ("Birch", "Selkirk"), ("Cedar", "Quillan"), ("Damson", "Orsova")]
    ships = "name,home port\n" + "\n".join(f"{ship},{port}" for ship, port in rows)
    towns = {
        f"{port.lower()}.md": f"# {port}\n\nThrough {port} runs the river {port[:3]}a."
        for _, port in rows
    }
    retriever = add_texts({"ships.csv": ships, **towns})
    for ship, port in rows:
        asked = f"On which river lies the home port of the ship {ship}?"
        assert {"ships.csv", f"{port.lower()}.md"} <= set(names(retriever.retrieve(asked, 3)))


def test_filters_hold_for_what_names_lead_to(add_texts: AddTexts) -> None:
    retriever = add_texts(
        {
            "mill.md": "# The mill of Odo Brask\n\nIt stands in Ferrowick.",
            "town.md": "# Ferrowick\n\nThe mayor of Ferrowick is Una Tarn.",
        }
    )
    asked = "Who is mayor of the place where the mill of Odo Brask stands?"
    assert set(names(retriever.retrieve(asked, 3))) >= {"mill.md", "town.md"}
    only = Filter("source", "ne", "town.md")
    assert "town.md" not in names(retriever.retrieve(asked, 12, only))


def test_statements() -> None:
    passage = (
        "Title > Part\n\nIt rained. Dr. Lund stayed.\n\nname: Amber\nport: Norwell\n\n"
        "name: Amber; port: Norwell\nname: Birch; port: Selkirk"
    )
    assert [text.strip() for text in statements(passage)] == [
        "Title > Part",
        "It rained.",
        "Dr. Lund stayed.",
        "name: Amber\nport: Norwell",
        "name: Amber; port: Norwell",
        "name: Birch; port: Selkirk",
    ]
