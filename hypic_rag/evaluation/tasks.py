"""Benchmarks by name: generated retrieval tasks, and loaders for the field's sets.

Generated tasks follow RULER (arXiv 2404.06654): needles of invented names and numbers in segments
of plain prose, sized by tokens. Sets are read from local files in the form of LongBench
(arXiv 2308.14508), 2WikiMultihopQA (arXiv 2011.01060) or MuSiQue (arXiv 2108.00573).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.metrics import best_over, contains_all, exact_match, rouge_l, token_f1

__all__ = ["DATASETS", "METRICS", "TASKS", "Dataset", "Item", "load_dataset", "make_item"]

Measure = Callable[[str, Sequence[str]], float]


def _best(metric: Callable[[str, str], float]) -> Measure:
    return lambda answer, references: best_over(metric, answer, references)


def _first_line_f1(answer: str, references: Sequence[str]) -> float:
    """F1 of the first line with text: LongBench's rule for sets whose prompts show examples."""
    return best_over(token_f1, answer.lstrip("\n").split("\n")[0], references)


METRICS: dict[str, Measure] = {
    "exact_match": _best(exact_match),
    "f1": _best(token_f1),
    "first_line_f1": _first_line_f1,
    "rouge_l": _best(rouge_l),
    "all_found": contains_all,
}
"""Scores of an answer against references, by name."""


@dataclass(frozen=True)
class Item:
    """One question over segments, with its right answers and the metric that judges."""

    segments: tuple[str, ...]
    question: str
    references: tuple[str, ...]
    metric: str


# --------------------------------------------------------------------------------------------
# Generated tasks
# --------------------------------------------------------------------------------------------

Count = Callable[[str], int]
"""Tokens of a text."""


@dataclass(frozen=True)
class _Task:
    """Sentences to hide, each in a segment of its own choice, with a question about them."""

    needles: tuple[str, ...]
    question: str
    references: tuple[str, ...]
    metric: str = "exact_match"


class _Names:
    """Names and values that don't occur twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()

    def new(self, kind: str) -> str:
        return facts.fresh_value(kind, self.rng, "held_out", self._used)

    def statement(self, relation: str, subject: str, value: str) -> str:
        return facts.fact_sentence(_RELATIONS[relation], subject, value, self.rng)

    def question(self, relation: str, subject: str) -> str:
        return self.rng.choice(_RELATIONS[relation].questions).format(s=subject)


_RELATIONS = {relation.name: relation for relation in facts.RELATIONS}


def _single(names: _Names) -> _Task:
    """One needle in prose."""
    relation = names.rng.choice(facts.RELATIONS)
    subject, value = names.new(relation.subject), names.new(relation.value)
    needle = names.statement(relation.name, subject, value)
    return _Task((needle,), names.question(relation.name, subject), (value,))


def _multi(names: _Names) -> _Task:
    """One of four needles of the same kind is asked for."""
    relation = names.rng.choice(facts.RELATIONS)
    pairs = [(names.new(relation.subject), names.new(relation.value)) for _ in range(4)]
    needles = tuple(names.statement(relation.name, subject, value) for subject, value in pairs)
    subject, value = names.rng.choice(pairs)
    return _Task(needles, names.question(relation.name, subject), (value,))


def _multi_value(names: _Names) -> _Task:
    """Several needles about one subject; all values are asked for."""
    subject = names.new("ship")
    values = [names.new("person") for _ in range(3)]
    needles = tuple(f"{value} once sailed on the ship {subject}." for value in values)
    question = f"Who are the three people that once sailed on the ship {subject}?"
    return _Task(needles, question, tuple(values), "all_found")


def _tracking(names: _Names) -> _Task:
    """A value is handed on from name to name; who holds it in the end?"""
    holders = [names.new("person") for _ in range(4)]
    code = names.new("code")
    needles = [f"Badge {code} was issued to {holders[0]}."]
    needles += [f"{giver} handed badge {code} on to {taker}." for giver, taker in pairwise(holders)]
    return _Task(tuple(needles), f"Who holds badge {code} in the end?", (holders[-1],))


def _two_hop(names: _Names) -> _Task:
    """Two needles in two segments, the first leading to the second."""
    chain = names.rng.choice(facts.CHAINS)
    first, second = _RELATIONS[chain.first], _RELATIONS[chain.second]
    subject, middle, value = (
        names.new(first.subject),
        names.new(first.value),
        names.new(second.value),
    )
    needles = (
        names.statement(first.name, subject, middle),
        names.statement(second.name, middle, value),
    )
    answer = chain.answer.format(b=middle, v=value)
    question = names.rng.choice(chain.questions).format(s=subject)
    return _Task(needles, question, (answer,))


TASKS: dict[str, Callable[[_Names], _Task]] = {
    "single_needle": _single,
    "multi_needle": _multi,
    "multi_value": _multi_value,
    "variable_tracking": _tracking,
    "two_hop": _two_hop,
}
"""Generated tasks by name."""


def make_item(
    task: str, seed: int, *, segments: int, tokens: int, count: Count, separator: str = "\n\n"
) -> Item:
    """A reproducible item: needles hidden in prose, in segments of about ``tokens`` tokens.

    No two needles share a segment while there are segments enough, and their order is random
    except where it carries the meaning (``variable_tracking`` keeps it).

    Args:
        task: a name of :data:`TASKS`.
        seed: number of the item.
        segments: how many.
        tokens: of each, at most one sentence more.
        count: counts a text's tokens.
        separator: what every segment ends with.

    Raises:
        ConfigError: the task is unknown, or there's no room.
    """
    if task not in TASKS:
        raise ConfigError(f"Unknown task {task!r}: expected one of {', '.join(TASKS)}.")
    if segments < 1 or tokens < 16:
        raise ConfigError(
            f"Expected at least 1 segment of at least 16 tokens, got {segments} of {tokens}."
        )
    rng = random.Random(f"{task}/{seed}/{segments}/{tokens}")
    names = _Names(rng)
    made = TASKS[task](names)
    places = _places(rng, segments, len(made.needles), ordered=task == "variable_tracking")
    hidden: list[list[str]] = [[] for _ in range(segments)]
    for place, needle in zip(places, made.needles, strict=True):
        hidden[place].append(needle)
    texts = tuple(_prose(rng, names, needles, tokens, count) + separator for needles in hidden)
    return Item(texts, made.question, made.references, made.metric)


def _places(rng: random.Random, segments: int, needles: int, *, ordered: bool) -> list[int]:
    if needles <= segments:
        places = rng.sample(range(segments), needles)
    else:
        places = [rng.randrange(segments) for _ in range(needles)]
    return sorted(places) if ordered else places


def _prose(
    rng: random.Random, names: _Names, needles: Sequence[str], tokens: int, count: Count
) -> str:
    """Filler sentences with the needles among them, in their order."""
    kind = rng.choice(facts.KINDS)
    subject = names.new(kind)
    sentences: list[str] = []
    size = sum(count(needle) for needle in needles)
    while size < tokens:
        sentence = facts.filler_sentence(kind, subject, rng)
        sentences.append(sentence)
        size += count(" " + sentence)
    spots = sorted(rng.randint(0, len(sentences)) for _ in needles)
    for offset, (spot, needle) in enumerate(zip(spots, needles, strict=True)):
        sentences.insert(spot + offset, needle)
    return " ".join(sentences)


# --------------------------------------------------------------------------------------------
# Sets of the field
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """A set of the field: where it is, how its entries are read, and how answers are judged.

    Attributes:
        hub: repository on the hub, and the file in it.
        metric: a name of :data:`METRICS`; LongBench's own for its sets.
        instruction: what's asked where entries bring no question.
        max_tokens: of an answer, as LongBench limits it.
    """

    hub: tuple[str, str]
    metric: str
    max_tokens: int
    instruction: str = ""


_LONGBENCH = "THUDM/LongBench"
DATASETS = {
    "hotpotqa": Dataset((_LONGBENCH, "data.zip:data/hotpotqa.jsonl"), "f1", 32),
    "2wikimqa": Dataset((_LONGBENCH, "data.zip:data/2wikimqa.jsonl"), "f1", 32),
    "musique": Dataset((_LONGBENCH, "data.zip:data/musique.jsonl"), "f1", 32),
    "triviaqa": Dataset((_LONGBENCH, "data.zip:data/triviaqa.jsonl"), "first_line_f1", 32),
    "multi_news": Dataset(
        (_LONGBENCH, "data.zip:data/multi_news.jsonl"),
        "rouge_l",
        512,
        "Write a one-page summary of all the news above.",
    ),
    "gov_report": Dataset(
        (_LONGBENCH, "data.zip:data/gov_report.jsonl"),
        "rouge_l",
        512,
        "Write a one-page summary of the report above.",
    ),
}
"""Sets by name. ``2wikimqa`` and ``musique`` also take those projects' own files."""

_PASSAGE = re.compile(r"(?=^Passage \d+:\n)", re.MULTILINE)


def load_dataset(
    name: str, path: Path | None = None, *, split: Callable[[str], Sequence[str]]
) -> Iterator[Item]:
    """Items of a set from a local file (JSONL or a JSON array), or from the hub without one.

    Args:
        name: a name of :data:`DATASETS`.
        path: the file; None downloads it, which needs the network.
        split: cuts a long text into segments.

    Raises:
        ConfigError: the set is unknown, or the file can't be read or has another form.
    """
    if name not in DATASETS:
        raise ConfigError(f"Unknown set {name!r}: expected one of {', '.join(DATASETS)}.")
    dataset = DATASETS[name]
    origin = str(path or name)
    text = _from_hub(dataset) if path is None else _read(path)
    for number, entry in enumerate(_entries(text, origin), 1):
        try:
            yield _item(dataset, entry, split)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{origin}, entry {number}: expected an entry of LongBench, 2WikiMultihopQA or "
                f"MuSiQue, but {type(error).__name__}: {error}."
            ) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The set {path} can't be read: {error}.") from None


def _from_hub(dataset: Dataset) -> str:
    import zipfile

    from huggingface_hub import hf_hub_download

    repository, place = dataset.hub
    archive, _, member = place.partition(":")
    try:
        local = hf_hub_download(repository, archive, repo_type="dataset")
        with zipfile.ZipFile(local) as opened:
            return opened.read(member).decode("utf-8")
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{repository} can't be downloaded ({error}): give a local file instead."
        ) from None


def _entries(text: str, origin: str) -> Iterator[Any]:
    if text.lstrip().startswith("["):
        try:
            yield from json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{origin} is no valid JSON: {error}.") from None
        return
    # Not splitlines(): a line separator of Unicode may stand inside a JSON string as it is.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{origin}, line {number} is no valid JSON: {error}.") from None


def _item(dataset: Dataset, entry: Any, split: Callable[[str], Sequence[str]]) -> Item:
    if "paragraphs" in entry:  # MuSiQue's own
        passages = [f"{p['title']}\n{p['paragraph_text']}" for p in entry["paragraphs"]]
        references = [entry["answer"], *entry.get("answer_aliases", [])]
        question = entry["question"]
    elif isinstance(entry["context"], list | dict):  # 2WikiMultihopQA's own, and HotpotQA's
        paragraphs = entry["context"]
        if isinstance(paragraphs, dict):  # as the hub's viewer exports them
            paragraphs = list(zip(paragraphs["title"], paragraphs["sentences"], strict=True))
        passages = [f"{title}\n{''.join(sentences)}" for title, sentences in paragraphs]
        references, question = [entry["answer"]], entry["question"]
    else:
        passages = [part for part in _PASSAGE.split(entry["context"]) if part.strip()]
        references, question = list(entry["answers"]), entry["input"] or dataset.instruction
    if not references or not all(isinstance(reference, str) for reference in references):
        raise ValueError("there's no answer to judge by")
    segments = tuple(piece for passage in passages for piece in split(passage))
    if not segments or not isinstance(question, str) or not question.strip():
        raise ValueError("there's no text or no question")
    return Item(segments, question, tuple(references), dataset.metric)
