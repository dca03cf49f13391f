"""hypic_rag for LlamaIndex: its query engines, chat engines and indexes, over cached states.

from hypic_rag import KnowledgeBase
from hypic_rag_llamaindex import HypicQueryEngine

kb = KnowledgeBase.open("./kb")
kb.ingest("docs/")
print(HypicQueryEngine.from_knowledge_base(kb).query("Who runs the ferry?"))
"""

from __future__ import annotations

from hypic_rag_llamaindex.chat_engine import HypicChatEngine, HypicChatResponse
from hypic_rag_llamaindex.embedding import HypicEmbedding, LlamaIndexEmbedder
from hypic_rag_llamaindex.ingestion import HypicIngestion
from hypic_rag_llamaindex.llm import HypicLLM
from hypic_rag_llamaindex.query_engine import HypicQueryEngine
from hypic_rag_llamaindex.retriever import HypicRetriever
from hypic_rag_llamaindex.synthesizer import HypicSynthesizer
from hypic_rag_llamaindex.vector_store import HypicVectorStore

__all__ = [
    "HypicChatEngine",
    "HypicChatResponse",
    "HypicEmbedding",
    "HypicIngestion",
    "HypicLLM",
    "HypicQueryEngine",
    "HypicRetriever",
    "HypicSynthesizer",
    "HypicVectorStore",
    "LlamaIndexEmbedder",
]
