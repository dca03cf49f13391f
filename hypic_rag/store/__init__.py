"""Documents, chunks, vectors and segment states in one folder."""

from hypic_rag.store.filters import AllOf, AnyOf, Condition, Filter, Not
from hypic_rag.store.records import (
    STORE_FORMAT,
    ChunkRecord,
    DocumentRecord,
    Hit,
    RepairReport,
    Statistics,
    StoredChunk,
    StoreSettings,
    Traffic,
)
from hypic_rag.store.segment_store import SegmentStore
from hypic_rag.store.tiers import HostTier

__all__ = [
    "STORE_FORMAT",
    "AllOf",
    "AnyOf",
    "ChunkRecord",
    "Condition",
    "DocumentRecord",
    "Filter",
    "Hit",
    "HostTier",
    "Not",
    "RepairReport",
    "SegmentStore",
    "Statistics",
    "StoreSettings",
    "StoredChunk",
    "Traffic",
]
