"""The ablation's results as tables and charts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypic_rag.config import Mode, Seam
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.cells import CONDITIONINGS, Cell, Outcome
from hypic_rag.evaluation.charts import Axis, Point, Series, chart
from hypic_rag.evaluation.metrics import Interval, bootstrap
from hypic_rag.evaluation.runs import Records
from hypic_rag.evaluation.summary import Row

__all__ = [
    "GOALS",
    "Goal",
    "against",
    "by_place",
    "categories_table",
    "complete",
    "goals_table",
    "modes_table",
    "places_table",
    "prefixes_chart",
    "prefixes_table",
    "seams_chart",
    "seams_table",
    "to_json",
    "write_json",
]

DEFAULT = Cell("other", Mode.SEAM, Seam())
PAPER = Seam(8, 8)
TITLES: dict[str, str] = {
    "all": "all",
    "one_fact": "one fact",
    "two_fact": "two facts",
    "first_sentence": "first sentence",
    "last_sentence": "last sentence",
    "no_answer": "no answer",
}


@dataclass(frozen=True)
class Goal:
    """Bounds that the default mode is held to.

    Attributes:
        points: largest difference of exact matches from full recompute's, either way, in
            percentage points; the interval must hold zero.
        agreement: least share of equal first tokens.
        kl: largest mean KL, in nats.
    """

    points: float
    agreement: float
    kl: float

    def missed(self, row: Row) -> list[str]:
        """What a row misses."""
        found = []
        off = row.difference
        # Means over a few hundred questions aren't exact in binary.
        if abs(100 * off.mean) > self.points + 1e-9 or not off.low <= 0 <= off.high:
            found.append("exact match")
        if row.first.mean < self.agreement:
            found.append("agreement")
        if row.kl.mean > self.kl:
            found.append("KL")
        return found


GOALS = {4: Goal(0.3, 0.99, 1e-3), 8: Goal(0.3, 0.99, 1e-3), 16: Goal(0.3, 0.99, 2e-3)}
"""By number of chunks."""


def percent(interval: Interval, signed: bool = False) -> str:
    """A share as ``98.4 [97.2, 99.4]``, a difference of two as ``-0.04 [-0.12, +0.00]``."""
    form = "+.2f" if signed else ".1f"
    low, high = 100 * interval.low, 100 * interval.high
    return f"{100 * interval.mean:{form}} [{low:{form}}, {high:{form}}]"


def divergence(interval: Interval) -> str:
    """A mean KL in thousandths of a nat, as ``1.47 [0.10, 4.11]``."""
    mean, low, high = (1000 * value for value in (interval.mean, interval.low, interval.high))
    places = 2 if max(abs(low), abs(high)) < 100 else 0
    return f"{mean:.{places}f} [{low:.{places}f}, {high:.{places}f}]"


def cell_title(name: str) -> str:
    """A cell's name as ``other, seam 4/0``."""
    if name == "full":
        return "full recompute"
    behind, _, mode = name.partition("/")
    return f"{behind}, {mode.replace('seam/', 'seam ')}"


def select(rows: Iterable[Row], chunks: int, category: str) -> dict[str, Row]:
    """Rows of one number of chunks and one category, by cell."""
    return {row.cell: row for row in rows if (row.chunks, row.category) == (chunks, category)}


def complete(rows: Sequence[Row]) -> list[Row]:
    """Rows of cells that were measured on every question that was recomputed in full.

    A run that was stopped leaves cells with fewer, which can't be compared with the others: a few
    questions hold most of a mean KL.
    """
    asked = {(row.chunks, row.category): row.exact.count for row in rows if row.cell == "full"}
    return [row for row in rows if row.exact.count == asked.get((row.chunks, row.category))]


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def goals_table(rows: Sequence[Row], cell: str = DEFAULT.name) -> str:
    """One cell, by default the default mode behind another prompt, against the goals."""
    body = []
    for chunks, goal in GOALS.items():
        for category in TITLES:
            row = select(rows, chunks, category).get(cell)
            full = select(rows, chunks, category).get("full")
            if row is None or full is None:
                continue
            missed = goal.missed(row)
            body.append(
                [
                    str(chunks),
                    TITLES[category],
                    str(row.exact.count),
                    percent(full.exact),
                    percent(row.exact),
                    percent(row.difference, signed=True),
                    percent(row.first),
                    divergence(row.kl),
                    f"{1000 * row.median:.4f}",
                    f"{1000 * row.kl_of_others:.2f}",
                    "missed: " + ", ".join(missed) if missed else "met",
                ]
            )
    head = ["chunks", "category", "questions", "full, %", "default, %", "difference, points",
            "first token agrees, %", "KL, 1e-3", "median KL, 1e-3", "but for the largest",
            "goals"]  # fmt: skip
    return table(head, body)


def modes_table(rows: Sequence[Row], chunks: int, category: str = "all") -> str:
    """Cells down, measures across; seams that only the sweep has are left to its own table."""
    body = [
        [
            cell_title(row.cell),
            str(row.exact.count),
            percent(row.exact),
            percent(row.difference, signed=True),
            percent(row.first),
            divergence(row.kl),
        ]
        for row in select(rows, chunks, category).values()
        if _is_a_mode(row.cell)
    ]
    head = ["encoded behind, mode", "questions", "exact match, %", "against full, points",
            "first token agrees, %", "KL, 1e-3"]  # fmt: skip
    return table(head, body)


def _is_a_mode(name: str) -> bool:
    cell = Cell.parse(name)
    return cell.mode is not Mode.SEAM or cell.seam in (DEFAULT.seam, PAPER)


def categories_table(rows: Sequence[Row], chunks: int, cells: Sequence[str]) -> str:
    """Cells down, categories across: exact matches and KL."""
    body = []
    for cell in cells:
        line = [cell_title(cell)]
        for category in facts.CATEGORIES:
            row = select(rows, chunks, category).get(cell)
            line.append(f"{percent(row.exact)}; {divergence(row.kl)}" if row else "")
        body.append(line)
    return table(["encoded behind, mode", *(TITLES[name] for name in facts.CATEGORIES)], body)


def seams_table(rows: Sequence[Row], chunks: int, category: str, conditioning: str) -> str:
    """Mean KL by head (down) and tail (across), where measured; empty unless seams were swept."""
    found = {}
    for name, row in select(rows, chunks, category).items():
        cell = Cell.parse(name)
        if cell.mode is Mode.SEAM and cell.conditioning == conditioning:
            found[cell.seam] = row
    if len(found) < 3:
        return ""
    heads = sorted({seam.head for seam in found})
    tails = sorted({seam.tail for seam in found})
    body = []
    for head in heads:
        line = [str(head)]
        for tail in tails:
            measured = found.get(Seam(head, tail))
            line.append(divergence(measured.kl) if measured else "")
        body.append(line)
    return table(["head \\ tail", *map(str, tails)], body)


def prefixes_table(rows: Sequence[Row], records: Records, category: str = "all") -> str:
    """The default seam behind every prefix, at every number of chunks."""
    body = []
    for name in CONDITIONINGS:
        for chunks in sorted({row.chunks for row in rows}):
            row = select(rows, chunks, category).get(Cell(name, Mode.SEAM, Seam()).name)
            if row is None:
                continue
            line = [
                name,
                str(chunks),
                str(row.exact.count),
                percent(row.difference, signed=True),
                percent(row.first),
                divergence(row.kl),
            ]
            if row.cell == DEFAULT.name:
                line += ["", ""]
            else:
                difference, lower = against(records, row.cell, chunks)
                line += [divergence(difference), percent(lower)]
            body.append(line)
    head = ["encoded behind", "chunks", "questions", "exact match against full, points",
            "first token agrees, %", "KL, 1e-3", "minus other's, 1e-3",
            "lower than other's, % of questions"]  # fmt: skip
    return table(head, body)


def against(
    records: Records, cell: str, chunks: int, other: str = DEFAULT.name
) -> tuple[Interval, Interval]:
    """A cell's KL minus another's on the same questions, and how often it's the lower one."""
    found = []
    for (name, size, seed), record in sorted(records.items()):
        yours = records.get((other, size, seed))
        if name != cell or size != chunks or yours is None:
            continue
        known = {outcome.category: outcome.kl for outcome in yours.outcomes}
        found += [
            mine.kl - known[mine.category] for mine in record.outcomes if mine.category in known
        ]
    return bootstrap(found), bootstrap([float(difference < 0) for difference in found])


def seams_chart(rows: Sequence[Row], chunks: int = 8, category: str = "one_fact") -> str:
    """KL by the seam's width, as SVG."""
    lines: dict[str, list[Point]] = defaultdict(list)
    for name, row in select(rows, chunks, category).items():
        cell = Cell.parse(name)
        if cell.mode is not Mode.SEAM or cell.conditioning not in ("none", "other"):
            continue
        head, tail = cell.seam.head, cell.seam.tail
        for shape, fits, width in (
            ("head n, no tail", tail == 0, head),
            ("no head, tail n", head == 0, tail),
            ("head 4, tail n", head == 4, tail),
            ("head n, tail n", head == tail, head),
        ):
            if fits:
                point = Point(width, row.kl.mean, row.kl.low, row.kl.high)
                lines[f"{cell.conditioning}: {shape}"].append(point)
    series = [
        Series(name, tuple(sorted(points, key=lambda point: point.x)))
        for name, points in sorted(lines.items())
        if len(points) > 1
    ]
    title = f"Divergence by seam, {chunks} chunks, {TITLES[category]}"
    return chart(
        series,
        Axis("n, tokens recomputed at each chunk's edge"),
        Axis("KL against full recompute, nats", log=True),
        title,
    )


def prefixes_chart(rows: Sequence[Row], category: str = "all") -> str:
    """KL of the default seam by number of chunks, one line per prefix, as SVG."""
    series = []
    for name in CONDITIONINGS:
        cell = Cell(name, Mode.SEAM, Seam()).name
        points = [
            Point(row.chunks, row.kl.mean, row.kl.low, row.kl.high)
            for row in sorted(rows, key=lambda row: row.chunks)
            if (row.cell, row.category) == (cell, category)
        ]
        if points:
            series.append(Series(name, tuple(points)))
    return chart(
        series,
        Axis("chunks"),
        Axis("KL against full recompute, nats", log=True),
        "Divergence by what chunks are encoded behind, seam 4/0",
    )


Place = tuple[int, Interval, Interval, Interval]
"""Place of the chunk that is needed, difference of exact matches, agreement, KL."""


def by_place(
    records: Records,
    chunks: int,
    needed: Mapping[tuple[int, facts.Category], int],
    cell: str = DEFAULT.name,
    groups: int = 4,
) -> list[Place]:
    """Measures of a cell by where the one chunk that a question needs stands in the prompt.

    Args:
        records: of any cells.
        chunks: of the contexts to look at.
        needed: per context and category the needed chunk.
        cell: what is measured.
        groups: neighbouring places that are put together make this many groups.
    """
    found: dict[int, list[tuple[Outcome, Outcome]]] = defaultdict(list)
    for (name, size, seed), record in records.items():
        full = records.get(("full", size, seed))
        if name != cell or size != chunks or full is None:
            continue
        reference = {outcome.category: outcome for outcome in full.outcomes}
        for mine in record.outcomes:
            place = needed.get((seed, mine.category))
            if place is not None and mine.category in reference:
                found[place * groups // chunks].append((mine, reference[mine.category]))
    return [
        (
            group,
            bootstrap([float(mine.exact) - theirs.exact for mine, theirs in pairs]),
            bootstrap([float(mine.agreed > 0) for mine, _ in pairs]),
            bootstrap([mine.kl for mine, _ in pairs]),
        )
        for group, pairs in sorted(found.items())
    ]


def places_table(places: Mapping[int, Sequence[Place]], groups: int = 4) -> str:
    """Numbers of chunks and places down."""
    body = [
        [
            str(chunks),
            _span(chunks * group // groups + 1, chunks * (group + 1) // groups),
            str(kl.count),
            percent(difference, signed=True),
            percent(first),
            divergence(kl),
        ]
        for chunks, found in places.items()
        for group, difference, first, kl in found
    ]
    head = ["chunks", "place of the needed chunk", "questions", "exact match against full, points",
            "first token agrees, %", "KL, 1e-3"]  # fmt: skip
    return table(head, body)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as JSON values with five significant digits: intervals as mean, low and high."""

    def rounded(value: float) -> float:
        return float(f"{value:.5g}")

    found = []
    for row in rows:
        line: dict[str, Any] = {
            "cell": row.cell,
            "chunks": row.chunks,
            "category": row.category,
            "questions": row.exact.count,
        }
        for name in ("exact", "difference", "first", "whole", "kl"):
            interval: Interval = getattr(row, name)
            line[name] = [rounded(v) for v in (interval.mean, interval.low, interval.high)]
        line |= {"median_kl": rounded(row.median), "largest_share": rounded(row.largest)}
        found.append(line)
    return found


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write :func:`to_json` of all rows to a file, a row a line."""
    lines = ",\n".join(json.dumps(line) for line in to_json(rows))
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
