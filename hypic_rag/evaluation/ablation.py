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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.engine import load_model
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.cells import (
    Cell,
    Conditioner,
    Encodings,
    Outcome,
    reference_outcomes,
    run_cell,
    without_transition,
)
from hypic_rag.evaluation.charts import Axis, Point, Series, chart
from hypic_rag.evaluation.metrics import Interval, bootstrap
from hypic_rag.evaluation.trials import TrialMaker
from hypic_rag.families.model import HybridModel

__all__ = ["STAGES", "Record", "Row", "Stage", "read_records", "run", "summarize", "to_markdown"]

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


@dataclass(frozen=True)
class Record:
    """What one cell made of one context's questions."""

    cell: str
    chunks: int
    seed: int
    outcomes: tuple[Outcome, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        """What makes a record unique."""
        return self.cell, self.chunks, self.seed

    def to_json(self) -> str:
        """One line."""
        rows = [dataclasses.astuple(outcome) for outcome in self.outcomes]
        return json.dumps([self.cell, self.chunks, self.seed, rows])

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Inverse of :meth:`to_json`."""
        cell, chunks, seed, rows = json.loads(line)
        return cls(cell, chunks, seed, tuple(Outcome(*row) for row in rows))


def read_records(folder: Path, model: HybridModel) -> dict[tuple[str, int, int], Record]:
    """All records of a model in a folder, from whatever processes; torn lines are left out."""
    found = {}
    for path in sorted(folder.glob(f"{model.fingerprint[:12]}.*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = Record.from_json(line)
            except (ValueError, TypeError):
                continue
            found[record.key] = record
    return found


def append_records(
    folder: Path, model: HybridModel, shard: tuple[int, int], records: Sequence[Record]
) -> None:
    """Append to this shard's file; a line that a stopped process tore is ended first."""
    if not records:
        return
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{model.fingerprint[:12]}.{shard[0]}of{shard[1]}.jsonl"
    torn = own.exists() and not own.read_bytes().endswith(b"\n")
    with own.open("a", encoding="utf-8") as file:
        file.write("\n" if torn else "")
        file.writelines(record.to_json() + "\n" for record in records)


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
    done = set(read_records(folder, model))
    maker = TrialMaker(model, words)
    conditioner = Conditioner(maker)
    with torch.inference_mode():
        for stage in stages:
            began = time.monotonic()
            seeds = range(shard[0], contexts, shard[1])
            size = max(1, unit * 8 // stage.chunks)
            for start in range(0, len(seeds), size):
                chosen = seeds[start : start + size]
                fresh = list(_unit(maker, conditioner, stage, chosen, done))
                append_records(folder, model, shard, fresh)
                done.update(record.key for record in fresh)
            took = time.monotonic() - began
            print(f"{stage.name}, {stage.chunks} chunks: {took:.0f} s", flush=True)


def _unit(
    maker: TrialMaker,
    conditioner: Conditioner,
    stage: Stage,
    seeds: Sequence[int],
    done: set[tuple[str, int, int]],
) -> Iterator[Record]:
    """Records that are still missing for a few contexts."""
    wanted = [
        cell
        for cell in stage.cells
        if any((cell.name, stage.chunks, seed) not in done for seed in seeds)
    ]
    full = [seed for seed in seeds if ("full", stage.chunks, seed) not in done]
    if not wanted and not full:
        return
    trials = [maker.with_references(maker.trial(seed, stage.chunks)) for seed in seeds]
    for trial in trials:
        if trial.seed in full:
            mine = tuple(reference_outcomes(trial))
            yield Record("full", stage.chunks, trial.seed, mine)
    for name in dict.fromkeys(cell.conditioning for cell in wanted):
        cells = [cell for cell in wanted if cell.conditioning == name]
        bases = [conditioner.of(name, trial) for trial in trials]
        widths = sorted({width for cell in cells for width in (cell.seam.head, cell.seam.tail)})
        encodings = Encodings(maker.model, trials, bases, widths)
        for cell in cells:
            states = encodings.states(cell.seam)
            if cell.identity:
                states = [tuple(map(without_transition, held)) for held in states]
            found = run_cell(maker.model, trials, states, cell.mode)
            for trial, outcomes in zip(trials, found, strict=True):
                yield Record(cell.name, stage.chunks, trial.seed, tuple(outcomes))


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


def parse_shard(text: str) -> tuple[int, int]:
    """``NUMBER/COUNT``: which part of the work a process does."""
    number, slash, count = text.partition("/")
    if not slash or not number.isdecimal() or not count.isdecimal() or int(number) >= int(count):
        raise ConfigError(f"A shard is NUMBER/COUNT with NUMBER < COUNT, not {text!r}.")
    return int(number), int(count)


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
