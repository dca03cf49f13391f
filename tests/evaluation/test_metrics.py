from __future__ import annotations

import math

import numpy as np
import pytest

from hypic_rag.evaluation.metrics import (
    best_over,
    bootstrap,
    contains_all,
    exact_match,
    normalize,
    rouge_l,
    token_f1,
)


def test_normalisation_and_matches() -> None:
    assert normalize("The  Ferry, of a TOWN!") == "ferry of town"
    assert exact_match("The ferry.", "ferry") == 1.0
    assert exact_match("ferries", "ferry") == 0.0
    assert token_f1("a red boat", "the red ship") == pytest.approx(0.5)
    assert token_f1("red red", "red") == pytest.approx(2 / 3)
    assert token_f1("", "red") == 0.0 and token_f1("", "") == 1.0
    assert best_over(exact_match, "noon", ["one", "Noon"]) == 1.0
    assert contains_all("Codes 12 and 7.", ["12", "9"]) == 0.5


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    # police … the gunman: 3 of 4 and 3 of 4 words.
    assert rouge_l("police kill the gunman", "police killed the gunman") == pytest.approx(0.75)
    assert rouge_l("the gunman kill police", "police killed the gunman") == pytest.approx(0.5)
    assert rouge_l("", "a") == 0.0


def test_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        values = (generator.random(60) < 0.3).astype(float).tolist()
        interval = bootstrap(values, resamples=400, seed=trial)
        assert interval.low <= interval.mean <= interval.high
        covered += interval.low <= 0.3 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_bootstrap_repeats_and_refuses_nothing() -> None:
    assert bootstrap([0.0, 1.0, 1.0]) == bootstrap([0.0, 1.0, 1.0])
    assert bootstrap([1.0, 1.0]).low == bootstrap([1.0, 1.0]).high == 1.0
    empty = bootstrap([])
    assert empty.count == 0 and math.isnan(empty.mean)
