"""Imports go downwards only, and the package is cheap to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hypic_rag

ROOT = Path(hypic_rag.__file__).parent

# What each room may import, beside itself.
ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "segments": {"errors", "config"},
    "operators": {"errors"},
    "states": {"errors", "config", "operators"},
    "answers": {"config"},
    "ops": {"errors", "config", "operators"},
    "families": {"errors", "config", "operators", "ops"},
    "store": {"errors", "config", "segments", "operators", "states"},
}
ALLOWED["engine"] = {*ALLOWED["store"], "ops", "families", "store"}
ALLOWED["ingest"] = {*ALLOWED["engine"], "engine"}
ALLOWED["following"] = {"answers", "store", "ingest"}
ALLOWED["retrieval"] = {*ALLOWED["following"], "errors", "segments", "following"}
ALLOWED["inquiry"] = {*ALLOWED["engine"], "engine", "answers", "knowledge_base"}
ALLOWED["knowledge_base"] = {
    *ALLOWED["ingest"], "ingest", "answers", "retrieval", "inquiry", "chat"
}  # fmt: skip
ALLOWED["chat"] = {*ALLOWED["knowledge_base"], "knowledge_base"}
ALLOWED["evaluation"] = {*ALLOWED["chat"], "chat"}
ALLOWED["demo"] = ALLOWED["evaluation"]
ALLOWED["server"] = {*ALLOWED["evaluation"], "demo"}
ALLOWED["bench_serve"] = {*ALLOWED["server"], "evaluation", "server"}
ALLOWED["cli"] = {"bench_serve", *ALLOWED["server"], "evaluation", "server"}
ALLOWED["__main__"] = {"cli"}


def room(module: Path) -> str:
    return module.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(module: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "hypic_rag" and len(parts) > 1:
                found.add(parts[1])
    return found


def test_imports_go_downwards() -> None:
    wrong = []
    modules = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    assert len(modules) > 40
    for module in modules:
        here = room(module)
        for other in imported_rooms(module) - {here} - ALLOWED[here]:
            wrong.append(f"{module.relative_to(ROOT)} imports {other}")
    assert not wrong


def test_connectors_use_the_public_package_only() -> None:
    connectors = ROOT.parent / "connectors"
    for module in connectors.rglob("*.py"):
        assert "hypic_rag.engine.packed" not in module.read_text(encoding="utf-8"), module


def test_public_names_exist() -> None:
    for name in hypic_rag.__all__:
        assert getattr(hypic_rag, name).__module__.startswith("hypic_rag.")


def test_importing_the_package_and_the_command_is_cheap() -> None:
    script = (
        "import sys, hypic_rag, hypic_rag.cli\n"
        "heavy = {'torch', 'transformers', 'faiss', 'sqlalchemy'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
