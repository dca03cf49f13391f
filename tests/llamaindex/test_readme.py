"""The page that users follow, run as it stands."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import MockEmbedding
from llama_index.core.llms import MockLLM

import hypic_rag_llamaindex
from hypic_rag.families.model import HybridModel

ROOT = Path(hypic_rag_llamaindex.__file__).parent
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python *(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "ferry.md").write_text(
        "# The ferry\n\nThe ferry leaves at nine. Its captain is Orla Venn.\n"
    )
    (folder / "mill.txt").write_text("The mill stands by the river. It was built in 1843.\n")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"llm": MockLLM(), "embed_model": MockEmbedding(embed_dim=8)}
    try:
        for name, block in BLOCKS:
            exec(compile(block, f"README.md {name}", "exec"), names)
            assert capsys.readouterr().out.strip() or "print" not in block
        assert names["query_engine"].query("When?").metadata["hypic"]["reused_tokens"] > 0
    finally:
        for name in ("kb",):
            names[name].close()


def test_five_lines_are_enough() -> None:
    first = [line for line in BLOCKS[0][1].splitlines() if line.strip()]
    assert len(first) == 5


def test_the_migration_keeps_what_it_can() -> None:
    blocks = dict(BLOCKS)
    before = {line for line in blocks["before"].splitlines() if line.strip()}
    after = {line for line in blocks["after"].splitlines() if line.strip()}
    assert len(before & after) >= 2


def test_only_public_names_of_the_library_are_used() -> None:
    public = {"hypic_rag", "hypic_rag.store", "hypic_rag.errors"}
    for path in ROOT.glob("*.py"):
        for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(item, ast.ImportFrom) and (item.module or "").startswith("hypic_rag."):
                assert item.module in public, f"{path.name} imports {item.module}"
            if isinstance(item, ast.ImportFrom) and item.module in public:
                module = __import__(item.module, fromlist=["*"])
                listed = getattr(module, "__all__", None)
                assert listed is None or {name.name for name in item.names} <= set(listed)
            if isinstance(item, ast.Attribute) and item.attr.startswith("_"):
                assert not isinstance(item.value, ast.Attribute) or item.value.attr not in (
                    "store",
                    "engine",
                    "prompt",
                    "model",
                ), f"{path.name} uses {item.attr}"


def test_names() -> None:
    for name in hypic_rag_llamaindex.__all__:
        assert getattr(hypic_rag_llamaindex, name).__doc__


def test_the_shipped_model_and_embedder(small_model: HybridModel, tmp_path: Path) -> None:
    from hypic_rag import KnowledgeBase

    (tmp_path / "ferry.md").write_text("# The ferry\n\nIts captain is Orla Venn.\n")
    with KnowledgeBase.open(tmp_path / "kb", small_model) as kb:
        kb.ingest(tmp_path / "ferry.md")
        engine = hypic_rag_llamaindex.HypicQueryEngine.from_knowledge_base(kb)
        question = "Who is the captain of the ferry?"
        assert str(engine.query(question)) == kb.ask(question).text
