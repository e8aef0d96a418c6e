"""The schema of planroom: which SQL files there are, and what the server must offer for them."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import psycopg
from psycopg.rows import tuple_row

from leasequeue import (
    Migration,
    MigrationError,
    apply_migrations,
    pending_migrations,
    read_migrations,
)
from planroom.errors import DatabaseUnusable

SERVER_VERSION_MIN = 14
VECTOR_VERSION_MIN = (0, 8)


def migration_files() -> list[Traversable]:
    """Return the SQL files in the wheel or, in an editable install, in the checkout."""
    folder: Traversable = resources.files("planroom") / "migrations"
    if not folder.is_dir():
        folder = Path(__file__).parents[2] / "migrations"
    return sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)


def migrations() -> list[Migration]:
    """Return every migration, the engine's and ours, in order."""
    return read_migrations(migration_files())


def migrate_database(conn: psycopg.Connection[object]) -> list[str]:
    """Apply what is missing and return the names; one query when there is nothing to do.

    Creates the extension `vector` where the session may. Raises `DatabaseUnusable` for a server
    that lacks what planroom needs, and for a schema of another version.
    """
    missing = pending(conn)
    if missing:
        check_server(conn)
        try:
            return apply_migrations(conn, migrations())
        except MigrationError as error:
            raise _unusable(error) from error
    return []


def pending(conn: psycopg.Connection[object]) -> list[str]:
    """Return the names of the migrations that the database lacks.

    Raises `DatabaseUnusable` when the schema is newer than this planroom, or edited.
    """
    try:
        return pending_migrations(conn, migrations())
    except MigrationError as error:
        raise _unusable(error) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise DatabaseUnusable(
            f"User {conn.info.user} may not read planroom's tables in {conn.info.dbname}.",
            hint="Connect as the role that ran `planroom migrate`, or grant this one its rights.",
        ) from error


def check_migrated(conn: psycopg.Connection[object]) -> None:
    """Raise `DatabaseUnusable` unless the schema is exactly what this planroom needs."""
    missing = pending(conn)
    if missing:
        raise DatabaseUnusable(
            f"Database {conn.info.dbname} lacks {len(missing)} of planroom's migrations, from "
            f"{missing[0]} on.",
            code="schema_behind",
            hint="Run `planroom migrate`.",
        )


def _unusable(error: MigrationError) -> DatabaseUnusable:
    hint = "Upgrade planroom." if error.code == "schema_newer" else error.hint
    return DatabaseUnusable(str(error), code=error.code, hint=hint)


_VECTOR = """
select
    (select extversion from pg_extension where extname = 'vector'),
    (select default_version from pg_available_extensions where name = 'vector'),
    to_regtype('vector') is not null
"""


def check_server(conn: psycopg.Connection[object]) -> None:
    """Raise `DatabaseUnusable` unless the server is new enough and `vector` is there and visible.

    Creates the extension if it is missing and the session may. The connection must be outside a
    transaction.
    """
    version = conn.info.server_version // 10000
    if version < SERVER_VERSION_MIN:
        raise DatabaseUnusable(
            f"The server is Postgres {version}; planroom needs {SERVER_VERSION_MIN} or later."
        )
    installed, available, visible = _vector(conn)
    if installed is None and available is not None and _is_enough(available):
        _create_vector(conn)
        installed, available, visible = _vector(conn)
    needed = ".".join(map(str, VECTOR_VERSION_MIN))
    if installed is None and (available is None or not _is_enough(available)):
        raise DatabaseUnusable(
            f"The server offers no extension `vector` of version {needed} or later.",
            code="vector_missing",
            hint="Install pgvector on the server's machine, for instance the package "
            f"postgresql-{version}-pgvector; then run: create extension vector;",
        )
    if installed is not None and not _is_enough(installed):
        raise DatabaseUnusable(
            f"The extension `vector` is version {installed}; planroom needs {needed} or later.",
            code="vector_old",
            hint="Upgrade pgvector on the server's machine, then run: alter extension vector "
            "update;",
        )
    if not visible:
        raise DatabaseUnusable(
            "The extension `vector` is in a schema that is not on the search_path.",
            code="vector_missing",
            hint="Move it: alter extension vector set schema public;",
        )


def _vector(conn: psycopg.Connection[object]) -> tuple[str | None, str | None, bool]:
    with conn.transaction(), conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(_VECTOR, prepare=False).fetchone()
    assert row is not None
    installed, available, visible = row
    return installed, available, visible


def _create_vector(conn: psycopg.Connection[object]) -> None:
    """Create the extension; a rival that does so at the same moment is as good."""
    try:
        with conn.transaction():
            conn.execute("create extension if not exists vector", prepare=False)
    except psycopg.errors.UniqueViolation:
        pass
    except psycopg.errors.InsufficientPrivilege as error:
        raise DatabaseUnusable(
            f"User {conn.info.user} may not create the extension `vector`.",
            code="vector_missing",
            hint=f"As a superuser, in the database {conn.info.dbname}: create extension vector;",
        ) from error


def _is_enough(version: str) -> bool:
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return parts >= VECTOR_VERSION_MIN
