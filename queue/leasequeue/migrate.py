"""Bring a schema up to date: plain SQL files, each run once, in order, with its record.

A migration and the row that says it ran are one transaction, under an advisory lock that ends
with that transaction. So any number of processes may start at once, a killed one leaves nothing
half done, and a pooler in transaction mode is no obstacle.

A file whose first line is `-- no transaction` holds one statement that Postgres only runs outside
one, as `create index concurrently if not exists`. It must bear being run twice: its record follows
it, and a kill may come between. What an interrupted one left INVALID is dropped first.

Knows nothing of what the migrations are for. Files are append-only: a checksum guards them.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from leasequeue.errors import MigrationError

NO_TRANSACTION = "-- no transaction"
WAIT_SECONDS = 0.05

_CONCURRENT_INDEX = re.compile(
    r"create\s+(?:unique\s+)?index\s+concurrently\s+(?:if\s+not\s+exists\s+)?\"?(\w+)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Migration:
    """One SQL file: `name` orders it among the others and is its identity for ever."""

    name: str
    text: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the text, in hex; line endings do not count."""
        return hashlib.sha256(self.text.replace("\r\n", "\n").encode()).hexdigest()

    @property
    def in_transaction(self) -> bool:
        """Whether it runs in one transaction with its record."""
        return self.text.partition("\n")[0].strip().lower() != NO_TRANSACTION


def apply_migrations(
    conn: psycopg.Connection[object], migrations: Sequence[Migration]
) -> list[str]:
    """Apply what is missing, in the order given, and return the names applied by this call.

    One query when there is nothing to do. The connection must be outside a transaction. Raises
    `MigrationError` for an edited migration, for a database that knows one the code lacks, and
    for one that fails; a server that goes away raises psycopg's own OperationalError.
    """
    if conn.info.transaction_status != TransactionStatus.IDLE:
        raise MigrationError("apply_migrations() needs a connection that is outside a transaction.")
    applied: list[str] = []
    missing = pending_migrations(conn, migrations)
    while missing:
        name = _apply_next(conn, migrations)
        if name is not None:
            applied.append(name)
        missing = pending_migrations(conn, migrations)
    return applied


def pending_migrations(
    conn: psycopg.Connection[object], migrations: Sequence[Migration]
) -> list[str]:
    """Return the names of the migrations that the database lacks, in order; one query.

    Raises `MigrationError` for an edited migration (`migration_edited`) and for a database with
    one that is not given (`schema_newer`).
    """
    return [migration.name for migration in _missing(_records(conn), migrations)]


def read_migrations(files: Iterable[Traversable]) -> list[Migration]:
    """Read SQL files, in the order of their names."""
    read = (Migration(file.name, file.read_text("utf-8")) for file in files)
    return sorted(read, key=lambda migration: migration.name)


def engine_migrations() -> list[Migration]:
    """The engine's own tables: from the wheel or, in an editable install, from the checkout."""
    folder: Traversable = resources.files("leasequeue") / "migrations"
    if not folder.is_dir():
        folder = Path(__file__).parents[2] / "migrations"
    return read_migrations(file for file in folder.iterdir() if file.name.endswith("_engine.sql"))


def _missing(records: dict[str, str], migrations: Sequence[Migration]) -> list[Migration]:
    known = {migration.name: migration.checksum for migration in migrations}
    foreign = sorted(records.keys() - known.keys())
    if foreign:
        raise MigrationError(
            f"The database has {', '.join(foreign)}, which this version does not know: a newer "
            "version has been here.",
            code="schema_newer",
            hint="Upgrade this installation to at least that version.",
        )
    for name, checksum in records.items():
        if known[name] != checksum:
            raise MigrationError(
                f"Migration {name} was edited after it was applied to this database.",
                code="migration_edited",
                hint="Restore the file, and put the change into a new one.",
            )
    return [migration for migration in migrations if migration.name not in records]


_RECORDS = """
select name, checksum
from schema_migrations
"""


def _records(conn: psycopg.Connection[object]) -> dict[str, str]:
    """What has been applied: names and checksums; the query fails when nothing ever was."""
    try:
        with conn.transaction(), conn.cursor(row_factory=tuple_row) as cursor:
            return dict(cursor.execute(_RECORDS, prepare=False).fetchall())
    except psycopg.errors.UndefinedTable:
        return {}


# Read committed, whatever the server's default: each statement has to see what a rival has just
# committed.
_BEGIN = (
    "set transaction isolation level read committed",
    "set local statement_timeout = 0",
    "set local idle_in_transaction_session_timeout = 0",
)

# The number is this module's own.
_TRY_LOCK = """
select pg_try_advisory_xact_lock(7811887455173341)
"""

_CREATE_TABLE = """
create table if not exists schema_migrations (
    name text primary key,
    checksum text not null,
    applied_at timestamptz not null default now()
)
"""

_RECORD = """
insert into schema_migrations (name, checksum)
values (%(name)s, %(checksum)s)
"""


@contextmanager
def _alone(conn: psycopg.Connection[object]) -> Generator[None]:
    """A transaction that one process of all is in at a time.

    The wait for it is outside any statement: `create index concurrently` waits for every older
    snapshot, so a rival that waited inside a statement and the one it waits for would wait for
    each other for ever, unseen by Postgres.
    """
    while True:
        with conn.transaction() as transaction:
            for statement in _BEGIN:
                conn.execute(statement, prepare=False)
            with conn.cursor(row_factory=tuple_row) as cursor:
                if cursor.execute(_TRY_LOCK, prepare=False).fetchone() == (True,):
                    yield
                    return
            raise psycopg.Rollback(transaction)
        time.sleep(WAIT_SECONDS)


def _apply_next(conn: psycopg.Connection[object], migrations: Sequence[Migration]) -> str | None:
    """Apply the first one that is missing; None if a rival has just done what was left."""
    with _alone(conn):
        conn.execute(_CREATE_TABLE, prepare=False)
        missing = _missing(_records(conn), migrations)
        if not missing:
            return None
        if missing[0].in_transaction:
            _run(conn, missing[0])
            return missing[0].name
    with (
        psycopg.connect(
            conn.info.dsn, password=conn.info.password or None, autocommit=True
        ) as other,
        _alone(conn),
    ):
        # The lock is held by one connection's transaction, the statement runs on another, which
        # is outside any: a lock of the session would be lost in a pooler.
        missing = _missing(_records(conn), migrations)
        if not missing or missing[0].in_transaction:
            return None
        _drop_invalid_indexes(other, missing[0])
        _run(other, missing[0])
        return missing[0].name


def _run(conn: psycopg.Connection[object], migration: Migration) -> None:
    """Execute one migration and record it."""
    before = conn.info.transaction_status
    try:
        conn.execute(migration.text.encode(), prepare=False)
        if conn.info.transaction_status != before:
            raise MigrationError(f"Migration {migration.name} ends the transaction it runs in.")
        record = {"name": migration.name, "checksum": migration.checksum}
        conn.execute(_RECORD, record, prepare=False)
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        said = error.diag.message_primary or str(error)
        raise MigrationError(
            f"Migration {migration.name} failed: {said}.", hint=error.diag.message_hint
        ) from error


_INVALID_INDEXES = """
select class.relname
from pg_index
join pg_class class on class.oid = pg_index.indexrelid
where not pg_index.indisvalid
  and class.relname = any(%(names)s)
  and pg_table_is_visible(class.oid)
"""


def _drop_invalid_indexes(conn: psycopg.Connection[object], migration: Migration) -> None:
    """Remove what an interrupted `create index concurrently` of this migration left behind."""
    names = _CONCURRENT_INDEX.findall(migration.text)
    with conn.cursor(row_factory=tuple_row) as cursor:
        invalid = cursor.execute(_INVALID_INDEXES, {"names": names}, prepare=False).fetchall()
    for (name,) in invalid:
        drop = sql.SQL("drop index concurrently if exists {}").format(sql.Identifier(name))
        conn.execute(drop, prepare=False)
