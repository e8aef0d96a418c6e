"""What a worker costs that has nothing to do: queries a poll, and CPU.

Statements are counted where psycopg sends them, on every connection of the worker, the keeper's
too; the pool's check of a connection before it is lent, an empty statement, is counted apart. The
server's own count of transactions, checks included, stands beside as seen from the other side. CPU
is the process's, from getrusage, user and system.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import psycopg
from claim_peers import leasequeue_peer
from pydantic import SecretStr

import leasequeue
from claim_parts.plan import IDLE_CPU_PERCENT_MAX, QUERIES_A_POLL_MAX, Plan, Result
from claim_parts.server import Server
from leasequeue import Stage, Worker
from planroom.blobs import BlobStore
from planroom.config import Settings
from planroom.database import Database
from planroom.migrate import migrate_database
from planroom.stages import Embedders, all_stages

Connection = psycopg.Connection[Any]

# The ends of a multiprocessing pipe have no public type that is the same everywhere.
Pipe = Any

# The worker's start, its first poll and its seldom stages are over by then.
SETTLED_SECONDS = 3.0


@dataclass(slots=True)
class Count:
    """What one process has sent so far; the keeper's thread and the worker's both add to it."""

    polls: int = 0
    statements: int = 0
    lent: int = 0
    keeper: int = 0


COUNT = Count()


class CountingCursor(psycopg.Cursor[Any]):
    """Counts what it sends."""

    def execute(self, *arguments: Any, **keywords: Any) -> Self:
        COUNT.statements += 1
        if threading.current_thread().name == "keeper":
            COUNT.keeper += 1
        return super().execute(*arguments, **keywords)


def measure_idle(server: Server, plan: Plan, say: Callable[[str], None]) -> Result:
    """The engine's own worker, and planroom's with every stage it has."""
    results = {}
    for name, prepare, serve in (
        ("engine", leasequeue_peer.prepare, _serve_engine),
        ("planroom", _prepare_planroom, _serve_planroom),
    ):
        say(f"idle: the {name}'s worker, {plan.idle_seconds:.0f} s")
        url = server.database(f"idle_{name}")
        prepare(url)
        results[name] = _watch(server, url, serve, plan.idle_seconds)
        server.drop(url)
    return {
        "workers": results,
        "queries_a_poll_max": QUERIES_A_POLL_MAX,
        "cpu_percent_max": IDLE_CPU_PERCENT_MAX,
    }


def _watch(
    server: Server, url: str, serve: Callable[[str, Pipe, float], None], seconds: float
) -> Result:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(url, theirs, seconds), daemon=True)
    process.start()
    ours.recv()
    before = _transactions(server, url)
    count, cpu_seconds, elapsed = ours.recv()
    after = _transactions(server, url)
    process.join()
    return {
        "seconds": round(elapsed, 2),
        "polls": count.polls,
        "queries_a_poll": round((count.statements - count.keeper) / count.polls, 2),
        "pool_checks_a_poll": round(count.lent / count.polls, 2),
        "keeper_queries_a_minute": round(60 * count.keeper / elapsed, 1),
        "server_transactions_a_poll": round((after - before) / count.polls, 2),
        "cpu_percent": round(100 * cpu_seconds / elapsed, 3),
    }


def _transactions(server: Server, url: str) -> int:
    """Transactions in this database so far, by the server; asked from another database."""
    with psycopg.connect(server.url) as conn:
        row = conn.execute(
            "select xact_commit + xact_rollback from pg_stat_database where datname = %(name)s",
            {"name": urlsplit(url).path.lstrip("/")},
        ).fetchone()
    assert row is not None
    return int(row[0])


def _serve_engine(url: str, pipe: Pipe, seconds: float) -> None:
    with leasequeue_peer.open_pool(url) as pool:
        worker = Worker(
            lambda: _counted(leasequeue_peer.connect(url)),
            lambda: _lend(pool.connection()),
            poll_seconds=leasequeue_peer.POLL_SECONDS,
        )
        worker.stages = leasequeue.engine_stages(
            worker, lambda: _lend(pool.connection()), {"sync": lambda run: None}
        )
        _run_idle(worker, pipe, seconds)


def _prepare_planroom(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        migrate_database(conn)


class _CountingDatabase(Database):
    """planroom's database, whose connections count what they send."""

    def connect(
        self, *, vectors: bool = True, read_timeout: float = math.inf
    ) -> psycopg.Connection:
        return _counted(super().connect(vectors=vectors, read_timeout=read_timeout))

    @contextmanager
    def connection(self) -> Generator[psycopg.Connection]:
        with _lend(super().connection()) as conn:
            yield conn


def _serve_planroom(url: str, pipe: Pipe, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(url, Path(folder))
        with _CountingDatabase(settings) as database:
            worker = Worker(
                database.connect, database.connection, poll_seconds=settings.poll_seconds
            )
            worker.stages = all_stages(
                worker, database, BlobStore(settings.home / "blobs"), settings, Embedders()
            )
            _run_idle(worker, pipe, seconds)


def _settings(url: str, home: Path) -> Settings:
    values: dict[str, Any] = {
        "_env_file": None,
        "home": home,
        "database_url": SecretStr(url),
        "embedder": "hashing",
    }
    return Settings(**values)


def _counted(conn: Connection) -> Connection:
    conn.cursor_factory = CountingCursor
    return conn


@contextmanager
def _lend(lent: AbstractContextManager[Connection]) -> Generator[Connection]:
    with lent as conn:
        COUNT.lent += 1
        own = conn.cursor_factory
        conn.cursor_factory = CountingCursor
        try:
            yield conn
        finally:
            # Or the pool's next check of this connection would count as a query of the worker's.
            conn.cursor_factory = own


def _run_idle(worker: Worker, pipe: Pipe, seconds: float) -> None:
    def poll_counted() -> int:
        COUNT.polls += 1
        return 0

    worker.stages = [*worker.stages, Stage("counted", poll_counted)]
    threading.Thread(target=_observe, args=(worker, pipe, seconds), daemon=True).start()
    worker.run()


def _observe(worker: Worker, pipe: Pipe, seconds: float) -> None:
    """Wait until the worker has settled, compare two moments, tell, and stop it."""
    time.sleep(SETTLED_SECONDS)
    pipe.send("settled")
    began_at, cpu, count = time.monotonic(), _cpu_seconds(), _snapshot()
    time.sleep(seconds)
    now = _snapshot()
    sent = Count(
        polls=now.polls - count.polls,
        statements=now.statements - count.statements,
        lent=now.lent - count.lent,
        keeper=now.keeper - count.keeper,
    )
    pipe.send((sent, _cpu_seconds() - cpu, time.monotonic() - began_at))
    worker.stop()


def _snapshot() -> Count:
    return Count(COUNT.polls, COUNT.statements, COUNT.lent, COUNT.keeper)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
