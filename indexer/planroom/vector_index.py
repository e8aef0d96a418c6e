"""An HNSW index for an embedder's vectors, once searching them all has become slow.

Kept up during a load, the index makes writing eighty times slower (480 rows a second against
38,600), and some ten thousand chunks are scanned in milliseconds. So search is exact until an
embedder has more chunks than that, and then this stage builds its index, CONCURRENTLY.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg
from psycopg import sql

Connection = psycopg.Connection[Any]

CHUNKS_MIN = 200_000
_WATCH_SECONDS = 0.5

# Also finds an index that an interrupted build has left invalid; one that is being built is
# invalid, too, and left alone.
_OUTGROWN = """
    select embedders.id, embedders.dimensions, class.relname is not null as has_invalid
      from embedders
      left join pg_class as class
        on class.relname = 'chunks_hnsw_' || embedders.id
       and class.relnamespace = (
           select relnamespace from pg_class where oid = 'chunks'::regclass
       )
      left join pg_index as index on index.indexrelid = class.oid
     where coalesce(index.indisvalid, false) is false
       and not exists (
           select 1 from pg_stat_progress_create_index as build
            where build.relid = 'chunks'::regclass
       )
       and (
           select count(*) from (
               select 1 from chunks where chunks.embedder_id = embedders.id limit %(chunks_min)s
           ) as counted
       ) >= %(chunks_min)s
"""
_DROP: LiteralString = "drop index concurrently if exists {index}"
_CREATE: LiteralString = """
    create index concurrently if not exists {index}
        on chunks using hnsw ((embedding::halfvec({dimensions})) halfvec_ip_ops)
     where embedder_id = {embedder_id}
"""


def build_vector_indexes(
    conn: Connection,
    chunks_min: int = CHUNKS_MIN,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Build the index of each embedder that has `chunks_min` chunks and none; returns how many.

    `conn` is in autocommit mode and outside a transaction. A build may take minutes, in which
    searches and writes go on; it is given up as soon as `stopping` answers True.
    """
    outgrown = conn.execute(_OUTGROWN, {"chunks_min": chunks_min}).fetchall()
    built = 0
    with _cancelled_when(stopping, conn):
        for embedder_id, dimensions, has_invalid in outgrown:
            names = {
                "index": sql.Identifier(f"chunks_hnsw_{embedder_id}"),
                "embedder_id": sql.Literal(embedder_id),
                "dimensions": sql.Literal(dimensions),
            }
            with suppress(psycopg.errors.QueryCanceled):
                if has_invalid:
                    conn.execute(sql.SQL(_DROP).format(**names))
                conn.execute(sql.SQL(_CREATE).format(**names))
                built += 1
            if stopping():
                break
    return built


@contextmanager
def _cancelled_when(stopping: Callable[[], bool], conn: Connection) -> Generator[None]:
    """Cancel what the connection is doing in the block as soon as `stopping` answers True."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_SECONDS):
            if stopping():
                conn.cancel_safe()
                return

    thread = threading.Thread(target=watch, name="index", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
