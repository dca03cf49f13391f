"""The demo: bundled documents, bundled questions, one table."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hypic_rag.answers import Answer
from hypic_rag.config import Sampling
from hypic_rag.engine.engine import load_model
from hypic_rag.errors import HypicError
from hypic_rag.knowledge_base import KnowledgeBase

__all__ = ["DemoRow", "demo_data", "run_demo"]

_QUESTIONS = 10
_TOP_K = 5


@dataclass(frozen=True)
class DemoRow:
    """One question of the demo and what came of it; seconds and tokens as in Answer."""

    question: str
    expected: str
    answer: str
    right: bool
    source: str
    reused: int
    computed: int
    ttft_s: float
    full_ttft_s: float
    same: bool


def demo_data() -> Path:
    """The folder with the demo's ``documents`` and ``questions.json``.

    In an installed wheel it's part of the package, in a checkout it's ``demos``.
    """
    package = Path(__file__).parent
    for folder in (package / "data" / "demo", package.parent / "demos"):
        if (folder / "questions.json").is_file():
            return folder
    raise HypicError("The demo's documents are missing: install the package again.")


def run_demo(store: Path | None = None, *, as_json: bool = False) -> bool:
    """Run the demo; tells whether every answer is right.

    Each question is asked twice: assembled from cached states, and recomputed in full by the
    library's own forward.
    """
    data = demo_data()
    questions = json.loads((data / "questions.json").read_text(encoding="utf-8"))[:_QUESTIONS]
    with tempfile.TemporaryDirectory() as scratch:
        folder = store or Path(scratch) / "store"
        with KnowledgeBase.open(folder, load_model()) as kb:
            report = kb.ingest(data / "documents")
            documents = len(report.added) + len(report.updated) + len(report.unchanged)
            print(
                f"{documents} documents, {report.tokens} tokens encoded in {report.seconds:.1f} s",
                file=sys.stderr,
            )
            kb.warm()
            for mode in ("seam", "full"):  # first calls allocate; the table is about the others
                kb.ask(questions[0]["question"], top_k=_TOP_K, mode=mode)
            rows = [_row(kb, question) for question in questions]
    right = all(row.right for row in rows) and not report.failed
    print(json.dumps([asdict(row) for row in rows], indent=2) if as_json else _table(rows))
    return right


def _row(kb: KnowledgeBase, item: dict[str, Any]) -> DemoRow:
    sampling = Sampling(max_tokens=64)
    answer = kb.ask(item["question"], top_k=_TOP_K, sampling=sampling)
    full = kb.ask(item["question"], top_k=_TOP_K, sampling=sampling, exact=True)
    return DemoRow(
        question=item["question"],
        expected=item["answer"],
        answer=answer.text,
        right=answer.text == item["answer"],
        source=_source(answer, item),
        reused=answer.tokens.reused,
        computed=answer.tokens.computed,
        ttft_s=answer.timings.ttft_s,
        full_ttft_s=full.timings.ttft_s,
        same=answer.text == full.text,
    )


def _source(answer: Answer, item: dict[str, Any]) -> str:
    """The retrieved document that holds the answer, else the best one."""
    named = item.get("document") or []
    wanted = {named} if isinstance(named, str) else set(named)
    found = [source.document for source in answer.sources]
    return next((name for name in found if name.rpartition("/")[2] in wanted), found[0])


def _table(rows: list[DemoRow]) -> str:
    """The rows as one table of plain text."""
    header = ("question", "answer", "right", "source", "reused", "computed", "TTFT", "full", "same")
    cells = [header]
    for row in rows:
        cells.append(
            (
                row.question,
                row.answer,
                "yes" if row.right else f"NO: {row.expected}",
                row.source,
                str(row.reused),
                str(row.computed),
                f"{row.ttft_s * 1000:.0f} ms",
                f"{row.full_ttft_s * 1000:.0f} ms",
                "yes" if row.same else "NO",
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    right = sum(row.right for row in rows)
    same = sum(row.same for row in rows)
    lines.append(
        f"{right} of {len(rows)} right; {same} of {len(rows)} the same as full recompute. "
        "TTFT: time to first token from cached states; full: the library's forward of the same "
        "prompt."
    )
    return "\n".join(line.rstrip() for line in lines)
