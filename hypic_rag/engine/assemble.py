"""Assembly: requests made of cached segments, seams and a question.

A segment whose state is still pending is encoded on the way: beside the requests' rows in the same
pass or, where that doesn't pay, in a pass of its own in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hypic_rag.config import Mode
from hypic_rag.engine.context import Context
from hypic_rag.engine.encode import encode_pending
from hypic_rag.engine.layout import build_layout
from hypic_rag.engine.packed import Missing, Wanted, run_packed
from hypic_rag.engine.pending import PendingState
from hypic_rag.engine.plan import RequestPlan, Reused, plan_encoding, plan_request
from hypic_rag.engine.repair import Repairs
from hypic_rag.errors import ConfigError, ContextLengthError, StateMismatchError
from hypic_rag.families.model import HybridModel
from hypic_rag.ops.choice import KernelChoice
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = ["ONE_PASS_TOKENS", "Assembly", "Request", "RequestState", "assemble", "plan_of"]

RequestState = SegmentState | PendingState | None
"""A segment's state in a request: at hand, still to be encoded, or none to be had."""

ONE_PASS_TOKENS = 1024
"""Most tokens of missing segments that are encoded within the pass that uses their states.

What one pass saves doesn't grow with them: encoding in front took 1.13 times as long in all for 32
tokens, 1.10 for 128, 1.02 for 512 to 1024 (a random 100m model, one thread of a CPU). Beyond, one
pass would only hold the activations of the encodings and of the requests at the same time.
"""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt ``[base][lead][segment 1]…[segment n][question]``.

    Attributes:
        segments: in prompt order.
        states: per segment its cached state, a pending one to be encoded on the way, or None to
            compute it whole.
        question: token ids behind the segments; at least one.
        base: a finished cache in front (resident system prompt, or the session so far).
        lead: token ids between the base and the segments, such as the end of the last answer.
        renewed: per segment how many of its interior's first tokens run beside its state, so that
            their keys and values are of the true context; none by default.
    """

    segments: tuple[Segment, ...]
    states: tuple[RequestState, ...]
    question: tuple[int, ...]
    base: Context | None = None
    lead: tuple[int, ...] = ()
    renewed: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole prompt; full recompute runs exactly these ids."""
        ids = list(self.base.token_ids) if self.base else []
        ids.extend(self.lead)
        for segment in self.segments:
            ids.extend(segment.token_ids)
        ids.extend(self.question)
        return tuple(ids)

    def repaired(self, repairs: Repairs) -> Request:
        """The request with ``repairs`` beside its seams."""
        states = tuple(
            None if place in repairs.whole else state for place, state in enumerate(self.states)
        )
        return replace(self, states=states, renewed=repairs.renewed)


@dataclass(frozen=True, eq=False)
class Assembly:
    """The outcome of a request.

    Attributes:
        context: the finished cache and the logits of the next token.
        plan: what was computed and what was reused.
        states: the request's states, those that were pending among them.
        encoded: tokens of the plan's reused interiors that had to be encoded for it.
        logits: of every token that the plan computes, ``[n, vocab]``, if asked for.
    """

    context: Context
    plan: RequestPlan
    states: tuple[SegmentState | None, ...]
    encoded: int
    logits: Tensor | None = None

    @property
    def computed(self) -> int:
        """Tokens of the prompt, behind its base, that ran for this request."""
        return self.plan.computed + self.encoded


def plan_of(request: Request) -> RequestPlan:
    """The plan of a request.

    Raises:
        ConfigError: the question is empty.
        StateMismatchError: a state was made for a segment of another length.
    """
    if not request.question:
        raise ConfigError("The question has no tokens: at least one token must be computed.")
    seams = []
    for index, (segment, state) in enumerate(zip(request.segments, request.states, strict=True)):
        if state is not None and state.length != len(segment):
            raise StateMismatchError(
                f"Segment {index} has {len(segment)} tokens but its state was made for "
                f"{state.length}; encode the segment again."
            )
        seams.append(state.seam if state else None)
    base = request.base.length if request.base else 0
    return plan_request(
        base, request.segments, seams, request.question, request.lead, request.renewed
    )


def assemble(
    model: HybridModel,
    requests: Sequence[Request],
    mode: Mode = Mode.SEAM,
    *,
    all_logits: bool = False,
    one_pass_tokens: int = ONE_PASS_TOKENS,
    kernels: KernelChoice | None = None,
) -> list[Assembly]:
    """Prefill ``requests`` in one packed pass.

    Whatever is pending in several places is encoded once.

    Args:
        model: the model that made the states.
        requests: any number, with different segments, lengths and hits.
        mode: how states are put together (:class:`~hypic_rag.config.Mode`, not ``FULL``).
        all_logits: also return the logits of every computed token.
        one_pass_tokens: if the pending segments have more tokens, they're encoded before.
        kernels: which implementations the pass uses; by default the best for the device.

    Raises:
        ContextLengthError: a prompt is longer than the model's context.
        StateMismatchError: a state doesn't fit its segment or the model.
        ConfigError: the mode is ``FULL``, or states with seams are used in a mode without.
    """
    if mode is Mode.FULL:
        raise ConfigError("Mode 'full' recomputes everything and has nothing to assemble.")
    if not requests:
        return []
    plans = [plan_of(request) for request in requests]
    for plan in plans:
        if plan.length > model.context_length:
            raise ContextLengthError(
                f"The prompt has {plan.length} tokens but the model's context holds "
                f"{model.context_length}: retrieve fewer chunks or ask a shorter question."
            )
    pending = _pending(requests)
    made: dict[PendingState, SegmentState] = {}
    if sum(state.length for state in pending) > one_pass_tokens:
        made = encode_pending(model, pending, kernels=kernels)
    layout = build_layout(plans, model.kernel, model.device)
    states: list[SegmentState | PendingState] = []
    for interior in layout.interiors:
        state = requests[interior.request].states[interior.segment]
        assert state is not None
        if state.seam != mode.seam(state.seam):
            raise ConfigError(
                f"Mode {mode.value!r} uses states of whole segments, but a state with the seam "
                f"{state.seam} came: encode with the seam 0/0, or use the mode 'seam'."
            )
        states.append(made.get(state, state) if isinstance(state, PendingState) else state)
    missing = _missing(model, [state for state in pending if state not in made])
    result = run_packed(
        model,
        layout,
        [request.base for request in requests],
        states,
        mode,
        missing=missing,
        wanted=Wanted.ALL if all_logits else Wanted.LAST,
        kernels=kernels,
    )
    if missing is not None:
        for one, layers in zip(missing.states, result.captured, strict=True):
            made[one] = one.of(layers)
    last = result.logits[layout.last] if all_logits else result.logits
    assemblies = []
    for index, request in enumerate(requests):
        writes = layout.writes[index]
        mine = result.logits[writes[0].start : writes[-1].end] if all_logits else None
        context = Context(request.token_ids, result.caches[index], last[index])
        held = tuple(made[s] if isinstance(s, PendingState) else s for s in request.states)
        assemblies.append(
            Assembly(context, plans[index], held, _encoded(request, plans[index]), mine)
        )
    return assemblies


def _pending(requests: Sequence[Request]) -> list[PendingState]:
    """What's pending in ``requests``, each state once."""
    states = (state for request in requests for state in request.states)
    return list(dict.fromkeys(state for state in states if isinstance(state, PendingState)))


def _encoded(request: Request, plan: RequestPlan) -> int:
    """Tokens of a request's pending interiors, wherever they stand in it, but for renewed ones."""
    return sum(
        piece.length - len(piece.renewed)
        for piece in plan.pieces
        if isinstance(piece, Reused) and isinstance(request.states[piece.segment], PendingState)
    )


def _missing(model: HybridModel, pending: Sequence[PendingState]) -> Missing | None:
    if not pending:
        return None
    plans = []
    for state in pending:
        plan = plan_encoding(state.offset, state.segment, state.seam)
        assert plan is not None
        plans.append(plan)
    layout = build_layout(plans, model.kernel, model.device)
    return Missing(tuple(pending), layout, tuple(state.context() for state in pending))
