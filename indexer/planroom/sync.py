"""The two runs of a connection: `sync` brings its files up to date, `purge` leaves nothing of them.

Both are handlers of leasequeue's general queue. What they write they write under the run's fence,
in small transactions, so that a run taken over by another worker goes on and repeats nothing that
matters: an intake of known bytes changes nothing, and what is deleted stays deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import psycopg

from leasequeue import Ended, Partial, Run, record_result, renew
from planroom import files, ingestions, intake
from planroom.blobs import BlobStore
from planroom.config import Settings
from planroom.connectors import Found, open_connector
from planroom.embed import Embedder
from planroom.errors import InputRefused
from planroom.ingest import current_fingerprint
from planroom.model import Fingerprint
from planroom.projects import ensure_project, project_settings

Connection = psycopg.Connection[Any]
Lend = Callable[[], AbstractContextManager[Connection]]

REMOVED_PER_STEP = 100
ROWS_PER_STEP = 5000
WAIT_SECONDS = 1.0


@dataclass(slots=True)
class _Counts:
    upserted: int = 0
    unchanged: int = 0
    deleted: int = 0
    failed: int = 0
    first_error: str | None = None


_CONFIG = """
    select config
      from connections
     where id = %(connection_id)s and workspace_id = %(workspace_id)s
"""
_KNOWN = """
    select name, id, source_stamp
      from files
     where connection_id = %(connection_id)s
       and workspace_id = %(workspace_id)s
       and status = 'ready'
"""
_STAMP = """
    update files set source_stamp = %(stamp)s
     where id = %(file_id)s and workspace_id = %(workspace_id)s
"""


def sync(
    run: Run,
    lend: Lend,
    blobs: BlobStore,
    defaults: Settings,
    open_embedder: Callable[[Settings], Embedder],
) -> Partial | None:
    """Take in what is new or changed at the source, and remove what is gone from it.

    A file that is refused is counted and named, and keeps no other from being taken in.
    """
    scope = {"connection_id": run.connection_id, "workspace_id": run.workspace_id}
    with lend() as conn:
        row = conn.execute(_CONFIG, scope).fetchone()
        config: dict[str, Any] = {} if row is None else row[0]
        known = {name: (id_, stamp) for name, id_, stamp in conn.execute(_KNOWN, scope)}
        project_id = ensure_project(conn, run.workspace_id, config.get("project", "default"))
        settings = project_settings(conn, run.workspace_id, project_id, defaults)
    fingerprint = current_fingerprint(settings, open_embedder(settings))
    counts = _Counts()
    for found in open_connector(run.provider, config).list():
        run.abort.check()
        _, stamp = known.pop(found.name, (None, None))
        if stamp == found.stamp:
            counts.unchanged += 1
            continue
        with lend() as conn:
            _take(conn, run, blobs, settings, project_id, fingerprint, found, counts)
    with lend() as conn:
        for file_id, _ in known.values():
            run.abort.check()
            renew(conn, run.lease)
            counts.deleted += files.remove_file(conn, run.workspace_id, file_id)
        _record(conn, run, counts)
    if counts.failed:
        were = "1 file was" if counts.failed == 1 else f"{counts.failed} files were"
        return Partial(f"{were} refused; the first: {counts.first_error}", code="files_refused")
    return None


def _take(
    conn: Connection,
    run: Run,
    blobs: BlobStore,
    settings: Settings,
    project_id: int,
    fingerprint: Fingerprint,
    found: Found,
    counts: _Counts,
) -> None:
    renew(conn, run.lease)
    try:
        taken = intake.take(
            conn,
            blobs,
            found.path,
            workspace_id=run.workspace_id,
            project_id=project_id,
            name=found.name,
            bytes_max=settings.file_bytes_max,
            fingerprint=fingerprint,
            connection_id=run.connection_id,
        )
    except InputRefused as error:
        counts.failed += 1
        counts.first_error = counts.first_error or str(error)
        return
    parameters = {
        "stamp": found.stamp,
        "file_id": taken.file_id,
        "workspace_id": run.workspace_id,
    }
    conn.execute(_STAMP, parameters)
    if taken.outcome in (intake.Outcome.ALREADY_INDEXED, intake.Outcome.RESUMED):
        counts.unchanged += 1
    else:
        counts.upserted += 1


def _record(conn: Connection, run: Run, counts: _Counts) -> None:
    record_result(
        conn,
        run.lease,
        "files",
        upserted=counts.upserted,
        unchanged=counts.unchanged,
        deleted=counts.deleted,
        failed=counts.failed,
        error=counts.first_error,
    )


_READY = """
    select id
      from files
     where connection_id = %(connection_id)s
       and workspace_id = %(workspace_id)s
       and status = 'ready'
     limit %(limit)s
"""
_RUNNING = """
    select file_ingestions.file_id
      from file_ingestions
      join files on files.id = file_ingestions.file_id
     where files.connection_id = %(connection_id)s
       and files.workspace_id = %(workspace_id)s
       and file_ingestions.status in ('queued', 'running')
"""


def purge(run: Run, lend: Lend) -> None:
    """Remove every file of the connection, wait for their ingestions to end, delete every row.

    The ingestions are asked to end and left to do so: a purge never fights one (rule L13).
    """
    scope: dict[str, Any] = {
        "connection_id": run.connection_id,
        "workspace_id": run.workspace_id,
        "limit": REMOVED_PER_STEP,
    }
    removed = 0
    with lend() as conn:
        while ready := conn.execute(_READY, scope).fetchall():
            for (file_id,) in ready:
                run.abort.check()
                renew(conn, run.lease)
                removed += files.remove_file(conn, run.workspace_id, file_id)
        _wait_until_ended(conn, run, scope)
        while _delete_rows(conn, run, scope):
            run.abort.check()
        record_result(conn, run.lease, "files", deleted=removed)


def _wait_until_ended(conn: Connection, run: Run, scope: dict[str, Any]) -> None:
    """Until nothing works on these files; what a dead worker left is ended here."""
    while running := conn.execute(_RUNNING, scope).fetchall():
        ids = [file_id for (file_id,) in running]
        if not isinstance(ingestions.claim(conn, run.lease.owner, run.lease.seconds, ids), Ended):
            run.abort.wait(WAIT_SECONDS)
        run.abort.check()


# Children first, at most so many rows a transaction, each under the run's fence.
_DELETE_CHUNKS = """
    delete from chunks
     where (ingestion_id, chunk_index) in (
         select chunks.ingestion_id, chunks.chunk_index
           from chunks
           join file_ingestions on file_ingestions.id = chunks.ingestion_id
           join files on files.id = file_ingestions.file_id
          where files.connection_id = %(connection_id)s
            and files.workspace_id = %(workspace_id)s
          limit %(limit)s
     )
"""
_DELETE_PAGES = """
    delete from pages
     where (ingestion_id, page_index) in (
         select pages.ingestion_id, pages.page_index
           from pages
           join file_ingestions on file_ingestions.id = pages.ingestion_id
           join files on files.id = file_ingestions.file_id
          where files.connection_id = %(connection_id)s
            and files.workspace_id = %(workspace_id)s
          limit %(limit)s
     )
"""
_DELETE_INGESTIONS = """
    delete from file_ingestions
     where id in (
         select file_ingestions.id
           from file_ingestions
           join files on files.id = file_ingestions.file_id
          where files.connection_id = %(connection_id)s
            and files.workspace_id = %(workspace_id)s
          limit %(limit)s
     )
"""
_DELETE_FILES = """
    delete from files
     where id in (
         select id
           from files
          where connection_id = %(connection_id)s
            and workspace_id = %(workspace_id)s
            and status = 'removed'
          limit %(limit)s
     )
"""


def _delete_rows(conn: Connection, run: Run, scope: dict[str, Any]) -> int:
    """Delete some rows, the deepest kind that is left; 0 when nothing is."""
    parameters = scope | {"limit": ROWS_PER_STEP}
    for statement in (_DELETE_CHUNKS, _DELETE_PAGES, _DELETE_INGESTIONS, _DELETE_FILES):
        with conn.transaction():
            renew(conn, run.lease)
            deleted = conn.execute(statement, parameters).rowcount
        if deleted:
            return deleted
    return 0
