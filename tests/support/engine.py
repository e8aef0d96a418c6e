"""A small world for tests of the engine: workspaces, connections, runs, and a clock to turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString, cast

import psycopg
from psycopg import sql

import leasequeue
from leasequeue import Ended, Lease, runs

Connection = psycopg.Connection[Any]

LEASE_SECONDS = 120.0
NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)
ALIVE_SECONDS = 20.0


def after(seconds: float) -> datetime:
    """A time so many seconds after noon, the time at which the tests' worlds begin."""
    return NOON + timedelta(seconds=seconds)


@dataclass(frozen=True, slots=True)
class World:
    """One workspace, and what a test does to it; every time is injected."""

    conn: Connection
    workspace: int

    @classmethod
    def new(cls, conn: Connection, name: str = "ACME") -> World:
        return cls(conn, leasequeue.ensure_workspace(conn, name))

    def connection(
        self, name: str, provider: str = "folder", *, interval_seconds: int | None = None
    ) -> int:
        added = leasequeue.add_connection(
            self.conn, self.workspace, name, provider, interval_seconds=interval_seconds, now=NOON
        )
        assert added is not None
        return added

    def run(
        self, name: str, provider: str = "folder", kind: str = "sync", *, now: datetime = NOON
    ) -> int:
        """A queued run of a new connection."""
        queued = leasequeue.enqueue(
            self.conn, self.workspace, self.connection(name, provider), kind, now=now
        )
        assert queued is not None
        return queued

    def claim(self, owner: str = "alice", *, now: datetime = NOON) -> Lease | Ended | None:
        return runs.claim(self.conn, owner, LEASE_SECONDS, ["sync", "purge"], now=now)

    def held(self, owner: str = "alice", *, now: datetime = NOON) -> Lease:
        """A claim that must succeed."""
        claimed = self.claim(owner, now=now)
        assert isinstance(claimed, Lease), claimed
        return claimed

    def cancel(self, run: int, *, now: datetime = NOON) -> dict[int, str]:
        return leasequeue.request_cancel(self.conn, leasequeue.RUNS, self.workspace, [run], now=now)

    def row(self, run: int) -> dict[str, Any]:
        """The run with its `lease_history` and its `results`."""
        row = leasequeue.run_history(self.conn, self.workspace, run)
        assert row is not None
        return row

    def status(self, run: int) -> str:
        return cast(str, self.row(run)["status"])

    def outcomes(self, run: int) -> list[str | None]:
        """How each attempt ended, oldest first; None for one that is open."""
        return [attempt["outcome"] for attempt in self.row(run)["lease_history"]]


def scalar(conn: Connection, statement: LiteralString, *parameters: object) -> Any:
    """The one value of the one row of a query."""
    row = conn.execute(statement, parameters).fetchone()
    assert row is not None
    return row[0]


def snapshot(conn: Connection, table: LiteralString) -> list[tuple[Any, ...]]:
    """All of a table, to compare before and after."""
    return conn.execute(
        sql.SQL("select * from {} as row order by row::text").format(sql.Identifier(table))
    ).fetchall()


@contextmanager
def begun(database_url: str) -> Generator[Connection]:
    """A session inside a transaction that the test commits itself.

    On one that is idle, psycopg's `conn.transaction()` commits at its end.
    """
    with psycopg.connect(database_url) as conn:
        conn.execute("select 1")
        yield conn


@contextmanager
def in_background(work: Callable[[], object]) -> Generator[threading.Thread]:
    """Do `work` in a thread beside the block, and pass on what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(ALIVE_SECONDS)
    assert not thread.is_alive(), "the work in the background did not end"
    if errors:
        raise errors[0]


def await_blocked(watcher: Connection, pid: int) -> None:
    """Return once the server says that process `pid` of its own waits for a lock."""
    await_true(
        lambda: scalar(watcher, "select cardinality(pg_blocking_pids(%s)) > 0", pid),
        "it never waited for a lock",
    )


def await_true(condition: Callable[[], bool], otherwise: str, seconds: float = 20.0) -> None:
    """Return as soon as the condition holds; fail after `seconds`."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(otherwise)
