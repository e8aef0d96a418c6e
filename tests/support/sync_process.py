"""A real worker of `connection_runs` for tests to kill: it syncs six notes and purges them again.

The handlers do what a real sync does, in miniature: rows and checkpoint in one fenced transaction,
a retry in the middle, a purge that somebody asks for while the sync runs. The table has no key, so
a row written twice stays visible: the purge counts what it deletes.

    python -m support.sync_process [--hold-at N]
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from datetime import timedelta

import leasequeue
from leasequeue import Partial, Retryable, Run, Worker
from planroom.config import Settings
from planroom.database import Database

NOTES = 6
FAILS_AT = 3
"""The first attempt to come here fails, as after a network error."""
PURGED_AT = 5
"""When this many are written, the user asks for everything to be removed."""


def sync(run: Run, hold_at: int) -> Partial | None:
    """Write the notes that are not written yet, one a transaction."""
    payload = dict(run.payload)
    while (done := payload.get("done", 0)) < NOTES:
        run.abort.check()
        if done == hold_at:
            run.abort.wait(60.0)
            run.abort.check()
        if done == FAILS_AT and "failed" not in payload:
            payload["failed"] = True
            with run.transaction(payload):
                pass
            raise Retryable("the other side is busy", retry_after=timedelta(0))
        if done == PURGED_AT:
            with run.lend() as conn:
                leasequeue.request_purge(conn, run.workspace_id, run.connection_id)
        payload["done"] = done + 1
        with run.transaction(payload) as conn:
            conn.execute("insert into notes values (%s, %s)", [run.connection_id, done])
    with run.lend() as conn:
        leasequeue.record_result(conn, run.lease, "notes", upserted=NOTES)
    return None


def purge(run: Run) -> None:
    """Delete the notes, two a transaction, counting them."""
    payload = {"deleted": 0, **run.payload}
    while True:
        with run.lend() as conn:
            left = conn.execute(
                "select ctid::text from notes where connection_id = %s limit 2",
                [run.connection_id],
            ).fetchall()
        if not left:
            return
        payload["deleted"] += len(left)
        with run.transaction(payload) as conn:
            conn.execute(
                "delete from notes where ctid = any (%s::text[]::tid[])", [[row[0] for row in left]]
            )


def main() -> None:
    """The command line: work until the source is purged."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--hold-at", type=int, default=-1)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    with Database.open(Settings(), name="sync") as database:

        def purged() -> bool:
            with database.connection() as conn:
                left = conn.execute("select 1 from connections where status <> 'disconnected'")
                return left.fetchone() is None

        worker = Worker(database.connect, database.connection, poll_seconds=0.05)
        handlers: dict[str, Callable[[Run], Partial | None]] = {
            "sync": lambda run: sync(run, given.hold_at),
            "purge": purge,
        }
        worker.stages = leasequeue.engine_stages(worker, database.connection, handlers)
        with worker.signals():
            worker.run(idle=purged)


if __name__ == "__main__":
    main()
