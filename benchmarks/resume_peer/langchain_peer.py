"""LangChain: `index()` with an SQL record manager and PGVectorStore, cleanup `incremental`."""

# What it imports is in an environment of its own (resume_peers.txt).
# pyright: basic, reportMissingImports=false
from __future__ import annotations

from case import BATCH, DIMENSIONS, MODEL, read_case
from langchain_classic.indexes import SQLRecordManager, index
from langchain_core.documents import Document
from langchain_openai import OpenAIEmbeddings
from langchain_postgres import PGEngine, PGVectorStore
from sqlalchemy.exc import ProgrammingError


def main() -> None:
    """Index, or go on indexing."""
    case = read_case()
    engine = PGEngine.from_connection_string(case.url("postgresql+asyncpg"))
    try:
        engine.init_vectorstore_table("chunks", DIMENSIONS, id_column="langchain_id")
    except ProgrammingError as error:
        # The table of the process that was killed.
        if "already exists" not in str(error):
            raise
    embeddings = OpenAIEmbeddings(
        model=MODEL,
        base_url=case.embeddings,
        api_key="none",
        chunk_size=BATCH,
        check_embedding_ctx_length=False,
    )
    store = PGVectorStore.create_sync(engine, embeddings, "chunks")
    records = SQLRecordManager("pgvector/chunks", db_url=case.url("postgresql+psycopg"))
    records.create_schema()
    documents = [
        Document(
            page_content=chunk["text"],
            metadata={"source": case.path.name, "page": chunk["page"], "chunk": chunk["id"]},
        )
        for chunk in case.chunks
    ]
    print(
        index(
            documents,
            records,
            store,
            batch_size=BATCH,
            cleanup="incremental",
            source_id_key="source",
            # Its table takes UUIDs, which only this one makes.
            key_encoder="sha1",
        )
    )


if __name__ == "__main__":
    main()
