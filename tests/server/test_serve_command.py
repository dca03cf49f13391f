from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from hypic_rag import KnowledgeBase
from hypic_rag.errors import ConfigError, HypicError, ServerError, StoreFormatError
from hypic_rag.server import cli

COMMAND = "import typer; from hypic_rag.server.cli import serve; typer.run(serve)"


def refused(*arguments: str) -> HypicError:
    app = typer.Typer()
    app.command()(cli.serve)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, HypicError), result.output
    return result.exception


@pytest.fixture
def store(new_kb: Callable[..., KnowledgeBase], documents: Path) -> str:
    kb = new_kb()
    kb.ingest(documents)
    kb.close()
    return str(kb.store.path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "192.168.1.5"])
def test_other_machines_need_keys(store: str, host: str) -> None:
    error = refused("--store", store, "--host", host)
    assert isinstance(error, ConfigError)
    assert "--api-keys" in str(error)


def test_wrong_options(store: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys]\n"the-right-key" = "a"\n', encoding="utf-8")
    for arguments in (
        ("--api-keys", str(tmp_path / "none.toml")),
        ("--api-keys", str(keys), "--tenant", "b"),
        ("--mode", "fastest"),
        ("--concurrency", "0"),
        ("--top-k", "0"),
        ("--max-kl", "0"),
        ("--max-kl", "1", "--probe-share", "1.5"),
        ("--probe-share", "0.5"),
        ("--config", str(tmp_path / "none.toml")),
        ("--system-prompt", f"@{tmp_path / 'none.txt'}"),
    ):
        assert refused("--store", store, *arguments).exit_code == 2


def test_a_folder_without_a_store(tmp_path: Path) -> None:
    assert isinstance(refused("--store", str(tmp_path / "none")), StoreFormatError)
    assert not (tmp_path / "none").exists()


def test_a_port_in_use_is_told_before_the_model_is_loaded(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KnowledgeBase, "open", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused("--store", store, "--port", str(port))
    assert isinstance(error, ServerError) and error.exit_code == 1
    assert f"port {port}" in str(error) and "--port" in str(error)


def test_missing_packages_are_named(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec

    def missing(name: str, package: str | None = None) -> Any:
        return None if name == "fastapi" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert "hypic-rag[server]" in str(refused("--store", store))


@pytest.mark.parametrize(("stop", "workers"), [(signal.SIGTERM, "1"), (signal.SIGINT, "0")])
def test_serving_until_a_signal(store: str, stop: signal.Signals, workers: str) -> None:
    options = [
        *("--store", store, "--port", "0", "--max-tokens", "4", "--workers", workers),
        *("--max-kl", "0.25", "--probe-share", "0"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        url = found[0]
        body = {"model": "small", "messages": [{"role": "user", "content": "Who is it?"}]}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False
        ).json()
        assert answer["usage"]["completion_tokens"] <= 4
        metrics = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
        assert "hypic_probe_max_kl 0.25" in metrics
        assert "hypic_probe_offered_total 1.0" in metrics
        process.send_signal(stop)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in errors
    with KnowledgeBase.open(store, read_only=True) as kb:
        assert json.dumps(kb.store.settings.to_json())
        assert (Path(store) / "vectors.faiss").exists()
