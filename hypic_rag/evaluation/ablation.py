"""The ablation on generated questions: modes, seams and conditioning against full recompute.

Every context has one question of each category; results are appended to a file per process, so a
run that was stopped goes on where it was, and several processes share the work::

    python -m hypic_rag.evaluation.ablation all --out results                 # run and report
    python -m hypic_rag.evaluation.ablation run --out results --shard 1/2     # in parallel
    python -m hypic_rag.evaluation.ablation report --out results --json rows.json --svg charts
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.engine import load_model
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.ablation_tables import (
    PAPER,
    by_place,
    categories_table,
    complete,
    goals_table,
    modes_table,
    places_table,
    prefixes_chart,
    prefixes_table,
    seams_chart,
    seams_table,
    write_json,
)
from hypic_rag.evaluation.cells import (
    Cell,
    Conditioner,
    Encodings,
    run_cell,
    without_transition,
)
from hypic_rag.evaluation.runs import Found, Records, parse_shard, read_records, run_missing
from hypic_rag.evaluation.summary import Row, summarize
from hypic_rag.evaluation.trials import Trial, TrialMaker
from hypic_rag.families.model import HybridModel

__all__ = ["STAGES", "Stage", "ablation_records", "report", "run"]

WIDTHS = (0, 2, 4, 8, 16, 32)
DEFAULT = Seam()


@dataclass(frozen=True)
class Stage:
    """Cells that are run together, at one number of chunks, on questions of some categories."""

    name: str
    chunks: int
    cells: tuple[Cell, ...]
    categories: tuple[facts.Category, ...] = facts.CATEGORIES


def _modes(conditioning: str, *, parts: bool) -> tuple[Cell, ...]:
    """The naive mode and two seams; with ``parts`` also what lies between them, one by one."""
    between = (
        Cell(conditioning, Mode.TRANSITION),
        Cell(conditioning, Mode.TRANSITION_ROPE),
    )
    return (
        Cell(conditioning, Mode.ADDITION),
        *(between if parts else ()),
        Cell(conditioning, Mode.SEAM, DEFAULT),
        Cell(conditioning, Mode.SEAM, PAPER),
    )


def _default(*conditionings: str) -> tuple[Cell, ...]:
    return tuple(Cell(name, Mode.SEAM, DEFAULT) for name in conditionings)


def _sweep(conditioning: str) -> tuple[Cell, ...]:
    """Every width of a head with every width of a tail."""
    return tuple(
        Cell(conditioning, Mode.SEAM, Seam(head, tail)) for head in WIDTHS for tail in WIDTHS
    )


def _diagonal(conditioning: str) -> tuple[Cell, ...]:
    """Heads without tails, and both alike."""
    seams = {Seam(width, tail) for width in WIDTHS for tail in (0, width)}
    return tuple(Cell(conditioning, Mode.SEAM, seam) for seam in sorted(seams))


MODES = (*_modes("other", parts=True), *_modes("none", parts=False))
ADDED_ROPE = Cell("other", Mode.TRANSITION_ROPE, identity=True)
STAGES = (
    Stage("modes", 16, MODES),
    Stage("conditioning", 8, _default("served", "document", "other+6", "previous")),
    Stage("modes", 4, MODES),
    Stage("modes", 8, (*MODES, ADDED_ROPE, *_modes("none", parts=True))),
    Stage("seams", 8, _sweep("other")),
    Stage("conditioning", 16, _default("served", "document", "other+6")),
    Stage("conditioning", 4, _default("served", "document", "other+6")),
    Stage("seams", 16, _sweep("other")),
    Stage("seams", 4, _sweep("other")),
    Stage("more prefixes", 8, _default("newline", "other+2", "previous3")),
    Stage("isolated seams", 8, _diagonal("none"), ("one_fact",)),
)
"""Everything, the most telling first."""


def run(
    model: HybridModel,
    folder: Path,
    *,
    contexts: int = 500,
    stages: Iterable[Stage] = STAGES,
    shard: tuple[int, int] = (0, 1),
    unit: int = 6,
    words: tuple[int, int] = (30, 110),
) -> None:
    """Run what's missing of ``stages`` and append it to this shard's file.

    Args:
        model: the model, with its tokenizer.
        folder: where results go; made if it isn't there.
        contexts: per stage; each has one question of every category.
        stages: what to run, in order.
        shard: this process's number and how many there are.
        unit: contexts at once, at 8 chunks.
        words: shortest and longest chunk in words.
    """
    for stage in stages:
        maker = TrialMaker(model, words, categories=stage.categories)
        conditioner = Conditioner(maker)
        cells = {cell.name: cell for cell in stage.cells}
        began = time.monotonic()

        def measure(
            trials: list[Trial],
            names: list[str],
            conditioner: Conditioner = conditioner,
            cells: dict[str, Cell] = cells,
        ) -> Found:
            return _measure(conditioner, trials, [cells[name] for name in names])

        run_missing(
            maker,
            folder,
            list(cells),
            measure,
            chunks=stage.chunks,
            contexts=contexts,
            shard=shard,
            unit=max(1, unit * 8 // stage.chunks),
        )
        took = time.monotonic() - began
        print(f"{stage.name}, {stage.chunks} chunks: {took:.0f} s", flush=True)


def _measure(conditioner: Conditioner, trials: list[Trial], cells: list[Cell]) -> Found:
    """Outcomes of ``cells``; those with one conditioning share their encodings."""
    model = conditioner.model
    for conditioning in dict.fromkeys(cell.conditioning for cell in cells):
        mine = [cell for cell in cells if cell.conditioning == conditioning]
        bases = [conditioner.behind(conditioning, trial) for trial in trials]
        encodings = Encodings(model, trials, bases, [cell.seam for cell in mine])
        for cell in mine:
            states = encodings.states(cell.seam)
            if cell.identity:
                states = [tuple(map(without_transition, held)) for held in states]
            yield cell.name, run_cell(model, trials, states, cell.mode)


# --------------------------------------------------------------------------------------------
# Report
# --------------------------------------------------------------------------------------------


def ablation_records(model: HybridModel, folder: Path) -> Records:
    """Records of the ablation's own cells; other measurements may share the folder."""
    records = read_records(folder, model)
    return {
        key: record
        for key, record in records.items()
        if not record.cell.startswith(("idea/", "precision/", "retrieved/"))
    }


def needed_chunks(
    model: HybridModel, contexts: int, chunks: int
) -> dict[tuple[int, facts.Category], int]:
    """Per context and category the chunk that the question needs, if it's one."""
    maker = TrialMaker(model)
    found = {}
    for seed in range(contexts):
        for question in maker.draw(seed, chunks)[1]:
            if len(question.fact_chunks) == 1:
                found[seed, question.category] = question.fact_chunks[0]
    return found


def report(model: HybridModel, records: Records, rows: Sequence[Row]) -> str:
    """All tables there are of ``rows``, as Markdown."""
    sizes = sorted({row.chunks for row in rows})
    parts = [("Goals", goals_table(rows))]
    for chunks in sizes:
        parts.append((f"Modes, {chunks} chunks, all categories", modes_table(rows, chunks)))
        cells = [cell.name for cell in MODES]
        body = categories_table(rows, chunks, ["full", *cells])
        parts.append((f"Modes, {chunks} chunks: exact match, %; KL, 1e-3", body))
    parts.append(("Prefixes", prefixes_table(rows, records)))
    for chunks in sizes:
        for name, category in (
            ("other", "all"), ("other", "one_fact"), ("other", "first_sentence"),
            ("none", "one_fact"),
        ):  # fmt: skip
            body = seams_table(rows, chunks, category, name)
            kind = category.replace("_", " ")
            parts.append((f"Seams, {chunks} chunks, behind {name}, {kind}: KL, 1e-3", body))
    contexts = 1 + max((seed for _, _, seed in records), default=-1)
    places = {
        chunks: by_place(records, chunks, needed_chunks(model, contexts, chunks))
        for chunks in sizes
    }
    parts.append(("Places", places_table(places)))
    return "\n".join(f"### {title}\n\n{body}\n" for title, body in parts if body)


# --------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------


def _stages(text: str | None) -> list[Stage]:
    """Stages named like ``modes:8,seams:8``; a bare name takes every number of chunks."""
    if text is None:
        return list(STAGES)
    chosen = []
    for part in text.split(","):
        name, _, chunks = part.partition(":")
        found = [s for s in STAGES if s.name == name and chunks in ("", str(s.chunks))]
        if not found:
            known = ", ".join(f"{s.name}:{s.chunks}" for s in STAGES)
            raise ConfigError(f"Unknown stage {part!r}: expected some of {known}.")
        chosen += found
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "report", "all"), help="'all' does both")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", default="small", help="name or folder of the model")
    parser.add_argument("--questions", type=int, default=500, help="per category and size")
    parser.add_argument("--stages", help="such as modes:8,seams; default all")
    parser.add_argument("--shard", type=parse_shard, default=(0, 1), help="NUMBER/COUNT")
    parser.add_argument("--json", type=Path, help="with a report: also write all rows here")
    parser.add_argument("--svg", type=Path, help="with a report: folder to draw charts into")
    chosen = parser.parse_args(arguments)
    model = load_model(chosen.model)
    if chosen.action != "report":
        run(
            model,
            chosen.out,
            contexts=chosen.questions,
            stages=_stages(chosen.stages),
            shard=chosen.shard,
        )
    if chosen.action == "run":
        return
    records = ablation_records(model, chosen.out)
    rows = complete(summarize(records.values()))
    sys.stdout.write(report(model, records, rows))
    if chosen.svg:
        chosen.svg.mkdir(parents=True, exist_ok=True)
        for name, drawing in (("seams", seams_chart(rows)), ("prefixes", prefixes_chart(rows))):
            (chosen.svg / f"{name}.svg").write_text(drawing + "\n", encoding="utf-8")
    if chosen.json:
        write_json(rows, chosen.json)


if __name__ == "__main__":
    main()
