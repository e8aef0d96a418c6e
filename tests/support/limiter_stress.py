"""One process of the limiter's stress test: claim, say so, leave, seal, until nothing is left.

While a run is held, its row stands in `occupancy`. Whoever enters beside a row that the limiter
should have kept it from adds to `violations`: the check is the database's, made under a lock of its
own, and knows nothing of leases.
"""

from __future__ import annotations

import sys
from typing import Any, LiteralString

import psycopg

import leasequeue
from leasequeue import Lease, runs

Connection = psycopg.Connection[Any]

SCHEMA: LiteralString = """
    create table occupancy (
        run_id bigint primary key,
        workspace_id bigint not null,
        provider text not null,
        is_purge boolean not null
    );
    create table violations (run_id bigint not null, beside bigint not null);
    create table entered (run_id bigint not null);
"""

DIES_EVERY = 101


_ENTER: LiteralString = """
    with violated as (
        insert into violations
        select %(run)s, other.run_id
          from occupancy as other
         where other.workspace_id = %(workspace)s
           and (other.is_purge or %(is_purge)s or other.provider = %(provider)s)
    ), noted as (
        insert into entered values (%(run)s)
    )
    insert into occupancy values (%(run)s, %(workspace)s, %(provider)s, %(is_purge)s)
"""


def enter(conn: Connection, run: int, workspace: int, provider: str, *, is_purge: bool) -> None:
    """Say that this run is running, and note those that should not be beside it."""
    with conn.transaction():
        conn.execute("select pg_advisory_xact_lock(%s)", [workspace])
        conn.execute(
            _ENTER,
            {"run": run, "workspace": workspace, "provider": provider, "is_purge": is_purge},
        )


def work(conn: Connection, name: str, lease_seconds: float) -> None:
    """Run whatever can be run, and enqueue what follows it, until nothing is left."""
    while _is_left(conn):
        leasequeue.promote(conn)
        held = runs.claim(conn, name, lease_seconds, ["sync", "purge"])
        if not isinstance(held, Lease):
            continue
        row = held.row
        is_purge = row["kind"] == runs.PURGE
        enter(conn, held.id, row["workspace_id"], row["provider"], is_purge=is_purge)
        conn.execute("delete from occupancy where run_id = %s", [held.id])
        if lease_seconds < 60 and held.id % DIES_EVERY == 0 and held.attempt == 1:
            continue  # As good as dead: the lease is neither renewed nor given back.
        _end(conn, held, is_purge)


def _end(conn: Connection, held: Lease, is_purge: bool) -> None:
    """Seal it, with what follows in the same transaction, so that `_is_left` cannot miss it."""
    row = held.row
    with conn.transaction():
        leasequeue.seal(conn, held, "succeeded")
        left = 0 if is_purge else row["payload"]["left"] - 1
        if left:
            leasequeue.enqueue(
                conn, row["workspace_id"], row["connection_id"], payload={"left": left}
            )
        elif not is_purge and row["connection_id"] % 3 == 0:
            leasequeue.request_purge(conn, row["workspace_id"], row["connection_id"])


def _is_left(conn: Connection) -> bool:
    row = conn.execute(
        "select exists (select 1 from connection_runs"
        " where status in ('waiting', 'queued', 'running'))"
    ).fetchone()
    return row is not None and bool(row[0])


def main(url: str, name: str, lease_seconds: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        work(conn, name, float(lease_seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
