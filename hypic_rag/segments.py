"""Segments and the keys their states are stored under."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypic_rag.config import Seam
from hypic_rag.errors import ConfigError

__all__ = [
    "FORMAT_VERSION",
    "Segment",
    "SegmentKey",
    "check_question",
    "is_unicode",
    "token_digest",
]

FORMAT_VERSION = 1
"""Version of the segment state format; part of every key, so old states are never read as new."""


@dataclass(frozen=True)
class Segment:
    """A run of tokens that is cached as one unit: a document chunk, as the model sees it.

    ``token_ids`` come from tokenising ``text`` alone, without special tokens; a prompt is the
    concatenation of such runs, so a segment's ids never depend on its neighbours.
    """

    token_ids: tuple[int, ...]
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ConfigError("A segment needs at least one token; this text gives none.")

    def __len__(self) -> int:
        return len(self.token_ids)


def is_unicode(text: str) -> bool:
    """Whether ``text`` is valid Unicode: lone surrogates can neither be tokenised nor stored."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_question(question: str) -> None:
    """Refuse a question that nothing can be found for.

    Raises:
        ConfigError: it's empty, or isn't valid Unicode.
    """
    if not question.strip():
        raise ConfigError("The question is empty: ask something.")
    if not is_unicode(question):
        raise ConfigError("The question isn't valid Unicode text: give it as UTF-8.")


def token_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 (hex) of token ids, as 64-bit little-endian integers behind their count."""
    data = struct.pack(f"<{len(token_ids) + 1}q", len(token_ids), *token_ids)
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class SegmentKey:
    """Everything a segment state depends on.

    Attributes:
        model: fingerprint of the weights, configuration, dtype and adapters.
        tokenizer: digest of the tokenizer.
        conditioning: digest of the token ids the segment was encoded behind; not of the prompt
            that is served.
        seam: the widths that the cached interior leaves out.
        token_ids: the segment's tokens; compared on a hit.
        tenant: whose segment it is.
    """

    model: str
    tokenizer: str
    conditioning: str
    seam: Seam
    token_ids: tuple[int, ...]
    tenant: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the typed, length-prefixed fields."""
        sha = hashlib.sha256(b"hypic-segment-key")
        for part in self._parts():
            sha.update(struct.pack("<q", len(part)))
            sha.update(part)
        return sha.hexdigest()

    def _parts(self) -> Iterable[bytes]:
        yield struct.pack("<q", self.format_version)
        for text in (self.model, self.tokenizer, self.conditioning, self.tenant):
            yield text.encode("utf-8")
        yield struct.pack("<qq", self.seam.head, self.seam.tail)
        yield token_digest(self.token_ids).encode("ascii")
