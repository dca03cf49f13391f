"""``hypic-rag bench serve`` measures the server, and only if its answers are right."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hypic_rag.bench_serve import measure as bench
from hypic_rag.bench_serve.measure import ServePoint, measure_serving, with_tokenizer
from hypic_rag.cli import app
from hypic_rag.evaluation.timing import WrongResultError
from hypic_rag.families.model import HybridModel

FEW = {"requests": 3, "max_tokens": 3, "rounds": 1, "documents": 2, "questions": 2}


def test_every_way_is_measured(model: HybridModel) -> None:
    points = measure_serving(model, [1, 2], **FEW)  # type: ignore[arg-type]
    assert [point.name for point in points] == ["serial", "1 client", "2 clients"]
    for point in points:
        found = point.to_json()
        assert found["requests"] == len(point.first_tokens) == 3
        assert found["requests_per_s"] == 3 / point.wall_s[0] > 0
        assert found["requests_per_cpu_s"] > 0
        assert 0 < found["ttft_median"] <= found["ttft_p95"]


def test_wrong_answers_are_not_measured(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_request", lambda port, question, tokens: ("something", 0.1))
    with pytest.raises(WrongResultError):
        measure_serving(model, [1], **FEW)  # type: ignore[arg-type]


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: HybridModel, clients: list[int], **options: object) -> list[ServePoint]:
        return [ServePoint(n, (8.0 / (n + 1),), (8.0,), 4, (0.5, 1.0, 1.5)) for n in (0, *clients)]

    monkeypatch.setattr(bench, "measure_serving", measured)
    arguments = ["bench", "serve", "--clients", "1,3", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)["results"]
    assert [entry["speedup"] for entry in found] == [1.0, 2.0, 4.0]
    assert [entry["cpu_speedup"] for entry in found] == [1.0, 1.0, 1.0]
    assert found[0]["ttft_median"] == 1.0


def test_a_tokenizer_is_lent(model: HybridModel) -> None:
    from hypic_rag.evaluation.random_models import random_model

    assert with_tokenizer(model) is model
    assert with_tokenizer(random_model("tiny")).tokenizer is not None
