"""leasequeue itself: its own `Worker` with its own stages, connected as planroom connects."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, LiteralString, Self, cast

import psycopg
from psycopg_pool import ConnectionPool

import leasequeue
from claim_peers import About, Count, Send, Started, counting

ABOUT = About(
    name="leasequeue",
    module="leasequeue",
    requirement="planroom",
    settings="poll 2 s, NOTIFY, pool of 4, lease 120 s",
    jobs_at_once="1",
    latency_phase_seconds=0.1,
    fence="yes: id, owner and token in every write of a holder, also the job's own rows",
    renewal="40 s of 120, by a thread with its own connection; stops itself when it cannot",
    tenant_limits="yes: one run per workspace and provider, a purge alone, across the fleet",
    transactional_enqueue="yes: in the caller's psycopg transaction",
    crash_recovery="by the claim: at most lease (120 s) + poll (2 s); 3 crashes in a row: failed",
)
_PENDING: LiteralString = """
    select count(*) from connection_runs where status in ('waiting', 'queued', 'running')
"""

PROVIDERS = 20
LEASE_SECONDS = 120.0
POLL_SECONDS = 2.0
SENDER_CONNECTIONS = 50


class DeafCursor(psycopg.Cursor[Any]):
    """Sends everything but LISTEN, as if behind a pooler in transaction mode."""

    # The overloads of psycopg's own execute() are not worth repeating here.
    def execute(self, query: Any, params: Any = None, **keywords: Any) -> Self:
        if isinstance(query, str) and query.startswith("listen"):
            return super().execute("select 1")
        return super().execute(cast(LiteralString, query), params, **keywords)


def connect(
    url: str, cursor: type[psycopg.Cursor[Any]] = psycopg.Cursor
) -> psycopg.Connection[Any]:
    """A connection in the settings of planroom: autocommit, nothing prepared on the server."""
    return psycopg.connect(url, autocommit=True, prepare_threshold=None, cursor_factory=cursor)


def open_pool(url: str) -> ConnectionPool[psycopg.Connection[Any]]:
    """A pool in the settings of planroom; each connection is checked before it is lent."""
    return ConnectionPool(
        url,
        kwargs={"autocommit": True, "prepare_threshold": None},
        min_size=1,
        max_size=4,
        check=ConnectionPool.check_connection,
        open=True,
    )


def prepare(url: str) -> None:
    with connect(url) as conn:
        leasequeue.apply_migrations(conn, leasequeue.engine_migrations())


def add_connections(conn: psycopg.Connection[Any], name: str, count: int) -> list[tuple[int, int]]:
    """So many connections as (workspace, connection), 20 providers a workspace.

    Neighbours are of different workspaces, so the limiter admits them all, as it does when the
    syncs of many tenants fall due together.
    """
    workspaces = max(1, count // PROVIDERS)
    ids = [leasequeue.ensure_workspace(conn, f"{name} {n}") for n in range(workspaces)]
    added: list[tuple[int, int]] = []
    for n in range(count):
        workspace = ids[n % workspaces]
        provider = f"provider-{n // workspaces}"
        connection = leasequeue.add_connection(conn, workspace, provider, provider)
        added.append((workspace, cast(int, connection)))
    return added


def fill(url: str, jobs: int) -> None:
    with connect(url) as conn, conn.transaction():
        for n, (workspace, connection) in enumerate(add_connections(conn, "filled", jobs)):
            leasequeue.enqueue(conn, workspace, connection, payload={"n": n})


@contextmanager
def sender(url: str) -> Generator[Send]:
    with connect(url) as conn:
        with conn.transaction():
            targets = add_connections(conn, "sent", SENDER_CONNECTIONS)

        def send(n: int) -> None:
            workspace, connection = targets[n % len(targets)]
            leasequeue.enqueue(conn, workspace, connection, payload={"n": n})

        yield send


def counter(url: str) -> AbstractContextManager[Count]:
    return counting(url, _PENDING)


def work(url: str, started: Started) -> None:
    serve(url, started, psycopg.Cursor)


def work_polling(url: str, started: Started) -> None:
    """The same worker where no notification ever arrives."""
    serve(url, started, DeafCursor)


def serve(url: str, started: Started, cursor: type[psycopg.Cursor[Any]]) -> None:
    """Run a worker whose keeper has cursors of this kind."""

    def handle(run: leasequeue.Run) -> None:
        started(run.payload["n"])

    with open_pool(url) as pool:
        worker = leasequeue.Worker(
            lambda: connect(url, cursor),
            pool.connection,
            poll_seconds=POLL_SECONDS,
        )
        worker.stages = leasequeue.engine_stages(
            worker, pool.connection, {"sync": handle}, lease_seconds=LEASE_SECONDS
        )
        worker.run()
