"""Decoding together equals decoding alone, whoever joins or leaves, and when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models import BUILDERS, VOCAB, tiny_model
from torch import Tensor

from hypic_rag.config import Sampling
from hypic_rag.engine import decoding
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.context import Context, attention_kv, forward, linear_state
from hypic_rag.engine.decoding import DecodeBatch
from hypic_rag.engine.generate import Chooser, generate_tokens
from hypic_rag.engine.oracle import recompute
from hypic_rag.families.base import LinearSpec
from hypic_rag.families.model import HybridModel

TOLERANCE = 2e-4
LENGTHS = (150, 2, 37, 301)

families = pytest.mark.parametrize("family", sorted(BUILDERS))


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())


def contexts_of(model: HybridModel) -> list[Context]:
    """Contexts of different lengths: by the library, and assembled behind another context."""
    base = recompute(model, tokens(37, 99))[0]
    made = [recompute(model, tokens(length, length))[0] for length in LENGTHS]
    packed = [Request((), (), tokens(length, length), base) for length in (70, 5)]
    return made + [assembly.context for assembly in assemble(model, packed)]


class Seen:
    """The logits from which every answer's tokens were chosen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._logits: dict[int, list[Tensor]] = {}
        choose, begin = Chooser.next, Chooser.__init__
        order: list[Chooser] = []

        def begun(chooser: Chooser, *args: object) -> None:
            begin(chooser, *args)  # type: ignore[arg-type]
            order.append(chooser)

        def chosen(chooser: Chooser, logits: Tensor) -> int | None:
            if chooser.wants_more:
                self._logits.setdefault(order.index(chooser), []).append(logits.clone())
            return choose(chooser, logits)

        monkeypatch.setattr(Chooser, "__init__", begun)
        monkeypatch.setattr(Chooser, "next", chosen)

    def of(self, number: int) -> Tensor:
        """``[tokens, vocab]`` of the answer that began as the ``number``-th."""
        return torch.stack(self._logits[number])


def serial(
    model: HybridModel, contexts: list[Context], samplings: list[Sampling]
) -> list[list[int]]:
    return [
        list(generate_tokens(model, context, sampling, stops=()))
        for context, sampling in zip(contexts, samplings, strict=True)
    ]


def in_turns(answers: list[Iterator[int]]) -> list[list[int]]:
    """Every answer's tokens; those that still have some take one each in turns."""
    told: list[list[int]] = [[] for _ in answers]
    left = list(range(len(answers)))
    while left:
        for number in list(left):
            token = next(answers[number], None)
            if token is None:
                left.remove(number)
            else:
                told[number].append(token)
    return told


def require_equal_caches(model: HybridModel, mine: Context, other: Context) -> None:
    for index, spec in enumerate(model.layers):
        read = linear_state if isinstance(spec, LinearSpec) else attention_kv
        for held, expected in zip(read(mine.cache, index), read(other.cache, index), strict=True):
            torch.testing.assert_close(held, expected, rtol=0, atol=TOLERANCE)


@families
def test_a_batch_equals_one_by_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens, their logits, and the caches that are left."""
    model = tiny_model(family)
    alone, together = contexts_of(model), contexts_of(model)
    samplings = [Sampling(max_tokens=4 + 3 * number) for number in range(len(alone))]
    seen = Seen(monkeypatch)
    expected = serial(model, alone, samplings)
    batch = DecodeBatch(model)
    answers = [
        batch.generate(context, sampling, stops=())
        for context, sampling in zip(together, samplings, strict=True)
    ]
    assert in_turns(answers) == expected
    assert [len(answer) for answer in expected] == [s.max_tokens for s in samplings]
    assert len(batch) == 0
    for number, (mine, other) in enumerate(zip(together, alone, strict=True)):
        difference = (seen.of(len(alone) + number) - seen.of(number)).abs().max()
        assert difference < TOLERANCE
        require_equal_caches(model, mine, other)


@families
def test_joining_and_leaving_at_any_step_changes_nothing(family: str) -> None:
    model = tiny_model(family)
    alone, together = contexts_of(model), contexts_of(model)
    limit = Sampling(max_tokens=12)
    expected = serial(model, alone, [limit] * len(alone))
    batch = DecodeBatch(model)
    answers = [batch.generate(context, limit, stops=()) for context in together]
    told: list[list[int]] = [[] for _ in answers]

    def take(*numbers: int) -> None:
        for number in numbers:
            told[number].append(next(answers[number]))

    take(0)
    take(0, 1)
    take(2, 1, 0)
    take(0, 1, 2)
    answers[1].close()  # from the middle
    take(2, 2, 2, 0)  # one ahead of the others
    take(3, 0, 2, 4)
    answers[4].close()  # behind its first token
    answers[0].close()  # from the front
    take(3, 5, 2, 3)
    for number in (2, 3, 5):
        told[number] += list(answers[number])
    assert len(batch) == 0
    for mine, whole in zip(told, expected, strict=True):
        assert mine == whole[: len(mine)]
    assert [len(mine) for mine in told] == [6, 3, 12, 12, 1, 12]
    for number, context in enumerate(together):
        continue_behind(model, context, told[number])


def continue_behind(model: HybridModel, context: Context, told: list[int]) -> None:
    """The library goes on behind what's left, as behind a prefill of the same tokens."""
    held = context.cache.get_seq_length() - context.length
    assert held in (len(told) - 1, len(told))
    ids = [*context.token_ids, *told[:held]]
    logits = forward(model.module, [7], len(ids), context.cache)[-1]
    _, whole = recompute(model, [*ids, 7])
    torch.testing.assert_close(logits, whole[-1], rtol=0, atol=TOLERANCE)


def test_an_assembly_continues_behind_a_batch() -> None:
    model = tiny_model("qwen3_5")
    batch = DecodeBatch(model)
    contexts = contexts_of(model)
    answers = [batch.generate(context, Sampling(max_tokens=5), stops=()) for context in contexts]
    told = in_turns(answers)
    for context, answer in zip(contexts, told, strict=True):
        ids = context.token_ids + tuple(answer[:-1])
        base = Context(ids, context.cache, context.logits)
        request = Request((), (), (answer[-1], *tokens(6, 3)), base)
        _, whole = recompute(model, request.token_ids)
        behind = assemble(model, [request])[0].context.logits
        torch.testing.assert_close(behind, whole[-1], rtol=0, atol=TOLERANCE)


def test_samples_are_those_of_their_seeds() -> None:
    model = tiny_model("qwen3_5")
    samplings = [
        Sampling(max_tokens=10, temperature=0.7 + 0.2 * number, top_p=0.9, seed=number)
        for number in range(6)
    ]
    expected = serial(model, contexts_of(model), samplings)
    batch = DecodeBatch(model)
    answers = [
        batch.generate(context, sampling, stops=())
        for context, sampling in zip(contexts_of(model), samplings, strict=True)
    ]
    assert in_turns(answers) == expected
    greedy = serial(model, contexts_of(model), [Sampling(max_tokens=10)] * 6)
    assert all(mine != other for mine, other in zip(expected, greedy, strict=True))


def test_stop_tokens_end_one_answer_only() -> None:
    model = tiny_model("qwen3_5")
    limit = Sampling(max_tokens=8)
    expected = serial(model, contexts_of(model)[:2], [limit] * 2)
    stop = next(token for token in expected[0][2:] if token not in expected[1])
    batch = DecodeBatch(model)
    answers = [batch.generate(context, limit, stops=[stop]) for context in contexts_of(model)[:2]]
    assert in_turns(answers) == [expected[0][: expected[0].index(stop)], expected[1]]


def test_answers_in_turns_share_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_5")
    rows: list[int] = []
    forwarded = DecodeBatch._forward

    def counted(batch: DecodeBatch, feeding: list[object]) -> None:
        rows.append(len(feeding))
        forwarded(batch, feeding)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeBatch, "_forward", counted)
    batch = DecodeBatch(model)
    limit = Sampling(max_tokens=9)
    in_turns([batch.generate(context, limit, stops=()) for context in contexts_of(model)])
    assert rows == [6] * 8  # nothing runs for the first token, nor behind the last one


def test_buffers_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_GROWTH_TOKENS", 2)
    model = tiny_model("qwen3_5")
    limit = [Sampling(max_tokens=20)] * 6
    expected = serial(model, contexts_of(model), limit)
    batch = DecodeBatch(model)
    answers = [batch.generate(context, limit[0], stops=()) for context in contexts_of(model)]
    assert in_turns(answers) == expected


def test_a_failing_answer_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward, and when its token is chosen; the others go on as if nothing had been."""
    model = tiny_model("qwen3_5_moe")
    limit = [Sampling(max_tokens=8)] * 6
    expected = serial(model, contexts_of(model), limit)
    contexts = contexts_of(model)
    batch = DecodeBatch(model)
    answers = [batch.generate(context, limit[0], stops=()) for context in contexts]
    told = [[next(answer) for answer in answers] for _ in range(3)]
    broken = batch._rows[2].buffers
    put = decoding._KeyValues.put

    def fail(buffer: decoding._KeyValues, *args: object) -> object:
        if buffer in broken.values():
            raise MemoryError("no room")
        return put(buffer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(decoding._KeyValues, "put", fail)
    monkeypatch.setattr(batch._rows[4].chooser, "next", lambda logits: 1 // 0)
    rest: dict[int, list[int]] = {}
    for number, failure in ((2, MemoryError), (4, ZeroDivisionError)):
        with pytest.raises(failure):
            next(answers[number])
    others = [0, 1, 3, 5]
    for number, told_later in zip(others, in_turns([answers[n] for n in others]), strict=True):
        rest[number] = told_later
    assert len(batch) == 0
    for number in others:
        assert [step[number] for step in told] + rest[number] == expected[number]
    for number, context in enumerate(contexts):
        continue_behind(model, context, [step[number] for step in told] + rest.get(number, []))
