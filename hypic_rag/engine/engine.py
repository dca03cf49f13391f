"""The engine: everything that runs a model, behind one object."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch

from hypic_rag.config import Mode, Sampling, Seam
from hypic_rag.engine.assemble import Assembly, Request, assemble
from hypic_rag.engine.context import Context, forward, new_cache
from hypic_rag.engine.encode import encode_pending, encode_segments
from hypic_rag.engine.generate import generate_tokens
from hypic_rag.engine.pending import PendingState
from hypic_rag.engine.prompt import PromptFormat
from hypic_rag.engine.self_test import self_test
from hypic_rag.engine.streaming import stream_text
from hypic_rag.errors import ConfigError, ContextLengthError
from hypic_rag.families.model import HybridModel, load_pretrained
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = ["SMALL_MODEL", "Engine", "checkpoint_path", "load_model"]

SMALL_MODEL = "small"
"""Name of the model that ships with the package."""


def load_model(
    name_or_path: str | Path = SMALL_MODEL,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype | str = "auto",
    check: bool = True,
) -> HybridModel:
    """Load an unmodified checkpoint and check that it works in pieces as it does as a whole.

    Args:
        name_or_path: a hub name, a local folder, or ``"small"`` for the model that ships here.
        device: ``"auto"`` takes a GPU if there is one.
        dtype: ``"auto"`` takes the checkpoint's own on a GPU and float32 on a CPU.
        check: run the self-test (a few hundred tokens); leave it on unless it has passed before.

    Raises:
        ModelLoadError: there's no such model, or it can't be read.
        UnsupportedModelError: its architecture isn't supported.
        SelfTestError: it fails the self-test; the message names the layer.
        ConfigError: the device or the dtype doesn't exist.
    """
    place = _device(device)
    if dtype == "auto" and place.type == "cpu":
        dtype = torch.float32
    elif isinstance(dtype, str) and dtype != "auto":
        dtype = _dtype(dtype)
    path = checkpoint_path(name_or_path)
    model = load_pretrained(path, device=place, dtype=dtype, name=str(name_or_path))
    if check:
        self_test(model)
    return model


def checkpoint_path(name_or_path: str | Path) -> str | Path:
    """Where a checkpoint lies: the shipped model's folder for ``"small"``, else what was given."""
    if str(name_or_path) == SMALL_MODEL:
        return Path(__file__).parent.parent / "data" / "small_model"
    return name_or_path


def _device(name: str | torch.device) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"Unknown device {name!r}: expected 'auto', 'cpu' or 'cuda'.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"The device {name!r} was asked for, but no GPU is available: use 'cpu'.")
    return place


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"Unknown dtype {name!r}: expected 'auto' or one of {', '.join(known)}.")
    return known[name]


class Engine:
    """Prefills, encodes, assembles and decodes with one model.

    Safe to call from several threads: nothing is kept but the model, and no context or state that
    is passed in is ever changed, except by :meth:`generate`, which grows its context's cache.
    """

    def __init__(self, model: HybridModel) -> None:
        self.model = model

    @cached_property
    def prompt(self) -> PromptFormat:
        """How this model's prompts are put together."""
        return PromptFormat(self.model)

    def prefill(self, token_ids: Sequence[int], base: Context | None = None) -> Context:
        """Prefill ``token_ids`` behind ``base`` without any cached segment.

        Raises:
            ConfigError: there are no tokens.
            ContextLengthError: they don't fit the model's context.
        """
        ids = tuple(token_ids)
        if not ids:
            raise ConfigError("There's nothing to prefill: at least one token is needed.")
        if base is not None:
            return self.assemble([Request((), (), ids, base)])[0].context
        if len(ids) > self.model.context_length:
            raise ContextLengthError(
                f"The prompt has {len(ids)} tokens but the model's context holds "
                f"{self.model.context_length}: shorten it."
            )
        cache = new_cache(self.model.config)
        logits = forward(self.model.module, ids, 0, cache)
        return Context(ids, cache, logits[-1])

    def recompute(self, request: Request) -> Context:
        """Full recompute of a request: the library's own forward of the identical token ids."""
        return self.prefill(request.token_ids)

    def encode(
        self, segments: Sequence[Segment], seam: Seam, conditioning: Context | None = None
    ) -> list[SegmentState | None]:
        """States of segments; see :func:`~hypic_rag.engine.encode.encode_segments`."""
        return encode_segments(self.model, segments, seam, conditioning)

    def encode_pending(self, pending: Sequence[PendingState]) -> dict[PendingState, SegmentState]:
        """Pending states; see :func:`~hypic_rag.engine.encode.encode_pending`."""
        return encode_pending(self.model, pending)

    def assemble(self, requests: Sequence[Request], mode: Mode = Mode.SEAM) -> list[Assembly]:
        """Prefill requests in one packed pass; see :func:`~hypic_rag.engine.assemble.assemble`."""
        return assemble(self.model, requests, mode)

    def generate(self, context: Context, sampling: Sampling | None = None) -> Generator[int]:
        """Answer tokens one by one; see :func:`~hypic_rag.engine.generate.generate_tokens`."""
        return generate_tokens(self.model, context, sampling or Sampling())

    def stream_text(
        self,
        context: Context,
        sampling: Sampling | None = None,
        kept: list[int] | None = None,
    ) -> Iterator[str]:
        """An answer's text as it grows; every generated id is appended to ``kept``."""
        ids = [] if kept is None else kept
        return stream_text(self.prompt, self.generate(context, sampling), ids)
