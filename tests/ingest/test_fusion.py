"""The law of reciprocal ranks, and its ties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic_rag.errors import ConfigError
from hypic_rag.ingest.fusion import reciprocal_rank_fusion

RANKINGS = st.lists(st.lists(st.integers(0, 9), max_size=8, unique=True), max_size=4)


def test_scores() -> None:
    fused = reciprocal_rank_fusion([["a", "b"], ["b", "c"]], weights=[1, 2], k=10)
    assert fused == [
        ("b", pytest.approx(1 / 12 + 2 / 11)),
        ("c", pytest.approx(2 / 12)),
        ("a", pytest.approx(1 / 11)),
    ]
    assert reciprocal_rank_fusion([["a", "b"], ["b", "c"]], limit=1)[0][0] == "b"


def test_ties_go_to_the_first_met() -> None:
    assert [name for name, _ in reciprocal_rank_fusion([["a", "b"], ["c", "d"]])] == list("acbd")


def test_repeated_ids_count_once() -> None:
    assert reciprocal_rank_fusion([["a", "a", "b"]], k=1) == [("a", 1 / 2), ("b", 1 / 3)]


@given(RANKINGS)
def test_every_id_once_and_sorted(rankings: list[list[int]]) -> None:
    fused = reciprocal_rank_fusion(rankings)
    assert sorted(name for name, _ in fused) == sorted({i for r in rankings for i in r})
    scores = [score for _, score in fused]
    assert scores == sorted(scores, reverse=True)


@given(st.lists(st.integers(), unique=True))
def test_a_single_ranking_stays(ranking: list[int]) -> None:
    assert [name for name, _ in reciprocal_rank_fusion([ranking])] == ranking


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], []])
def test_weights_are_checked(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="Expected 2 weights"):
        reciprocal_rank_fusion([[1], [2]], weights=weights)


def test_k_is_checked() -> None:
    with pytest.raises(ConfigError, match="k must be positive"):
        reciprocal_rank_fusion([[1]], k=0)
