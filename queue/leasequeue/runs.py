"""Runs: the general queue, one leased execution of a connection at a time.

On top of the lease stand the three rules that make a queue of syncs safe: one active run a
connection (L11), a limiter per workspace and provider (L12), and purges that wait for what is
running and then run alone (L13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from leasequeue import lease
from leasequeue.lease import Ended, Lease, LeaseTable
from leasequeue.workspaces import lock_workspace

Connection = psycopg.Connection[Any]

PURGE = "purge"
WORKSPACES_PER_CLAIM = 20

# A sync goes on while its connection is active, a purge while it is being deleted.
RUNS = LeaseTable(
    table="connection_runs",
    attempts="run_attempts",
    key="run_id",
    world="""
        exists (
            select 1
              from connections
             where connections.id = job.connection_id
               and connections.status = case job.kind when 'purge' then 'deleting'
                       else 'active' end
        )
    """,
)


_ENQUEUE = """
    with added as (
        insert into connection_runs (
            workspace_id, connection_id, provider, kind, payload, timeout_seconds, queued_at
        )
        select workspace_id, id, provider, %(kind)s, %(payload)s, %(timeout)s,
               coalesce(%(now)s, now())
          from connections
         where id = %(connection_id)s and workspace_id = %(workspace_id)s and status = 'active'
        on conflict (connection_id) where status in ('queued', 'running') do nothing
        returning id
    )
    select id, pg_notify('leasequeue', 'connection_runs') from added
"""
_LIVE = """
    select id
      from connection_runs
     where connection_id = %(connection_id)s
       and workspace_id = %(workspace_id)s
       and status in ('queued', 'running')
"""
_ACTIVE = """
    select 1 from connections
     where id = %(connection_id)s and workspace_id = %(workspace_id)s and status = 'active'
"""


def enqueue(
    conn: Connection,
    workspace_id: int,
    connection_id: int,
    kind: str = "sync",
    payload: Mapping[str, Any] | None = None,
    *,
    timeout_seconds: float | None = None,
    now: datetime | None = None,
) -> int | None:
    """Ask for a run of an active connection: its id, or that of the live run met (L11).

    None when the connection is not active, or not this workspace's.
    """
    if kind == PURGE:
        raise ValueError("a purge is asked for with request_purge")
    parameters = {
        "workspace_id": workspace_id,
        "connection_id": connection_id,
        "kind": kind,
        "payload": Jsonb(dict(payload or {})),
        "timeout": timeout_seconds,
        "now": now,
    }
    # The live run that stopped the insert may end before it is read; then the insert goes through.
    while True:
        for statement in (_ENQUEUE, _LIVE):
            row = conn.execute(statement, parameters).fetchone()
            if row is not None:
                return cast(int, row[0])
        if conn.execute(_ACTIVE, parameters).fetchone() is None:
            return None


# Locks the connection, so that of two purges asked for at once the second meets the first.
_MARK_DELETING = """
    update connections
       set status = 'deleting', next_run_at = null
     where id = %(connection_id)s and workspace_id = %(workspace_id)s
    returning id
"""
_CANCEL_QUEUED = """
    update connection_runs
       set status = 'cancelled', finished_at = coalesce(%(now)s, now()), error_code = 'purged'
     where connection_id = %(connection_id)s and status = 'queued' and kind <> 'purge'
"""
_ADD_PURGE = """
    with added as (
        insert into connection_runs (
            workspace_id, connection_id, provider, kind, status, timeout_seconds, queued_at
        )
        select workspace_id, id, provider, 'purge',
               case when exists (
                   select 1 from connection_runs
                    where connection_id = %(connection_id)s and status in ('queued', 'running')
               ) then 'waiting' else 'queued' end,
               %(timeout)s, coalesce(%(now)s, now())
          from connections
         where id = %(connection_id)s
        on conflict do nothing
        returning id
    )
    select id, pg_notify('leasequeue', 'connection_runs') from added
"""
_PENDING_PURGE = """
    select id
      from connection_runs
     where connection_id = %(connection_id)s
       and kind = 'purge'
       and status in ('waiting', 'queued', 'running')
"""


def request_purge(
    conn: Connection,
    workspace_id: int,
    connection_id: int,
    *,
    timeout_seconds: float | None = None,
    now: datetime | None = None,
) -> int | None:
    """Ask that everything a connection brought be removed (rule L13): the id of the purge.

    The connection is `deleting` from here on and its queued sync is cancelled; a running one is
    left to end, with the purge `waiting` behind it. A second request returns the pending purge.
    None when the workspace has no such connection.
    """
    parameters = {
        "workspace_id": workspace_id,
        "connection_id": connection_id,
        "timeout": timeout_seconds,
        "now": now,
    }
    with conn.transaction():
        if conn.execute(_MARK_DELETING, parameters).fetchone() is None:
            return None
        row = conn.execute(_PENDING_PURGE, parameters).fetchone()
        if row is not None:
            return cast(int, row[0])
        conn.execute(_CANCEL_QUEUED, parameters)
        row = conn.execute(_ADD_PURGE, parameters).fetchone()
        return cast(int, cast(tuple[Any, ...], row)[0])


# One at a time and skip locked: a purge that cannot be promoted just now keeps no other waiting.
_PROMOTE = """
    update connection_runs as purge
       set status = 'queued', queued_at = coalesce(%(now)s, now())
     where purge.id = (
        select waiting.id
          from connection_runs as waiting
         where waiting.status = 'waiting'
           and not exists (
               select 1
                 from connection_runs as active
                where active.connection_id = waiting.connection_id
                  and active.status in ('queued', 'running')
           )
         order by waiting.queued_at, waiting.id
         limit 1
           for update of waiting skip locked
     )
    returning purge.id
"""


def promote(conn: Connection, *, now: datetime | None = None) -> int | None:
    """Queue the oldest waiting purge whose connection has nothing active left (rule L13)."""
    row = conn.execute(_PROMOTE, {"now": now}).fetchone()
    return None if row is None else cast(int, row[0])


# What the limiter asks of a row (rule L12). An expired run counts: its worker may still be at
# work, and the row itself is what is to be claimed next; it never counts against itself, so a
# dead worker's run is not in the way of its own reclaim (cases Q7 and Q9). Nor may a stream of new
# syncs starve a purge: what was queued after it stays behind it.
_ADMISSION = """
    job.kind = any (%(kinds)s)
    and not exists (
        select 1
          from connection_runs as other
         where other.workspace_id = job.workspace_id
           and other.status = 'running'
           and other.id <> job.id
           and (other.kind = 'purge' or job.kind = 'purge' or other.provider = job.provider)
    )
    and not exists (
        select 1
          from connection_runs as purge
         where purge.workspace_id = job.workspace_id
           and purge.kind = 'purge'
           and purge.status = 'queued'
           and job.status = 'queued'
           and job.kind <> 'purge'
           and (purge.queued_at, purge.id) < (job.queued_at, job.id)
    )
"""
_ADMITTED_IN_WORKSPACE = "job.workspace_id = %(workspace_id)s and " + _ADMISSION
_CANDIDATES = (
    """
    with due as (
        select job.workspace_id, job.queued_at, job.id
          from connection_runs as job
         where job.status in ('queued', 'running')
           and job.queued_at <= coalesce(%(now)s, now())
           and (job.status = 'queued' or job.lease_expires_at < coalesce(%(now)s, now()))
           and not exists (select 1 from maintenance_state where paused_at is not null)
           and """
    + _ADMISSION
    + """
         order by job.queued_at, job.id
         limit %(limit)s
    )
    select workspace_id from due group by workspace_id order by min(queued_at), min(id)
"""
)


def claim(
    conn: Connection,
    owner: str,
    lease_seconds: float,
    kinds: Sequence[str],
    *,
    now: datetime | None = None,
) -> Lease | Ended | None:
    """Claim the oldest run that the limiter admits (rules L1 and L12), of the `kinds` given.

    The limiter locks the workspace in one statement and decides in the next, whose snapshot is
    taken under the lock. A single statement cannot: its snapshot may be older than the lock it
    waited for, and then it does not see what the lock's last holder started. So `conn` must be
    outside a transaction, in READ COMMITTED.
    """
    parameters: dict[str, Any] = {"kinds": list(kinds)}
    candidates = conn.execute(
        _CANDIDATES, {**parameters, "limit": WORKSPACES_PER_CLAIM, "now": now}
    ).fetchall()
    for (workspace_id,) in candidates:
        with conn.transaction():
            lock_workspace(conn, workspace_id)
            claimed = lease.claim(
                conn,
                RUNS,
                owner,
                lease_seconds,
                condition=_ADMITTED_IN_WORKSPACE,
                parameters={**parameters, "workspace_id": workspace_id},
                now=now,
            )
        if claimed is not None:
            return claimed
    return None


_ENQUEUE_DUE = """
    with due as (
        select id, workspace_id, provider, interval_seconds
          from connections
         where next_run_at <= coalesce(%(now)s, now())
         order by next_run_at, id
         limit %(limit)s
           for update skip locked
    ), advanced as (
        update connections
           set next_run_at = coalesce(%(now)s, now()) + make_interval(secs => due.interval_seconds)
          from due
         where connections.id = due.id
    ), added as (
        insert into connection_runs (workspace_id, connection_id, provider, kind, queued_at)
        select workspace_id, id, provider, 'sync', coalesce(%(now)s, now()) from due
        on conflict (connection_id) where status in ('queued', 'running') do nothing
        returning id
    )
    select (select count(*) from due), (select count(*) from added)
"""


def enqueue_due(conn: Connection, limit: int = 100, *, now: datetime | None = None) -> int:
    """Enqueue the connections whose schedule is due (rule L14); returns how many were due.

    The next time counts from now, so a fleet that was down for hours runs each source once.
    """
    row = conn.execute(_ENQUEUE_DUE, {"limit": limit, "now": now}).fetchone()
    return cast(int, cast(tuple[Any, ...], row)[0])


_RECORD_RESULT = """
    insert into run_results (run_id, table_name, upserted, unchanged, deleted, failed, error)
    values (%(run_id)s, %(table_name)s, %(upserted)s, %(unchanged)s, %(deleted)s, %(failed)s,
            %(error)s)
    on conflict (run_id, table_name) do update
       set upserted = excluded.upserted, unchanged = excluded.unchanged,
           deleted = excluded.deleted, failed = excluded.failed, error = excluded.error
"""


def record_result(
    conn: Connection,
    held: Lease,
    table_name: str,
    *,
    upserted: int = 0,
    unchanged: int = 0,
    deleted: int = 0,
    failed: int = 0,
    error: str | None = None,
    now: datetime | None = None,
) -> None:
    """Note what a run did to one table, under its fence; a later attempt's result replaces it."""
    with conn.transaction():
        lease.renew(conn, held, now=now)
        conn.execute(
            _RECORD_RESULT,
            {
                "run_id": held.id,
                "table_name": table_name,
                "upserted": upserted,
                "unchanged": unchanged,
                "deleted": deleted,
                "failed": failed,
                "error": error,
            },
        )


_LIST = """
    select run.id, connection.name as connection, run.provider, run.kind, run.status,
           run.attempts, run.created_at, run.queued_at, run.started_at, run.finished_at,
           run.lease_owner, run.lease_expires_at, run.cancel_requested_at,
           run.error_code, run.error
      from connection_runs as run
      join connections as connection on connection.id = run.connection_id
     where run.workspace_id = %(workspace_id)s
       and (%(status)s::text is null or run.status = %(status)s)
     order by run.id desc
     limit %(limit)s
"""


def list_runs(
    conn: Connection, workspace_id: int, *, status: str | None = None, limit: int = 50
) -> list[dict[str, Any]]:
    """The workspace's newest runs first."""
    with conn.cursor(row_factory=dict_row) as cursor:
        cursor.execute(_LIST, {"workspace_id": workspace_id, "status": status, "limit": limit})
        return cursor.fetchall()


_RUN = """
    select run.*, connection.name as connection
      from connection_runs as run
      join connections as connection on connection.id = run.connection_id
     where run.id = %(id)s and run.workspace_id = %(workspace_id)s
"""
_ATTEMPTS = """
    select attempt, worker, lease_token, started_at, seen_at, ended_at, outcome,
           error_code, error, retry_at
      from run_attempts
     where run_id = %(id)s
     order by attempt
"""
_RESULTS = """
    select table_name, upserted, unchanged, deleted, failed, error
      from run_results
     where run_id = %(id)s
     order by table_name
"""


def run_history(conn: Connection, workspace_id: int, run_id: int) -> dict[str, Any] | None:
    """One run with its `lease_history` (who held it, when, why it ended) and its `results`."""
    parameters = {"id": run_id, "workspace_id": workspace_id}
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_RUN, parameters).fetchone()
        if row is None:
            return None
        row["lease_history"] = cursor.execute(_ATTEMPTS, parameters).fetchall()
        row["results"] = cursor.execute(_RESULTS, parameters).fetchall()
        return row


# Bounded, oldest first; attempts and results go with their run.
_REMOVE_OLD = """
    with old as (
        select id
          from connection_runs
         where finished_at < coalesce(%(now)s, now()) - make_interval(days => %(days)s)
         order by finished_at
         limit %(limit)s
           for update skip locked
    )
    delete from connection_runs where id in (select id from old)
"""


def remove_old_runs(
    conn: Connection, days: int, limit: int = 1000, *, now: datetime | None = None
) -> int:
    """Remove at most `limit` runs that finished over `days` ago; returns how many."""
    return conn.execute(_REMOVE_OLD, {"days": days, "limit": limit, "now": now}).rowcount
