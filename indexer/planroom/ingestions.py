"""Ingestions: the leased, checkpointed job of one version of a file; its states, its moves.

The lease itself is leasequeue's, and so are claim, renew, requeue, release and seal: here is what
is particular to this table. Locks are taken top down, file before ingestion, in every transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import psycopg
from psycopg.rows import dict_row

import leasequeue
from leasequeue import Ended, Lease, LeaseTable
from planroom.model import Fingerprint

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

# An ingestion goes on while its file is there.
INGESTIONS = LeaseTable(
    table="file_ingestions",
    attempts="ingestion_attempts",
    key="ingestion_id",
    world="""
        exists (
            select 1 from files where files.id = job.file_id and files.status = 'ready'
        )
    """,
)

_ONLY_THESE = "job.file_id = any (%(files)s)"


def claim(
    conn: Connection,
    owner: str,
    lease_seconds: float,
    files: Sequence[int] | None = None,
    *,
    now: datetime | None = None,
) -> Lease | Ended | None:
    """Claim the oldest ingestion of any workspace, or of these files alone (rule L1)."""
    if files is None:
        return leasequeue.claim(conn, INGESTIONS, owner, lease_seconds, now=now)
    return leasequeue.claim(
        conn,
        INGESTIONS,
        owner,
        lease_seconds,
        condition=_ONLY_THESE,
        parameters={"files": list(files)},
        now=now,
    )


# One active ingestion a file (L11): the insert meets the partial unique index, and the file's
# row, which the caller holds, keeps its version from changing under it.
_ENQUEUE = """
    with added as (
        insert into file_ingestions (
            workspace_id, project_id, file_id, version, sha256, size_bytes, queued_at
        )
        select workspace_id, project_id, id, version, sha256, size_bytes,
               coalesce(%(now)s, now())
          from files
         where id = %(file_id)s and workspace_id = %(workspace_id)s and status = 'ready'
        on conflict (file_id) where status in ('queued', 'running') do nothing
        returning id, file_id, version
    ), noted as (
        update files set queued_version = added.version from added where files.id = added.file_id
    )
    select id, pg_notify('leasequeue', 'file_ingestions') from added
"""


def enqueue(
    conn: Connection, workspace_id: int, file_id: int, *, now: datetime | None = None
) -> int | None:
    """Queue an ingestion of the file's present version; None when one is active already.

    It takes over the pages that an earlier, unfinished ingestion of the same bytes has read. Call
    it with the file locked.
    """
    parameters = {"workspace_id": workspace_id, "file_id": file_id, "now": now}
    row = conn.execute(_ENQUEUE, parameters).fetchone()
    if row is None:
        return None
    ingestion_id = cast(int, row[0])
    _adopt_pages(conn, workspace_id, file_id, ingestion_id)
    return ingestion_id


_FIND_ENDING = """
    select id
      from file_ingestions
     where file_id = %(file_id)s
       and status in ('queued', 'running')
       and cancel_requested_at is not null
"""


def find_ending(conn: Connection, file_id: int) -> int | None:
    """The active ingestion of a file that was asked to end, if that is so."""
    row = conn.execute(_FIND_ENDING, {"file_id": file_id}).fetchone()
    return None if row is None else cast(int, row[0])


# Up to the first page that failed: whoever tries again wants that one read again. What is unread a
# sweep may have begun to delete; that is decided under the file's lock, which the caller holds.
_ADOPTABLE = """
    select earlier.id, earlier.page_count, earlier.extractor, earlier.chunker, earlier.embedder,
           coalesce(
               (select min(page_index) from pages
                 where ingestion_id = earlier.id and status = 'failed'),
               (select max(page_index) + 1 from pages where ingestion_id = earlier.id)
           ) as pages
      from file_ingestions as earlier
      join file_ingestions as job on job.id = %(ingestion_id)s
     where earlier.file_id = %(file_id)s
       and earlier.workspace_id = %(workspace_id)s
       and earlier.status in ('failed', 'cancelled')
       and earlier.sha256 = job.sha256
       and earlier.unread_at is null
     order by earlier.id desc
     limit 1
"""
_MOVE_PAGES = """
    update pages
       set ingestion_id = %(ingestion_id)s
     where ingestion_id = %(earlier_id)s and page_index < %(pages)s
"""
_COUNT_ADOPTED = """
    update file_ingestions as job
       set page_count = %(page_count)s, extractor = %(extractor)s, chunker = %(chunker)s,
           embedder = %(embedder)s, processed_pages = moved.pages,
           image_only_pages = moved.image_only, planned_units = moved.units,
           total_units = case when moved.pages = %(page_count)s then moved.units end
      from (
          select count(*) as pages, coalesce(sum(chunk_count), 0) as units,
                 count(*) filter (where status = 'image_only') as image_only
            from pages
           where ingestion_id = %(ingestion_id)s
      ) as moved
     where job.id = %(ingestion_id)s
"""


def _adopt_pages(conn: Connection, workspace_id: int, file_id: int, ingestion_id: int) -> None:
    parameters: Row = {
        "workspace_id": workspace_id,
        "file_id": file_id,
        "ingestion_id": ingestion_id,
    }
    with conn.cursor(row_factory=dict_row) as cursor:
        earlier = cursor.execute(_ADOPTABLE, parameters).fetchone()
    if earlier is None or not earlier["pages"]:
        return
    parameters |= {**earlier, "earlier_id": earlier["id"]}
    conn.execute(_MOVE_PAGES, parameters)
    conn.execute(_COUNT_ADOPTED, parameters)


_UNQUEUED = """
    select id, workspace_id
      from files
     where status = 'ready' and queued_version < version
       and not exists (
           select 1 from file_ingestions as active
            where active.file_id = files.id and active.status in ('queued', 'running')
       )
     order by id
     limit %(limit)s
       for no key update skip locked
"""


def enqueue_unqueued(conn: Connection, limit: int = 50, *, now: datetime | None = None) -> int:
    """Queue the files whose newest bytes no ingestion was made for: the last one was in the way.

    Changed bytes cancel the ingestion that was running; this is how their own turn comes.
    """
    with conn.transaction():
        files = conn.execute(_UNQUEUED, {"limit": limit}).fetchall()
        for file_id, workspace_id in files:
            enqueue(conn, workspace_id, file_id, now=now)
    return len(files)


# Not a checkpoint: beginning is no progress, so it forgives no crash.
_BEGIN = """
    update file_ingestions
       set project_id = %(project_id)s,
           extractor = %(extractor)s, chunker = %(chunker)s, embedder = %(embedder)s
     where id = %(id)s
"""
_FORGET_PAGES = """
    update file_ingestions
       set page_count = null, processed_pages = 0, image_only_pages = 0, failed_pages = 0,
           planned_units = 0, total_units = null, processed_units = 0
     where id = %(id)s
"""
_DELETE_PAGES = "delete from pages where ingestion_id = %(id)s"
_FORGET_UNITS = "update file_ingestions set processed_units = 0 where id = %(id)s"
_REPLAN = """
    update file_ingestions as job
       set planned_units = plan.units,
           total_units = case when job.processed_pages = job.page_count then plan.units end
      from (
          select coalesce(sum(chunk_count), 0) as units from pages where ingestion_id = %(id)s
      ) as plan
     where job.id = %(id)s
"""


def forget_pages(conn: Connection, lease: Lease) -> None:
    """Start from page 0; call it under the fence. Old chunks go with the tail or are replaced."""
    conn.execute(_FORGET_PAGES, {"id": lease.id})
    conn.execute(_DELETE_PAGES, {"id": lease.id})


def forget_units(conn: Connection, lease: Lease) -> None:
    """Start from unit 0 with the pages as they are; call it under the fence."""
    conn.execute(_FORGET_UNITS, {"id": lease.id})


def replan(conn: Connection, lease: Lease) -> None:
    """Count the units again after the pages' chunk counts changed; call it under the fence."""
    conn.execute(_REPLAN, {"id": lease.id})


def store_fingerprint(
    conn: Connection, lease: Lease, project_id: int, fingerprint: Fingerprint
) -> None:
    """Say for which project, and by what, the pages and chunks are made; under the fence."""
    conn.execute(
        _BEGIN,
        {
            "id": lease.id,
            "project_id": project_id,
            "extractor": fingerprint.extractor,
            "chunker": fingerprint.chunker,
            "embedder": fingerprint.embedder,
        },
    )


_RELOAD = "select * from file_ingestions where id = %(id)s"


def reload(conn: Connection, lease: Lease) -> Row:
    """The row as it is now."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cast(Row, cursor.execute(_RELOAD, {"id": lease.id}).fetchone())


# The ledger of the attempt in hand. `…_begun` is written ahead: how far this attempt may go before
# its next commit, so that what a kill wastes is known even though the killed could not tell.
_NOTE = """
    update ingestion_attempts
       set first_page = coalesce(%(first_page)s, first_page),
           first_unit = coalesce(%(first_unit)s, first_unit),
           pages_read = pages_read + %(pages_read)s,
           pages_begun = greatest(pages_begun, %(pages_begun)s),
           units_embedded = units_embedded + %(units_embedded)s,
           units_reused = units_reused + %(units_reused)s,
           units_begun = greatest(units_begun, %(units_begun)s),
           committed_at = clock_timestamp()
     where ingestion_id = %(id)s and lease_token = %(token)s
"""


def note_progress(
    conn: Connection,
    lease: Lease,
    *,
    first_page: int | None = None,
    first_unit: int | None = None,
    pages_read: int = 0,
    pages_begun: int = 0,
    units_embedded: int = 0,
    units_reused: int = 0,
    units_begun: int = 0,
) -> None:
    """Add to the ledger of this attempt, in the transaction of what is noted."""
    conn.execute(
        _NOTE,
        {
            "id": lease.id,
            "token": lease.token,
            "first_page": first_page,
            "first_unit": first_unit,
            "pages_read": pages_read,
            "pages_begun": pages_begun,
            "units_embedded": units_embedded,
            "units_reused": units_reused,
            "units_begun": units_begun,
        },
    )


_MOVE_TO_PROJECT = """
    update file_ingestions set project_id = %(project_id)s where id = %(id)s
"""


def move_to_project(conn: Connection, lease: Lease, project_id: int) -> None:
    """Follow the file into the project it was moved to; call it under the fence."""
    conn.execute(_MOVE_TO_PROJECT, {"id": lease.id, "project_id": project_id})


_PENDING = """
    select exists (
        select 1 from file_ingestions
         where status in ('queued', 'running')
           and (%(files)s::bigint[] is null or file_id = any (%(files)s))
    ) or exists (
        select 1 from files
         where status = 'ready' and queued_version < version
           and (%(files)s::bigint[] is null or id = any (%(files)s))
    )
"""


def any_pending(conn: Connection, files: Sequence[int] | None = None) -> bool:
    """Whether anything, or anything for these files, is not over yet."""
    parameters = {"files": None if files is None else list(files)}
    return cast(bool, cast(tuple[Any, ...], conn.execute(_PENDING, parameters).fetchone())[0])


_RETIRE = """
    update file_ingestions
       set unread_at = coalesce(%(now)s, now())
     where file_id = %(file_id)s
       and id is distinct from %(except_id)s
       and unread_at is null
"""


def retire(
    conn: Connection, file_id: int, *, except_id: int | None = None, now: datetime | None = None
) -> None:
    """Say that nobody wants the rows of a file's ingestions any more, but for one's.

    Call it with the file locked. What has not ended yet is swept when it has.
    """
    conn.execute(_RETIRE, {"file_id": file_id, "except_id": except_id, "now": now})


# Unfinished work of which no later version was published is not here: a retry takes it over.
_SWEEPABLE = """
    select job.id
      from file_ingestions as job
     where job.unread_at < coalesce(%(now)s, now()) - %(grace)s::interval
       and job.finished_at is not null
       and job.swept_at is null
     order by job.unread_at, job.id
     limit 1
       for no key update skip locked
"""
_SWEEP_CHUNKS = """
    delete from chunks
     where ingestion_id = %(id)s
       and chunk_index in (
           select chunk_index from chunks where ingestion_id = %(id)s limit %(limit)s
       )
"""
_SWEEP_PAGES = """
    delete from pages
     where ingestion_id = %(id)s
       and page_index in (
           select page_index from pages where ingestion_id = %(id)s limit %(limit)s
       )
"""
_SWEPT = "update file_ingestions set swept_at = coalesce(%(now)s, now()) where id = %(id)s"

SWEEP_GRACE = timedelta(minutes=1)
"""A search that began before a version was superseded may still be reading it."""


def sweep(
    conn: Connection,
    rows_max: int = 5000,
    *,
    grace: timedelta = SWEEP_GRACE,
    now: datetime | None = None,
) -> int:
    """Delete at most `rows_max` rows that no search reaches; returns how many, and 1 for a last
    look at an ingestion of which nothing was left.

    One ingestion at a time, and only once `grace` has passed since nobody wants it.
    """
    with conn.transaction():
        row = conn.execute(_SWEEPABLE, {"grace": grace, "now": now}).fetchone()
        if row is None:
            return 0
        parameters: Row = {"id": row[0], "limit": rows_max, "now": now}
        removed = conn.execute(_SWEEP_CHUNKS, parameters).rowcount
        if removed < rows_max:
            parameters["limit"] = rows_max - removed
            removed += conn.execute(_SWEEP_PAGES, parameters).rowcount
        if removed < rows_max:
            conn.execute(_SWEPT, parameters)
        return max(removed, 1)
