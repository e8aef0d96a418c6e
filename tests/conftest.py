"""One embedded server for the whole run, and for each test a database of its own.

The schema is migrated once, into a template that every test's database is cloned from: about
25 ms a test. PLANROOM_TEST_DATABASE_URL names a server of your own to use instead; its role must
be allowed to create databases.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from planroom import embedded
from planroom.config import Settings
from planroom.migrate import migrate_database
from support.folder import reachable_folder

# The server of the tests may lose everything when the machine crashes, but nothing when only the
# server does.
_CARELESS = ("fsync = off", "full_page_writes = off")

_GUARD = """
import shutil, sys
from pathlib import Path
from planroom import embedded
sys.stdin.read()
embedded.stop(Path(sys.argv[1]))
shutil.rmtree(sys.argv[1])
"""


def pytest_configure() -> None:
    """Hear SIGINT, as the tests' processes are to: in the background a shell has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """A server with a role that may create databases; stopped at the end, whatever happens."""
    given = os.environ.get("PLANROOM_TEST_DATABASE_URL")
    if given:
        yield given
        return
    major = int(os.environ.get("PLANROOM_TEST_POSTGRES", str(embedded.MAJOR)))
    home = reachable_folder()
    # Whatever ends this process, also a kill, closes the pipe; then the guard stops the server.
    with subprocess.Popen(
        [sys.executable, "-c", _GUARD, home], stdin=subprocess.PIPE, start_new_session=True
    ):
        url = embedded.start(home, major=major)
        with psycopg.connect(url, autocommit=True) as conn:
            for setting in _CARELESS:
                conn.execute(sql.SQL("alter system set ") + sql.SQL(setting))
            conn.execute("select pg_reload_conf()")
        yield url


@pytest.fixture(scope="session")
def template(server_url: str) -> Iterator[str]:
    """The name of a database with the whole schema and no rows."""
    name = f"template_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        with psycopg.connect(make_conninfo(server_url, dbname=name)) as conn:
            migrate_database(conn)
        yield name
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def admin(server_url: str) -> Iterator[psycopg.Connection]:
    """A connection that creates and drops the databases of the tests."""
    with psycopg.connect(server_url, autocommit=True) as conn:
        yield conn


@pytest.fixture
def empty_database_url(server_url: str, admin: psycopg.Connection) -> Iterator[str]:
    """A database of the test's own with nothing in it."""
    yield from _fresh(server_url, admin, "template1")


@pytest.fixture
def database_url(server_url: str, template: str, admin: psycopg.Connection) -> Iterator[str]:
    """A database of the test's own with the whole schema and no rows."""
    yield from _fresh(server_url, admin, template)


def _fresh(server_url: str, admin: psycopg.Connection, template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    names = {"name": sql.Identifier(name), "template": sql.Identifier(template)}
    admin.execute(sql.SQL("create database {name} template {template}").format(**names))
    yield make_conninfo(server_url, dbname=name)
    admin.execute(sql.SQL("drop database {name} with (force)").format(**names))


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    """A connection to the test's database, outside a transaction between statements."""
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield conn


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer has set for planroom must not steer the tests."""
    for name in os.environ:
        if name.startswith("PLANROOM_") and not name.startswith("PLANROOM_TEST_"):
            monkeypatch.delenv(name)


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    """Settings for the test's database, its own folder, and an embedder that needs no model."""
    values: dict[str, Any] = {
        "_env_file": None,
        "home": tmp_path / "home",
        "database_url": SecretStr(database_url),
        "embedder": "hashing",
    }
    return Settings(**values)


@pytest.fixture
def now() -> Callable[[], datetime]:
    """The time of this process, aware, in UTC."""
    return lambda: datetime.now(UTC)
