"""How often five chunks hold every document that a question needs.

    python -m demos.check_retrieval                  # the bundled documents and questions
    python -m demos.check_retrieval --seeds 101 102  # other invented worlds

Documents are chunked and embedded as at ingestion; no states are made.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from demos.make_documents import make
from hypic_rag.engine.engine import load_model
from hypic_rag.engine.prompt import PromptFormat
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.chunking import split_document
from hypic_rag.ingest.embedder import Embedder, MiniLmEmbedder
from hypic_rag.ingest.readers import read_document
from hypic_rag.retrieval import Retriever
from hypic_rag.store import ChunkRecord, DocumentRecord, SegmentStore, StoreSettings

HERE = Path(__file__).parent


def index(
    folder: Path, place: Path, model: HybridModel, embedder: Embedder, chunk_tokens: int = 512
) -> SegmentStore:
    """A new store at ``place`` with the chunks and vectors of all files in ``folder``."""
    tokenize = PromptFormat(model).text
    store = SegmentStore.create(place, StoreSettings(dimension=embedder.dimension))
    for path in sorted(folder.iterdir()):
        document = read_document(path)
        chunks = split_document(document, tokenize, chunk_tokens)
        vectors = embedder.embed([chunk.text for chunk in chunks])
        record = DocumentRecord(
            source=path.name,
            title=document.title,
            content_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            bytes=path.stat().st_size,
            mtime_ns=0,
            media_type=document.media_type,
        )
        store.put_document(
            record,
            [
                ChunkRecord(chunk.text, chunk.token_ids, vector, heading=chunk.heading)
                for chunk, vector in zip(chunks, vectors, strict=True)
            ],
        )
    return store


def missed(
    retriever: Retriever, questions: Iterable[Mapping[str, Any]], top_k: int = 5
) -> list[str]:
    """Those of ``questions`` for which a document that they need isn't among ``top_k`` chunks."""
    return [
        question["question"]
        for question in questions
        if not set(question["document"])
        <= {source.document for source in retriever.retrieve(question["question"], top_k)}
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", help="worlds instead of the bundled one")
    parser.add_argument("--top-k", type=int, default=5)
    options = parser.parse_args()
    model, embedder = load_model("small", check=False), MiniLmEmbedder()
    for seed in options.seeds or [None]:
        with tempfile.TemporaryDirectory() as scratch:
            folder, questions = HERE / "documents", HERE / "questions.json"
            if seed is not None:
                folder = Path(scratch) / "documents"
                folder.mkdir()
                documents, asked = make(seed)
                for name, text in documents.items():
                    (folder / name).write_text(text, encoding="utf-8")
            else:
                asked = json.loads(questions.read_text(encoding="utf-8"))
            with index(folder, Path(scratch) / "store", model, embedder) as store:
                retriever = Retriever(store, embedder)
                for category in ("one_fact", "two_fact"):
                    of_kind = [item for item in asked if item["category"] == category]
                    lost = missed(retriever, of_kind, options.top_k)
                    found = len(of_kind) - len(lost)
                    print(f"{seed or 'bundled'}: {category} {found} of {len(of_kind)}", flush=True)
                    for question in lost:
                        print(f"  missed: {question}", flush=True)


if __name__ == "__main__":
    main()
