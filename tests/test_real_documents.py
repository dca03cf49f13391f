"""Documents that nobody here wrote: installed packages' and the system's own.

They're read, chunked, encoded by the small model, and held to the exactness laws.
"""

from __future__ import annotations

import gzip
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from hypic_rag import KnowledgeBase, Sampling
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.oracle import assemble_sequentially, recompute
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder

SITE = Path(sysconfig.get_paths()["purelib"])
TOLERANCE = 2e-4


def copy_some(folder: Path) -> dict[str, Path]:
    """One real document of each kind, as short as one gets."""
    found: dict[str, Path] = {}
    for kind, pattern in {
        "md": "sentence_transformers/**/model_card_template.md",
        "rst": "numpy/ma/README.rst",
        "txt": "**/LICENSE.txt",
        "docx": "docx/templates/default.docx",
    }.items():
        sources = sorted(SITE.glob(pattern))
        if sources:
            found[kind] = folder / f"{kind}-{sources[0].name}"
            shutil.copy(sources[0], found[kind])
    page = next(iter(sorted(SITE.glob("playwright/driver/**/*.html"))), None)
    if page:
        found["html"] = folder / page.name
        shutil.copy(page, found["html"])
    for pdf in sorted(Path("/usr/share/doc").glob("*/*.pdf*")):
        if pdf.stat().st_size < 400_000:
            found["pdf"] = folder / pdf.name.removesuffix(".gz")
            data = pdf.read_bytes()
            found["pdf"].write_bytes(gzip.decompress(data) if pdf.suffix == ".gz" else data)
            break
    return found


def test_real_documents_keep_the_laws(
    tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    found = copy_some(folder)
    assert {"md", "rst", "txt"} <= found.keys()
    with KnowledgeBase.open(
        tmp_path / "kb", small_model, embedder=embedder, chunk_tokens=256
    ) as kb:
        report = kb.ingest(folder)
        # A template without text, or a page of scripts alone, may be refused, but says so.
        assert {source.rpartition(".")[2] for source in report.added} >= {"md", "rst", "txt"}
        assert len(report.added) + len(report.failed) == len(found)
        assert report.chunks > 20
        chunks = [c for d in kb.store.documents() for c in kb.store.chunks_of(d.id or 0)]
        segments = [kb.prompt.segment(chunk.text) for chunk in chunks]
        assert [s.token_ids for s in segments] == [chunk.token_ids for chunk in chunks]
        assert all(kb.prompt.decode(list(s.token_ids)) == s.text for s in segments)

        seam = kb.store.settings.seam
        base, _ = kb.prefix(kb.system_prompt)
        question = kb.prompt.question("What is this about?")
        chosen = tuple(segments[:: max(1, len(segments) // 6)][:6])
        states = kb.segment_cache().fetch(chosen, seam)
        # One segment directly behind the prompt it was conditioned on: exact.
        for segment, state in zip(chosen, states, strict=True):
            request = Request((segment,), (state,), question, base)
            _, logits = recompute(small_model, request.token_ids)
            found_logits = assemble(small_model, [request])[0].context.logits
            torch.testing.assert_close(found_logits, logits[-1], rtol=0, atol=TOLERANCE)
        # Several: the packed pass equals the sequential oracle.
        request = Request(chosen, states, question, base)
        packed = assemble(small_model, [request])[0].context
        sequential, _ = assemble_sequentially(small_model, request)
        torch.testing.assert_close(packed.logits, sequential.logits, rtol=0, atol=TOLERANCE)
        # In their true context: exact again.
        true, before = [], base.token_ids
        for segment in chosen:
            behind, _ = recompute(small_model, before)
            true += encode_segments(small_model, [segment], seam, behind)
            before += segment.token_ids
        request = Request(chosen, tuple(true), question, base)
        _, logits = recompute(small_model, request.token_ids)
        exact = assemble(small_model, [request])[0].context.logits
        torch.testing.assert_close(exact, logits[-1], rtol=0, atol=TOLERANCE)

        answer = kb.ask("Which licence is granted?", sampling=Sampling(max_tokens=2))
        assert answer.tokens.reused > answer.tokens.computed


def test_a_real_pdf_is_among_them(tmp_path: Path) -> None:
    if "pdf" not in copy_some(tmp_path):
        pytest.skip("this system has no PDF under /usr/share/doc")
