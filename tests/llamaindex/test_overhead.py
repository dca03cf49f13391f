"""The script that measures what LlamaIndex adds."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llamaindex_samples import TOPICS

from hypic_rag import KnowledgeBase
from hypic_rag.errors import HypicError

SCRIPT = Path(__file__).parents[2] / "demos" / "benchmarks" / "llamaindex_overhead.py"
QUESTIONS = [f"Who kept the {topic}?" for topic in TOPICS[:3]]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("llamaindex_overhead", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look for it there
        spec.loader.exec_module(module)
        yield module


def test_all_ways_are_timed_over_the_same_passages(script: Any, full_kb: KnowledgeBase) -> None:
    with asyncio.Runner() as runner:
        found = script.measure(script.ways(full_kb, 2, runner), QUESTIONS)
    rows = {row["way"]: row for row in script.summary(found)}
    assert len(rows) == 4
    assert rows[script.PLAIN]["added_ms"] == rows[script.PLAIN]["added_cpu_ms"] == 0
    for row in rows.values():
        assert 0 < row["retrieval_ms"] < row["ttft_ms"]
    assert {len(one.passages) for firsts in found.values() for one in firsts} == {2}


def test_nothing_is_told_of_ways_that_disagree(script: Any, full_kb: KnowledgeBase) -> None:
    plain = script.plain(full_kb, 2)

    def other(question: str) -> Any:
        return replace(plain(question), text="something else")

    with pytest.raises(HypicError, match="other answers"):
        script.measure({script.PLAIN: plain, "other": other}, QUESTIONS)
