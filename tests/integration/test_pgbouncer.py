"""Case Q27: behind a real PgBouncer in transaction mode everything works, by polling only."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import leasequeue
from conftest import reachable_folder
from leasequeue import Lease, keeper, runs
from support.engine import World, await_true, scalar
from support.engine_worker import worker_process

Connection = psycopg.Connection[Any]

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)"
)

_CONFIG = """
[databases]
* = host={host} port={port} user={user} {password}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
server_reset_query =
ignore_startup_parameters = extra_float_digits
"""


@pytest.fixture
def pooled_url(database_url: str, tmp_path: Path) -> Generator[str]:
    """The test's database through a PgBouncer of the test's own, three server sessions in all."""
    given = conninfo_to_dict(database_url)
    host = unquote(str(given["host"]))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    password = given.get("password")
    config = _CONFIG.format(
        host=host,
        port=given.get("port") or 5432,
        user=given.get("user") or "postgres",
        password=f"password='{password}'" if password else "",
        listen_port=port,
    )
    folder = reachable_folder()
    (folder / "pgbouncer.ini").write_text(config)
    log = tmp_path / "pgbouncer.log"
    assert PROGRAM is not None
    with log.open("wb") as out:
        process = subprocess.Popen(
            [PROGRAM, folder / "pgbouncer.ini"], stderr=out, user=_server_user(host)
        )
    try:
        url = make_conninfo(database_url, host="127.0.0.1", port=port)
        await_true(lambda: _answers(url), "PgBouncer does not answer")
        yield url
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def _server_user(host: str) -> str | None:
    """PgBouncer refuses to be root; the server's own user is one that its socket lets in."""
    if os.geteuid() != 0:
        return None
    return pwd.getpwuid(Path(host).stat().st_uid).pw_name if host.startswith("/") else "nobody"


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def world(connection: Connection) -> World:
    return World.new(connection)


def test_q27_a_worker_works_by_polling_behind_pgbouncer(
    world: World, pooled_url: str, tmp_path: Path
) -> None:
    """Q27. Jobs, a cancel, and a shutdown that gives the lease back; and nobody listens."""
    runs = [world.run(name, name) for name in "abcdef"]
    log = tmp_path / "log"
    with worker_process(pooled_url, log, poll_seconds=0.05) as process:
        await_true(
            lambda: [world.status(run) for run in runs] == ["succeeded"] * 6, log.read_text()
        )
        cancelled = _start(world, "wait", "to cancel")
        await_true(lambda: world.status(cancelled) == "running", "it did not start")
        world.cancel(cancelled)
        await_true(lambda: world.status(cancelled) == "cancelled", "it did not hear the cancel")
        released = _start(world, "wait", "to release")
        await_true(lambda: world.status(released) == "running", "it did not start")
        listening = "select count(*) from pg_stat_activity where starts_with(query, 'listen')"
        assert scalar(world.conn, listening) == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert (world.status(released), world.outcomes(released)) == ("queued", ["released"])
    assert scalar(world.conn, "select count(*) from workers") == 0
    assert "ERROR" not in log.read_text()
    assert "WARNING" not in log.read_text()


def _start(world: World, do: str, name: str) -> int:
    run = leasequeue.enqueue(
        world.conn, world.workspace, world.connection(name, name), payload={"do": do}
    )
    assert run is not None
    return run


def test_q27_a_poolers_session_is_told_from_one_of_our_own(
    database_url: str, pooled_url: str
) -> None:
    """Q27. A LISTEN would stay on a session that others use next."""
    for url, own in ((database_url, True), (pooled_url, False)):
        with leasequeue.connect(url) as conn:
            assert keeper._own_session(conn) is own  # pyright: ignore[reportPrivateUsage]


def test_q27_the_limiters_two_statements_share_a_transaction_behind_pgbouncer(
    world: World, pooled_url: str
) -> None:
    """Q27. Its lock is held from the one to the other, whichever session they are on."""
    first = world.run("a", "s3")
    world.run("b", "s3")
    with leasequeue.connect(pooled_url) as one, leasequeue.connect(pooled_url) as other:
        held = runs.claim(one, "alice", 120, ["sync"])
        assert isinstance(held, Lease)
        assert held.id == first
        assert runs.claim(other, "bob", 120, ["sync"]) is None
        assert leasequeue.seal(other, held, "succeeded") == "succeeded"
