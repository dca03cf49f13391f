"""Conversations that are continued, taken up again, and recomputed: the same prompt each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hypic_rag import KnowledgeBase, Mode, Sampling
from hypic_rag.families.model import HybridModel
from hypic_rag.server.sessions import SessionPool, context_bytes, session_key

SHORT = Sampling(max_tokens=8)
QUESTIONS = ("Who is the harbour master?", "Who made the wheel?", "When is the library open?")


@pytest.fixture
def kb(new_kb: Callable[..., KnowledgeBase], documents: Path) -> KnowledgeBase:
    made = new_kb()
    made.ingest(documents)
    return made


def test_a_conversation_taken_up_again_has_the_same_prompt_and_answer(kb: KnowledgeBase) -> None:
    kept = kb.chat(top_k=1, sampling=SHORT)
    history = []
    for question in QUESTIONS:
        restored = kb.chat(top_k=1, sampling=SHORT)
        restored.restore(history)
        mine, other = kept.stream(question), restored.stream(question)
        assert mine.context.token_ids[: len(kb.prompt.prefix(kb.system_prompt))]
        expected, answer = mine.finish(), other.finish()
        if len(history) < 2:
            # An answer's tokens, made one by one, may differ from those of its whole text.
            assert kb.prompt.decode(list(mine.context.token_ids)) == kb.prompt.decode(
                list(other.context.token_ids)
            )
        assert [s.id for s in mine.sources] == [s.id for s in other.sources]
        assert answer.tokens.prompt == answer.tokens.reused + answer.tokens.computed
        assert answer.tokens.computed >= expected.tokens.computed
        assert 0 < answer.tokens.computed < answer.tokens.prompt
        history.append((question, expected.text))


def test_what_a_rebuilding_computes_is_counted(kb: KnowledgeBase) -> None:
    kb.warm()
    fresh = kb.chat(top_k=1, sampling=SHORT)
    first = fresh.ask(QUESTIONS[0])
    second = fresh.ask(QUESTIONS[1])
    restored = kb.chat(top_k=1, sampling=SHORT)
    restored.restore([(QUESTIONS[0], first.text)])
    again = restored.ask(QUESTIONS[1])
    said = len(kb.prompt.question(QUESTIONS[0])) + len(kb.prompt.text(first.text))
    assert again.tokens.computed >= second.tokens.computed + said
    assert again.tokens.reused > 0


def test_in_full_mode_every_turn_recomputes_the_same_prompt(kb: KnowledgeBase) -> None:
    history = [(QUESTIONS[0], "Ada Quill"), (QUESTIONS[1], "Oren Tuck")]
    streams = {}
    for mode in (Mode.SEAM, Mode.FULL):
        session = kb.chat(top_k=1, mode=mode, sampling=SHORT)
        session.restore(history)
        streams[mode] = session.stream(QUESTIONS[2])
    assert streams[Mode.FULL].context.token_ids == streams[Mode.SEAM].context.token_ids
    full = streams[Mode.FULL].finish()
    assert full.tokens.reused == 0
    assert full.tokens.computed == full.tokens.prompt


def test_a_full_conversation_continues(kb: KnowledgeBase) -> None:
    session = kb.chat(top_k=1, mode="full", sampling=SHORT)
    first, second = session.ask(QUESTIONS[0]), session.ask(QUESTIONS[1])
    assert second.tokens.prompt > first.tokens.prompt
    assert second.tokens.reused == 0


def test_a_conversation_about_given_passages_reads_each_once(kb: KnowledgeBase) -> None:
    passages = ["The mayor is Ines Orr.", "The tower is forty metres high and made of oak."]
    session = kb.chat(sampling=SHORT, passages=passages)
    session.ask("Who is the mayor?")
    session.ask("How high is the tower?")
    assert [p.text for p in session.turns[0].passages] == passages
    assert session.turns[1].passages == ()


def test_the_oldest_turns_go_when_the_context_is_full(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = kb.chat(top_k=1, sampling=SHORT)
    session.ask(QUESTIONS[0])
    length = session.ask(QUESTIONS[1]).tokens.prompt
    monkeypatch.setattr(HybridModel, "context_length", property(lambda self: length + 10))
    answer = session.ask(QUESTIONS[2])
    assert answer.tokens.prompt + answer.tokens.generated <= length + 10
    assert [turn.question for turn in session.turns][-1] == QUESTIONS[2]
    assert len(session.turns) < 3


def test_much_room_asked_for_the_answer_doesnt_cost_the_history(kb: KnowledgeBase) -> None:
    session = kb.chat(top_k=1, sampling=SHORT)
    session.ask(QUESTIONS[0])
    stream = session.stream(QUESTIONS[1], sampling=Sampling(max_tokens=1_000_000))
    next(iter(stream), None)
    stream.stop()
    assert len(session.turns) == 2


def test_a_stopped_answer_is_what_was_generated(kb: KnowledgeBase) -> None:
    session = kb.chat(top_k=1, sampling=SHORT)
    stream = session.stream(QUESTIONS[0])
    answer = stream.stop()  # before anything was generated
    assert (answer.text, answer.tokens.generated) == ("", 0)
    assert stream.stop() is answer
    following = session.ask(QUESTIONS[1])  # the session isn't stuck
    assert following.tokens.prompt > answer.tokens.prompt


def test_sharing_a_store_with_another_tenant_and_prompt(kb: KnowledgeBase) -> None:
    other = kb.share(tenant="other", system_prompt="Answer in one word.")
    assert (other.store, other.model) == (kb.store, kb.model)
    assert other.system_prompt == "Answer in one word."
    assert other.tenant == "other"
    assert other.probe is kb.probe
    assert kb.store.documents("other") == []
    mine = kb.share(system_prompt="Answer in one word.")
    assert mine.tenant == kb.tenant
    answer = mine.ask(QUESTIONS[0], top_k=1, sampling=SHORT)
    assert answer.tokens.reused > 0, "the served prompt invalidates no state"


# -- the pool ------------------------------------------------------------------------------------


def test_a_session_is_named_by_everything_said() -> None:
    base = session_key(["t", "seam"], [("a", "b")])
    assert session_key(["t", "seam"], [(" a\n", "b ")]) == base
    others = [
        session_key(["u", "seam"], [("a", "b")]),
        session_key(["t", "seam"], [("a", "c")]),
        session_key(["t", "seam"], [("a", "b"), ("c", "d")]),
        session_key(["t", "seam"], [("ab", "")]),
        session_key(["t", "seam"], []),
    ]
    assert len({base, *others}) == 6


def test_the_pool_keeps_to_its_budget_and_forgets_the_idle(kb: KnowledgeBase) -> None:
    sessions = []
    for question in QUESTIONS:
        session = kb.chat(top_k=1, sampling=SHORT)
        session.ask(question)
        sessions.append(session)
    assert sessions[0].context is not None
    size = max(context_bytes(s.context) for s in sessions if s.context)
    assert size > 1000
    now = 0.0
    pool = SessionPool(size * 2, 10.0, lambda: now)
    for name, session in zip("abc", sessions, strict=True):
        pool.put(name, session)
    assert len(pool) == 2
    assert 0 < pool.bytes <= size * 2
    assert pool.take("a") is None
    assert pool.take("b") is sessions[1]
    assert pool.take("b") is None, "who takes one has it alone"
    now = 10.0
    assert pool.take("c") is None
    assert (len(pool), pool.bytes) == (0, 0)
    tiny = SessionPool(10, 10.0)
    tiny.put("a", sessions[0])
    assert len(tiny) == 0
