"""Rows of chunks: written a batch at a time, looked up by their text to use a vector again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import psycopg
from pgvector import HalfVector

Connection = psycopg.Connection[Any]
ChunkRow = tuple[int, int, bytes, str, HalfVector]
"""Page index, tokens, hash of the text, text, vector."""


_FIND_EMBEDDER = "select id from embedders where identity = %(identity)s"
_ADD_EMBEDDER = """
    insert into embedders (identity, dimensions) values (%(identity)s, %(dimensions)s)
    on conflict (identity) do update set identity = excluded.identity
    returning id
"""


def ensure_embedder(conn: Connection, identity: str, dimensions: int) -> int:
    """The short number under which chunks name their embedder."""
    parameters = {"identity": identity, "dimensions": dimensions}
    row = conn.execute(_FIND_EMBEDDER, parameters).fetchone()
    if row is None:
        row = conn.execute(_ADD_EMBEDDER, parameters).fetchone()
    return cast(int, cast(tuple[Any, ...], row)[0])


# One look into the index a text: notes that stand on every sheet have thousands of rows by now, of
# which one is enough.
_EMBEDDED = """
    select wanted.text_hash, found.embedding
      from unnest(%(hashes)s::bytea[]) as wanted (text_hash)
     cross join lateral (
         select chunks.embedding
           from chunks
          where chunks.workspace_id = %(workspace_id)s
            and chunks.embedder_id = %(embedder_id)s
            and chunks.text_hash = wanted.text_hash
          limit 1
     ) as found
"""


def find_embedded(
    conn: Connection, workspace_id: int, embedder_id: int, hashes: Iterable[bytes]
) -> dict[bytes, HalfVector]:
    """The vectors this workspace has already of these texts, by SHA-256 of the text.

    Never another workspace's: that a text is known somewhere is that tenant's secret.
    """
    parameters = {
        "workspace_id": workspace_id,
        "embedder_id": embedder_id,
        "hashes": list(hashes),
    }
    # As text a vector of 256 dimensions takes longer to read than to find.
    with conn.cursor(binary=True) as cursor:
        rows = cursor.execute(_EMBEDDED, parameters).fetchall()
    return dict(cast(list[tuple[bytes, HalfVector]], rows))


_ANY_FROM = """
    select exists (
        select 1 from chunks where ingestion_id = %(ingestion_id)s and chunk_index >= %(start)s
    )
"""


def any_from(conn: Connection, ingestion_id: int, start: int) -> bool:
    """Whether there is any unit from number `start` on: a longer attempt has left some."""
    parameters = {"ingestion_id": ingestion_id, "start": start}
    return cast(bool, cast(tuple[Any, ...], conn.execute(_ANY_FROM, parameters).fetchone())[0])


# The row lock of the fence makes this attempt the only writer of the ingestion's chunks, so
# clearing the range and copying it is an upsert, at nearly the speed of a bare COPY. Chunks commit
# with their checkpoint, so there is nothing to clear unless the plan was begun anew.
_CLEAR = """
    delete from chunks
     where ingestion_id = %(ingestion_id)s
       and chunk_index >= %(start)s
       and chunk_index < %(stop)s
"""
_COPY = """
    copy chunks (
        ingestion_id, chunk_index, workspace_id, page_index, embedder_id, tokens, text_hash, text,
        embedding
    ) from stdin with (format binary)
"""
_TYPES = ("int8", "int4", "int8", "int4", "int4", "int4", "bytea", "text", "halfvec")


def write_batch(
    conn: Connection,
    ingestion_id: int,
    workspace_id: int,
    embedder_id: int,
    start: int,
    rows: Iterable[ChunkRow],
    *,
    replace: bool,
) -> None:
    """Write the units from number `start` on; with `replace`, in place of what stands there.

    Call it in a transaction that holds the ingestion's fence.
    """
    entered = [
        (ingestion_id, index, workspace_id, page, embedder_id, tokens, text_hash, text, vector)
        for index, (page, tokens, text_hash, text, vector) in enumerate(rows, start)
    ]
    if replace:
        parameters = {"ingestion_id": ingestion_id, "start": start, "stop": start + len(entered)}
        conn.execute(_CLEAR, parameters)
    copy_chunks(conn, entered)


def copy_chunks(conn: Connection, rows: Iterable[Sequence[Any]]) -> None:
    """COPY whole rows of chunks, with the columns in the order of the statement above."""
    with conn.cursor() as cursor, cursor.copy(_COPY) as copy:
        copy.set_types(_TYPES)
        for row in rows:
            copy.write_row(row)


_DELETE_TAIL = """
    delete from chunks where ingestion_id = %(ingestion_id)s and chunk_index >= %(total)s
"""


def delete_tail(conn: Connection, ingestion_id: int, total: int) -> int:
    """Remove what a longer attempt left past the last unit; returns how many."""
    return conn.execute(_DELETE_TAIL, {"ingestion_id": ingestion_id, "total": total}).rowcount
