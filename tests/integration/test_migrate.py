"""The migration runner, on real databases, with SQL of its own; then planroom's own migrations."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from leasequeue import (
    Migration,
    MigrationError,
    apply_migrations,
    engine_migrations,
    pending_migrations,
)
from planroom import migrate
from planroom.errors import DatabaseUnusable

SHEETS = Migration("0001_sheets.sql", "create table sheets (number text); -- 100 % plain\n")
TITLES = Migration("0002_titles.sql", "alter table sheets add title text;\nselect 1;\n")
BROKEN = Migration("0003_broken.sql", "create table half (id int); select 1/0;")
INDEX = Migration(
    "0003_index.sql",
    "-- no transaction\n"
    "create unique index concurrently if not exists by_number on sheets (number)",
)


@pytest.fixture
def conn(empty_database_url: str) -> Any:
    with psycopg.connect(empty_database_url, autocommit=True) as conn:
        yield conn


def rows(conn: psycopg.Connection, query: LiteralString) -> list[Any]:
    return conn.execute(query).fetchall()


def test_what_is_missing_is_applied_once_in_order(conn: psycopg.Connection) -> None:
    assert pending_migrations(conn, [SHEETS, TITLES]) == ["0001_sheets.sql", "0002_titles.sql"]

    assert apply_migrations(conn, [SHEETS]) == ["0001_sheets.sql"]
    assert apply_migrations(conn, [SHEETS, TITLES]) == ["0002_titles.sql"]
    assert apply_migrations(conn, [SHEETS, TITLES]) == []

    conn.execute("insert into sheets (number, title) values ('A-101', 'Plan')")
    assert rows(conn, "select name, checksum from schema_migrations order by applied_at") == [
        (m.name, hashlib.sha256(m.text.encode()).hexdigest()) for m in (SHEETS, TITLES)
    ]


def test_nothing_to_do_is_one_query(conn: psycopg.Connection) -> None:
    apply_migrations(conn, [SHEETS])
    sent: list[object] = []

    class Counting(psycopg.Cursor[Any]):
        def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
            sent.append(query)
            return super().execute(query, *args, **kwargs)

    conn.cursor_factory = Counting
    assert apply_migrations(conn, [SHEETS]) == []

    assert len(sent) == 1


def test_a_failing_migration_leaves_no_trace_and_is_named(conn: psycopg.Connection) -> None:
    with pytest.raises(MigrationError, match=r"0003_broken\.sql failed: division by zero"):
        apply_migrations(conn, [SHEETS, TITLES, BROKEN])

    assert rows(conn, "select to_regclass('half')") == [(None,)]
    assert pending_migrations(conn, [SHEETS, TITLES, BROKEN]) == ["0003_broken.sql"]
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_an_edited_migration_is_refused_by_name(conn: psycopg.Connection) -> None:
    apply_migrations(conn, [SHEETS])
    edited = Migration(SHEETS.name, SHEETS.text + "-- and more")

    with pytest.raises(MigrationError, match=r"0001_sheets\.sql was edited") as caught:
        apply_migrations(conn, [edited, TITLES])

    assert caught.value.code == "migration_edited"
    assert rows(conn, "select count(*) from schema_migrations") == [(1,)]


def test_line_endings_do_not_count_as_an_edit(conn: psycopg.Connection) -> None:
    apply_migrations(conn, [SHEETS, TITLES])

    windows = Migration(TITLES.name, TITLES.text.replace("\n", "\r\n"))
    assert pending_migrations(conn, [SHEETS, windows]) == []


def test_a_newer_schema_is_refused_by_name(conn: psycopg.Connection) -> None:
    apply_migrations(conn, [SHEETS, TITLES])

    with pytest.raises(MigrationError, match=r"has 0002_titles\.sql, which this version") as caught:
        apply_migrations(conn, [SHEETS])

    assert caught.value.code == "schema_newer"
    assert "Upgrade" in str(caught.value.hint)


@pytest.mark.parametrize("end", ["commit", "rollback", "commit; begin; commit"])
def test_a_migration_may_not_end_its_transaction(conn: psycopg.Connection, end: str) -> None:
    sneaky = Migration("0001_sneaky.sql", f"create table a (id int); {end};")

    with pytest.raises(MigrationError, match="ends the transaction it runs in"):
        apply_migrations(conn, [sneaky])

    assert pending_migrations(conn, [sneaky]) == [sneaky.name]


def test_it_refuses_to_run_inside_a_transaction(conn: psycopg.Connection) -> None:
    with conn.transaction(), pytest.raises(MigrationError, match="outside a transaction"):
        apply_migrations(conn, [SHEETS])


def test_any_kind_of_connection_will_do(empty_database_url: str) -> None:
    with psycopg.Connection[dict[str, Any]].connect(
        empty_database_url, row_factory=dict_row
    ) as conn:
        assert apply_migrations(conn, [SHEETS]) == [SHEETS.name]
        assert pending_migrations(conn, [SHEETS, TITLES]) == [TITLES.name]

    with psycopg.connect(empty_database_url) as other:
        assert pending_migrations(other, [SHEETS]) == []


ONE_OF_TEN = """
import sys
import psycopg
from leasequeue import Migration, apply_migrations
slow = [
    Migration(f"{n:04}.sql", f"create table t{n} (id int); select pg_sleep(0.01)") for n in range(8)
]
text = "-- no transaction\\ncreate index concurrently if not exists late on t0 (id)"
with psycopg.connect(sys.argv[1]) as conn:
    conn.execute("select pg_advisory_xact_lock_shared(1)")
    conn.commit()
    print(len(apply_migrations(conn, [*slow, Migration("0008.sql", text)])))
"""


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_ten_processes_may_start_at_once(
    empty_database_url: str, conn: psycopg.Connection, isolation: str
) -> None:
    name = sql.Identifier(conn.info.dbname)
    level = sql.Literal(isolation)
    conn.execute(
        sql.SQL("alter database {} set default_transaction_isolation = {}").format(name, level)
    )
    command = [sys.executable, "-c", ONE_OF_TEN, empty_database_url]
    with ThreadPoolExecutor(10) as pool:
        conn.execute("select pg_advisory_lock(1)")
        children = [pool.submit(subprocess.check_output, command) for _ in range(10)]
        wait_until(conn, "select count(*) = 10 from pg_locks where not granted")
        conn.execute("select pg_advisory_unlock(1)")
        applied = [int(child.result()) for child in children]

    assert sum(applied) == 9
    assert rows(conn, "select count(*) from schema_migrations") == [(9,)]


def test_a_rival_s_migration_is_waited_for_and_not_done_again(
    conn: psycopg.Connection, empty_database_url: str
) -> None:
    """The rival holds the lock when we begin, and commits while we wait for it."""
    apply_migrations(conn, [SHEETS])
    with (
        psycopg.connect(empty_database_url) as rival,
        psycopg.connect(empty_database_url, autocommit=True) as watcher,
        ThreadPoolExecutor(1) as pool,
    ):
        rival.execute("select pg_advisory_xact_lock(7811887455173341)")
        ours = pool.submit(apply_migrations, conn, [SHEETS, TITLES])
        # It has found the lock taken, and let go of its transaction.
        wait_until(watcher, GAVE_WAY, {"pid": conn.info.backend_pid})
        rival.execute(TITLES.text.encode())
        rival.execute(
            "insert into schema_migrations (name, checksum) values (%s, %s)",
            (TITLES.name, TITLES.checksum),
        )
        rival.commit()

        assert ours.result(timeout=30) == []


GAVE_WAY = """
select exists (
    select from pg_stat_activity
    where pid = %(pid)s and state = 'idle' and lower(query) = 'rollback'
)
"""


def wait_until(
    conn: psycopg.Connection, condition: LiteralString, values: dict[str, Any] | None = None
) -> None:
    """Ask the database again and again; half a minute is for ever."""
    pause = threading.Event()
    for _ in range(3000):
        if conn.execute(condition, values).fetchone() == (True,):
            return
        pause.wait(0.01)
    raise AssertionError(f"never true: {condition}")


def test_one_statement_may_run_outside_a_transaction(conn: psycopg.Connection) -> None:
    assert apply_migrations(conn, [SHEETS, TITLES, INDEX]) == [
        SHEETS.name,
        TITLES.name,
        INDEX.name,
    ]
    assert apply_migrations(conn, [SHEETS, TITLES, INDEX]) == []

    assert rows(conn, "select indisvalid from pg_index where indexrelid = 'by_number'::regclass")


def test_the_invalid_index_of_an_interrupted_migration_is_built_anew(
    conn: psycopg.Connection,
) -> None:
    apply_migrations(conn, [SHEETS, TITLES])
    conn.execute("insert into sheets (number) values ('A-101'), ('A-101')")
    with pytest.raises(MigrationError, match=r"0003_index\.sql failed: could not create unique"):
        apply_migrations(conn, [SHEETS, TITLES, INDEX])
    valid: LiteralString = (
        "select indisvalid from pg_index where indexrelid = 'by_number'::regclass"
    )
    assert rows(conn, valid) == [(False,)]

    conn.execute("delete from sheets")
    assert apply_migrations(conn, [SHEETS, TITLES, INDEX]) == [INDEX.name]
    assert rows(conn, valid) == [(True,)]


def test_a_server_that_goes_away_is_no_migration_error(
    conn: psycopg.Connection, empty_database_url: str
) -> None:
    suicide = Migration("0001.sql", "select pg_terminate_backend(pg_backend_pid())")

    with (
        psycopg.connect(empty_database_url) as doomed,
        pytest.raises(psycopg.OperationalError),
    ):
        apply_migrations(doomed, [suicide])

    assert pending_migrations(conn, [suicide]) == [suicide.name]


# ------------------------------------------------------------------------ planroom's own


def test_the_engine_s_migrations_are_a_part_of_planroom_s() -> None:
    ours = {m.name: m.checksum for m in migrate.migrations()}

    engine = engine_migrations()

    assert [m.name for m in engine][:1] == ["0001_engine.sql"]
    assert {m.name: m.checksum for m in engine}.items() <= ours.items()


def test_the_engine_s_migrations_stand_alone(conn: psycopg.Connection) -> None:
    apply_migrations(conn, engine_migrations())

    assert rows(conn, "select to_regclass('connection_runs') is not null") == [(True,)]
    assert (
        migrate.pending(conn) == [m.name for m in migrate.migrations()][len(engine_migrations()) :]
    )


def test_planroom_s_migrations_apply_to_an_empty_database(conn: psycopg.Connection) -> None:
    assert migrate.migrate_database(conn) == [f.name for f in migrate.migration_files()]
    assert migrate.migrate_database(conn) == []
    migrate.check_migrated(conn)


def test_a_schema_that_is_behind_says_what_to_run(conn: psycopg.Connection) -> None:
    with pytest.raises(DatabaseUnusable, match=r"from 0001_engine\.sql on") as caught:
        migrate.check_migrated(conn)

    assert caught.value.code == "schema_behind"
    assert "planroom migrate" in str(caught.value.hint)


def test_a_schema_of_a_newer_planroom_says_to_upgrade(connection: psycopg.Connection) -> None:
    connection.execute("insert into schema_migrations (name, checksum) values ('9999_x.sql', '')")

    for call in (migrate.check_migrated, migrate.migrate_database):
        check: Callable[[psycopg.Connection], object] = call
        with pytest.raises(DatabaseUnusable) as caught:
            check(connection)
        assert caught.value.code == "schema_newer"
        assert caught.value.hint == "Upgrade planroom."


@pytest.fixture
def plain_role(conn: psycopg.Connection, empty_database_url: str) -> Any:
    """The URL of a role that may not create extensions."""
    role = sql.Identifier(f"{conn.info.dbname}_app")
    conn.execute(sql.SQL("create role {} login").format(role))
    yield make_conninfo(empty_database_url, user=f"{conn.info.dbname}_app")
    conn.execute(sql.SQL("drop owned by {}").format(role))
    conn.execute(sql.SQL("drop role {}").format(role))


def test_a_session_that_may_not_create_the_extension_says_what_to_run(plain_role: str) -> None:
    with (
        psycopg.connect(plain_role) as conn,
        pytest.raises(DatabaseUnusable, match="may not create the extension") as caught,
    ):
        migrate.migrate_database(conn)

    assert caught.value.code == "vector_missing"
    assert "create extension vector" in str(caught.value.hint)


def test_a_session_that_may_not_read_the_schema_is_told_so(
    connection: psycopg.Connection, database_url: str
) -> None:
    role = sql.Identifier(f"{connection.info.dbname}_app")
    connection.execute(sql.SQL("create role {} login").format(role))
    try:
        url = make_conninfo(database_url, user=f"{connection.info.dbname}_app")
        with (
            psycopg.connect(url) as conn,
            pytest.raises(DatabaseUnusable, match="may not read planroom's tables"),
        ):
            migrate.check_migrated(conn)
    finally:
        connection.execute(sql.SQL("drop role {}").format(role))


def test_an_extension_that_is_too_old_or_out_of_sight_is_refused(
    conn: psycopg.Connection,
) -> None:
    conn.execute("create schema elsewhere")
    conn.execute("create extension vector schema elsewhere")
    with pytest.raises(DatabaseUnusable, match="not on the search_path"):
        migrate.check_server(conn)

    conn.execute("update pg_extension set extversion = '0.7.4' where extname = 'vector'")
    with pytest.raises(DatabaseUnusable, match=r"version 0\.7\.4; planroom needs 0\.8") as caught:
        migrate.check_server(conn)
    assert caught.value.code == "vector_old"


def test_the_files_are_only_sql_and_numbered_without_a_gap() -> None:
    folder = Path(__file__).parents[2] / "migrations"

    names = sorted(p.name for p in folder.iterdir())

    assert [f.name for f in migrate.migration_files()] == names
    assert [name[:5] for name in names] == [f"{n:04}_" for n in range(1, len(names) + 1)]
