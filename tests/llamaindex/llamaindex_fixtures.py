"""A small random model, a cheap embedder, documents, and no network."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from llama_index.core.node_parser import SentenceSplitter
from llamaindex_samples import CHECKPOINT, CONTEXT, TOPICS, Gate, WordEmbedder, tale
from models import slow_decay

from hypic_rag import KnowledgeBase
from hypic_rag.families.model import HybridModel, wrap
from hypic_rag_llamaindex import HypicEmbedding, HypicLLM


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"A test reached for the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def model() -> HybridModel:
    """Random weights that remember, with the shipped tokenizer: it hardly ever stops by itself."""
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    torch.manual_seed(3)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=4,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    module = Qwen3_5ForCausalLM(config).eval()
    slow_decay(module, seed=3)
    return wrap(module, tokenizer, "random")


@pytest.fixture
def kb(tmp_path: Path, model: HybridModel) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(tmp_path / "kb", model, embedder=WordEmbedder()) as opened:
        yield opened


@pytest.fixture
def full_kb(kb: KnowledgeBase, tmp_path: Path) -> KnowledgeBase:
    """With one file for each topic."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for topic in TOPICS:
        (folder / f"{topic}.md").write_text(f"# The {topic}\n\n{tale(topic)}\n")
    report = kb.ingest(folder)
    assert len(report.added) == len(TOPICS)
    return kb


@pytest.fixture
def llm(kb: KnowledgeBase) -> HypicLLM:
    return HypicLLM(kb, max_tokens=6)


@pytest.fixture
def embedding(kb: KnowledgeBase) -> HypicEmbedding:
    return HypicEmbedding(kb)


@pytest.fixture
def splitter(llm: HypicLLM) -> SentenceSplitter:
    # Its own sentences: the default function needs data that older versions download.
    return SentenceSplitter(
        chunk_size=120,
        chunk_overlap=0,
        tokenizer=llm.tokenizer,
        chunking_tokenizer_fn=lambda text: re.findall(r"[^.]+[.]?\s*", text),
    )


@pytest.fixture
def gate(kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(kb, monkeypatch)


@pytest.fixture
def slow(kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation that takes at least 50 ms a token, without using the processor."""
    generate = kb.engine.generate

    def slowly(*args: Any, **kwargs: Any) -> Iterator[int]:
        for token in generate(*args, **kwargs):
            time.sleep(0.05)
            yield token

    monkeypatch.setattr(kb.engine, "generate", slowly)
