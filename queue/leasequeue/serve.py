"""A whole worker in one call, for whoever has no wiring of their own.

What it adds to `Worker` is the connections: a pool of 4 (rule L17), one for the keeper, and
settings that notice a dead network within 40 seconds, a third of a lease. A connection of the pool
that is alive and silent is given up after half a lease, unless the server is at work for it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool

from leasequeue.migrate import apply_migrations, engine_migrations
from leasequeue.poll import Stage
from leasequeue.stages import Handler, engine_stages
from leasequeue.timed_connection import TimedConnection, read_timeout
from leasequeue.worker import GRACE_SECONDS, POLL_SECONDS, Worker

Connection = psycopg.Connection[Any]

POOL_SIZE_MAX = 4
POOL_WAIT_SECONDS = 5.0
CHECK_SECONDS = 1.0

_DEFAULTS: Mapping[str, Any] = {
    "application_name": "leasequeue",
    "connect_timeout": 5,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 40_000,
}


def connect(conninfo: str) -> TimedConnection:
    """A connection as the engine wants it: autocommit, nothing prepared, a dead network noticed."""
    return TimedConnection.connect(
        _with_defaults(conninfo), autocommit=True, prepare_threshold=None
    )


def migrate_engine(conninfo: str) -> list[str]:
    """Make or update the engine's own tables; returns the names of what was applied."""
    with connect(conninfo) as conn:
        return apply_migrations(conn, engine_migrations())


def serve(
    conninfo: str,
    handlers: Mapping[str, Handler],
    *,
    lease_seconds: float = 120.0,
    retention_days: int = 90,
    grace_seconds: float = GRACE_SECONDS,
    poll_seconds: float = POLL_SECONDS,
    more_stages: Sequence[Stage] = (),
    once: bool = False,
    idle: Callable[[], bool] | None = None,
) -> None:
    """Work on the runs of these kinds until SIGTERM or SIGINT (rule L10).

    `once` ends after one poll, `idle` after the first poll that found nothing to do and for which
    it answers True. To be called in the main thread; more throughput is more processes.
    """
    # The pool warns of each try to connect; the worker says the same once a second.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
    with closing(_Connections(conninfo, read_timeout(lease_seconds))) as connections:
        worker = Worker(
            connections.connect,
            connections.lend,
            poll_seconds=poll_seconds,
            grace_seconds=grace_seconds,
            after_outage=connections.close,
        )
        worker.stages = [
            *engine_stages(
                worker,
                connections.lend,
                handlers,
                lease_seconds=lease_seconds,
                retention_days=retention_days,
            ),
            *more_stages,
        ]
        with worker.signals():
            worker.run(once=once, idle=idle)


class _Connections:
    """A pool that begins afresh after an outage.

    A pool left to itself waits ever longer between its tries, and a fail-over may leave it with
    sessions on what is a standby now: alive, and of no use.
    """

    def __init__(self, conninfo: str, read_timeout: float) -> None:
        self._conninfo = conninfo
        self._read_timeout = read_timeout
        self._lock = threading.Lock()
        self._pool: ConnectionPool[TimedConnection] | None = None
        self._checked_at: WeakKeyDictionary[TimedConnection, float] = WeakKeyDictionary()

    def connect(self) -> Connection:
        return connect(self._conninfo)

    @contextmanager
    def lend(self) -> Generator[Connection]:
        with self._open().connection() as conn:
            yield conn

    def _open(self) -> ConnectionPool[TimedConnection]:
        """The pool; a connection before its first tells at once why there can be none."""
        with self._lock:
            if self._pool is None:
                self.connect().close()
                self._pool = ConnectionPool(
                    _with_defaults(self._conninfo),
                    connection_class=TimedConnection,
                    kwargs={"autocommit": True, "prepare_threshold": None},
                    min_size=1,
                    max_size=POOL_SIZE_MAX,
                    timeout=POOL_WAIT_SECONDS,
                    configure=self._configure,
                    check=self._check,
                    open=True,
                )
            return self._pool

    def _configure(self, conn: TimedConnection) -> None:
        conn.read_timeout = self._read_timeout
        conn.ask = self._ask

    def _ask(self) -> TimedConnection:
        conn = connect(self._conninfo)
        conn.read_timeout = POOL_WAIT_SECONDS
        return conn

    def _check(self, conn: TimedConnection) -> None:
        """Ask whether it still works, unless it answered within the last second.

        So the stages of one poll, which each borrow one, ask once.
        """
        now = time.monotonic()
        if now - self._checked_at.get(conn, -math.inf) > CHECK_SECONDS:
            with conn.waiting(POOL_WAIT_SECONDS):
                ConnectionPool.check_connection(conn)
            self._checked_at[conn] = now

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(timeout=0)


def _with_defaults(conninfo: str) -> str:
    return make_conninfo("", **{**_DEFAULTS, **conninfo_to_dict(conninfo)})
