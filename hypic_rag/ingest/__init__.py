"""From files to chunks and vectors: discovery, readers, chunking, embedding, fusion of rankings.

Nothing is imported here, so that ``import hypic_rag.ingest`` stays cheap: take the names from
:mod:`~hypic_rag.ingest.readers`, :mod:`~hypic_rag.ingest.chunking`,
:mod:`~hypic_rag.ingest.discovery`, :mod:`~hypic_rag.ingest.embedder` and
:mod:`~hypic_rag.ingest.fusion`.
"""
