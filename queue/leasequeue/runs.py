"""Runs: the general queue, one leased execution of a connection at a time.

On top of the lease stand the three rules that make a queue of syncs safe: one active run a
connection (L11), a limiter per workspace and provider (L12), and purges that wait for what is
running and then run alone (L13).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from leasequeue import lease
from leasequeue.crashpoint import crash_point
from leasequeue.lease import Ended, Lease, LeaseTable
from leasequeue.workspaces import lock_workspace, try_lock_workspace

Connection = psycopg.Connection[Any]

PURGE = "purge"
CANDIDATES_PER_LOOK = 20
PROMOTED_PER_CALL = 10
LOCK_SECONDS = 2

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
    select run.id
      from connection_runs as run
      join connections as connection on connection.id = run.connection_id
     where run.connection_id = %(connection_id)s
       and run.workspace_id = %(workspace_id)s
       and run.status in ('queued', 'running')
       and connection.status = 'active'
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


_CANCEL_QUEUED = """
    update connection_runs
       set status = 'cancelled', finished_at = coalesce(%(now)s, now()), error_code = %(reason)s
     where connection_id = %(connection_id)s and status = 'queued' and kind <> 'purge'
"""
_DISCONNECT = """
    update connections
       set status = 'disconnected', next_run_at = null
     where id = %(connection_id)s and workspace_id = %(workspace_id)s and status = 'active'
    returning id
"""


def disconnect(
    conn: Connection, workspace_id: int, connection_id: int, *, now: datetime | None = None
) -> bool:
    """Stop syncing a source and keep what it brought; False if it was not active.

    Its queued run is cancelled. A running one may finish; it is not tried again (rule L8).
    """
    parameters = {
        "workspace_id": workspace_id,
        "connection_id": connection_id,
        "reason": "disconnected",
        "now": now,
    }
    with conn.transaction():
        if conn.execute(_DISCONNECT, parameters).fetchone() is None:
            return False
        conn.execute(_CANCEL_QUEUED, parameters)
        return True


# Locks the connection, so that of two purges asked for at once the second meets the first.
_MARK_DELETING = """
    update connections
       set status = 'deleting', next_run_at = null
     where id = %(connection_id)s and workspace_id = %(workspace_id)s
    returning id
"""
_ADD_PURGE = """
    with added as (
        insert into connection_runs (
            workspace_id, connection_id, provider, kind, status, timeout_seconds, queued_at
        )
        select workspace_id, id, provider, 'purge',
               case when exists (
                   select 1
                     from connection_runs as active
                    where active.connection_id = %(connection_id)s
                      and active.status in ('queued', 'running')
               ) then 'waiting' else 'queued' end,
               %(timeout)s, coalesce(%(now)s, now())
          from connections
         where id = %(connection_id)s
        on conflict (connection_id) where status in ('queued', 'running') do nothing
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
        # A sync that was being enqueued meanwhile stops the insert; seen by the next, it is
        # cancelled or waited for. No other can follow: the connection is locked and `deleting`.
        while row is None:
            conn.execute(_CANCEL_QUEUED, {**parameters, "reason": "purged"})
            row = conn.execute(_ADD_PURGE, parameters).fetchone()
        crash_point("purge.asked")
        return cast(int, row[0])


# `kind` is named so that the small index of pending purges serves this, and not the whole queue's.
_WAITING = """
    select waiting.id
      from connection_runs as waiting
     where waiting.kind = 'purge'
       and waiting.status = 'waiting'
       and not exists (
           select 1
             from connection_runs as active
            where active.connection_id = waiting.connection_id
              and active.status in ('queued', 'running')
       )
     order by waiting.queued_at, waiting.id
     limit %(limit)s
"""
_PROMOTE = """
    update connection_runs
       set status = 'queued', queued_at = coalesce(%(now)s, now())
     where id = %(id)s and status = 'waiting'
    returning id, pg_notify('leasequeue', 'connection_runs')
"""


def promote(
    conn: Connection, limit: int = PROMOTED_PER_CALL, *, now: datetime | None = None
) -> int:
    """Queue the waiting purges whose connection has nothing active left (rule L13): how many.

    One at a time: where a sync was enqueued at this very moment, L11's unique index decides, that
    purge goes on waiting, and no other waits for it.
    """
    promoted = 0
    for (purge,) in conn.execute(_WAITING, {"limit": limit}).fetchall():
        try:
            with conn.transaction():
                promoted += conn.execute(_PROMOTE, {"id": purge, "now": now}).rowcount
                crash_point("promote.before_commit")
        except psycopg.errors.UniqueViolation:
            continue
        crash_point("promote.after")
    return promoted


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
         where job.finished_at is null
           and job.queued_at <= coalesce(%(now)s, now())
           and (job.status = 'queued' or job.lease_expires_at < coalesce(%(now)s, now()))
           and not exists (select 1 from maintenance_state where paused_at is not null)
           and job.workspace_id <> all (%(tried)s)
           and """
    + _ADMISSION
    + """
         order by job.queued_at, job.id
         limit %(limit)s
    ), oldest as (
        select distinct on (workspace_id) workspace_id, queued_at, id
          from due
         order by workspace_id, queued_at, id
    )
    select workspace_id from oldest order by queued_at, id
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

    A workspace in which another worker is just deciding is left for last, so that neither a busy
    one nor one whose lock-holder hangs keeps the others waiting.
    """
    parameters: dict[str, Any] = {"kinds": list(kinds), "now": now}
    busy: list[int] = []
    for workspace_id in _workspaces(conn, parameters):
        began_at = time.monotonic()
        with conn.transaction():
            if not try_lock_workspace(conn, workspace_id):
                busy.append(workspace_id)
                continue
            claimed = _claim_in(conn, workspace_id, owner, lease_seconds, parameters)
        if claimed is not None:
            return _held_since(began_at, claimed)
    for workspace_id in busy:
        began_at = time.monotonic()
        with conn.transaction():
            conn.execute(_BOUND_THE_WAIT, {"limit": f"{LOCK_SECONDS}s"})
            lock_workspace(conn, workspace_id)
            claimed = _claim_in(conn, workspace_id, owner, lease_seconds, parameters)
        if claimed is not None:
            return _held_since(began_at, claimed)
    return None


def _held_since(began_at: float, claimed: Lease | Ended) -> Lease | Ended:
    """The lease counts from its transaction's now(): from before the wait for the workspace."""
    return replace(claimed, claimed_at=began_at) if isinstance(claimed, Lease) else claimed


_BOUND_THE_WAIT = "select set_config('lock_timeout', %(limit)s, true)"


def _workspaces(conn: Connection, parameters: Mapping[str, Any]) -> Generator[int]:
    """The workspaces with a run that may be claimed, oldest run first, each once.

    Looked up a few at a time: mostly the first is the one.
    """
    tried: list[int] = []
    while True:
        found = conn.execute(
            _CANDIDATES, {**parameters, "tried": tried, "limit": CANDIDATES_PER_LOOK}
        ).fetchall()
        if not found:
            return
        for (workspace_id,) in found:
            tried.append(workspace_id)
            yield workspace_id


def _claim_in(
    conn: Connection,
    workspace_id: int,
    owner: str,
    lease_seconds: float,
    parameters: Mapping[str, Any],
) -> Lease | Ended | None:
    """Decide, in a statement of its own under the workspace's lock."""
    return lease.claim(
        conn,
        RUNS,
        owner,
        lease_seconds,
        condition=_ADMITTED_IN_WORKSPACE,
        parameters={"kinds": parameters["kinds"], "workspace_id": workspace_id},
        now=parameters["now"],
    )


# `for no key update`, as the update takes anyway: plain `for update` would deadlock with an enqueue
# whose row is written, so that the insert here waits for it, while it waits to reference the
# connection.
_ENQUEUE_DUE = """
    with due as (
        select id, workspace_id, provider, interval_seconds
          from connections
         where next_run_at <= coalesce(%(now)s, now())
         order by next_run_at, id
         limit %(limit)s
           for no key update skip locked
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
    select (select count(*) from due),
           (select pg_notify('leasequeue', 'connection_runs') from added limit 1)
"""


def enqueue_due(conn: Connection, limit: int = 100, *, now: datetime | None = None) -> int:
    """Enqueue the connections whose schedule is due (rule L14); returns how many were due.

    The next time counts from now, so a fleet that was down for hours runs each source once.
    """
    row = conn.execute(_ENQUEUE_DUE, {"limit": limit, "now": now}).fetchone()
    crash_point("schedule.after")
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
        crash_point("result.written")


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
