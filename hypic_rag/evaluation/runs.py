"""Runs over generated contexts: what's missing is measured and appended to files of records.

A run that was stopped goes on where it was, and several processes share one: each appends to a file
of its own, and whoever reads takes them all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.cells import Outcome, reference_outcomes
from hypic_rag.evaluation.trials import Trial, TrialMaker
from hypic_rag.families.model import HybridModel

__all__ = [
    "Found",
    "Measure",
    "Record",
    "Records",
    "add_record",
    "append_records",
    "is_missing",
    "parse_categories",
    "parse_seeds",
    "parse_shard",
    "read_records",
    "run_missing",
]

Found = Iterable[tuple[str, list[list[Outcome]]]]
"""Names of cells, each with its outcomes per context and question."""
Measure = Callable[[list[Trial], list[str]], Found]
"""Measures the named cells on contexts that have been recomputed in full."""


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


Records = dict[tuple[str, int, int], Record]
"""Records by what makes them unique."""


def read_records(folder: Path, model: HybridModel) -> Records:
    """All records of a model in a folder, from whatever processes; torn lines are left out.

    What was measured on different categories of one context is put together.
    """
    found: Records = {}
    for path in sorted(folder.glob(f"{model.fingerprint[:12]}.*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = Record.from_json(line)
            except (ValueError, TypeError):
                continue
            add_record(found, record)
    return found


def add_record(found: Records, record: Record) -> None:
    """Put a record among others; its outcomes replace earlier ones of the same categories."""
    before = found.get(record.key)
    known = {outcome.category: outcome for outcome in before.outcomes} if before else {}
    known |= {outcome.category: outcome for outcome in record.outcomes}
    ordered = tuple(known[name] for name in facts.CATEGORIES if name in known)
    found[record.key] = dataclasses.replace(record, outcomes=ordered)


def is_missing(
    found: Records, key: tuple[str, int, int], categories: Collection[facts.Category]
) -> bool:
    """Whether a record, or one of ``categories`` in it, isn't there yet."""
    record = found.get(key)
    known = {outcome.category for outcome in record.outcomes} if record else set()
    return not known.issuperset(categories)


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


def run_missing(
    maker: TrialMaker,
    folder: Path,
    names: Sequence[str],
    measure: Measure,
    *,
    chunks: int,
    contexts: int,
    shard: tuple[int, int] = (0, 1),
    unit: int = 4,
    seeds: Sequence[int] | None = None,
) -> None:
    """Measure what's missing of ``names`` and append it to this shard's file.

    Every context also has a record of full recompute, under the name ``full``. What's missing is
    told by cell, context and category of questions.

    Args:
        maker: makes the contexts, and knows the categories.
        folder: where results go; made if it isn't there.
        names: of cells, in the order they're measured.
        measure: called with some contexts and the names that any of them lacks.
        chunks: segments of a context.
        contexts: how many there are in all shards together: 0, 1, …
        shard: this process's number and how many there are.
        unit: contexts at once; an interruption loses no more.
        seeds: other numbers of contexts, in place of the first ``contexts``.
    """
    model = maker.model
    done = read_records(folder, model)
    numbers = (range(contexts) if seeds is None else seeds)[shard[0] :: shard[1]]

    def missing(name: str, seed: int) -> bool:
        return is_missing(done, (name, chunks, seed), maker.categories)

    with torch.inference_mode():
        for start in range(0, len(numbers), unit):
            mine = numbers[start : start + unit]
            lacking = [
                name for name in ("full", *names) if any(missing(name, seed) for seed in mine)
            ]
            if not lacking:
                continue
            trials = [maker.with_references(maker.trial(seed, chunks)) for seed in mine]
            records = [
                Record("full", chunks, trial.seed, tuple(reference_outcomes(trial)))
                for trial in trials
                if missing("full", trial.seed)
            ]
            for name, found in measure(trials, [name for name in lacking if name != "full"]):
                for trial, outcomes in zip(trials, found, strict=True):
                    records.append(Record(name, chunks, trial.seed, tuple(outcomes)))
            append_records(folder, model, shard, records)


def parse_shard(text: str) -> tuple[int, int]:
    """``NUMBER/COUNT``: which part of the work a process does."""
    number, slash, count = text.partition("/")
    if not slash or not number.isdecimal() or not count.isdecimal() or int(number) >= int(count):
        raise ConfigError(f"A shard is NUMBER/COUNT with NUMBER < COUNT, not {text!r}.")
    return int(number), int(count)


def parse_categories(text: str) -> tuple[facts.Category, ...]:
    """Names of categories, separated by commas."""
    names = text.split(",")
    unknown = [name for name in names if name not in facts.CATEGORIES]
    if unknown:
        known = ", ".join(facts.CATEGORIES)
        raise ConfigError(f"Unknown category {unknown[0]!r}: expected some of {known}.")
    return tuple(name for name in facts.CATEGORIES if name in names)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Numbers of contexts, separated by commas."""
    names = text.split(",")
    wrong = [name for name in names if not name.isdecimal()]
    if wrong:
        raise ConfigError(f"Contexts have whole numbers, such as 131,141; {wrong[0]!r} is none.")
    return tuple(map(int, names))
