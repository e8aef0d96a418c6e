"""Reach the database: the embedded one or the user's own, as a small pool or one connection.

Two things make a lease outlive its holder only by seconds when a machine or a cable dies, with
nobody left to close the connection. Our end gives up after about 40 s without an answer, well
within a lease. And the server's end is told to do the same, or its abandoned transaction would
go on holding row locks, and the claim would skip the row, for the two hours of TCP's defaults.
A peer that is alive and silent the kernel cannot notice: after half a lease without a word a
connection of the pool breaks, unless the server is at work for it (`leasequeue.TimedConnection`).

Every connection is in autocommit mode: a transaction is where the code says `conn.transaction()`
and nowhere else. Statements are never prepared on the server, so a pooler in transaction mode is
no special case.

No password reaches a message, a repr or a log: errors that quote the URL are replaced.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from pgvector.psycopg import register_vector
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool

from leasequeue import TimedConnection, read_timeout
from planroom import embedded
from planroom.config import Settings
from planroom.errors import DatabaseUnusable
from planroom.migrate import check_migrated, check_server, migrate_database

POOL_SIZE_MAX = 4
POOL_WAIT_SECONDS = 5.0
RESTED_SECONDS = 1.0
CONNECT_SECONDS = 10
SILENCE_SECONDS = 40
IDLE_SECONDS_MAX = 60.0

# What a URL leaves open. Half a lease is 60 s: 20 s of quiet and four unanswered probes are 40 s.
_DEFAULTS: Mapping[str, str | int] = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 1000 * SILENCE_SECONDS,
}


class Database:
    """The database of one process. Threads may share it; after a fork, make another.

    Nothing is connected until it is needed. `name` is what the server's own views show.
    """

    def __init__(self, settings: Settings, *, name: str = "planroom") -> None:
        self._settings = settings
        self._name = name
        self._lock = threading.Lock()
        self._pool: ConnectionPool[TimedConnection] | None = None
        self._used_at = WeakKeyDictionary[psycopg.Connection, float]()
        self._read_timeout = read_timeout(settings.lease_seconds)
        self._idle_seconds = min(IDLE_SECONDS_MAX, settings.lease_seconds / 2)

    @classmethod
    def open(cls, settings: Settings, *, name: str = "planroom") -> Database:
        """Return a database that is there and has the schema of this version.

        The embedded one is started and migrated. A server of the user's is only checked: when its
        schema is behind, `DatabaseUnusable` (`schema_behind`) says to run `planroom migrate`.
        """
        database = cls(settings, name=name)
        # A migration waits for others and takes its time; a look at the schema does not.
        patience = math.inf if database.is_embedded else CONNECT_SECONDS
        with database._first_connection(patience) as conn:
            if database.is_embedded:
                migrate_database(conn)
            else:
                check_migrated(conn)
        return database

    def __repr__(self) -> str:
        where = "embedded" if self._settings.database_url is None else "of your own"
        return f"<Database {where}, {self._name}>"

    @property
    def is_embedded(self) -> bool:
        """Whether this is the server that planroom starts itself."""
        return self._settings.database_url is None

    def migrate(self) -> list[str]:
        """Bring the schema up to date and return the names of what was applied."""
        with self._first_connection() as conn:
            check_server(conn)
            return migrate_database(conn)

    @contextmanager
    def _first_connection(self, read_timeout: float = math.inf) -> Generator[psycopg.Connection]:
        """A connection whose failure is told to a person, not to a loop that tries again."""
        try:
            with self.connect(vectors=False, read_timeout=read_timeout) as conn:
                yield conn
        except psycopg.OperationalError as error:
            raise DatabaseUnusable(
                f"The database cannot be reached: {str(error).strip()}",
                code="database_unreachable",
                hint="Is the server up, and is PLANROOM_DATABASE_URL right?",
            ) from error

    def conninfo(self) -> str:
        """Return what libpq needs to connect, password included; starts the embedded server."""
        url = self._settings.database_url
        text = embedded.start(self._settings.home) if url is None else url.get_secret_value()
        given = _parse(text)
        return make_conninfo("", **{**_DEFAULTS, "application_name": self._name, **given})

    def connect(
        self, *, vectors: bool = True, read_timeout: float = math.inf
    ) -> psycopg.Connection:
        """Return a connection of the caller's own, in autocommit mode, outside the pool.

        Without `vectors` the types of pgvector are not known to it, and need not exist. After
        `read_timeout` seconds without a word from the server it breaks; by default it waits for
        ever. Raises psycopg's OperationalError when nobody answers.
        """
        conn = TimedConnection.connect(self.conninfo(), autocommit=True, prepare_threshold=None)
        try:
            self._set_up(conn, vectors=vectors)
            conn.read_timeout = read_timeout
        except BaseException:
            conn.close()
            raise
        return conn

    @contextmanager
    def connection(self) -> Generator[psycopg.Connection]:
        """Lend a connection of the pool, at most 4, in autocommit mode.

        A connection that died while it rested is replaced before it is lent; one that died within
        the last second fails at its first statement. When the database goes away the pool is
        dropped, and the next call connects afresh, so it is back as soon as the server is.
        """
        pool = self._open_pool()
        try:
            with pool.connection() as conn:
                try:
                    yield conn
                finally:
                    self._used_at[conn] = time.monotonic()
        except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction) as error:
            # A server that was demoted goes on answering old sessions; only a new one finds its
            # successor.
            if error.sqlstate in (None, psycopg.errors.ReadOnlySqlTransaction.sqlstate):
                self._drop(pool)
            raise

    def close(self) -> None:
        """Close the pool. The embedded server goes on, for the next command."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_pool(self) -> ConnectionPool[TimedConnection]:
        """The pool, opened at its first use; a first connection tells why if there can be none."""
        with self._lock:
            if self._pool is None:
                self.connect(vectors=False).close()
                self._pool = ConnectionPool(
                    self.conninfo,
                    connection_class=TimedConnection,
                    kwargs={"autocommit": True, "prepare_threshold": None},
                    min_size=1,
                    max_size=POOL_SIZE_MAX,
                    timeout=POOL_WAIT_SECONDS,
                    configure=self._configure,
                    check=self._check_if_rested,
                    name=self._name,
                    open=True,
                )
            return self._pool

    def _check_if_rested(self, conn: TimedConnection) -> None:
        """Ask a connection whether it lives, unless it answered a moment ago.

        So a poll of five short queries costs one question, and not five.
        """
        if time.monotonic() - self._used_at.get(conn, -RESTED_SECONDS) >= RESTED_SECONDS:
            with conn.waiting(POOL_WAIT_SECONDS):
                ConnectionPool.check_connection(conn)

    def _configure(self, conn: TimedConnection) -> None:
        self._set_up(conn)
        conn.read_timeout = self._read_timeout
        conn.ask = lambda: self.connect(vectors=False, read_timeout=POOL_WAIT_SECONDS)

    def _set_up(self, conn: TimedConnection, *, vectors: bool = True) -> None:
        idle = round(1000 * self._idle_seconds)
        with conn.waiting(CONNECT_SECONDS):
            conn.execute(_SET_UP_SESSION, {"pid": conn.info.backend_pid, "idle": str(idle)})
            if vectors:
                _register_vectors(conn)

    def _drop(self, pool: ConnectionPool[TimedConnection]) -> None:
        with self._lock:
            if self._pool is not pool:
                return
            self._pool = None
        pool.close(timeout=0)


# A pooler in transaction mode lends the server's session to others too, so these are set only
# where the session is ours: a pooler does not tell its clients the server process's own number.
# idle_in_transaction: a holder that hangs inside a transaction lets go of its locks in half a
# lease, or in a minute. There is no statement_timeout: building an index or deleting a version may
# take long, and client_connection_check_interval ends the statements of clients that are gone.
_SET_UP_SESSION = """
select set_config(name, value, false)
from (
    values
        ('timezone', 'UTC'),
        ('tcp_keepalives_idle', '20'),
        ('tcp_keepalives_interval', '5'),
        ('tcp_keepalives_count', '4'),
        ('tcp_user_timeout', '40000'),
        ('client_connection_check_interval', '10000'),
        ('idle_in_transaction_session_timeout', %(idle)s)
) as settings (name, value)
where pg_backend_pid() = %(pid)s
"""


def _register_vectors(conn: psycopg.Connection[Any]) -> None:
    """Teach the connection pgvector's types, or say that the server lacks them."""
    try:
        register_vector(conn)
    except psycopg.OperationalError:
        raise
    except psycopg.ProgrammingError:
        check_server(conn)
        register_vector(conn)


def _parse(url: str) -> dict[str, Any]:
    """The parts of a URL; a malformed one is refused without quoting it, for its password."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise _malformed() from None
    ports = str(given.get("port", "")).split(",")
    split_wrongly = any("@" in str(given.get(part, "")) for part in ("host", "dbname"))
    if split_wrongly or not all(port == "" or port.isdecimal() for port in ports):
        raise _malformed()
    return given


def _malformed() -> DatabaseUnusable:
    return DatabaseUnusable(
        "PLANROOM_DATABASE_URL is not the address of a Postgres database.",
        code="database_url_malformed",
        hint="It looks like postgresql://user:password@host:5432/database; in the password, "
        "write @ as %40, / as %2F, : as %3A, ? as %3F and % as %25.",
    )
