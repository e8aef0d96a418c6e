"""DBOS: a workflow whose steps are the batches, each embedded and written by one step."""

# What it imports is in an environment of its own (resume_peers.txt).
# pyright: basic, reportMissingImports=false
from __future__ import annotations

import httpx
import psycopg
from case import BATCH, MODEL, Case, read_case
from dbos import DBOS, SetWorkflowID

CASE: Case = read_case()


@DBOS.step()
def embed_and_store(first: int) -> int:
    """Embed one batch and write it, over whatever a killed attempt wrote."""
    chunks = CASE.chunks[first : first + BATCH]
    answer = httpx.post(
        f"{CASE.embeddings}/embeddings",
        json={"model": MODEL, "input": [chunk["text"] for chunk in chunks]},
        timeout=60.0,
    )
    rows = [
        (chunk["id"], chunk["page"], chunk["text"], str(entry["embedding"]))
        for chunk, entry in zip(chunks, answer.raise_for_status().json()["data"], strict=True)
    ]
    with psycopg.connect(CASE.url()) as conn, conn.cursor() as cursor:
        cursor.executemany(
            "insert into chunks values (%s, %s, %s, %s) on conflict (id) do update"
            " set page = excluded.page, text = excluded.text, embedding = excluded.embedding",
            rows,
        )
    return len(rows)


@DBOS.workflow()
def ingest(total: int) -> int:
    """All batches in order; what is done is skipped when the workflow is recovered."""
    return sum(embed_and_store(first) for first in range(0, total, BATCH))


def main() -> None:
    """Index, or go on indexing."""
    with psycopg.connect(CASE.url()) as conn:
        conn.execute("create extension if not exists vector")
        conn.execute(
            "create table if not exists chunks (id text primary key, page text, text text,"
            " embedding vector)"
        )
    DBOS(config={"name": "resume", "system_database_url": CASE.url()})
    DBOS.launch()
    with SetWorkflowID(CASE.path.name):
        handle = DBOS.start_workflow(ingest, len(CASE.chunks))
    print(handle.get_result())
    DBOS.destroy()


if __name__ == "__main__":
    main()
