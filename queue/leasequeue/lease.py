"""The lease: claim, renew, fence, release, requeue, seal and cancel, for any table of jobs.

One idea carries all of it. The right to work on a row is four of its columns, `id`,
`lease_owner`, `lease_token` and `status = 'running'`, and every write by a holder names all four
in the transaction of the rows it protects. Zero rows means that the right is gone. Expired rows
are claimable like queued ones, so crash recovery is the claim itself and there is no reaper.

A `LeaseTable` says which table: the engine's own `connection_runs` is one, and a table with the
same lease columns and an attempts table beside it is another. Time is the database's (rule L3);
each function takes `now` for tests alone.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, LiteralString, cast

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from leasequeue.crashpoint import crash_point
from leasequeue.errors import LeaseLost

log = logging.getLogger("leasequeue")

ATTEMPTS_MAX = 3
CRASHES_MAX = 3
REFUSED_MAX = 100

Row = dict[str, Any]
Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class LeaseTable:
    """A table of leased jobs: its name, the table of its attempts, and that table's key to it.

    `world` is a condition on the job's row, named `job`, that must hold for it to go on: a claim
    or a requeue that finds it false ends the job `cancelled` (rule L8).
    """

    table: LiteralString
    attempts: LiteralString
    key: LiteralString
    world: LiteralString = "true"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on one row, as it was claimed. `row` is the whole row at that moment.

    `claimed_at` is this process's monotonic clock just before the claim was sent: the lease is
    certainly held for `seconds` from then on, however long the answer took.
    """

    table: LeaseTable
    id: int
    owner: str
    token: int
    seconds: float
    attempt: int
    row: Row
    claimed_at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def fence(self) -> Row:
        """The parameters of the fence: every write by a holder passes them."""
        return {
            "id": self.id,
            "owner": self.owner,
            "token": self.token,
            "lease": timedelta(seconds=self.seconds),
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """A row that a claim found and ended instead of running it: cancelled, or out of crashes."""

    id: int
    status: str
    row: Row


NOTHING_MORE: LiteralString = "true"

FENCE: LiteralString = """
           job.id = %(id)s
       and job.lease_owner = %(owner)s
       and job.lease_token = %(token)s
       and job.status = 'running'
"""


@functools.cache
def compose(
    template: LiteralString, table: LeaseTable, condition: LiteralString = NOTHING_MORE
) -> sql.Composed:
    """The statement for one table: the templates below are written once and serve every table."""
    return sql.SQL(template).format(
        table=sql.Identifier(table.table),
        attempts=sql.Identifier(table.attempts),
        key=sql.Identifier(table.key),
        world=sql.SQL(table.world),
        condition=sql.SQL(condition),
        fence=sql.SQL(FENCE),
    )


# The row is picked and decided in one statement. `next_status` is `running`, or the end of a job
# that must not run again: it was cancelled, its world is gone, or its last workers all died.
# `finished_at is null` names the claim's own index and no other; with a lease's end, which only a
# running row has, it says no less than the statuses would.
# `for no key update` is what the update takes anyway; plain `for update` would pass over a row
# that somebody's insert merely references.
# Parts of one statement run in no order of their own: the new attempt asks for `closed`, or it
# would meet the dead holder's still open one in the index of open attempts.
_CLAIM: LiteralString = """
    with picked as (
        select job.id, job.status as old_status, job.lease_token as old_token,
               case
                   when job.cancel_requested_at is not null or not ({world}) then 'cancelled'
                   when job.status = 'running' and job.crashes + 1 >= %(crashes_max)s then 'failed'
                   else 'running'
               end as next_status
          from {table} as job
         where job.finished_at is null
           and job.queued_at <= coalesce(%(now)s, now())
           and (job.status = 'queued' or job.lease_expires_at < coalesce(%(now)s, now()))
           and job.id <> all (%(skip)s)
           and not exists (select 1 from maintenance_state where paused_at is not null)
           and ({condition})
         order by job.queued_at, job.id
         limit 1
           for no key update of job skip locked
    ), claimed as (
        update {table} as job
           set status = next_status,
               attempts = attempts + (next_status = 'running')::integer,
               crashes = crashes + (old_status = 'running')::integer,
               started_at = case when next_status = 'running'
                   then coalesce(started_at, %(now)s, now()) else started_at end,
               finished_at = case when next_status <> 'running'
                   then coalesce(%(now)s, now()) end,
               lease_owner = case when next_status = 'running' then %(owner)s end,
               lease_token = case when next_status = 'running' then nextval('lease_tokens') end,
               lease_expires_at = case when next_status = 'running'
                   then coalesce(%(now)s, now()) + %(lease)s end,
               error_code = case when next_status = 'failed' then 'crash_budget'
                   else error_code end,
               error = case when next_status = 'failed'
                   then 'its last ' || (crashes + 1) || ' workers died without any progress'
                   else error end
          from picked
         where job.id = picked.id
        returning job.*, picked.old_token, picked.old_status
    ), closed as (
        update {attempts} as attempt
           set ended_at = coalesce(%(now)s, now()), outcome = 'expired'
          from claimed
         where attempt.{key} = claimed.id
           and attempt.lease_token = claimed.old_token
           and claimed.old_status = 'running'
        returning attempt.{key}
    ), opened as (
        insert into {attempts} ({key}, attempt, lease_token, worker, started_at, seen_at)
        select id, attempts, lease_token, lease_owner,
               coalesce(%(now)s, now()), coalesce(%(now)s, now())
          from claimed
         where status = 'running'
           and (select count(*) from closed) is not null
    )
    select * from claimed
"""


def claim(
    conn: Connection,
    table: LeaseTable,
    owner: str,
    lease_seconds: float,
    *,
    condition: LiteralString = NOTHING_MORE,
    parameters: Mapping[str, Any] | None = None,
    crashes_max: int = CRASHES_MAX,
    now: datetime | None = None,
) -> Lease | Ended | None:
    """Take the oldest claimable row (rule L1), or None when there is none.

    Claimable is queued and due, or running with an expired lease; `condition` narrows that, on
    the row named `job`. The claim draws a fresh token and opens an attempt; the attempt of a dead
    holder is closed as `expired`. A row that has to end instead (cancelled meanwhile, its world
    gone, or `crashes_max` workers dead in a row, rule L9) is ended and returned as `Ended`. While
    the fleet is paused nothing is claimable (L18).

    A row on which the database refuses the claim (a unique index of the user's own, say) is
    passed over with a warning: it keeps one row waiting and never the queue behind it. What is
    refused on a hundred rows is no matter of one row, and is raised.
    """
    skip: list[int] = []
    statement = compose(_CLAIM, table, condition)
    values = {
        **(parameters or {}),
        "owner": owner,
        "lease": timedelta(seconds=lease_seconds),
        "crashes_max": crashes_max,
        "skip": skip,
        "now": now,
    }
    while True:
        crash_point("claim.before")
        claimed_at = time.monotonic()
        try:
            with _guarded(conn), conn.cursor(row_factory=dict_row) as cursor:
                row = cursor.execute(statement, values).fetchone()
        except psycopg.IntegrityError as error:
            refused = _next_claimable(conn, table, condition, values)
            if refused is None or len(skip) >= REFUSED_MAX:
                raise
            log.warning("%s %s cannot be claimed: %s", table.table, refused, error)
            skip.append(refused)
            continue
        if row is None:
            return None
        if row["status"] != "running":
            return Ended(row["id"], row["status"], row)
        crash_point("claim.after")
        return Lease(
            table=table,
            id=row["id"],
            owner=owner,
            token=row["lease_token"],
            seconds=lease_seconds,
            attempt=row["attempts"],
            row=row,
            claimed_at=claimed_at,
        )


def _guarded(conn: Connection) -> AbstractContextManager[object]:
    """A savepoint inside a transaction; outside one the statement is its own, and it costs less."""
    idle = conn.info.transaction_status == TransactionStatus.IDLE
    return nullcontext() if conn.autocommit and idle else conn.transaction()


_NEXT_CLAIMABLE: LiteralString = """
    select job.id
      from {table} as job
     where job.finished_at is null
       and job.queued_at <= coalesce(%(now)s, now())
       and (job.status = 'queued' or job.lease_expires_at < coalesce(%(now)s, now()))
       and job.id <> all (%(skip)s)
       and ({condition})
     order by job.queued_at, job.id
     limit 1
"""


def _next_claimable(
    conn: Connection, table: LeaseTable, condition: LiteralString, values: Mapping[str, Any]
) -> int | None:
    """The row that a claim would take, without taking it: the one the database just refused.

    Or, when another worker is busy with an older one, that: then the next try names the next.
    """
    row = conn.execute(compose(_NEXT_CLAIMABLE, table, condition), values).fetchone()
    return None if row is None else cast(int, row[0])


# `greatest`, because now() is when the transaction began: one that was open for a while before it
# renews must not take back what the keeper has renewed meanwhile.
_RENEW: LiteralString = """
    update {table} as job
       set lease_expires_at = greatest(
               job.lease_expires_at, coalesce(%(now)s, now()) + %(lease)s
           )
     where {fence}
    returning job.cancel_requested_at
"""


def renew(conn: Connection, lease: Lease, *, now: datetime | None = None) -> bool:
    """Extend the lease from now (rule L4); True when the user has asked for the job to end.

    In a transaction this is also the bare fence: the row stays locked until the commit, so
    whatever else the transaction writes is the holder's. Raises LeaseLost.
    """
    crash_point("renew.before")
    row = conn.execute(compose(_RENEW, lease.table), {**lease.fence, "now": now}).fetchone()
    crash_point("renew.after")
    if row is None:
        raise _lost(lease)
    return row[0] is not None


# The sign of life goes to the attempt's row, not to the job's: the job's row is fenced and
# indexed, and a write to it every two seconds would be paid by every claim.
_CHECK_CONTROL: LiteralString = """
    with held as (
        select job.id, job.lease_token, job.cancel_requested_at
          from {table} as job
         where {fence}
    ), seen as (
        update {attempts} as attempt
           set seen_at = coalesce(%(now)s, now())
          from held
         where attempt.{key} = held.id
           and attempt.lease_token = held.lease_token
    )
    select cancel_requested_at from held
"""


def check_control(conn: Connection, lease: Lease, *, now: datetime | None = None) -> bool:
    """One query for two questions (rule L5): LeaseLost when it is; True when cancel was asked."""
    row = conn.execute(compose(_CHECK_CONTROL, lease.table), {**lease.fence, "now": now}).fetchone()
    if row is None:
        raise _lost(lease)
    return row[0] is not None


_CHECKPOINT: LiteralString = """
    update {table} as job
       set lease_expires_at = greatest(
               job.lease_expires_at, coalesce(%(now)s, now()) + %(lease)s
           ),
           failures = 0, crashes = 0{progress}
     where {fence}
    returning job.cancel_requested_at
"""


@functools.cache
def _compose_checkpoint(table: LeaseTable, columns: tuple[str, ...]) -> sql.Composed:
    progress = sql.SQL("").join(
        sql.SQL(", {} = {}").format(sql.Identifier(column), sql.Placeholder("progress_" + column))
        for column in columns
    )
    return sql.SQL(_CHECKPOINT).format(
        table=sql.Identifier(table.table), progress=progress, fence=sql.SQL(FENCE)
    )


def checkpoint(
    conn: Connection, lease: Lease, progress: Mapping[str, Any], *, now: datetime | None = None
) -> bool:
    """Fence, renew and record progress in one statement; True when cancel was asked.

    Called first in the transaction that writes what the progress stands for: both commit, or
    neither. `progress` names columns of the job's row. Progress forgives earlier failures and
    crashes (rule L9). Raises LeaseLost: roll back and stop.
    """
    parameters = {f"progress_{column}": value for column, value in progress.items()}
    row = conn.execute(
        _compose_checkpoint(lease.table, tuple(progress)),
        {**parameters, **lease.fence, "now": now},
    ).fetchone()
    if row is None:
        raise _lost(lease)
    return row[0] is not None


_CLOSE: LiteralString = """
    , closed as (
        update {attempts} as attempt
           set ended_at = coalesce(%(now)s, now()),
               seen_at = coalesce(%(now)s, now()),
               outcome = case moved.status when 'queued' then %(outcome)s else moved.status end,
               error_code = %(error_code)s,
               error = %(error)s,
               retry_at = case when moved.status = 'queued'
                   then greatest(moved.queued_at, coalesce(%(now)s, now())) end
          from moved
         where attempt.{key} = moved.id
           and attempt.lease_token = %(token)s
    )
    select status from moved
"""

_SEAL: LiteralString = (
    """
    with moved as (
        update {table} as job
           set status = case when cancel_requested_at is not null then 'cancelled'
                   else %(status)s end,
               finished_at = coalesce(%(now)s, now()),
               -- Why it was cancelled was said by whoever asked for it.
               error_code = case when cancel_requested_at is not null then error_code
                   else %(error_code)s end,
               error = case when cancel_requested_at is not null then error else %(error)s end,
               lease_owner = null, lease_token = null, lease_expires_at = null
         where {fence}
        returning job.id, job.status, job.queued_at
    )"""
    + _CLOSE
)


def seal(
    conn: Connection,
    lease: Lease,
    status: LiteralString,
    *,
    error_code: str | None = None,
    error: str | None = None,
    now: datetime | None = None,
) -> str:
    """End the job for good (rule L16); returns the status it ended in.

    That is `status`, or `cancelled` when a cancel landed first: it wins over the finish (L7).
    Raises LeaseLost.
    """
    crash_point("seal.before")
    status_then = _move(conn, _SEAL, lease, now, status, "sealed", error_code, error)
    crash_point("seal.after")
    return status_then


# `world` is judged in this very statement: a connection disconnected while the job ran ends it.
# One that commits while this runs is met by the next claim instead, with the same end.
_REQUEUE: LiteralString = (
    """
    with moved as (
        update {table} as job
           set status = decided.status,
               failures = failures + 1,
               queued_at = case decided.status when 'queued'
                   then coalesce(%(now)s, now()) + %(delay)s else job.queued_at end,
               finished_at = case when decided.status <> 'queued'
                   then coalesce(%(now)s, now()) end,
               error_code = case when cancel_requested_at is not null then error_code
                   else %(error_code)s end,
               error = case when cancel_requested_at is not null then error else %(error)s end,
               lease_owner = null, lease_token = null, lease_expires_at = null
          from (
              select job.id as decided_id,
                     case when job.cancel_requested_at is not null or not ({world})
                              then 'cancelled'
                          when job.failures + 1 >= %(attempts_max)s then %(status)s
                          else 'queued' end as status
                from {table} as job
               where {fence}
                 for no key update of job
          ) as decided
         where job.id = decided.decided_id and {fence}
        returning job.id, job.status, job.queued_at
    )"""
    + _CLOSE
)


def requeue(
    conn: Connection,
    lease: Lease,
    delay: timedelta,
    *,
    error_code: str,
    error: str,
    exhausted: LiteralString = "failed",
    attempts_max: int = ATTEMPTS_MAX,
    now: datetime | None = None,
) -> str:
    """Put the same row back to be tried again after `delay` (rule L8); returns its new status.

    `queued`; or `cancelled` when the user or the world asked for that meanwhile; or `exhausted`
    when this was the last of `attempts_max` failures in a row. Raises LeaseLost.
    """
    crash_point("requeue.before")
    status_then = _move(
        conn, _REQUEUE, lease, now, exhausted, "retried", error_code, error, delay, attempts_max
    )
    crash_point("requeue.after")
    return status_then


_RELEASE: LiteralString = (
    """
    with moved as (
        update {table} as job
           set status = case when cancel_requested_at is not null then 'cancelled'
                   else 'queued' end,
               finished_at = case when cancel_requested_at is not null
                   then coalesce(%(now)s, now()) end,
               queued_at = case when cancel_requested_at is null and %(delay)s > interval '0'
                   then coalesce(%(now)s, now()) + %(delay)s else queued_at end,
               error_code = case when cancel_requested_at is not null then error_code
                   else %(error_code)s end,
               error = case when cancel_requested_at is not null then error else %(error)s end,
               lease_owner = null, lease_token = null, lease_expires_at = null
         where {fence}
        returning job.id, job.status, job.queued_at
    )"""
    + _CLOSE
)


def release(
    conn: Connection,
    lease: Lease,
    *,
    delay: timedelta = timedelta(0),
    error_code: str | None = None,
    error: str | None = None,
    now: datetime | None = None,
) -> str:
    """Give the lease back: queued, in its old place, no budget spent (rule L10).

    With a `delay` it is not due before that: for a worker whose database or disk is failing and
    who would otherwise take it again at once. Raises LeaseLost.
    """
    crash_point("release.before")
    status_then = _move(conn, _RELEASE, lease, now, "queued", "released", error_code, error, delay)
    crash_point("release.after")
    return status_then


def _move(
    conn: Connection,
    statement: LiteralString,
    lease: Lease,
    now: datetime | None,
    status: LiteralString,
    outcome: LiteralString,
    error_code: str | None,
    error: str | None,
    delay: timedelta = timedelta(0),
    attempts_max: int = ATTEMPTS_MAX,
) -> str:
    """Run one of the three statements by which a holder lets go of its row."""
    row = conn.execute(
        compose(statement, lease.table),
        {
            **lease.fence,
            "now": now,
            "status": status,
            "outcome": outcome,
            "error_code": error_code,
            "error": error,
            "delay": delay,
            "attempts_max": attempts_max,
        },
    ).fetchone()
    if row is None:
        raise _lost(lease)
    return cast(str, row[0])


# Locked in the order of their ids, so that two who cancel many at once cannot deadlock.
_REQUEST_CANCEL: LiteralString = """
    with locked as (
        select job.id
          from {table} as job
         where job.id = any (%(ids)s)
           and job.workspace_id = %(workspace_id)s
           and job.status not in ('succeeded', 'partial', 'ready', 'failed', 'cancelled')
         order by job.id
           for no key update of job
    )
    update {table} as job
       set status = case when status = 'running' then status else 'cancelled' end,
           finished_at = case when status = 'running' then null
               else coalesce(%(now)s, now()) end,
           cancel_requested_at = coalesce(cancel_requested_at, %(now)s, now()),
           error_code = coalesce(%(reason)s, error_code)
      from locked
     where job.id = locked.id
       and job.status not in ('succeeded', 'partial', 'ready', 'failed', 'cancelled')
    returning job.id, job.status
"""


def request_cancel(
    conn: Connection,
    table: LeaseTable,
    workspace_id: int,
    ids: Iterable[int],
    *,
    reason: str | None = None,
    now: datetime | None = None,
) -> dict[int, str]:
    """Cancel jobs (rule L7): {id: status} of those that were not over yet.

    A queued job is `cancelled` by this statement; a running one is asked to end, and ends
    `cancelled` whatever its holder reports after this.
    """
    rows = conn.execute(
        compose(_REQUEST_CANCEL, table),
        {"ids": list(ids), "workspace_id": workspace_id, "reason": reason, "now": now},
    ).fetchall()
    return dict(rows)


_EXPIRE: LiteralString = """
    update {table} as job
       set lease_expires_at = coalesce(%(now)s, now()) - interval '1 microsecond'
     where job.status = 'running'
       and job.lease_owner = any (%(owners)s)
       and job.lease_expires_at >= coalesce(%(now)s, now())
"""


def expire(
    conn: Connection, table: LeaseTable, owners: Iterable[str], *, now: datetime | None = None
) -> int:
    """Let the leases of workers that are known to be dead expire now; returns how many.

    Whoever knows that (a process on the same machine, say) spares the others the rest of the
    lease. It takes nothing from anybody who is wrong: a holder that lives after all keeps its
    right until the row is claimed, and is fenced from then on, as after any expiry.
    """
    parameters = {"owners": list(owners), "now": now}
    return conn.execute(compose(_EXPIRE, table), parameters).rowcount


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"{lease.table.table} {lease.id} is no longer held by {lease.owner} "
        f"under token {lease.token}"
    )
