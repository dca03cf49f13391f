"""Assembly: requests made of cached segments, seams and a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hypic_rag.config import Mode
from hypic_rag.engine.context import Context
from hypic_rag.engine.layout import build_layout
from hypic_rag.engine.packed import Wanted, run_packed
from hypic_rag.engine.plan import RequestPlan, plan_request
from hypic_rag.errors import ConfigError, ContextLengthError, StateMismatchError
from hypic_rag.families.model import HybridModel
from hypic_rag.ops.choice import KernelChoice
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = ["Assembly", "Request", "assemble", "plan_of"]


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt ``[base][lead][segment 1]…[segment n][question]``.

    Attributes:
        segments: in prompt order.
        states: per segment its cached state, or None to compute it whole.
        question: token ids behind the segments; at least one.
        base: a finished cache in front (resident system prompt, or the session so far).
        lead: token ids between the base and the segments, such as the end of the last answer.
    """

    segments: tuple[Segment, ...]
    states: tuple[SegmentState | None, ...]
    question: tuple[int, ...]
    base: Context | None = None
    lead: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole prompt; full recompute runs exactly these ids."""
        ids = list(self.base.token_ids) if self.base else []
        ids.extend(self.lead)
        for segment in self.segments:
            ids.extend(segment.token_ids)
        ids.extend(self.question)
        return tuple(ids)


@dataclass(frozen=True, eq=False)
class Assembly:
    """The outcome of a request.

    Attributes:
        context: the finished cache and the logits of the next token.
        plan: what was computed and what was reused.
        logits: ``[computed, vocab]`` of every computed token if asked for.
    """

    context: Context
    plan: RequestPlan
    logits: Tensor | None = None


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
    return plan_request(base, request.segments, seams, request.question, request.lead)


def assemble(
    model: HybridModel,
    requests: Sequence[Request],
    mode: Mode = Mode.SEAM,
    *,
    all_logits: bool = False,
    kernels: KernelChoice | None = None,
) -> list[Assembly]:
    """Prefill ``requests`` in one packed pass.

    Args:
        model: the model that made the states.
        requests: any number, with different segments, lengths and hits.
        mode: how states are put together (:class:`~hypic_rag.config.Mode`, not ``FULL``).
        all_logits: also return the logits of every computed token.
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
    layout = build_layout(plans, model.kernel, model.device)
    states = []
    for interior in layout.interiors:
        state = requests[interior.request].states[interior.segment]
        assert state is not None
        if state.seam != mode.seam(state.seam):
            raise ConfigError(
                f"Mode {mode.value!r} uses states of whole segments, but a state with the seam "
                f"{state.seam} came: encode with the seam 0/0, or use the mode 'seam'."
            )
        states.append(state)
    bases = [request.base for request in requests]
    wanted = Wanted.ALL if all_logits else Wanted.LAST
    result = run_packed(model, layout, bases, states, mode, wanted=wanted, kernels=kernels)
    last = result.logits[layout.last] if all_logits else result.logits
    assemblies = []
    for index, request in enumerate(requests):
        writes = layout.writes[index]
        mine = result.logits[writes[0].start : writes[-1].end] if all_logits else None
        context = Context(request.token_ids, result.caches[index], last[index])
        assemblies.append(Assembly(context, plans[index], mine))
    return assemblies
