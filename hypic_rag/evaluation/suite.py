"""Benchmarks of the field, by name, in every mode, next to full recompute.

Generated tasks need nothing but a model; sets are read from a local file or, without one, from the
hub::

    python -m hypic_rag.evaluation.suite                              # all generated tasks
    python -m hypic_rag.evaluation.suite single_needle two_hop --segments 8 --tokens 128
    python -m hypic_rag.evaluation.suite hotpotqa --file hotpotqa.jsonl --model org/model

Every item's segments are encoded behind the conditioning text, assembled, and answered greedily.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.assemble import Request
from hypic_rag.engine.context import Context
from hypic_rag.engine.engine import Engine, load_model
from hypic_rag.engine.generate import stop_tokens
from hypic_rag.engine.prompt import PromptFormat
from hypic_rag.errors import ConfigError, ContextLengthError, HypicError
from hypic_rag.evaluation.fidelity import compare, follow, greedy, recompute_reference
from hypic_rag.evaluation.metrics import Interval, bootstrap
from hypic_rag.evaluation.tasks import DATASETS, METRICS, TASKS, Item, load_dataset, make_item
from hypic_rag.evaluation.verify import Variant, variants_of
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.chunking import split_document
from hypic_rag.ingest.readers.document import Block, Document
from hypic_rag.knowledge_base import DEFAULT_SYSTEM_PROMPT

__all__ = ["Score", "evaluate"]


@dataclass(frozen=True)
class Score:
    """One task in one mode.

    Attributes:
        score: the task's own metric.
        difference: the same minus full recompute's on the same items.
        first: share of equal first tokens.
        kl: KL of the next-token distribution, in nats.
        tokens: of a prompt, mean.
        problems: why items were left out, one message each.
    """

    task: str
    mode: str
    metric: str
    score: Interval
    difference: Interval
    first: Interval
    kl: Interval
    tokens: float
    problems: tuple[str, ...] = ()


@dataclass
class _Found:
    scores: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)


class _Suite:
    def __init__(self, model: HybridModel, conditioning: str | None, served: str | None) -> None:
        self.model = model
        self.engine = Engine(model)
        self.prompt = PromptFormat(model)
        self.stops = stop_tokens(model)
        self.base = self.engine.prefill(self.prompt.prefix(served))
        self.conditioning: Context | None = None
        if conditioning is not None:
            self.conditioning = self.engine.prefill(self.prompt.prefix(conditioning))

    def item(
        self, item: Item, variants: Sequence[Variant], limit: int, found: dict[str, _Found]
    ) -> int:
        """Measure one item in all modes; nothing is recorded unless all of them work."""
        segments = tuple(self.prompt.segment(text) for text in item.segments)
        question = self.prompt.question(item.question)
        plain = Request(segments, (None,) * len(segments), question, self.base)
        if len(plain.token_ids) > self.model.context_length:
            raise ContextLengthError(
                f"the prompt has {len(plain.token_ids)} tokens but the model's context holds "
                f"{self.model.context_length}"
            )
        reference = recompute_reference(self.model, plain.token_ids, limit)
        metric = METRICS[item.metric]
        known = metric(self._text(reference.continuation), item.references)
        rows = {"full": (known, 0.0, 1.0, 0.0)}
        for variant in variants:
            states = tuple(self.engine.encode(segments, variant.seam, self.conditioning))
            request = dataclasses.replace(plain, states=states)
            context = self.engine.assemble([request], variant.mode)[0].context
            logits = follow(self.model, context, reference.continuation)
            compared = compare(reference.context.logits, reference.continuation, logits)
            answer = reference.continuation
            if not compared.all_agree:
                given = (*answer[: compared.agreed], int(logits[compared.agreed].argmax()))
                ended = given[-1] in self.stops
                answer = given if ended else greedy(self.model, context, limit, self.stops, given)
            score = metric(self._text(answer), item.references)
            rows[variant.name] = (
                score,
                score - known,
                float(compared.first_agrees),
                compared.kl,
            )
        for name, (score, difference, first, kl) in rows.items():
            found[name].scores.append(score)
            found[name].differences.append(difference)
            found[name].first.append(first)
            found[name].kl.append(kl)
        return len(plain.token_ids)

    def _text(self, tokens: Sequence[int]) -> str:
        return self.prompt.decode([t for t in tokens if t not in self.stops]).strip()


def evaluate(
    model: HybridModel,
    task: str,
    items: Iterable[Item],
    variants: Sequence[Variant],
    *,
    limit: int = 32,
    conditioning: str | None = DEFAULT_SYSTEM_PROMPT,
    system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
) -> list[Score]:
    """Answer ``items`` by full recompute and in every variant; one score per mode.

    An item that can't be answered in one of the ways, such as one that's too long for the model,
    is left out of all of them and named.
    """
    suite = _Suite(model, conditioning, system_prompt)
    found = {name: _Found() for name in ("full", *(variant.name for variant in variants))}
    lengths, problems, metric = [], [], ""
    for number, item in enumerate(items):
        metric = item.metric
        try:
            lengths.append(suite.item(item, variants, limit, found))
        except HypicError as error:
            problems.append(f"item {number}: {error}")
    mean = sum(lengths) / len(lengths) if lengths else float("nan")
    return [
        Score(
            task,
            name,
            metric,
            bootstrap(values.scores),
            bootstrap(values.differences),
            bootstrap(values.first),
            bootstrap(values.kl),
            mean,
            tuple(problems),
        )
        for name, values in found.items()
    ]


def splitter(model: HybridModel, tokens: int) -> Any:
    """Cuts a text into segments of at most ``tokens`` tokens, as ingestion does."""
    prompt = PromptFormat(model)

    def split(text: str) -> list[str]:
        blocks = tuple(Block(part.strip()) for part in text.split("\n\n") if part.strip())
        document = Document("", "text/plain", blocks)
        return [chunk.text for chunk in split_document(document, prompt.text, tokens)]

    return split


def to_markdown(scores: Sequence[Score]) -> str:
    """A table: tasks and modes down, measures across."""
    lines = [
        "| task | mode | items | tokens | metric | score | against full | first token agrees "
        "| KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.task} | {s.mode} | {s.score.count} | {s.tokens:.0f} | {s.metric} | {s.score} "
        f"| {s.difference.mean:+.3f} [{s.difference.low:+.3f}, {s.difference.high:+.3f}] "
        f"| {s.first} | {s.kl.mean:.2g} [{s.kl.low:.2g}, {s.kl.high:.2g}] |"
        for s in scores
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tasks",
        nargs="*",
        metavar="TASK",
        help=f"{', '.join((*TASKS, *DATASETS))}; default: those that are generated",
    )
    parser.add_argument("--model", default="small", help="name or folder of the model")
    parser.add_argument("--items", type=int, default=100, help="of each task")
    parser.add_argument("--segments", type=int, default=8, help="of a generated item")
    parser.add_argument("--tokens", type=int, default=128, help="of a segment")
    parser.add_argument("--file", type=Path, help="file of a set; default: from the hub")
    parser.add_argument("--modes", default="addition,transition,transition_rope,seam")
    parser.add_argument("--seams", default="default,paper")
    parser.add_argument("--conditioning", default=DEFAULT_SYSTEM_PROMPT, help="a text, or 'none'")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    try:
        scores = _run(chosen)
    except HypicError as error:
        parser.exit(error.exit_code, f"{error}\n")
    if chosen.json:
        json.dump([dataclasses.asdict(score) for score in scores], sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    sys.stdout.write(to_markdown(scores) + "\n")
    for score in scores:
        if score.mode == "full" and score.problems:
            sys.stderr.write(f"{score.task}: left out {'; '.join(score.problems)}\n")


def _run(chosen: argparse.Namespace) -> list[Score]:
    variants = variants_of(
        [Mode.parse(name) for name in chosen.modes.split(",")],
        [Seam.parse(name) for name in chosen.seams.split(",")],
    )
    tasks = chosen.tasks or list(TASKS)
    unknown = [task for task in tasks if task not in TASKS and task not in DATASETS]
    if unknown:
        known = ", ".join((*TASKS, *DATASETS))
        raise ConfigError(f"Unknown task {unknown[0]!r}: expected some of {known}.")
    if chosen.file and len(tasks) > 1:
        raise ConfigError("One file holds one set: name one task with --file.")
    model = load_model(chosen.model)
    prompt = PromptFormat(model)
    scores = []
    for task in tasks:
        limit = 32
        items: Iterable[Item]
        if task in TASKS:
            items = (
                make_item(
                    task,
                    seed,
                    segments=chosen.segments,
                    tokens=chosen.tokens,
                    count=lambda text: len(prompt.text(text)),
                )
                for seed in range(chosen.items)
            )
        else:
            limit = DATASETS[task].max_tokens
            loaded = load_dataset(task, chosen.file, split=splitter(model, chosen.tokens))
            items = islice(loaded, chosen.items)
        conditioning = None if chosen.conditioning == "none" else chosen.conditioning
        scores += evaluate(model, task, items, variants, limit=limit, conditioning=conditioning)
    return scores


if __name__ == "__main__":
    main()
