"""End the session of a holder that froze inside a transaction, so that its row can be claimed.

A worker that is stopped between two statements of a transaction is put out by the server, by
`idle_in_transaction_session_timeout`. One that is stopped in the middle of a COPY is not: to the
server it is at work, its lock on the row stands, and every claim passes over that row. So a row
that has been expired for a while and is locked all the same has its locker's session ended. The
locker loses nothing it had a right to: its lease is over, and its commit was to be refused anyway.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, LiteralString

import psycopg

from leasequeue.lease import LeaseTable, compose

PATIENCE = timedelta(seconds=10)

# The `xmax` of the version that is seen is the transaction that holds or replaces it; the lock on
# the table tells that transaction from a number that only looks like it.
_EVICT: LiteralString = """
    with frozen as (
        select distinct holder.pid
          from {table} as job
          join pg_stat_activity as holder on holder.backend_xid = job.xmax
          join pg_locks as held on held.pid = holder.pid
         where job.finished_at is null
           and job.status = 'running'
           and job.lease_expires_at < coalesce(%(now)s, now()) - %(patience)s
           and holder.datname = current_database()
           and held.relation = %(table)s::regclass
           and held.mode = 'RowExclusiveLock'
           and held.granted
    )
    select count(*) from frozen where pg_terminate_backend(pid)
"""


def evict(
    conn: psycopg.Connection[Any],
    table: LeaseTable,
    *,
    patience: timedelta = PATIENCE,
    now: datetime | None = None,
) -> int:
    """End the sessions that lock rows expired for over `patience`; returns how many.

    The sessions are this role's own, or it is a superuser's: Postgres refuses otherwise.
    """
    parameters = {"patience": patience, "now": now, "table": table.table}
    row = conn.execute(compose(_EVICT, table), parameters).fetchone()
    return 0 if row is None else int(row[0])
