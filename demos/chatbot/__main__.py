"""The chat page over the bundled documents: ``python demos/chatbot``.

Makes a store from the documents (in a temporary folder, or where ``--store`` says), and serves it
on this machine. An existing store is served as it is.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
import webbrowser
from pathlib import Path
from typing import Annotated
from urllib.error import URLError
from urllib.request import urlopen

import typer

from hypic_rag.errors import HypicError


def main(
    store: Annotated[
        Path | None, typer.Option("--store", help="Keep the store here, or serve this one.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    no_browser: Annotated[bool, typer.Option(help="Don't open the page.")] = False,
) -> None:
    """Talk to documents in the browser."""
    from transformers.utils import logging as library

    from hypic_rag.demo import demo_data
    from hypic_rag.knowledge_base import KnowledgeBase
    from hypic_rag.server.cli import require_server_packages, run
    from hypic_rag.server.settings import ServerSettings

    require_server_packages()
    library.set_verbosity_error()
    library.disable_progress_bar()
    exists = store is not None and store.is_dir() and any(store.iterdir())
    suggestions: tuple[str, ...] = ()
    with (
        tempfile.TemporaryDirectory() as scratch,
        KnowledgeBase.open(store or Path(scratch) / "store") as kb,
    ):
        if not exists:
            data = demo_data()
            print("Reading the bundled documents…", file=sys.stderr)
            report = kb.ingest(data / "documents")
            count, tokens = len(report.added), report.tokens
            print(f"{count} documents, {tokens} tokens in {report.seconds:.1f} s", file=sys.stderr)
            questions = json.loads((data / "questions.json").read_text(encoding="utf-8"))
            suggestions = tuple(item["question"] for item in questions[:4])
        if not no_browser and port:
            threading.Thread(target=_open, args=(port,), daemon=True).start()
        run(kb, ServerSettings(suggestions=suggestions), "127.0.0.1", port)


def _open(port: int) -> None:
    """Open the page as soon as it's there."""
    address = f"http://127.0.0.1:{port}/"
    for _ in range(600):
        try:
            with urlopen(f"{address}healthz", timeout=1):
                break
        except (URLError, OSError):
            time.sleep(0.1)
    webbrowser.open(address)


if __name__ == "__main__":
    try:
        typer.run(main)
    except HypicError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
