"""Orphans: blobs that no row names any more, found and deleted a few at a time.

A removed file, a superseded version or an intake that was killed leaves bytes that nobody will ask
for. A blob is wanted while it is what a file is now, what is published of one, or what unfinished
work reads. History needs none: it keeps the hash and not the bytes.

Only the database knows what is wanted, so a folder of blobs that two databases use must not be
tidied by either. Each leaves its mark in the folder before its first intake; where there is any
other mark than one's own, nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import psycopg

from planroom.blobs import BlobStore

Connection = psycopg.Connection[Any]

IDLE_SECONDS = 3600.0
"""An intake that has just met a blob is about to name it: so long it is left alone."""


_INSTALLATION = "select uuid::text from installation"


def _database_id(conn: Connection) -> str:
    return cast(str, cast(tuple[Any, ...], conn.execute(_INSTALLATION).fetchone())[0])


def _marks(blobs: BlobStore) -> Path:
    return blobs.root / "databases"


def mark_store(conn: Connection, blobs: BlobStore) -> None:
    """Leave this database's mark in the folder of blobs; call it before a blob is put there."""
    mark = _marks(blobs) / _database_id(conn)
    if not mark.exists():
        # For root the home also holds the embedded database, whose user has to pass it.
        blobs.root.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        blobs.root.mkdir(mode=0o700, exist_ok=True)
        mark.parent.mkdir(mode=0o700, exist_ok=True)
        mark.touch()


def is_sole_user(conn: Connection, blobs: BlobStore) -> bool:
    """Whether this database is the only one that has left its mark."""
    folder = _marks(blobs)
    marks = {mark.name for mark in folder.iterdir()} if folder.is_dir() else set[str]()
    return marks == {_database_id(conn)}


_UNWANTED = """
    select blob.sha256
      from unnest(%(hashes)s::bytea[]) as blob (sha256)
     where not exists (
         select 1 from files where files.sha256 = blob.sha256 and files.status = 'ready'
     )
       and not exists (
         select 1
           from file_ingestions as job
          where job.sha256 = blob.sha256
            and (
                job.status in ('queued', 'running')
                or exists (select 1 from files where files.published_ingestion_id = job.id)
            )
     )
"""


def delete_orphans(
    conn: Connection,
    blobs: BlobStore,
    hashes: Sequence[bytes],
    *,
    idle_seconds: float = IDLE_SECONDS,
) -> int:
    """Delete those of these blobs that nothing wants, in any workspace; returns how many."""
    if not is_sole_user(conn, blobs):
        return 0
    unwanted = conn.execute(_UNWANTED, {"hashes": list(hashes)}).fetchall()
    return sum(blobs.delete(sha256, idle_seconds=idle_seconds) for (sha256,) in unwanted)
