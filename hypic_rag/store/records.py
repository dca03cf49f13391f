"""What goes into a store and what comes out of it: frozen records without behaviour."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypic_rag.config import Seam, parse_state_precision
from hypic_rag.errors import ConfigError

__all__ = [
    "STORE_FORMAT",
    "ChunkRecord",
    "DocumentRecord",
    "Hit",
    "RepairReport",
    "Statistics",
    "StoreSettings",
    "StoredChunk",
    "Traffic",
]

STORE_FORMAT = 1
"""Version of the folder's layout and of the catalogue's schema."""

_MAX_TOKEN = 2**31 - 1


_ADDED = {"state_precision"}
"""Settings that stores made before them lack; they have the default."""


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """What a store was made with; saved inside it and the same for everything it holds.

    Attributes:
        dimension: length of the embedding vectors.
        conditioning: the text that segments are encoded behind; ``None`` encodes them alone.
        chunk_tokens: the most tokens a chunk may have.
        seam: the seam widths of the stored states.
        model: name or path of the model given at creation; for information, since every state's
            key carries the fingerprint of the model that made it.
        embedder: name of the embedding model.
        embedder_digest: digest of the embedding model's weights.
        state_precision: how states are compressed on the disk, one of
            :data:`~hypic_rag.config.STATE_PRECISIONS`.
        format_version: version of the folder's layout.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    dimension: int
    conditioning: str | None = None
    chunk_tokens: int = 512
    seam: Seam = field(default_factory=Seam)
    model: str = ""
    embedder: str = ""
    embedder_digest: str = ""
    state_precision: str = "exact"
    format_version: int = STORE_FORMAT

    def __post_init__(self) -> None:
        for name in ("dimension", "chunk_tokens", "format_version"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number >= 1, but is {value!r}.")
        for name in ("model", "embedder", "embedder_digest"):
            _require_text(name, getattr(self, name))
        if self.conditioning is not None:
            _require_text("conditioning", self.conditioning)
        if not isinstance(self.seam, Seam):
            raise ConfigError(f"seam must be a Seam, but is {self.seam!r}.")
        parse_state_precision(self.state_precision)

    def to_json(self) -> dict[str, Any]:
        """These settings as plain JSON values."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return values | {"seam": [self.seam.head, self.seam.tail]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StoreSettings:
        """Inverse of :meth:`to_json`.

        Raises:
            ConfigError: a key is unknown or missing, or a value is wrong.
        """
        known = {item.name for item in dataclasses.fields(cls)}
        unknown, missing = sorted(set(values) - known), sorted(known - set(values) - _ADDED)
        if unknown or missing:
            raise ConfigError(
                "The store's settings don't fit this version: "
                f"unknown {unknown}, missing {missing}; use the version that made the store."
            )
        seam = values["seam"]
        if not isinstance(seam, list) or len(seam) != 2:
            raise ConfigError(f"The store's seam should be [head, tail], but is {seam!r}.")
        return cls(**{**values, "seam": Seam(*seam)})


@dataclass(frozen=True)
class DocumentRecord:
    """A document of one tenant.

    Attributes:
        source: stable name, unique within the tenant: a path or a URI.
        tenant: whose document it is.
        title: what to show for it.
        content_sha256: digest of the document's bytes.
        bytes: size of the document.
        mtime_ns: when the document was last changed, if that's known.
        media_type: such as ``text/markdown``.
        metadata: JSON values by name; filters can ask for them.
        id: given by the store; ignored in a new record.
        ingested_at: given by the store (UTC); ignored in a new record.

    Raises:
        ConfigError: the source is empty, or a text or the metadata can't be stored.
    """

    source: str
    tenant: str = ""
    title: str = ""
    content_sha256: str = ""
    bytes: int = 0
    mtime_ns: int | None = None
    media_type: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    id: int | None = None
    ingested_at: datetime | None = None

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("A document needs a source: a stable name such as its path.")
        for name in ("source", "tenant", "title", "content_sha256", "media_type"):
            _require_text(f"The document's {name}", getattr(self, name))
        _require_json("The document's metadata", self.metadata)


@dataclass(frozen=True, eq=False)
class ChunkRecord:
    """A chunk of a document that is to be stored; its place in the list is its ordinal.

    Attributes:
        text: the chunk, exactly as the model sees it.
        token_ids: ``text`` as tokens, without special tokens.
        embedding: float32 ``[dimension]``.
        heading: the heading that the chunk stands under.
        page: page number in the document, from 1.
        start: where the chunk starts in the document's text, in characters.
        end: where it ends.
        metadata: JSON values by name, on top of the document's.
        name: what its maker calls the chunk; if it's given, the tenant has one chunk of that name.

    Raises:
        ConfigError: there are no tokens, an embedding isn't a finite vector, or a text or the
            metadata can't be stored.
    """

    text: str
    token_ids: tuple[int, ...]
    embedding: NDArray[np.float32]
    heading: str = ""
    page: int | None = None
    start: int = 0
    end: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None

    def __post_init__(self) -> None:
        for name in ("text", "heading"):
            _require_text(f"The chunk's {name}", getattr(self, name))
        if self.name is not None:
            _require_text("The chunk's name", self.name)
            if not self.name:
                raise ConfigError("A chunk's name is some text or None, not ''.")
        _require_json("The chunk's metadata", self.metadata)
        if not self.token_ids or not all(0 <= token <= _MAX_TOKEN for token in self.token_ids):
            raise ConfigError(f"A chunk needs token ids from 0 to {_MAX_TOKEN}, at least one.")
        if self.embedding.ndim != 1 or not np.isfinite(self.embedding).all():
            raise ConfigError(
                "A chunk's embedding must be one vector of finite numbers, but has the shape "
                f"{list(self.embedding.shape)}."
            )


@dataclass(frozen=True)
class StoredChunk:
    """A chunk as it comes out of the store, with the document it belongs to.

    ``id`` is never given to another chunk, even after this one is deleted. ``metadata`` is the
    document's with the chunk's on top, which is also what filters see.
    """

    id: int
    document_id: int
    source: str
    title: str
    ordinal: int
    text: str
    heading: str
    page: int | None
    start: int
    end: int
    token_ids: tuple[int, ...]
    metadata: Mapping[str, Any]
    name: str | None = None


@dataclass(frozen=True)
class Hit:
    """A chunk that was found; a higher ``score`` is a better match."""

    chunk: StoredChunk
    score: float


@dataclass(frozen=True)
class Statistics:
    """How much a store holds.

    ``orphans`` are states that no chunk refers to; ``disk_bytes`` counts the whole folder.
    """

    documents: int
    chunks: int
    states: int
    state_bytes: int
    orphans: int
    quarantined: int
    disk_bytes: int


@dataclass(frozen=True)
class Traffic:
    """What has happened to states since the store was opened, in this process.

    Attributes:
        host_hits: loads that found the state in memory.
        disk_hits: loads that found it on the disk.
        misses: loads that found none that can be used.
        host_evictions: states that memory let go of to stay within its budget.
        disk_evictions: states deleted from the disk to stay within its budget.
        host_states: states in memory now.
        host_bytes: memory that they take.
    """

    host_hits: int
    disk_hits: int
    misses: int
    host_evictions: int
    disk_evictions: int
    host_states: int
    host_bytes: int


@dataclass(frozen=True)
class RepairReport:
    """What a repair found and did.

    Attributes:
        temporary_files: leftovers of interrupted writes that were removed.
        lost_states: states whose file was missing; they'll be computed again.
        recovered_states: intact files that the catalogue didn't know and knows again.
        quarantined_states: damaged files that were moved to ``quarantine/``.
        deleted_states: states whose deletion had been interrupted.
        vectors_rebuilt: whether the vector index was built anew.
        problems: what the database's own check found; empty for a healthy catalogue.
    """

    temporary_files: int = 0
    lost_states: int = 0
    recovered_states: int = 0
    quarantined_states: int = 0
    deleted_states: int = 0
    vectors_rebuilt: bool = False
    problems: tuple[str, ...] = ()


def encode_json(value: Any) -> str:
    """``value`` as strict JSON in plain Unicode, so that SQL compares names as they're written."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, but is {value!r}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{name} has characters that aren't valid Unicode text.") from None


def _require_json(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be a mapping from names to values, but is {value!r}.")
    try:
        encode_json(dict(value)).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be plain JSON values ({error}).") from None
