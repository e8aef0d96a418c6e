"""Intake: a path becomes a blob, a file and a queued ingestion; or it leaves nothing behind.

The bytes are streamed once, into the content-addressed store; then one transaction enters the
rows. A kill between the two leaves a blob that no row names, which a later sweep removes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import psycopg
from psycopg.rows import dict_row

from leasequeue import crash_point
from planroom import ingestions
from planroom.blobs import Blob, BlobStore, InputTooLarge
from planroom.errors import InputRefused
from planroom.files import File, cancel_ingestions, lock_file, take_file
from planroom.model import Fingerprint

Connection = psycopg.Connection[Any]


class Outcome(StrEnum):
    """What an intake came to."""

    NEW = "new"
    """A file that was not there before."""
    NEW_VERSION = "new_version"
    """Other bytes under a known name: the version before stays searchable until this is ready."""
    ALREADY_INDEXED = "already_indexed"
    """The same bytes, indexed by the same means: nothing to do."""
    RESUMED = "resumed"
    """The same bytes, not finished: their ingestion goes on where it stopped."""
    RETRIED = "retried"
    """The same bytes, which failed or were cancelled before: a new ingestion."""
    REINDEXED = "reindexed"
    """The same bytes, but settings that decide the chunks or vectors have changed."""
    TOO_LARGE = "too_large"
    """Over the cap: entered as `failed`, its bytes not kept."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The result for one path. `ingestion_id` is what is queued, running or published."""

    name: str
    file_id: int
    version: int
    ingestion_id: int
    outcome: Outcome


def take(
    conn: Connection,
    blobs: BlobStore,
    path: Path,
    *,
    workspace_id: int,
    project_id: int,
    name: str,
    bytes_max: int,
    fingerprint: Fingerprint,
    connection_id: int | None = None,
    now: datetime | None = None,
) -> Taken:
    """Take one PDF in. Raises InputRefused, and then no row and no blob is left.

    A file over `bytes_max` is entered as `failed`, so that it is seen, but not kept.
    """
    clean = _clean_name(name)
    try:
        blob = blobs.put(path, bytes_max=bytes_max)
    except InputTooLarge as error:
        return _enter_too_large(conn, path, workspace_id, project_id, clean, error, now)
    crash_point("intake.blob_kept")
    with conn.transaction():
        file = take_file(conn, workspace_id, project_id, clean, blob, connection_id)
        taken = _queue(conn, file, fingerprint, now)
        crash_point("intake.before_commit")
    crash_point("intake.committed")
    return taken


def _clean_name(name: str) -> str:
    """A name that Postgres can hold and a terminal can show: no NUL, no surrogate, no control."""
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
    clean = printable.encode("utf-8", "replace").decode("utf-8")
    if not clean.strip():
        raise InputRefused("The name is empty.", code="name_invalid")
    return clean


_LATEST = """
    select id, status, version, extractor, chunker, embedder, error_code
      from file_ingestions
     where file_id = %(file_id)s
     order by id desc
     limit 1
"""


def _queue(conn: Connection, file: File, fingerprint: Fingerprint, now: datetime | None) -> Taken:
    with conn.cursor(row_factory=dict_row) as cursor:
        latest = cursor.execute(_LATEST, {"file_id": file.id}).fetchone()
    outcome = _outcome(file, latest, fingerprint)
    if latest is not None and outcome in (Outcome.ALREADY_INDEXED, Outcome.RESUMED):
        return Taken(file.name, file.id, file.version, latest["id"], outcome)
    if latest is not None and latest["status"] in ("queued", "running"):
        cancel_ingestions(conn, file.workspace_id, file.id, reason="superseded", now=now)
    ingestion_id = ingestions.enqueue(conn, file.workspace_id, file.id, now=now)
    if ingestion_id is None:
        # The version before is still being worked on and has been asked to end. This one is
        # queued when it has, by ingestions.enqueue_unqueued.
        ingestion_id = cast(int, cast(dict[str, Any], latest)["id"])
    return Taken(file.name, file.id, file.version, ingestion_id, outcome)


def _outcome(file: File, latest: dict[str, Any] | None, current: Fingerprint) -> Outcome:
    """Compare the file as it is now with its latest ingestion."""
    if latest is None:
        return Outcome.NEW
    if latest["version"] != file.version:
        return Outcome.NEW_VERSION
    if latest["status"] in ("queued", "running"):
        return Outcome.RESUMED
    if latest["status"] != "ready":
        return Outcome.RETRIED
    made_by = Fingerprint(latest["extractor"], latest["chunker"], latest["embedder"])
    if made_by != current or file.published_ingestion_id != latest["id"]:
        return Outcome.REINDEXED
    return Outcome.ALREADY_INDEXED


_ENTER_FAILED = """
    with entered as (
        insert into file_ingestions (
            workspace_id, project_id, file_id, version, sha256, size_bytes, status,
            queued_at, finished_at, error_code, error
        )
        select workspace_id, project_id, id, version, sha256, size_bytes, 'failed',
               coalesce(%(now)s, now()), coalesce(%(now)s, now()), %(error_code)s, %(error)s
          from files
         where id = %(file_id)s
        returning id, file_id, version
    ), noted as (
        update files set queued_version = entered.version
          from entered where files.id = entered.file_id
    )
    select id from entered
"""


def _enter_too_large(
    conn: Connection,
    path: Path,
    workspace_id: int,
    project_id: int,
    name: str,
    error: InputTooLarge,
    now: datetime | None,
) -> Taken:
    """Enter a file over the cap as failed. Its bytes are read once for their hash, not kept."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").digest()
    with conn.transaction():
        file = take_file(conn, workspace_id, project_id, name, Blob(sha256, error.size))
        cancel_ingestions(conn, workspace_id, file.id, reason="superseded", now=now)
        parameters = {
            "file_id": file.id,
            "error_code": error.code,
            "error": f"{error} ({error.hint})",
            "now": now,
        }
        row = conn.execute(_ENTER_FAILED, parameters).fetchone()
    ingestion_id = cast(int, cast(tuple[Any, ...], row)[0])
    return Taken(name, file.id, file.version, ingestion_id, Outcome.TOO_LARGE)


def retry(
    conn: Connection, workspace_id: int, file_id: int, *, now: datetime | None = None
) -> int | None:
    """Queue a file again whose last ingestion is over; None when one is active already.

    What an unfinished ingestion had read is taken over, up to the first page that failed.
    """
    with conn.transaction():
        lock_file(conn, workspace_id, file_id)
        return ingestions.enqueue(conn, workspace_id, file_id, now=now)


def find_pdfs(path: Path) -> Iterator[tuple[Path, str]]:
    """The PDF files that a path names, each with the name it is entered under.

    A file is entered under its own name, what a folder holds under the folder's name and the path
    below it, in a fixed order. Hidden files and folders are left out, and links that lead outside
    the folder. A folder without any PDF is refused.
    """
    if not path.is_dir():
        yield path, path.name
        return
    root = path.resolve()
    found = False
    for candidate in sorted(root.rglob("*"), key=lambda p: p.as_posix()):
        below = candidate.relative_to(root)
        hidden = any(part.startswith(".") for part in below.parts)
        if hidden or candidate.suffix.lower() != ".pdf" or not candidate.is_file():
            continue
        if not candidate.resolve().is_relative_to(root):
            continue
        found = True
        yield candidate, (Path(root.name) / below).as_posix()
    if not found:
        raise InputRefused(f"{path} is a folder without any PDF file.", code="no_pdf")
