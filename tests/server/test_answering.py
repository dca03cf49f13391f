"""Answers that take turns share passes, and are what each would be alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hypic_rag import KnowledgeBase, Mode, Sampling
from hypic_rag.engine import generate
from hypic_rag.engine.assemble import Assembly, Request
from hypic_rag.engine.decoding import DecodeBatch
from hypic_rag.engine.engine import Engine
from hypic_rag.engine.generate import Chooser
from hypic_rag.server.answering import Answering, Event, Finished, Piece, Started
from hypic_rag.server.protocol import ChatCall, ChatRequest, read_chat_request
from hypic_rag.server.sessions import SessionPool
from hypic_rag.server.settings import ServerSettings
from hypic_rag.server.worker import PAUSE, Pause

QUESTIONS = (
    "Who is the harbour master of Brindle?",
    "Who made the wheel of the mill?",
    "When is the library open?",
    "How many books does the library own?",
    "How many quays has the harbour?",
)


@pytest.fixture
def kb(
    new_kb: Callable[..., KnowledgeBase], documents: Path, monkeypatch: pytest.MonkeyPatch
) -> KnowledgeBase:
    made = new_kb()
    made.ingest(documents)
    monkeypatch.setattr(generate, "stop_tokens", lambda model: frozenset())  # long answers
    return made


@pytest.fixture
def answering(kb: KnowledgeBase) -> Answering:
    return Answering(kb, SessionPool(1 << 30, 1800.0))


def call(question: str, tokens: int = 12, **body: Any) -> ChatCall:
    messages = [{"role": "user", "content": question}]
    sent = {"model": "small", "messages": messages, "max_tokens": tokens, **body}
    return read_chat_request(ChatRequest.model_validate(sent), ServerSettings())


class Run:
    """An answer that is made step by step."""

    def __init__(self, answering: Answering, asked: ChatCall) -> None:
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.ended = False
        self.iterator: Iterator[Event | Pause] = answering.answer("", asked)

    def step(self) -> None:
        try:
            event = next(self.iterator)
        except StopIteration:
            self.ended = True
        except Exception as error:
            self.error, self.ended = error, True
        else:
            if event is not PAUSE:
                self.events.append(event)

    @property
    def finished(self) -> Finished:
        assert self.error is None
        assert isinstance(self.events[0], Started)
        last = self.events[-1]
        assert isinstance(last, Finished)
        assert "".join(e.text for e in self.events if isinstance(e, Piece)) == last.text
        return last


def in_turns(runs: Sequence[Run]) -> None:
    while left := [run for run in runs if not run.ended]:
        for run in left:
            run.step()


def told(kb: KnowledgeBase, asked: ChatCall) -> str:
    return kb.ask(asked.question, mode=asked.mode, sampling=asked.sampling).text


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of every packed pass."""
    sizes: list[int] = []
    assemble = Engine.assemble

    def counted(self: Engine, requests: Sequence[Request], mode: Mode) -> list[Assembly]:
        sizes.append(len(requests))
        return assemble(self, requests, mode)

    monkeypatch.setattr(Engine, "assemble", counted)
    return sizes


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Answers of every batched step."""
    sizes: list[int] = []
    forward = DecodeBatch._forward

    def counted(self: DecodeBatch, rows: Any) -> None:
        sizes.append(len(rows))
        forward(self, rows)

    monkeypatch.setattr(DecodeBatch, "_forward", counted)
    return sizes


def test_answers_in_turns_share_passes(
    kb: KnowledgeBase, answering: Answering, passes: list[int], forwards: list[int]
) -> None:
    calls = [call(question) for question in QUESTIONS]
    calls[1] = call(QUESTIONS[1], temperature=1.0, seed=7)
    calls[2] = call(QUESTIONS[2], hypic={"mode": "full"})
    calls[3] = call(QUESTIONS[3], tokens=5)
    expected = [told(kb, asked) for asked in calls]
    passes.clear()
    runs = [Run(answering, asked) for asked in calls]
    in_turns(runs)
    assert [run.finished.text for run in runs] == expected
    assert passes == [3, 1]  # of the first four one is recomputed in full
    # Those of the first pass are a token ahead of the fifth.
    assert forwards == [4, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4, 1]


def test_a_pass_is_followed_by_its_first_tokens(kb: KnowledgeBase, answering: Answering) -> None:
    """So many who begin at once don't wait for one another's prefills."""
    runs = [Run(answering, call(question)) for question in (*QUESTIONS, *QUESTIONS)]
    order = []
    told = [0] * len(runs)
    while not all(run.ended for run in runs):
        for number, run in enumerate(runs):
            run.step()
            for event in run.events[told[number] :]:
                order.append((type(event).__name__, number))
            told[number] = len(run.events)
    first = {kind: [order.index((kind, n)) for n in range(10)] for kind in ("Started", "Piece")}
    for earlier, later in ((0, 4), (3, 4), (4, 8), (7, 8)):
        assert first["Piece"][earlier] < first["Started"][later]


def test_whoever_comes_later_joins(
    kb: KnowledgeBase, answering: Answering, forwards: list[int]
) -> None:
    calls = [call(question) for question in QUESTIONS[:3]]
    expected = [told(kb, asked) for asked in calls]
    runs = [Run(answering, asked) for asked in calls]
    for number in range(3):
        for _ in range(5):
            for run in runs[: number + 1]:
                run.step()
    in_turns(runs)
    assert [run.finished.text for run in runs] == expected
    assert {1, 2, 3} == set(forwards)


def test_an_answer_that_is_given_up_leaves_the_others_alone(
    kb: KnowledgeBase, answering: Answering
) -> None:
    """At every step: before and behind the prefill, and among the tokens."""
    calls = [call(question, tokens=8) for question in QUESTIONS[:3]]
    expected = [told(kb, asked) for asked in calls]
    for steps in (0, 1, 2, 3, 4, 7):
        runs = [Run(answering, asked) for asked in calls]
        for _ in range(steps):
            for run in runs:
                run.step()
        runs[1].iterator.close()  # type: ignore[attr-defined]
        in_turns([runs[0], runs[2]])
        assert [runs[0].finished.text, runs[2].finished.text] == [expected[0], expected[2]]
        assert len(answering._batch) == 0
        assert kb.store.evict(0) >= 0, "nothing is leased any more"
    assert kb.store.statistics().state_bytes == 0


def test_an_answer_whose_prefill_fails_fails_alone(
    kb: KnowledgeBase, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [call(question) for question in QUESTIONS[:4]]
    expected = [told(kb, asked) for asked in calls]
    assemble = Engine.assemble
    wrong = kb.prompt.question(QUESTIONS[2])

    def fail(self: Engine, requests: Sequence[Request], mode: Mode) -> list[Assembly]:
        if any(request.question == wrong for request in requests):
            raise MemoryError("no room")
        return assemble(self, requests, mode)

    monkeypatch.setattr(Engine, "assemble", fail)
    runs = [Run(answering, asked) for asked in calls]
    in_turns(runs)
    assert isinstance(runs.pop(2).error, MemoryError)
    del expected[2]
    assert [run.finished.text for run in runs] == expected


def test_an_answer_whose_token_fails_fails_alone(
    kb: KnowledgeBase, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [call(question) for question in QUESTIONS[:3]]
    expected = [told(kb, asked) for asked in calls]
    calls[1] = dataclasses.replace(calls[1], sampling=Sampling(12, 1.0, seed=13))
    choose = Chooser.next

    def fail(self: Chooser, logits: Any) -> int | None:
        if self._sampling.seed == 13 and self._left < 9:
            raise ZeroDivisionError
        return choose(self, logits)

    monkeypatch.setattr(Chooser, "next", fail)
    runs = [Run(answering, asked) for asked in calls]
    in_turns(runs)
    assert isinstance(runs[1].error, ZeroDivisionError)
    assert len([e for e in runs[1].events if isinstance(e, Piece)]) > 0
    assert [runs[0].finished.text, runs[2].finished.text] == [expected[0], expected[2]]
    assert len(answering._batch) == 0


def test_a_conversation_goes_on_behind_a_batch(kb: KnowledgeBase, answering: Answering) -> None:
    sampling = Sampling(max_tokens=9)
    serial = [kb.chat(sampling=sampling) for _ in range(3)]
    histories: list[list[dict[str, str]]] = [[] for _ in serial]
    for turn in range(3):
        asked = [QUESTIONS[(number + turn) % len(QUESTIONS)] for number in range(3)]
        expected = [session.ask(question) for session, question in zip(serial, asked, strict=True)]
        calls = []
        for history, question in zip(histories, asked, strict=True):
            history.append({"role": "user", "content": question})
            calls.append(call(question, tokens=9, messages=history))
        runs = [Run(answering, one) for one in calls]
        in_turns(runs)
        for run, answer, history in zip(runs, expected, histories, strict=True):
            assert run.finished.text == answer.text
            assert run.finished.answer.tokens == answer.tokens
            started = run.events[0]
            assert isinstance(started, Started)
            assert started.conversation == ("continued" if turn else "new")
            history.append({"role": "assistant", "content": run.finished.text})


def test_a_stopped_answer_leaves_the_batch_and_its_conversation_goes_on(kb: KnowledgeBase) -> None:
    batch = DecodeBatch(kb.model)
    sampling = Sampling(max_tokens=9)
    answers = []
    for decode in (None, batch.generate):
        session = kb.chat(sampling=sampling)
        stream = session.prepare(QUESTIONS[0]).start(decode)
        for _ in range(4):
            next(stream.steps())
        stream.stop()
        assert len(batch) == 0
        assert session.context is not None
        assert session.context.length > stream.context.length, "what was said is in the cache"
        answers.append((stream.answer.text, session.ask(QUESTIONS[1]).text))
    assert answers[0] == answers[1]
