"""The ablation on generated questions: modes, seams and conditioning against full recompute.

Every context has one question of each category; results are appended to a file per process, so a
run that was stopped goes on where it was, and several processes share the work::

    python -m hypic_rag.evaluation.ablation run --out results --questions 500
    python -m hypic_rag.evaluation.ablation run --out results --shard 1/2     # in parallel
    python -m hypic_rag.evaluation.ablation report --out results
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.engine import load_model
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.cells import (
    Cell,
    Conditioner,
    Encodings,
    Outcome,
    run_cell,
    without_transition,
)
from hypic_rag.evaluation.charts import Axis, Point, Series, chart
from hypic_rag.evaluation.metrics import Interval, bootstrap
from hypic_rag.evaluation.runs import Found, Record, parse_shard, read_records, run_missing
from hypic_rag.evaluation.trials import Trial, TrialMaker
from hypic_rag.families.model import HybridModel

__all__ = ["STAGES", "Row", "Stage", "run", "summarize", "to_markdown"]

WIDTHS = (0, 2, 4, 8, 16, 32)
DEFAULT, PAPER = Seam(), Seam(8, 8)


@dataclass(frozen=True)
class Stage:
    """Cells that are run together, at one number of chunks."""

    name: str
    chunks: int
    cells: tuple[Cell, ...]


def _modes(*conditionings: str) -> tuple[Cell, ...]:
    parts = (Mode.ADDITION, Mode.TRANSITION, Mode.TRANSITION_ROPE)
    return tuple(
        cell
        for name in conditionings
        for cell in (
            *(Cell(name, mode) for mode in parts),
            Cell(name, Mode.TRANSITION_ROPE, identity=True),
            Cell(name, Mode.SEAM, DEFAULT),
            Cell(name, Mode.SEAM, PAPER),
        )
    )


def _sweep(*conditionings: str) -> tuple[Cell, ...]:
    heads = [Seam(width, 0) for width in WIDTHS if width != DEFAULT.head]
    tails = [Seam(DEFAULT.head, width) for width in WIDTHS if width]
    return tuple(Cell(name, Mode.SEAM, seam) for name in conditionings for seam in (*heads, *tails))


MAIN = _modes("none", "other")
OTHERS = _modes("served", "document", "newline", "other+2", "other+6")
STAGES = (
    Stage("main", 8, MAIN),
    Stage("main", 16, MAIN),
    Stage("main", 4, MAIN),
    Stage("conditioning", 8, OTHERS),
    Stage("seams", 8, _sweep("none", "other")),
    Stage("conditioning", 16, OTHERS),
    Stage("seams", 16, _sweep("other")),
    Stage("conditioning", 4, OTHERS),
    Stage("seams", 4, _sweep("other")),
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
    maker = TrialMaker(model, words)
    conditioner = Conditioner(maker)
    for stage in stages:
        began = time.monotonic()
        cells = {cell.name: cell for cell in stage.cells}

        def measure(trials: list[Trial], names: list[str], cells: dict[str, Cell] = cells) -> Found:
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
    for name in dict.fromkeys(cell.conditioning for cell in cells):
        mine = [cell for cell in cells if cell.conditioning == name]
        bases = [conditioner.of(name, trial) for trial in trials]
        widths = sorted({width for cell in mine for width in (cell.seam.head, cell.seam.tail)})
        encodings = Encodings(model, trials, bases, widths)
        for cell in mine:
            states = encodings.states(cell.seam)
            if cell.identity:
                states = [tuple(map(without_transition, held)) for held in states]
            yield cell.name, run_cell(model, trials, states, cell.mode)


# --------------------------------------------------------------------------------------------
# Summaries
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One cell, number of chunks and category (or ``all``).

    Attributes:
        exact: share of exactly right answers.
        difference: the same minus full recompute's on the same questions.
        first: share of equal first tokens.
        whole: share of equal continuations.
        kl: mean KL of the next-token distribution, in nats.
    """

    cell: str
    chunks: int
    category: str
    exact: Interval
    difference: Interval
    first: Interval
    whole: Interval
    kl: Interval


def summarize(records: Iterable[Record]) -> list[Row]:
    """Rows of everything that has a full recompute of the same question to stand beside."""
    records = list(records)
    full = {(r.chunks, r.seed): r.outcomes for r in records if r.cell == "full"}
    pairs: dict[tuple[str, int, str], list[tuple[Outcome, Outcome]]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.seed):
        reference = full.get((record.chunks, record.seed))
        if reference is None:
            continue
        for mine, theirs in zip(record.outcomes, reference, strict=True):
            for category in (mine.category, "all"):
                pairs[record.cell, record.chunks, category].append((mine, theirs))
    return [
        Row(
            cell,
            chunks,
            category,
            exact=bootstrap([float(mine.exact) for mine, _ in found]),
            difference=bootstrap([float(mine.exact) - theirs.exact for mine, theirs in found]),
            first=bootstrap([float(mine.agreed > 0) for mine, _ in found]),
            whole=bootstrap([float(mine.agreed == mine.length) for mine, _ in found]),
            kl=bootstrap([mine.kl for mine, _ in found]),
        )
        for (cell, chunks, category), found in sorted(pairs.items())
    ]


def to_markdown(rows: Sequence[Row], chunks: int, category: str = "all") -> str:
    """One table: cells down, measures across."""
    lines = [
        "| encoded behind | mode | questions | exact match | against full | first token agrees "
        "| continuation agrees | KL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.chunks != chunks or row.category != category:
            continue
        behind, _, mode = ("-", "", "full recompute") if row.cell == "full" else (
            row.cell.partition("/")
        )  # fmt: skip
        low, high = row.difference.low, row.difference.high
        lines.append(
            f"| {behind} | {mode.replace('seam/', 'seam ')} | {row.exact.count} "
            f"| {row.exact} | {row.difference.mean:+.3f} [{low:+.3f}, {high:+.3f}] "
            f"| {row.first.mean:.4f} | {row.whole.mean:.4f} "
            f"| {row.kl.mean:.5f} [{row.kl.low:.5f}, {row.kl.high:.5f}] |"
        )
    return "\n".join(lines)


def to_svg(rows: Sequence[Row], chunks: int) -> str:
    """KL against the seam's width, one line per conditioning."""
    series: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        if row.chunks != chunks or row.category != "all" or row.cell == "full":
            continue
        cell = Cell.parse(row.cell)
        if cell.mode is not Mode.SEAM:
            continue
        name = f"behind {cell.conditioning}" + (", 8/8" if cell.seam == PAPER else "")
        if cell.seam.tail and cell.seam != PAPER:
            name = f"behind {cell.conditioning}, {cell.seam.head} + tail"
        width = cell.seam.head + cell.seam.tail
        series[name].append(Point(width, row.kl.mean, row.kl.low, row.kl.high))
    lines = [
        Series(name, tuple(sorted(points, key=lambda point: point.x)))
        for name, points in sorted(series.items())
    ]
    return chart(
        lines,
        Axis("recomputed tokens per segment (head + tail)"),
        Axis("KL against full recompute, nats", log=True),
        f"Divergence by seam, {chunks} chunks",
    )


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as JSON values."""
    return [dataclasses.asdict(row) for row in rows]


def ablation_rows(model: HybridModel, folder: Path) -> list[Row]:
    """Rows of the ablation's own cells; other measurements may share the folder."""
    records = read_records(folder, model).values()
    return summarize(r for r in records if not r.cell.startswith(("idea/", "precision/")))


def report(rows: Sequence[Row]) -> str:
    """All tables there are, as Markdown."""
    parts = []
    for chunks in sorted({row.chunks for row in rows}):
        for category in ("all", *facts.CATEGORIES):
            table = to_markdown(rows, chunks, category)
            parts.append(f"### {chunks} chunks, {category.replace('_', ' ')}\n\n{table}\n")
    return "\n".join(parts)


# --------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------


def _stages(text: str | None) -> list[Stage]:
    """Stages named like ``main:8,seams:8``; a bare name takes every number of chunks."""
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
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", default="small", help="name or folder of the model")
    parser.add_argument("--questions", type=int, default=500, help="per category and size")
    parser.add_argument("--stages", help="such as main:8,seams; default all")
    parser.add_argument("--shard", type=parse_shard, default=(0, 1), help="NUMBER/COUNT")
    parser.add_argument("--json", type=Path, help="with report: also write all rows here")
    parser.add_argument("--svg", type=Path, help="with report: also draw the seams at 8 chunks")
    chosen = parser.parse_args(arguments)
    model = load_model(chosen.model)
    if chosen.action == "run":
        run(
            model,
            chosen.out,
            contexts=chosen.questions,
            stages=_stages(chosen.stages),
            shard=chosen.shard,
        )
        return
    rows = ablation_rows(model, chosen.out)
    sys.stdout.write(report(rows))
    if chosen.svg:
        chosen.svg.write_text(to_svg(rows, 8) + "\n", encoding="utf-8")
    if chosen.json:
        chosen.json.write_text(json.dumps(to_json(rows), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
