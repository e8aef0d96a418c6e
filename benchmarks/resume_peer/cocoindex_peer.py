"""CocoIndex: one memoised function a document, one a chunk's embedding, batched; rows declared."""

# What it imports is in an environment of its own (resume_peers.txt).
# pyright: basic, reportMissingImports=false
from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import asyncpg
import httpx
import numpy as np
from case import BATCH, DIMENSIONS, MODEL, Case, read_case
from numpy.typing import NDArray

CASE: Case = read_case()
os.environ.setdefault("COCOINDEX_DB", str(CASE.state / "cocoindex.db"))

import cocoindex as coco  # noqa: E402
from cocoindex.connectors import localfs, postgres  # noqa: E402
from cocoindex.resources.file import FileLike  # noqa: E402
from cocoindex.resources.schema import VectorSchema  # noqa: E402

DATABASE = coco.ContextKey[asyncpg.Pool]("database")
SCHEMA = VectorSchema(dtype=np.dtype(np.float32), size=DIMENSIONS)


@coco.lifespan
async def lifespan(builder: Any) -> AsyncIterator[None]:
    """The connections for as long as it runs."""
    async with asyncpg.create_pool(CASE.url()) as pool:
        builder.provide(DATABASE, pool)
        yield


@coco.fn.as_async(batching=True, max_batch_size=BATCH)
def embed_batch(texts: list[str]) -> list[NDArray[np.float32]]:
    """One request."""
    answer = httpx.post(
        f"{CASE.embeddings}/embeddings", json={"model": MODEL, "input": texts}, timeout=60.0
    )
    data = answer.raise_for_status().json()["data"]
    return [np.array(entry["embedding"], np.float32) for entry in data]


@coco.fn(memo=True)
async def embed(text: str) -> NDArray[np.float32]:
    """One vector, kept for the next run."""
    # The decorator makes of it a function of one text, and gathers the calls.
    one: Any = embed_batch
    return await one(text)


@dataclass
class Row:
    """A row of the table."""

    id: str
    page: str
    text: str
    embedding: Annotated[NDArray[np.float32], SCHEMA]


@coco.fn
async def process_chunk(chunk: dict[str, str], table: Any) -> None:
    """Declare the row of a chunk."""
    embedding = await embed(chunk["text"])
    table.declare_row(row=Row(chunk["id"], chunk["page"], chunk["text"], embedding))


@coco.fn(memo=True)
async def process_file(file: FileLike, table: Any) -> None:
    """All chunks of the document."""
    await coco.map(process_chunk, json.loads(await file.read_text()), table)


@coco.fn
async def app_main(folder: Any) -> None:
    """The table, and every file of the folder."""
    schema = await postgres.TableSchema.from_class(Row, primary_key=["id"])
    table = await postgres.mount_table_target(DATABASE, "chunks", schema)
    files = localfs.walk_dir(folder, recursive=True)
    await coco.mount_each(process_file, files.items(), table)


app = coco.App(coco.AppConfig(name="resume"), app_main, folder=CASE.path.parent)

if __name__ == "__main__":
    app.update_blocking()
