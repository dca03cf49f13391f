"""Cells of the ablation: one way of encoding and assembling, run on many trials at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.context import Context
from hypic_rag.engine.engine import Engine
from hypic_rag.engine.pieces import encode_pieces, seam_cuts, state_from_pieces
from hypic_rag.engine.repair import Repairs
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.fidelity import compare
from hypic_rag.evaluation.trials import Asked, Trial, TrialMaker, common_start
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.chunking import SEPARATOR
from hypic_rag.operators import AffineMap, Elementwise
from hypic_rag.states import LayerState, LinearState, SegmentState

__all__ = ["CONDITIONINGS", "Cell", "Conditioner", "Encodings", "Outcome", "run_cell"]

OTHER_PROMPT = (
    "Notes from the shelves of a small library are given. Say what they hold, and say it plainly."
)
GENERIC_DOCUMENT = (
    "The old garden lies behind the mill, between the station and the park. In summer the visitors "
    "rest on the benches, and in winter the snow covers the path. The inn opens in the morning."
)

CONDITIONINGS = {
    "none": "nothing: every segment is encoded alone (the paper)",
    "newline": "one line break",
    "served": "the system prompt that is served, a new one per context",
    "other": "one other system prompt of similar length, for all contexts",
    "document": "a generic text in place of the system prompt",
    "other+2": "the other prompt and two generic segments",
    "other+6": "the other prompt and six generic segments",
    "served+6": "the system prompt that is served and six generic segments",
    "previous": "the other prompt and the text in front of the segment in its document",
    "previous3": "the other prompt and the three texts in front of it in its document",
}
"""What segments are encoded behind, by name."""


NO_SEAM = Seam(0, 0)


@dataclass(frozen=True)
class Cell:
    """One way of encoding and assembling.

    Attributes:
        conditioning: a name of :data:`CONDITIONINGS`.
        mode: how states are put together; ``FULL`` is the reference itself.
        seam: widths, in the mode ``seam``.
        identity: leave out the transitions (put identity in their place) but do everything else as
            the mode says; with ``TRANSITION_ROPE`` that's addition with moved keys.
    """

    conditioning: str
    mode: Mode
    seam: Seam = NO_SEAM
    identity: bool = False

    @property
    def name(self) -> str:
        """Unique name, such as ``other/seam/4/0``."""
        if self.mode is Mode.FULL:
            return "full"
        if self.identity:
            return f"{self.conditioning}/addition_rope"
        base = f"{self.conditioning}/{self.mode}"
        return f"{base}/{self.seam}" if self.mode is Mode.SEAM else base

    @classmethod
    def parse(cls, name: str) -> Cell:
        """Inverse of :attr:`name`."""
        if name == "full":
            return cls("none", Mode.FULL)
        conditioning, mode, *seam = name.split("/", 2)
        if conditioning not in CONDITIONINGS:
            raise ConfigError(f"Unknown conditioning {conditioning!r} in the cell {name!r}.")
        if mode == "addition_rope":
            return cls(conditioning, Mode.TRANSITION_ROPE, identity=True)
        return cls(conditioning, Mode.parse(mode), Seam.parse(seam[0]) if seam else NO_SEAM)


@dataclass(frozen=True)
class Outcome:
    """One question answered in one way, against full recompute of the same ids.

    Attributes:
        category: of the question.
        exact: whether greedy decoding gives exactly the expected answer.
        kl: KL of the next-token distribution against full recompute's, in nats.
        agreed: tokens of full recompute's greedy continuation that are repeated.
        length: tokens of that continuation.
    """

    category: facts.Category
    exact: bool
    kl: float
    agreed: int
    length: int


NEIGHBOURS = {"previous": 1, "previous3": 3}
"""Conditionings under which every segment has a prefix of its own, and how many texts that holds.

No store encodes like that: its states would depend on where in a document a text stands.
"""


class Conditioner:
    """Prefixes that segments are encoded behind."""

    def __init__(self, maker: TrialMaker) -> None:
        self.model = maker.model
        self._maker = maker
        self._held: dict[str, Context | None] = {}

    def behind(self, name: str, trial: Trial) -> list[Context | None]:
        """Per segment of a trial the prefix that ``name`` puts in front of it."""
        if name not in NEIGHBOURS:
            return [self.of(name, trial)] * len(trial.segments)
        prompt = self._maker.prompt
        requests = []
        for earlier in trial.earlier:
            ids = [token for text in earlier[-NEIGHBOURS[name] :] for token in prompt.text(text)]
            requests.append(Request((), (), tuple(ids), self.of("other", trial)))
        return [assembly.context for assembly in assemble(self.model, requests)]

    def of(self, name: str, trial: Trial) -> Context | None:
        """The prefix called ``name`` where all of a trial's segments share one."""
        if name == "served":
            return trial.base
        key = f"{name} {trial.system}" if name == "served+6" else name
        if key not in self._held:
            ids = self._ids(name, trial)
            self._held[key] = self._maker.context_of(ids) if ids else None
        return self._held[key]

    def _ids(self, name: str, trial: Trial) -> tuple[int, ...]:
        prompt = self._maker.prompt
        match name:
            case "none":
                return ()
            case "newline":
                return prompt.text("\n")
            case "other":
                return prompt.prefix(OTHER_PROMPT)
            case "document":
                return prompt.prefix(GENERIC_DOCUMENT)
            case "other+2" | "other+6" | "served+6":
                served = name.startswith("served")
                ids = list(prompt.prefix(trial.system if served else OTHER_PROMPT))
                for text in generic_texts(int(name[-1])):
                    ids.extend(prompt.text(text))
                return tuple(ids)
        raise ConfigError(f"Unknown conditioning {name!r}: see CONDITIONINGS.")


def generic_texts(count: int) -> list[str]:
    """Texts in the manner of the documents, with names that no trial has."""

    rng = random.Random("generic documents")
    context = facts.build_context(rng, count, (40, 80), "train")
    return [text + SEPARATOR for text in context.chunks]


class Encodings:
    """States of the trials' segments for several seams, from one encoding in pieces.

    Args:
        model: the model.
        trials: whose segments are encoded.
        bases: per trial the prefixes of its segments.
        seams: the seams that states will be asked for.
    """

    def __init__(
        self, model: HybridModel, trials: Sequence[Trial],
        bases: Sequence[Sequence[Context | None]], seams: Iterable[Seam],
    ) -> None:  # fmt: skip
        self._model = model
        chosen = set(seams)
        segments = [segment for trial in trials for segment in trial.segments]
        behind = [base for of_trial in bases for base in of_trial]
        self._lengths = [len(segment) for segment in segments]
        self._cuts = [seam_cuts(length, chosen) for length in self._lengths]
        self._pieces = encode_pieces(model, segments, self._cuts, behind)
        self._counts = [len(trial.segments) for trial in trials]
        self._joined: dict[Seam, list[tuple[SegmentState | None, ...]]] = {}

    def states(self, seam: Seam) -> list[tuple[SegmentState | None, ...]]:
        """Per trial the states of its segments."""
        if seam not in self._joined:
            self._joined[seam] = self._join(seam)
        return self._joined[seam]

    def _join(self, seam: Seam) -> list[tuple[SegmentState | None, ...]]:
        flat = [
            state_from_pieces(pieces, cuts, length, seam, self._model.kernel)
            for pieces, cuts, length in zip(self._pieces, self._cuts, self._lengths, strict=True)
        ]
        found, start = [], 0
        for count in self._counts:
            found.append(tuple(flat[start : start + count]))
            start += count
        return found


def without_transition(state: SegmentState | None) -> SegmentState | None:
    """The state with identity in place of every transition."""
    if state is None:
        return None
    layers: list[LayerState] = []
    for layer in state.layers:
        if isinstance(layer, LinearState):
            offset = layer.map.offset
            one = Elementwise(offset.new_ones(offset.shape[0], 1, 1))
            layer = LinearState(AffineMap(one, offset), layer.conv_tail)
        layers.append(layer)
    return replace(state, layers=tuple(layers))


def run_cell(
    model: HybridModel,
    trials: Sequence[Trial],
    states: Sequence[tuple[SegmentState | None, ...]],
    mode: Mode,
    repairs: Sequence[Repairs] | None = None,
) -> list[list[Outcome]]:
    """Outcomes per trial and question, with a trial's ``repairs`` beside its seams.

    A trial's segments are assembled once, up to where its questions part; every question then runs
    behind a copy, together with the continuation that it's compared on.
    """
    engine = Engine(model)
    shared = [common_start([asked.question for asked in trial.asked]) for trial in trials]
    fronts = [
        Request(trial.segments, held, trial.asked[0].question[:count], trial.base)
        for trial, held, count in zip(trials, states, shared, strict=True)
    ]
    if repairs is not None:
        fronts = [front.repaired(spent) for front, spent in zip(fronts, repairs, strict=True)]
    contexts = [assembly.context for assembly in engine.assemble(fronts, mode)]

    def behind(place: int, asked: Asked, end: tuple[int, ...]) -> Request:
        return Request((), (), asked.question[shared[place] :] + end, contexts[place])

    return score_requests(model, trials, behind)


def score_requests(
    model: HybridModel,
    trials: Sequence[Trial],
    make: Callable[[int, Asked, tuple[int, ...]], Request],
    mode: Mode = Mode.SEAM,
) -> list[list[Outcome]]:
    """Outcomes per trial and question of the requests that ``make`` gives.

    ``make`` is called with a trial's place, a question and the tokens of an answer that it must put
    behind the question, so that one pass tells what greedy decoding would do.
    """
    requests = []
    for place, trial in enumerate(trials):
        for asked, reference in zip(trial.asked, trial.references, strict=True):
            requests.append(make(place, asked, reference.continuation[:-1]))
            if asked.expected != reference.continuation:
                requests.append(make(place, asked, asked.expected[:-1]))
    assemblies = iter(assemble(model, requests, mode, all_logits=True))

    def predictions(count: int) -> Tensor:
        logits = next(assemblies).logits
        assert logits is not None
        return logits[-count:]

    outcomes = []
    for trial in trials:
        mine = []
        for asked, reference in zip(trial.asked, trial.references, strict=True):
            logits = predictions(len(reference.continuation))
            compared = compare(reference.logits, reference.continuation, logits)
            exact = compared.all_agree
            if asked.expected != reference.continuation:
                chosen = predictions(len(asked.expected)).argmax(-1).tolist()
                exact = tuple(chosen) == asked.expected
            mine.append(
                Outcome(asked.category, exact, compared.kl, compared.agreed, compared.length)
            )
        outcomes.append(mine)
    return outcomes


def reference_outcomes(trial: Trial) -> list[Outcome]:
    """Full recompute as a cell of its own."""
    return [
        Outcome(
            asked.category,
            reference.exact,
            0.0,
            len(reference.continuation),
            len(reference.continuation),
        )
        for asked, reference in zip(trial.asked, trial.references, strict=True)
    ]
