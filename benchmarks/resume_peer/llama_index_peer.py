"""LlamaIndex: an IngestionPipeline whose document, cache and vector stores are in Postgres."""

# What it imports is in an environment of its own (resume_peers.txt).
# pyright: basic, reportMissingImports=false
from __future__ import annotations

from case import BATCH, DIMENSIONS, MODEL, read_case
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.schema import TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.storage.docstore.postgres import PostgresDocumentStore
from llama_index.storage.kvstore.postgres import PostgresKVStore
from llama_index.vector_stores.postgres import PGVectorStore
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine


def main() -> None:
    """Index, or go on indexing."""
    case = read_case()
    sync, later = case.url("postgresql+psycopg2"), case.url("postgresql+asyncpg")
    engine, async_engine = create_engine(sync), create_async_engine(later)
    cache = PostgresKVStore(
        table_name="cache", engine=engine, async_engine=async_engine, perform_setup=True
    )
    documents = PostgresKVStore(
        table_name="docstore", engine=engine, async_engine=async_engine, perform_setup=True
    )
    vectors = PGVectorStore(
        connection_string=sync,
        async_connection_string=later,
        table_name="chunks",
        embed_dim=DIMENSIONS,
    )
    pipeline = IngestionPipeline(
        transformations=[
            OpenAILikeEmbedding(
                model_name=MODEL,
                api_base=case.embeddings,
                api_key="none",
                embed_batch_size=BATCH,
            )
        ],
        docstore=PostgresDocumentStore(documents),
        docstore_strategy=DocstoreStrategy.UPSERTS,
        cache=IngestionCache(cache=cache),
        vector_store=vectors,
    )
    nodes = [
        TextNode(id_=chunk["id"], text=chunk["text"], metadata={"page": chunk["page"]})
        for chunk in case.chunks
    ]
    print(len(pipeline.run(nodes=nodes)))


if __name__ == "__main__":
    main()
