"""The default mode as it's served: segments in the order that retrieval gives, against its goals.

The ablation's contexts and questions; for every question the context's chunks are ranked by the
library's own retriever, all of them are put into the prompt best first, and every row is compared
with full recompute of that order::

    python -m hypic_rag.evaluation.retrieved --out results --shard 0/2
    python -m hypic_rag.evaluation.retrieved --out results --report

Results stand beside the ablation's, in the same form.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.engine import load_model
from hypic_rag.engine.repair import Repairs, choose_repairs
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.ablation_tables import complete, goals_table, write_json
from hypic_rag.evaluation.cells import (
    Cell,
    Conditioner,
    Encodings,
    reference_outcomes,
    run_cell,
)
from hypic_rag.evaluation.orders import Order, one_question_each, per_trial, states_in_order
from hypic_rag.evaluation.runs import (
    Found,
    Record,
    parse_categories,
    parse_shard,
    read_records,
    run_missing,
)
from hypic_rag.evaluation.summary import Row, summarize
from hypic_rag.evaluation.trials import Trial, TrialMaker
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.chunking import SEPARATOR
from hypic_rag.ingest.embedder import Embedder, MiniLmEmbedder
from hypic_rag.retrieval import Retriever
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState
from hypic_rag.store import ChunkRecord, DocumentRecord, SegmentStore, StoreSettings

__all__ = [
    "PREFIX",
    "SETTINGS",
    "Setting",
    "retrieval_orders",
    "run",
]

PREFIX = "retrieved/"
"""What names of these cells begin with."""
_FULL = PREFIX + "full"
BUDGETS = (0, 32, 128)


@dataclass(frozen=True)
class Setting:
    """The default seam behind a prefix, and a budget of repairs.

    Attributes:
        conditioning: a name of :data:`CONDITIONINGS`; what's served is the context's own prompt.
        repair_tokens: as in :meth:`KnowledgeBase.ask`.
    """

    conditioning: str
    repair_tokens: int = 0

    @property
    def cell(self) -> Cell:
        """The cell of the ablation that it is but for repairs."""
        return Cell(self.conditioning, Mode.SEAM, Seam())

    @property
    def name(self) -> str:
        """Unique name, such as ``served/seam/4/0`` or ``served/seam/4/0 + 32``."""
        return self.cell.name + (f" + {self.repair_tokens}" if self.repair_tokens else "")

    def repairs(self, segments: Sequence[Segment]) -> Repairs:
        """What's recomputed of ``segments``, which stand best first."""
        ranks = [-float(place) for place in range(len(segments))]
        exact = (0,) if self.conditioning == "served" else ()
        return choose_repairs(segments, Seam(), ranks, self.repair_tokens, exact)


SETTINGS = (
    *(Setting("served", budget) for budget in BUDGETS),
    *map(Setting, ("served+6", "other", "other+6")),
)


def retrieval_orders(trials: Iterable[Trial], embedder: Embedder) -> Order:
    """The library's retrieval over each trial's own chunks, all of them, best first."""
    found: dict[tuple[int, str], list[int]] = {}
    for trial in trials:
        with tempfile.TemporaryDirectory() as scratch, _index(trial, scratch, embedder) as store:
            retriever = Retriever(store, embedder)
            for asked in trial.asked:
                sources = retriever.retrieve(asked.text, top_k=len(trial.segments))
                found[trial.seed, asked.category] = [source.chunk for source in sources]
    return lambda trial, asked: found[trial.seed, asked.category]


def _index(trial: Trial, scratch: str, embedder: Embedder) -> SegmentStore:
    """A store of a trial's chunks with their vectors, without states."""
    store = SegmentStore.create(Path(scratch) / "kb", StoreSettings(dimension=embedder.dimension))
    texts = [segment.text.removesuffix(SEPARATOR) for segment in trial.segments]
    document = DocumentRecord(
        source="context",
        title="",
        content_sha256="0" * 64,
        bytes=sum(map(len, texts)),
        mtime_ns=0,
        media_type="text/plain",
    )
    rows = zip(texts, trial.segments, embedder.embed(texts), strict=True)
    store.put_document(document, [ChunkRecord(text, s.token_ids, v) for text, s, v in rows])
    return store


def run(
    model: HybridModel,
    folder: Path,
    *,
    contexts: int,
    sizes: Sequence[int] = (4, 8, 16),
    shard: tuple[int, int] = (0, 1),
    unit: int = 4,
    words: tuple[int, int] = (30, 110),
    settings: Sequence[Setting] = SETTINGS,
    categories: Sequence[facts.Category] = facts.CATEGORIES,
    embedder: Embedder | None = None,
) -> None:
    """Run what's missing and append it to this shard's file.

    Args:
        model: the model, with its tokenizer.
        folder: where results go.
        contexts: per size; each has one question of every category.
        sizes: numbers of chunks.
        shard: this process's number and how many there are.
        unit: contexts at once, at 8 chunks.
        words: shortest and longest chunk in words.
        settings: prefixes and budgets.
        categories: of the questions.
        embedder: of the retrieval; by default the one that ships.
    """
    maker = TrialMaker(model, words, categories=categories)
    conditioner = Conditioner(maker)
    embedder = embedder or MiniLmEmbedder()
    by_name = {PREFIX + setting.name: setting for setting in settings}

    def measure(trials: list[Trial], names: list[str]) -> Found:
        order = retrieval_orders(trials, embedder)
        moved = one_question_each(maker, trials, order)
        encoded: dict[str, list[tuple[SegmentState | None, ...]]] = {}
        if _FULL in names:
            yield _FULL, per_trial(trials, map(reference_outcomes, moved))
        for name in names:
            if name == _FULL:
                continue
            setting = by_name[name]
            if setting.conditioning not in encoded:
                bases = [conditioner.behind(setting.conditioning, trial) for trial in trials]
                states = Encodings(model, trials, bases, [Seam()]).states(Seam())
                encoded[setting.conditioning] = states
            held = states_in_order(trials, encoded[setting.conditioning], order)
            repairs = [setting.repairs(one.segments) for one in moved]
            found = run_cell(model, moved, held, setting.cell.mode, repairs)
            yield name, per_trial(trials, found)

    for chunks in sizes:
        run_missing(
            maker,
            folder,
            [_FULL, *by_name],
            measure,
            chunks=chunks,
            contexts=contexts,
            shard=shard,
            unit=max(1, unit * 8 // chunks),
        )


def retrieved_rows(model: HybridModel, folder: Path) -> list[Row]:
    """Rows of what was measured here, beside full recompute of the same order."""
    records = read_records(folder, model).values()
    mine: list[Record] = [
        replace(record, cell=record.cell.removeprefix(PREFIX))
        for record in records
        if record.cell.startswith(PREFIX)
    ]
    return complete(summarize(mine))


def to_markdown(rows: Sequence[Row]) -> str:
    """Per way of encoding the table against the goals."""
    parts = []
    for name in dict.fromkeys(row.cell for row in rows if row.cell != "full"):
        parts.append(f"### {name}\n\n{goals_table(rows, name)}\n")
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", default="small", help="name or folder of the model")
    parser.add_argument("--contexts", type=int, default=500)
    parser.add_argument("--chunks", type=int, nargs="*", default=(4, 8, 16))
    parser.add_argument(
        "--behind",
        choices=list(dict.fromkeys(setting.conditioning for setting in SETTINGS)),
        nargs="*",
        help="prefixes that segments are encoded behind; default: all",
    )
    parser.add_argument(
        "--categories",
        type=parse_categories,
        default=facts.CATEGORIES,
        help="of the questions, such as one_fact,no_answer; default: all",
    )
    parser.add_argument("--shard", type=parse_shard, default=(0, 1), help="NUMBER/COUNT")
    parser.add_argument("--report", action="store_true", help="print the tables instead")
    parser.add_argument("--json", type=Path, help="with a report: also write all rows here")
    chosen = parser.parse_args(arguments)
    model = load_model(chosen.model)
    if not chosen.report:
        run(
            model,
            chosen.out,
            contexts=chosen.contexts,
            sizes=chosen.chunks,
            shard=chosen.shard,
            settings=[
                setting
                for setting in SETTINGS
                if chosen.behind is None or setting.conditioning in chosen.behind
            ],
            categories=chosen.categories,
        )
        return
    rows = retrieved_rows(model, chosen.out)
    if not rows:
        parser.error(f"{chosen.out} holds no results of this model: run it without --report first.")
    sys.stdout.write(to_markdown(rows))
    if chosen.json:
        write_json(rows, chosen.json)


if __name__ == "__main__":
    main()
