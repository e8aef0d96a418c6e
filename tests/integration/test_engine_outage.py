"""Cases Q16 and Q17: a server that restarts, and one that turns read-only, under a real worker."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import leasequeue
from conftest import reachable_folder
from planroom import embedded
from support.engine import World, await_true, scalar
from support.engine_worker import worker_process
from support.tcp_proxy import proxied

Connection = psycopg.Connection[Any]


@pytest.fixture
def home() -> Generator[Path]:
    """A place for a server of the test's own, which it may stop and start."""
    folder = reachable_folder()
    try:
        yield folder
    finally:
        embedded.stop(folder)
        shutil.rmtree(folder)


def _run(url: str, name: str, do: str = "") -> int:
    with psycopg.connect(url, autocommit=True) as conn:
        world = World.new(conn)
        run = leasequeue.enqueue(
            conn, world.workspace, world.connection(name, name), payload={"do": do}
        )
        assert run is not None
        return run


def _status(url: str, run: int) -> str:
    with psycopg.connect(url, autocommit=True) as conn:
        return World.new(conn).status(run)


def _await_status(url: str, run: int, status: str) -> None:
    await_true(lambda: _status(url, run) == status, f"it is not {status}")


def _lines(log: Path) -> list[str]:
    """What was logged above INFO, one entry a line."""
    return [line for line in log.read_text().splitlines() if line.startswith(("WARN", "ERR"))]


def test_q16_a_restart_is_outlived_by_idle_and_busy_workers_in_the_same_process(
    home: Path, tmp_path: Path
) -> None:
    """Q16. Every loop resumes: the poll, the keeper's renewals, and the job's own ending.

    While the server is away each worker logs about one line a second, and a SIGTERM still ends it.
    """
    url = embedded.start(home)
    leasequeue.migrate_engine(url)
    idle_log, busy_log = tmp_path / "idle", tmp_path / "busy"
    held = _run(url, "held", "wait")
    with (
        worker_process(url, busy_log, poll_seconds=0.05) as busy,
        worker_process(url, idle_log, poll_seconds=0.05) as idle,
    ):
        _await_status(url, held, "running")
        stopped_at = time.monotonic()
        embedded.stop(home)
        await_true(lambda: len(_lines(idle_log)) >= 3, "the idle worker said nothing")
        away = time.monotonic() - stopped_at
        for log in (idle_log, busy_log):
            assert len(_lines(log)) <= away + 2
            assert "Traceback" not in log.read_text()
        assert embedded.start(home) == url
        _await_status(url, _run(url, "next"), "succeeded")
        # Its lease was kept through the restart, and it hears what the user says now.
        with psycopg.connect(url, autocommit=True) as conn:
            World.new(conn).cancel(held)
        _await_status(url, held, "cancelled")
        assert busy.poll() is None
        assert idle.poll() is None
        embedded.stop(home)
        for process in (busy, idle):
            process.terminate()
            assert process.wait(10) == 0


@pytest.mark.slow
def test_q18_connections_that_are_alive_and_silent_are_given_up(
    database_url: str, tmp_path: Path
) -> None:
    with (
        proxied(database_url) as proxy,
        worker_process(proxy.url, tmp_path / "log", poll_seconds=0.05, lease_seconds=6.0) as worker,
    ):
        _await_status(database_url, _run(database_url, "first"), "succeeded")
        proxy.freeze()
        _await_status(database_url, _run(database_url, "second"), "succeeded")
        worker.terminate()
        assert worker.wait(10) == 0


@pytest.mark.slow
def test_q18_a_worker_outlives_a_silence_in_the_middle_of_its_transaction(
    database_url: str, tmp_path: Path
) -> None:
    """Its session stands on the server with the row locked; the same worker puts it out."""
    with (
        proxied(database_url) as proxy,
        worker_process(proxy.url, tmp_path / "log", poll_seconds=0.05, lease_seconds=6.0),
    ):
        run = _run(database_url, "held", "hold")
        _await_status(database_url, run, "running")
        proxy.freeze()
        await_true(
            lambda: _status(database_url, run) == "succeeded", (tmp_path / "log").read_text(), 90.0
        )
    with psycopg.connect(database_url) as conn:
        assert World.new(conn).outcomes(run) == ["expired", "succeeded"]


def test_q17_a_standby_that_cannot_write_is_waited_out_with_a_line_a_second(
    database_url: str, connection: Connection, tmp_path: Path
) -> None:
    """Q17. After a fail-over the sessions are alive and the server is read-only, then is not.

    Nothing is terminated when it ends, so the worker itself must let go of the read-only sessions.
    """
    database = sql.Identifier(connection.info.dbname)
    alter = sql.SQL("alter database {} ").format(database)
    log = tmp_path / "log"
    with worker_process(database_url, log, poll_seconds=0.05) as process:
        _await_status(database_url, _run(database_url, "before"), "succeeded")
        connection.execute(alter + sql.SQL("set default_transaction_read_only = on"))
        began_at = time.monotonic()
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        await_true(lambda: "read-only" in log.read_text(), "it never met the standby")
        seen = len(_lines(log))
        await_true(lambda: len(_lines(log)) >= seen + 2, "it went silent")
        assert len(_lines(log)) <= time.monotonic() - began_at + 2
        connection.execute(alter + sql.SQL("reset default_transaction_read_only"))
        _await_status(database_url, _run(database_url, "after"), "succeeded")
        assert process.poll() is None
        await_true(
            lambda: scalar(
                connection, "select bool_and(heartbeat_at > now() - interval '9 s') from workers"
            ),
            "the keeper did not come back",
        )
