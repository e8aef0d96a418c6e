"""Intake: a path becomes a blob, a file and a queued ingestion; or it leaves nothing behind.

The bytes are streamed once, into the content-addressed store; then one transaction enters the
rows. A kill between the two leaves a blob that no row names: an orphan, which is deleted later.
"""

from __future__ import annotations

import hashlib
import unicodedata
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
from planroom.errors import InputRefused, NotFound
from planroom.files import File, end_ingestions, lock_file, take_file, wait_for_turn
from planroom.model import Fingerprint
from planroom.orphans import mark_store

Connection = psycopg.Connection[Any]

NAME_BYTES_MAX = 1000
"""Well within what an index of Postgres takes."""


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
    mark_store(conn, blobs)
    try:
        blob = blobs.put(path, bytes_max=bytes_max)
    except InputTooLarge as error:
        blob, too_large = Blob(_hash_of(path), error.size), error
    else:
        too_large = None
    crash_point("intake.blob_kept")
    with conn.transaction():
        file = take_file(conn, workspace_id, project_id, clean, blob, connection_id)
        taken = _queue(conn, file, fingerprint, too_large, now)
        crash_point("intake.before_commit")
    crash_point("intake.committed")
    return taken


def _hash_of(path: Path) -> bytes:
    """The SHA-256 of a file that is not kept: by it the same file is known again."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


# Marks that turn the direction of writing around: in a list of files they make one name look like
# another.
_DIRECTION_MARKS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_UNPRINTABLE_KINDS = frozenset({"Cc", "Cs", "Cn", "Co", "Zl", "Zp"})


def _clean_name(name: str) -> str:
    """A name that Postgres can hold and a terminal can show, in one Unicode form.

    NUL, other controls and lone surrogates become U+FFFD; every kind of blank is a blank.
    """
    clean = unicodedata.normalize("NFC", "".join(map(_clean_character, name)))
    size = len(clean.encode())
    if not clean.strip():
        raise InputRefused("The name is empty.", code="name_invalid")
    if size > NAME_BYTES_MAX:
        raise InputRefused(
            f"The name has {size:,} bytes; at most {NAME_BYTES_MAX:,} are taken: {clean[:60]}…",
            code="name_invalid",
        )
    return clean


def _clean_character(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Zs":
        return " "
    if kind in _UNPRINTABLE_KINDS or character in _DIRECTION_MARKS:
        return "\N{REPLACEMENT CHARACTER}"
    return character


_LATEST = """
    select id, status, version, extractor, chunker, embedder, cancel_requested_at, error_code
      from file_ingestions
     where file_id = %(file_id)s
     order by id desc
     limit 1
"""


def _queue(
    conn: Connection,
    file: File,
    fingerprint: Fingerprint,
    too_large: InputTooLarge | None,
    now: datetime | None,
) -> Taken:
    """Enter the ingestion that this intake calls for, if it calls for one."""
    with conn.cursor(row_factory=dict_row) as cursor:
        latest = cursor.execute(_LATEST, {"file_id": file.id}).fetchone()
    outcome = _outcome(file, latest, fingerprint, too_large)
    if latest is not None and outcome in (Outcome.ALREADY_INDEXED, Outcome.RESUMED):
        return Taken(file.name, file.id, file.version, latest["id"], outcome)
    if latest is not None and outcome is Outcome.TOO_LARGE and _was_too_large(file, latest):
        return Taken(file.name, file.id, file.version, latest["id"], outcome)
    end_ingestions(conn, file.workspace_id, file.id, reason="superseded", now=now)
    if too_large is not None:
        ingestion_id = _enter_failed(conn, file, too_large, now)
    else:
        ingestion_id = ingestions.enqueue(conn, file.workspace_id, file.id, now=now)
    if ingestion_id is None:
        # What is running for it has been asked to end; this is queued when it has.
        wait_for_turn(conn, file.id)
        ingestion_id = cast(int, cast(dict[str, Any], latest)["id"])
    return Taken(file.name, file.id, file.version, ingestion_id, outcome)


def _outcome(
    file: File,
    latest: dict[str, Any] | None,
    current: Fingerprint,
    too_large: InputTooLarge | None,
) -> Outcome:
    """Compare the file as it is now with its latest ingestion."""
    known = latest is not None and latest["version"] == file.version
    if latest is not None and known and latest["status"] == "ready":
        made_by = Fingerprint(latest["extractor"], latest["chunker"], latest["embedder"])
        if made_by == current and file.published_ingestion_id == latest["id"]:
            return Outcome.ALREADY_INDEXED
    active = latest is not None and latest["status"] in ("queued", "running")
    if latest is not None and known and active and latest["cancel_requested_at"] is None:
        return Outcome.RESUMED
    if too_large is not None:
        return Outcome.TOO_LARGE
    if latest is None:
        return Outcome.NEW
    if not known:
        return Outcome.NEW_VERSION
    return Outcome.REINDEXED if latest["status"] == "ready" else Outcome.RETRIED


def _was_too_large(file: File, latest: dict[str, Any]) -> bool:
    return latest["version"] == file.version and latest["error_code"] == InputTooLarge.code


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


def _enter_failed(conn: Connection, file: File, error: InputTooLarge, now: datetime | None) -> int:
    """Enter an ingestion that is over before it began, so that the failure is seen."""
    parameters = {
        "file_id": file.id,
        "error_code": error.code,
        "error": f"{error} ({error.hint})",
        "now": now,
    }
    row = conn.execute(_ENTER_FAILED, parameters).fetchone()
    return cast(int, cast(tuple[Any, ...], row)[0])


def retry(
    conn: Connection, workspace_id: int, file_id: int, *, now: datetime | None = None
) -> int | None:
    """Queue a file again whose last ingestion is over; None when one is active already.

    What an unfinished ingestion had read is taken over, up to the first page that failed. One that
    was asked to end and has not yet is waited for: then its id is returned. Raises NotFound.
    """
    with conn.transaction():
        file = lock_file(conn, workspace_id, file_id)
        if file.status != "ready":
            raise NotFound(f"{file.name!r} was removed.", hint="Add it again.")
        ingestion_id = ingestions.enqueue(conn, workspace_id, file_id, now=now)
        if ingestion_id is None:
            ingestion_id = ingestions.find_ending(conn, file_id)
            if ingestion_id is not None:
                wait_for_turn(conn, file_id)
        return ingestion_id


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
