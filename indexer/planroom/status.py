"""What there is and how far it is: files, their progress and gaps, and every attempt.

Every file is live, waiting with a reason, or over (case D27); nothing is called stalled because
something else is in front of it (case D25).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.rows import dict_row

Connection = psycopg.Connection[Any]
Row = dict[str, Any]


_FILES = """
    select *,
           case
               when waits_for_its_turn and status in ('ready', 'failed', 'cancelled') then 'queued'
               when status in ('ready', 'failed', 'cancelled') then status
               when cancel_requested_at is not null then 'cancelling'
               when status = 'running' and lease_expires_at < now() then 'taken over next'
               when status = 'running' and total_units is null then 'reading'
               when status = 'running' then 'embedding'
               when exists (select 1 from maintenance_state where paused_at is not null)
                   then 'paused'
               when queued_at > now() then 'waiting to retry'
               when attempts > 0 then 'queued to resume'
               else 'queued'
           end as state,
           greatest(0, extract(epoch from queued_at - now())) as waits_seconds
      from file_overview
     where workspace_id = %(workspace_id)s
       and (%(project)s::text is null or project = %(project)s)
       and (%(files)s::bigint[] is null or id = any (%(files)s))
     order by project, name
"""


def list_files(
    conn: Connection,
    workspace_id: int,
    *,
    project: str | None = None,
    files: Sequence[int] | None = None,
) -> list[Row]:
    """The workspace's files, each with its latest ingestion's progress and a `state` in words."""
    parameters: Row = {
        "workspace_id": workspace_id,
        "project": project,
        "files": None if files is None else list(files),
    }
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_FILES, parameters).fetchall()


_GAPS = """
    select pages.page_index + 1 as page, pages.status, pages.reason, pages.detail,
           pages.sheet_number, pages.label
      from pages
     where pages.ingestion_id = %(ingestion_id)s
       and pages.workspace_id = %(workspace_id)s
       and pages.status <> 'text'
     order by pages.page_index
"""


def list_gaps(conn: Connection, workspace_id: int, ingestion_id: int) -> list[Row]:
    """The pages that gave no text: which, and why (cases D4 and D5). Pages count from 1."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            _GAPS, {"ingestion_id": ingestion_id, "workspace_id": workspace_id}
        ).fetchall()


_LEDGER = """
    select ledger.*
      from ingestion_ledger as ledger
     where ledger.file_id = %(file_id)s and ledger.workspace_id = %(workspace_id)s
     order by ledger.ingestion_id, ledger.attempt
"""


def list_attempts(conn: Connection, workspace_id: int, file_id: int) -> list[Row]:
    """The kill ledger of a file: every attempt of every ingestion, oldest first."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            _LEDGER, {"file_id": file_id, "workspace_id": workspace_id}
        ).fetchall()
