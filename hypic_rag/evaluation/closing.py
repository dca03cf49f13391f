"""Ways to close what's left between assembly and full recompute, each measured on its own.

All start from the default seam on segments encoded behind one other prompt, at 8 chunks::

    python -m hypic_rag.evaluation.closing --out results --contexts 100
    python -m hypic_rag.evaluation.closing --out results --report

Results stand beside the ablation's, in the same form.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.context import attention_kv
from hypic_rag.engine.engine import load_model
from hypic_rag.engine.pieces import encode_pieces, join_pieces
from hypic_rag.engine.repair import Repairs, choose_repairs
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.cells import (
    Conditioner,
    Encodings,
    Outcome,
    run_cell,
    score_requests,
)
from hypic_rag.evaluation.fidelity import position_deviation
from hypic_rag.evaluation.orders import one_question_each, per_trial, states_in_order
from hypic_rag.evaluation.runs import (
    Found,
    parse_categories,
    parse_seeds,
    parse_shard,
    read_records,
    run_missing,
)
from hypic_rag.evaluation.summary import summarize
from hypic_rag.evaluation.trials import Asked, Trial, TrialMaker, rank_segments, word_scores
from hypic_rag.families.base import AttentionInputs, LinearSpec
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.sentences import sentence_spans
from hypic_rag.ops.rope import rotate
from hypic_rag.segments import Segment
from hypic_rag.states import AttentionState, LayerState, LinearState, SegmentState

__all__ = ["IDEAS", "sentence_cuts"]

_PREFIX = "idea/"
CONDITIONING = "other"
HEAD = Seam().head
BUDGETS = (32, 64, 128, 256)


def sentence_cuts(tokenizer: Any, segment: Segment, first: int) -> tuple[int, ...]:
    """Token places at which a segment's sentences start, from ``first`` on, ``first`` included.

    ``first`` is the seam's head; a sentence that starts within it isn't cut.
    """
    encoded = tokenizer(
        segment.text,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
    )
    if tuple(encoded["input_ids"]) != segment.token_ids:
        raise ConfigError("The segment's text doesn't give its tokens: keep the two together.")
    ends = [end for _, end in encoded["offset_mapping"]]
    places = {first} if first else set()
    for start, _ in sentence_spans(segment.text):
        # A sentence starts with the first token that reaches into it.
        place = next((index for index, end in enumerate(ends) if end > start), len(ends))
        if place > first:
            places.add(place)
    return tuple(sorted(place for place in places if 0 < place < len(segment)))


@dataclass
class Bench:
    """Trials with their segments encoded once, whole and in sentences."""

    maker: TrialMaker
    conditioner: Conditioner
    trials: list[Trial]

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """Per trial its segments in sentences, each with its own state."""
        model = self.maker.model
        tokenizer = model.require_tokenizer()
        segments = [segment for trial in self.trials for segment in trial.segments]
        cuts = [sentence_cuts(tokenizer, segment, HEAD) for segment in segments]
        bases = [
            self.conditioner.of(CONDITIONING, trial)
            for trial in self.trials
            for _ in trial.segments
        ]
        states = encode_pieces(model, segments, cuts, bases)
        pieces: list[list[Piece]] = []
        start = 0
        for trial in self.trials:
            mine = []
            for number, segment in enumerate(trial.segments):
                edges = (0, *cuts[start], len(segment))
                for begin, end, state in zip(edges, edges[1:], states[start], strict=False):
                    ids = segment.token_ids[begin:end]
                    text = tokenizer.decode(list(ids))
                    head = begin == 0 and end <= HEAD
                    mine.append(Piece(number, Segment(ids, text), None if head else state))
                start += 1
            pieces.append(mine)
        return pieces

    @cached_property
    def states(self) -> list[tuple[SegmentState | None, ...]]:
        """Per trial the states of its segments, as a store holds them."""
        bases = [self.conditioner.behind(CONDITIONING, trial) for trial in self.trials]
        return Encodings(self.maker.model, self.trials, bases, [Seam()]).states(Seam())

    def starts(self, place: int) -> list[int]:
        """Positions at which a trial's pieces start."""
        found, at = [], self.trials[place].base.length
        for piece in self.pieces[place]:
            found.append(at)
            at += len(piece.segment)
        return found

    def request(self, place: int, tail: tuple[int, ...], repaired: set[int]) -> Request:
        """A trial's prompt with the pieces ``repaired`` computed and ``tail`` behind."""
        pieces = self.pieces[place]
        states = tuple(
            None if index in repaired else piece.state for index, piece in enumerate(pieces)
        )
        segments = tuple(piece.segment for piece in pieces)
        return Request(segments, states, tail, self.trials[place].base)

    def score(self, choose: Callable[[int, Asked], set[int]]) -> list[list[Outcome]]:
        """Outcomes when ``choose`` says which pieces to repair for each question."""
        chosen: dict[tuple[int, str], set[int]] = {}

        def make(place: int, asked: Asked, end: tuple[int, ...]) -> Request:
            key = (place, asked.category)
            if key not in chosen:
                chosen[key] = choose(place, asked)
            return self.request(place, asked.question + end, chosen[key])

        return score_requests(self.maker.model, self.trials, make)


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of tokens of segment ``number``; without a state it's always computed."""

    number: int
    segment: Segment
    state: SegmentState | None

    @property
    def cost(self) -> int:
        """Tokens that repairing it adds."""
        return len(self.segment) if self.state else 0


Idea = Callable[[Bench], list[list[Outcome]]]


def whole_segments(count: int, known: bool = False) -> Idea:
    """Recompute the best-ranked segments whole, or those that are known to hold the facts."""

    def run(bench: Bench) -> list[list[Outcome]]:
        def choose(place: int, asked: Asked) -> set[int]:
            trial = bench.trials[place]
            best = rank_segments(asked.text, trial.segments)[:count]
            numbers = set(asked.fact_chunks) if known else set(best)
            pieces = bench.pieces[place]
            return {i for i, piece in enumerate(pieces) if piece.number in numbers}

        return bench.score(choose)

    return run


def sentences(budget: int, by: str) -> Idea:
    """Recompute the sentences with the highest scores within a budget of tokens."""

    def run(bench: Bench) -> list[list[Outcome]]:
        attended = attention_scores(bench) if by == "attention" else None
        oracle = deviation_scores(bench) if by == "deviation" else None

        def choose(place: int, asked: Asked) -> set[int]:
            pieces = bench.pieces[place]
            if by == "words":
                scores = word_scores(asked.text, [piece.segment.text for piece in pieces])
            elif by == "random":
                rng = random.Random(f"{bench.trials[place].seed}/{asked.category}")
                scores = [rng.random() for _ in pieces]
            elif attended is not None:
                scores = attended[place, asked.category]
            else:
                assert oracle is not None
                scores = oracle[place, asked.category]
            return set(best_runs([piece.cost for piece in pieces], scores, budget))

        return bench.score(choose)

    return run


def starts_within(budget: int) -> Idea:
    """Recompute interiors from their start, the best-ranked first: what ``repair_tokens`` does."""

    def choose(trial: Trial, asked: Asked) -> Repairs:
        scores = word_scores(asked.text, [segment.text for segment in trial.segments])
        return choose_repairs(trial.segments, Seam(), scores, budget)

    return repaired(choose)


def starts_of(count: int | None, width: int) -> Idea:
    """Recompute ``width`` tokens from the start of the ``count`` best interiors, or of all."""

    def choose(trial: Trial, asked: Asked) -> Repairs:
        best = rank_segments(asked.text, trial.segments)[:count]
        interiors = [Seam().interior(len(segment)) for segment in trial.segments]
        sizes = [end - start for start, end in interiors]
        renewed = tuple(min(size, width) if i in best else 0 for i, size in enumerate(sizes))
        whole = frozenset(i for i, size in enumerate(sizes) if 0 < size == renewed[i])
        return Repairs(renewed, whole)

    return repaired(choose)


def repaired(choose: Callable[[Trial, Asked], Repairs]) -> Idea:
    """Spend what ``choose`` says beside the states that a store holds."""

    def run(bench: Bench) -> list[list[Outcome]]:
        def make(place: int, asked: Asked, end: tuple[int, ...]) -> Request:
            trial = bench.trials[place]
            question = asked.question + end
            plain = Request(trial.segments, bench.states[place], question, trial.base)
            return plain.repaired(choose(trial, asked))

        return score_requests(bench.maker.model, bench.trials, make)

    return run


def best_runs(costs: Sequence[int], scores: Sequence[float], budget: int) -> list[int]:
    """Which of several runs of tokens to recompute: the best ones that fit, best first.

    The choice ends at the first run that doesn't fit, so that a larger budget only adds to it.

    Args:
        costs: tokens of each run; runs without cost are never chosen.
        scores: how much each matters; higher is more. Ties go to the earlier run.
        budget: tokens to spend.
    """
    chosen = []
    for index in sorted(range(len(costs)), key=lambda place: -scores[place]):
        if not costs[index]:
            continue
        if costs[index] > budget:
            break
        budget -= costs[index]
        chosen.append(index)
    return chosen


def attention_scores(bench: Bench) -> dict[tuple[int, str], list[float]]:
    """Per question the attention that its tokens pay to each piece, in a first pass.

    Summed over the question's tokens, heads and full-attention layers, per token of the piece.
    """
    model = bench.maker.model
    seen: list[Tensor] = []
    recording = replace(model, family=_recording(model.family, seen))
    scores: dict[tuple[int, str], list[float]] = {}
    for place, trial in enumerate(bench.trials):
        lengths = [len(piece.segment) for piece in bench.pieces[place]]
        starts = bench.starts(place)
        for asked in trial.asked:
            seen.clear()
            request = bench.request(place, asked.question, set())
            # All logits are asked for, so that the last layer has all queries too.
            context = assemble(recording, [request], all_logits=True)[0].context
            count, length = len(asked.question), context.length
            where = torch.arange(length, device=model.device)
            cos, sin = model.family.rotary(model.decoder, model.embedding_like(), where)
            total = torch.zeros(length)
            layers = [i for i, spec in enumerate(model.layers) if not isinstance(spec, LinearSpec)]
            for layer, queries in zip(layers, seen, strict=True):
                keys = attention_kv(context.cache, layer)[0]
                asking = rotate(queries[:, -count:], cos[-count:], sin[-count:])
                shared = asking.shape[0] // keys.shape[0]
                weights = asking @ keys.repeat_interleave(shared, 0).transpose(1, 2)
                hidden = where > where[-count:].unsqueeze(-1)
                scaled = (weights * asking.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
                total += scaled.softmax(-1).sum((0, 1)).cpu()
            scores[place, asked.category] = [
                float(total[start : start + size].mean())
                for start, size in zip(starts, lengths, strict=True)
            ]
    return scores


def _recording(family: Any, seen: list[Tensor]) -> Any:
    """The family, keeping the queries of every full-attention layer that runs."""

    class Recording(type(family)):  # type: ignore[misc]
        def attention_inputs(self, *arguments: Any) -> AttentionInputs:
            inputs: AttentionInputs = super().attention_inputs(*arguments)
            seen.append(inputs.queries)
            return inputs

    recording = Recording.__new__(Recording)
    recording.__dict__.update(getattr(family, "__dict__", {}))
    return recording


def deviation_scores(bench: Bench) -> dict[tuple[int, str], list[float]]:
    """Per question the true deviation of each piece's keys and values: an oracle."""
    scores: dict[tuple[int, str], list[float]] = {}
    for place, trial in enumerate(bench.trials):
        lengths = [len(piece.segment) for piece in bench.pieces[place]]
        for asked in trial.asked:
            request = bench.request(place, asked.question, set())
            context = assemble(bench.maker.model, [request])[0].context
            whole = bench.maker.context_of(request.token_ids)
            off = position_deviation(bench.maker.model, context, whole)
            scores[place, asked.category] = [
                float(off[start : start + size].mean())
                for start, size in zip(bench.starts(place), lengths, strict=True)
            ]
    return scores


def reordered(best_first: bool, conditioning: str) -> Idea:
    """Put the best-ranked segment first or last; compared with full recompute of that order."""

    def order(trial: Trial, asked: Asked) -> list[int]:
        best = rank_segments(asked.text, trial.segments)[0]
        others = [index for index in range(len(trial.segments)) if index != best]
        return [best, *others] if best_first else [*others, best]

    def run(bench: Bench) -> list[list[Outcome]]:
        model = bench.maker.model
        bases = [bench.conditioner.behind(conditioning, trial) for trial in bench.trials]
        states = Encodings(model, bench.trials, bases, [Seam()]).states(Seam())
        moved = one_question_each(bench.maker, bench.trials, order)
        held = states_in_order(bench.trials, states, order)
        return per_trial(bench.trials, run_cell(model, moved, held, Mode.SEAM))

    return run


Exchange = Callable[[int, LayerState, LayerState], LayerState]
"""What to use of a layer, given how many full-attention layers come before it, its true state and
its cached one."""


def true_attention(
    layer: int | None = None, first: int | None = None, keys: bool = True, values: bool = True
) -> Exchange:
    """True keys and values in place of cached ones.

    Args:
        layer: only in this full-attention layer, counted from 0.
        first: only of this many of the cached interior's first tokens.
        keys: exchange keys.
        values: exchange values.
    """

    def exchange(number: int, true: LayerState, held: LayerState) -> LayerState:
        if not isinstance(true, AttentionState) or not isinstance(held, AttentionState):
            return held
        if layer not in (None, number):
            return held
        count = held.keys.shape[1] if first is None else first

        def mixed(exact: Tensor, cached: Tensor, chosen: bool) -> Tensor:
            return torch.cat([exact[:, :count], cached[:, count:]], dim=1) if chosen else cached

        return AttentionState(
            mixed(true.keys, held.keys, keys), mixed(true.values, held.values, values)
        )

    return exchange


def true_linear(number: int, true: LayerState, held: LayerState) -> LayerState:
    """True states of the linear layers in place of cached ones."""
    return true if isinstance(true, LinearState) else held


def oracle(exchange: Exchange) -> Idea:
    """Replace some of the cached states by true ones: which is it that matters?"""

    def run(bench: Bench) -> list[list[Outcome]]:
        model = bench.maker.model
        states = []
        for place, trial in enumerate(bench.trials):
            edges, at = [], 0
            for segment in trial.segments:
                edges += [at, at + min(HEAD, len(segment) - 1)]
                at += len(segment)
            ids = tuple(token for segment in trial.segments for token in segment.token_ids)
            true = encode_pieces(model, [Segment(ids)], [edges[1:]], [trial.base])[0]
            mine = []
            for number, segment in enumerate(trial.segments):
                cached = [
                    piece.state
                    for piece in bench.pieces[place]
                    if piece.number == number and piece.state is not None
                ]
                whole = join_pieces(cached, model.kernel)
                layers: list[LayerState] = []
                attention = 0
                for exact, held in zip(true[2 * number + 1].layers, whole.layers, strict=True):
                    layers.append(exchange(attention, exact, held))
                    attention += isinstance(held, AttentionState)
                mine.append(SegmentState(len(segment), Seam(), whole.offset - HEAD, tuple(layers)))
            states.append(tuple(mine))
        return run_cell(model, bench.trials, states, Mode.SEAM)

    return run


IDEAS: dict[str, Idea] = {
    "nothing": lambda bench: bench.score(lambda place, asked: set()),
    "true keys and values, cached states": oracle(true_attention()),
    "cached keys and values, true states": oracle(true_linear),
    "true keys, cached values and states": oracle(true_attention(values=False)),
    "true values, cached keys and states": oracle(true_attention(keys=False)),
    **{
        f"true keys and values in full-attention layer {layer}": oracle(true_attention(layer - 1))
        for layer in (1, 2)
    },
    **{
        f"true keys and values of the first {count} cached tokens": oracle(
            true_attention(first=count)
        )
        for count in (4, 12, 28)
    },
    **{f"best {count} segments whole": whole_segments(count) for count in (1, 2, 4)},
    **{f"{budget} tokens from the best starts": starts_within(budget) for budget in BUDGETS},
    **{
        f"{width} tokens from the starts of {'all' if count is None else f'the best {count}'}": (
            starts_of(count, width)
        )
        for count in (1, 2, 4, None)
        for width in (12, 28)
    },
    "segments with the facts whole": whole_segments(0, known=True),
    **{
        f"{budget} tokens of sentences by {by}": sentences(budget, by)
        for by in ("words", "attention", "deviation", "random")
        for budget in BUDGETS
    },
    "best segment first": reordered(True, CONDITIONING),
    "best segment first, behind the served prompt": reordered(True, "served"),
    "best segment last": reordered(False, CONDITIONING),
    "everything": lambda bench: bench.score(
        lambda place, asked: set(range(len(bench.pieces[place])))
    ),
}
"""What is tried, by name; ``deviation`` and ``true`` ones are oracles that need full recompute."""


def run(
    model: HybridModel,
    folder: Path,
    *,
    contexts: int,
    chunks: int = 8,
    names: Sequence[str] | None = None,
    shard: tuple[int, int] = (0, 1),
    unit: int = 4,
    words: tuple[int, int] = (30, 110),
    categories: Sequence[facts.Category] = facts.CATEGORIES,
    seeds: Sequence[int] | None = None,
) -> None:
    """Run what's missing of the ideas and append it to this shard's file.

    Contexts are 0, 1, … up to ``contexts``, or ``seeds`` if they're given.
    """
    maker = TrialMaker(model, words, categories=categories)
    conditioner = Conditioner(maker)

    def measure(trials: list[Trial], wanted: list[str]) -> Found:
        bench = Bench(maker, conditioner, trials)
        for name in wanted:
            yield name, IDEAS[name.removeprefix(_PREFIX)](bench)

    run_missing(
        maker,
        folder,
        [_PREFIX + name for name in (IDEAS if names is None else names)],
        measure,
        chunks=chunks,
        contexts=contexts,
        shard=shard,
        unit=unit,
        seeds=seeds,
    )


def to_markdown(model: HybridModel, folder: Path, chunks: int = 8, category: str = "all") -> str:
    """The table of ideas, over all categories or one."""
    records = read_records(folder, model).values()
    rows = {
        row.cell: row
        for row in summarize(record for record in records if record.chunks == chunks)
        if row.category == category
    }
    lines = [
        "| what is done | questions | exact match | against full | first token agrees | KL |",
        "|---|---|---|---|---|---|",
    ]
    for name in IDEAS:
        row = rows.get(_PREFIX + name)
        if row is None:
            continue
        off = row.difference
        lines.append(
            f"| {name} | {row.exact.count} | {row.exact} "
            f"| {off.mean:+.3f} [{off.low:+.3f}, {off.high:+.3f}] | {row.first} "
            f"| {row.kl.mean:.5f} [{row.kl.low:.5f}, {row.kl.high:.5f}] |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", default="small", help="name or folder of the model")
    parser.add_argument("--contexts", type=int, default=100)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--ideas", help="some of the names, separated by semicolons")
    parser.add_argument("--seeds", type=parse_seeds, help="contexts, such as 131,141; default: all")
    parser.add_argument(
        "--categories",
        type=parse_categories,
        default=facts.CATEGORIES,
        help="of the questions, such as one_fact,no_answer; default: all",
    )
    parser.add_argument("--shard", type=parse_shard, default=(0, 1), help="NUMBER/COUNT")
    parser.add_argument("--report", action="store_true", help="print the table instead")
    chosen = parser.parse_args(arguments)
    model = load_model(chosen.model)
    if chosen.report:
        category = chosen.categories[0] if len(chosen.categories) == 1 else "all"
        sys.stdout.write(to_markdown(model, chosen.out, chosen.chunks, category) + "\n")
        return
    names = chosen.ideas.split(";") if chosen.ideas else None
    run(
        model,
        chosen.out,
        contexts=chosen.contexts,
        chunks=chosen.chunks,
        names=names,
        shard=chosen.shard,
        categories=chosen.categories,
        seeds=chosen.seeds,
    )


if __name__ == "__main__":
    main()
