"""``repair_tokens`` through the front door: what's recomputed, what it costs, what it's worth."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hypic_rag import KnowledgeBase, Mode, Passage, Sampling, Source
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation.cells import OTHER_PROMPT
from hypic_rag.evaluation.fidelity import kl_divergence
from hypic_rag.evaluation.trials import SERVED_PROMPTS, TrialMaker
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder
from hypic_rag.inquiry import AnswerStream

ALL = 10**6
SHORT = Sampling(max_tokens=3)
QUESTION = "Who is the captain of the ferry of Talmir?"
FERRY = "The ferry of Talmir leaves at nine, and its captain is Orla Venn.\n\n"
MILL = "The mill of Dorvak stands by the river. Its wheel is four metres wide, and made of oak.\n\n"
MARKET = "On Monday the market opens at noon. Bread, wool and fish are sold there.\n\n"


@pytest.fixture(scope="module")
def kb(
    tmp_path_factory: pytest.TempPathFactory, small_model: HybridModel, embedder: MiniLmEmbedder
) -> Iterator[KnowledgeBase]:
    """States are encoded behind another prompt than the one that's served."""
    with KnowledgeBase.open(
        tmp_path_factory.mktemp("repair") / "kb",
        small_model,
        system_prompt=SERVED_PROMPTS[0],
        conditioning=OTHER_PROMPT,
        embedder=embedder,
    ) as opened:
        opened.warm()
        yield opened


def scored(*entries: tuple[str, float]) -> list[Passage]:
    return [Passage(text, Source("", i, s, text)) for i, (text, s) in enumerate(entries)]


def interior(kb: KnowledgeBase, text: str) -> int:
    return len(kb.prompt.segment(text)) - kb.store.settings.seam.head


def logits(kb: KnowledgeBase, stream: AnswerStream) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the stream's first token, and of the library's own forward of the same ids."""
    return stream.context.logits, kb.engine.prefill(stream.context.token_ids).logits


def test_a_budget_is_spent_to_its_last_token(kb: KnowledgeBase) -> None:
    passages = scored((MARKET, 0.1), (FERRY, 0.9), (MILL, 0.5))
    first, second, third = (interior(kb, text) for text in (FERRY, MILL, MARKET))

    def computed(budget: int) -> int:
        answer = kb.answer_from(QUESTION, passages, repair_tokens=budget, sampling=SHORT)
        assert answer.tokens.prompt == answer.tokens.reused + answer.tokens.computed
        return answer.tokens.computed

    computed(0)  # so that all states are stored
    plain = kb.answer_from(QUESTION, passages, sampling=SHORT).tokens.computed
    expected = {
        0: 0,
        1: 1,
        first - 1: first - 1,
        first: first,
        first + 5: first + 5,
        first + second: first + second,
        ALL: first + second + third,
    }
    for budget, more in expected.items():
        assert computed(budget) == plain + more, budget


def test_nothing_is_spent_on_a_passage_that_is_exact(
    tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> None:
    """The first one, where what's served is what segments are encoded behind."""
    with KnowledgeBase.open(tmp_path / "kb", small_model, embedder=embedder) as same:
        passages = scored((FERRY, 0.9), (MILL, 0.5), (MARKET, 0.1))
        same.encode([FERRY, MILL, MARKET])

        def computed(mode: Mode, budget: int) -> int:
            answer = same.answer_from(
                QUESTION, passages, mode=mode, repair_tokens=budget, sampling=SHORT
            )
            return answer.tokens.computed

        plain = computed(Mode.SEAM, 0)
        second, third = interior(same, MILL), interior(same, MARKET)
        for budget in (5, second + 5, ALL):
            assert computed(Mode.SEAM, budget) - plain == min(budget, second + third)
        stream = same.stream_from(QUESTION, passages, repair_tokens=ALL, sampling=SHORT)
        stream.stop()
        mine, exact = logits(same, stream)
        torch.testing.assert_close(mine, exact, rtol=0, atol=2e-4)
        # Without transitions the states in front of it don't reach what stands behind it.
        computed(Mode.ADDITION, 0)
        everything = sum(len(same.prompt.segment(text)) for text in (FERRY, MILL, MARKET))
        assert computed(Mode.ADDITION, ALL) - computed(Mode.ADDITION, 0) == everything


def test_a_budget_for_everything_is_full_recompute(kb: KnowledgeBase) -> None:
    texts = [FERRY, MILL, MARKET]
    for mode in (Mode.SEAM, Mode.ADDITION):
        stream = kb.stream_from(QUESTION, texts, mode=mode, repair_tokens=ALL, sampling=SHORT)
        mine, exact = logits(kb, stream)
        torch.testing.assert_close(mine, exact, rtol=0, atol=2e-4)
        base = kb.prefix(kb.system_prompt)[0].length
        assert stream.finish().tokens.reused == base
        cached = kb.stream_from(QUESTION, texts, mode=mode, sampling=SHORT)
        mine, exact = logits(kb, cached)
        cached.stop()
        assert (mine - exact).abs().max() > 2e-3


def test_fidelity_does_not_fall_as_the_budget_grows(kb: KnowledgeBase) -> None:
    """Mean KL over fixed generated questions, on passages that nobody has scored.

    One question may go the other way: a repaired passage changes what the next ones' states stand
    behind. Three contexts are too few for a mean in which one question doesn't decide.
    """
    maker = TrialMaker(kb.model, (12, 20))
    found: dict[int, list[float]] = {budget: [] for budget in (0, 30, 60, 120, ALL)}
    for seed in range(8):
        context, questions = maker.draw(seed, 4)
        for question in questions:
            exact = None
            for budget, divergences in found.items():
                stream = kb.stream_from(question.text, context.chunks, repair_tokens=budget)
                stream.stop()
                if exact is None:
                    exact = kb.engine.prefill(stream.context.token_ids).logits
                divergences.append(kl_divergence(exact, stream.context.logits))
    means = [statistics.fmean(divergences) for divergences in found.values()]
    assert means == sorted(means, reverse=True)
    assert means[0] > 1e-7
    assert means[-1] < means[0] / 1000


def test_scores_come_before_similarity_and_similarity_before_order(kb: KnowledgeBase) -> None:
    texts = [MARKET, MILL, FERRY]
    segments = [kb.prompt.segment(text) for text in texts]
    seam = kb.store.settings.seam

    def best(passages: list[Passage]) -> int:
        return kb.repairs(QUESTION, passages, segments, seam, 1).renewed.index(1)

    assert best(scored((MARKET, 0.1), (MILL, 0.9), (FERRY, 0.2))) == 1
    assert best([Passage(text) for text in texts]) == 2
    assert best(scored((MARKET, 0.0), (MILL, 0.0), (FERRY, 0.0))) == 2


def test_what_is_repaired_is_neither_loaded_nor_encoded(kb: KnowledgeBase) -> None:
    new = "The lantern of Osk is green, and nobody has lit it since the winter of 1877.\n\n"
    before = kb.store.statistics()
    answer = kb.answer_from(QUESTION, [new], repair_tokens=ALL, sampling=SHORT)
    assert answer.tokens.reused == kb.prefix(kb.system_prompt)[0].length
    assert not answer.warnings
    assert kb.store.statistics() == before


def test_a_budget_shorter_than_a_passage_brings_it_nearer(kb: KnowledgeBase) -> None:
    """The first tokens of the best passage alone; what they cost is counted once."""
    new = "The lock of Ismar has two gates. Nobody but Runa Holt opens them.\n\n"
    asked = "Who opens the gates of the lock of Ismar?"
    off, computed = [], []
    for budget in (0, 0, 4, interior(kb, new) - 1):
        stream = kb.stream_from(asked, [MARKET, MILL, new], repair_tokens=budget)
        tokens = stream.stop().tokens
        mine, exact = logits(kb, stream)
        off.append(kl_divergence(exact, mine))
        computed.append(tokens.computed)
        assert tokens.prompt == tokens.reused + tokens.computed
    # The first pass also encodes what nobody has read yet.
    assert computed[0] > computed[1]
    assert [count - computed[1] for count in computed[2:]] == [4, interior(kb, new) - 1]
    assert off[3] < off[1] / 2
    fresh = "The weir of Ismar was built in 1904 by Runa Holt. Nobody likes it.\n\n"
    passages = scored((MILL, 0.1), (fresh, 0.9))
    tokens = kb.answer_from(asked, passages, repair_tokens=9, sampling=SHORT).tokens
    read = len(kb.prompt.segment(fresh)) + kb.store.settings.seam.head
    assert tokens.computed == read + len(kb.prompt.question(asked))
    assert tokens.prompt == tokens.reused + tokens.computed


def test_conversations_repair_every_turn(kb: KnowledgeBase) -> None:
    """Behind the first turn's pass and its answer, rounding adds up; caching costs 0.4."""
    questions = (QUESTION, "And what is sold at the market?")
    session = kb.chat(passages=[FERRY], repair_tokens=ALL, sampling=SHORT)
    for question, passage in zip(questions, (FERRY, MARKET), strict=True):
        stream = session.stream(question, passages=[Passage(passage)])
        mine, exact = logits(kb, stream)
        stream.finish()
        torch.testing.assert_close(mine, exact, rtol=0, atol=2e-3)
    again = kb.chat(passages=[FERRY], repair_tokens=ALL, sampling=SHORT)
    again.restore([(QUESTION, "Orla Venn.")])
    stream = again.stream(questions[1], passages=[Passage(MARKET)])
    mine, exact = logits(kb, stream)
    tokens = stream.finish().tokens
    torch.testing.assert_close(mine, exact, rtol=0, atol=2e-3)
    assert tokens.reused == kb.prefix(kb.system_prompt)[0].length


def test_restored_turns_are_repaired_by_the_same_budget(kb: KnowledgeBase) -> None:
    kb.encode([FERRY, MARKET])
    computed = []
    for budget in (0, 4):
        session = kb.chat(passages=[FERRY], repair_tokens=budget, sampling=SHORT)
        session.restore([(QUESTION, "Orla Venn.")])
        asked = "And what is sold at the market?"
        stream = session.stream(asked, passages=[Passage(MARKET)])
        computed.append(stream.finish().tokens.computed)
    assert computed[1] == computed[0] + 2 * 4


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "64"])
def test_wrong_budgets_are_refused(kb: KnowledgeBase, wrong: int) -> None:
    message = "repair_tokens must be a whole number >= 0"
    for call in (
        lambda: kb.ask(QUESTION, repair_tokens=wrong),
        lambda: kb.stream(QUESTION, repair_tokens=wrong),
        lambda: kb.answer_from(QUESTION, [FERRY], repair_tokens=wrong),
        lambda: kb.stream_from(QUESTION, [FERRY], repair_tokens=wrong),
        lambda: kb.chat(repair_tokens=wrong),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_retrieved_passages_are_repaired_by_their_rank(kb: KnowledgeBase, tmp_path: Path) -> None:
    for name, text in (("ferry", FERRY), ("mill", MILL), ("market", MARKET)):
        (tmp_path / f"{name}.txt").write_text(text)
    kb.ingest(tmp_path)
    plain = kb.ask(QUESTION, top_k=3, sampling=SHORT)
    best = interior(kb, plain.sources[0].text)
    repaired = kb.ask(QUESTION, top_k=3, sampling=SHORT, repair_tokens=best)
    assert repaired.sources == plain.sources
    assert repaired.tokens.computed == plain.tokens.computed + best
    assert kb.stream(QUESTION, top_k=3, sampling=SHORT, repair_tokens=best).finish().tokens == (
        repaired.tokens
    )
