"""Reaching the database: what a connection is set to, outages, and secrets that stay secret."""

from __future__ import annotations

import contextlib
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from leasequeue import TimedConnection, is_outage
from planroom import database as database_module
from planroom import embedded
from planroom.config import Settings
from planroom.database import (
    _SET_UP_SESSION,  # pyright: ignore[reportPrivateUsage]
    Database,
)
from planroom.errors import DatabaseUnusable
from support.folder import reachable_folder
from support.tcp_proxy import Proxy, proxied


def settings_for(url: str) -> Settings:
    values: dict[str, Any] = {"_env_file": None, "database_url": SecretStr(url)}
    return Settings(**values)


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a pool that has nothing to lend."""
    monkeypatch.setattr(database_module, "POOL_WAIT_SECONDS", 2.0)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    with Database.open(settings, name="planroom test") as database:
        yield database


def test_both_kinds_of_connection_know_vectors_and_commit_by_themselves(
    database: Database,
) -> None:
    with database.connection() as pooled, database.connect() as single:
        for conn in (pooled, single):
            assert conn.autocommit
            vector = np.array([1.0, 2.0], dtype=np.float32)
            row = conn.execute("select %s::halfvec, now()", (vector,)).fetchone()
            assert row is not None
            assert row[0].to_list() == [1.0, 2.0]
            assert row[1].tzname() == "UTC"
            assert conn.execute("show application_name").fetchone() == ("planroom test",)


@pytest.mark.usefixtures("impatience")
def test_no_more_than_four_connections_are_lent(database: Database) -> None:
    """L17: a worker's pool has four."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(database.connection()) for _ in range(4)]
        assert len({conn.info.backend_pid for conn in held}) == 4

        with pytest.raises(psycopg.OperationalError) as caught, database.connection():
            pass
        assert is_outage(caught.value)


def test_a_server_of_the_user_s_is_not_migrated_without_being_asked(
    empty_database_url: str,
) -> None:
    settings = settings_for(empty_database_url)

    with pytest.raises(DatabaseUnusable) as caught:
        Database.open(settings)
    assert caught.value.code == "schema_behind"

    applied = Database(settings).migrate()
    assert applied[0] == "0001_engine.sql"
    Database.open(settings).close()


def test_a_missing_extension_is_named(empty_database_url: str) -> None:
    """The types are asked for before there is a schema: it is created, or there is a reason."""
    with psycopg.connect(empty_database_url, autocommit=True) as conn:
        conn.execute("create schema elsewhere")
        conn.execute("create extension vector schema elsewhere")

    with pytest.raises(DatabaseUnusable, match="not on the search_path"):
        Database(settings_for(empty_database_url)).connect()


def test_q16_a_connection_that_died_while_it_rested_is_replaced_before_it_is_lent(
    database: Database, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planroom.database.RESTED_SECONDS", 0.0)
    with database.connection() as conn:
        first = conn.info.backend_pid
    connection.execute("select pg_terminate_backend(%s, 10000)", (first,))

    with database.connection() as conn:
        assert conn.execute("select 1").fetchone() == (1,)
        assert conn.info.backend_pid != first


# ---------------------------------------------------------------------------- half-open


def test_q18_a_half_open_connection_is_noticed_within_a_lease(database_url: str) -> None:
    """The kernel is told: 20 s of quiet, 4 probes 5 s apart, or 40 s of unanswered data."""
    with (
        proxied(database_url) as proxy,
        Database(settings_for(proxy.url)).connect() as conn,
        socket.socket(fileno=conn.fileno()) as link,
    ):
        try:
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            interval = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            count = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            unanswered = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert (idle, interval, count, unanswered) == (20, 5, 4, 40_000)
            assert idle + interval * count < 120 / 2
        finally:
            link.detach()


def test_q18_the_server_lets_go_of_the_locks_of_a_client_that_is_gone(
    database: Database,
) -> None:
    with database.connect() as conn:
        shown = {
            name: conn.execute(f"show {name}".encode()).fetchone()
            for name in ("idle_in_transaction_session_timeout", "client_connection_check_interval")
        }
    assert shown == {
        "idle_in_transaction_session_timeout": ("1min",),
        "client_connection_check_interval": ("10s",),
    }


def test_q18_a_short_lease_s_holder_lets_go_of_its_locks_in_half_of_it(settings: Settings) -> None:
    short = settings.model_copy(update={"lease_seconds": 6.0})
    with Database(short).connect() as conn:
        shown = conn.execute("show idle_in_transaction_session_timeout").fetchone()
    assert shown == ("3s",)


def execute(conn: psycopg.Connection) -> None:
    conn.execute("select 1")


def commit(conn: psycopg.Connection) -> None:
    with conn.transaction():
        conn.execute("select 1")


@pytest.mark.parametrize("ask", [execute, commit])
def test_q18_a_server_that_is_alive_and_silent_is_given_up(
    database_url: str, ask: Callable[[psycopg.Connection], None]
) -> None:
    with (
        proxied(database_url) as proxy,
        Database(settings_for(proxy.url)).connect(read_timeout=0.3) as conn,
    ):
        ask(conn)
        proxy.freeze()

        with pytest.raises(psycopg.OperationalError, match="has said nothing") as caught:
            ask(conn)

        assert is_outage(caught.value)
        assert conn.closed


@pytest.mark.usefixtures("impatience")
def test_q18_a_pool_whose_connections_are_all_silent_is_replaced(database_url: str) -> None:
    with (
        proxied(database_url) as proxy,
        Database(settings_for(proxy.url)) as database,
    ):
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                execute(stack.enter_context(database.connection()))
        proxy.freeze()
        database._used_at.clear()  # pyright: ignore[reportPrivateUsage]

        with pytest.raises(psycopg.OperationalError) as caught, database.connection():
            pass

        assert is_outage(caught.value)
        with database.connection() as conn:
            execute(conn)


def ask_over_another(database: Database, conn: psycopg.Connection) -> None:
    assert isinstance(conn, TimedConnection)
    conn.read_timeout = 0.3
    conn.ask = lambda: database.connect(vectors=False)


def test_a_server_that_is_at_work_may_be_silent(database: Database) -> None:
    with database.connect() as conn:
        ask_over_another(database, conn)
        with conn.transaction():
            conn.execute("select pg_sleep(1)")


def test_an_answer_that_comes_while_the_server_is_asked_is_taken(database: Database) -> None:
    def ask_slowly() -> psycopg.Connection:
        threading.Event().wait(0.8)
        return database.connect(vectors=False)

    with database.connect() as conn:
        ask_over_another(database, conn)
        conn.ask = ask_slowly  # pyright: ignore[reportAttributeAccessIssue]
        assert conn.execute("select pg_sleep(0.6), 7").fetchone() == ("", 7)


def test_q18_a_lock_that_is_not_let_go_of_is_waited_for_no_longer_than_a_silent_server(
    database: Database,
) -> None:
    """It may be that of a session which has lost its client, as this one's own of before."""
    lock = "select 1 from maintenance_state for update"
    with database.connect() as holder, holder.transaction(), database.connect() as conn:
        holder.execute(lock)
        ask_over_another(database, conn)
        with pytest.raises(psycopg.OperationalError, match="has said nothing"):
            conn.execute(lock)


@pytest.mark.parametrize("error", [RuntimeError("no"), psycopg.OperationalError("no")])
def test_q18_a_server_that_cannot_be_asked_is_given_up(
    database: Database, error: Exception
) -> None:
    def fail() -> psycopg.Connection:
        raise error

    with database.connect() as conn:
        ask_over_another(database, conn)
        conn.ask = fail  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(psycopg.OperationalError, match="has said nothing"):
            conn.execute("select pg_sleep(2)")


@pytest.mark.parametrize("lost", ["asking", "answering"])
def test_q18_a_server_that_has_long_been_done_is_given_up(
    database: Database, database_url: str, lost: str
) -> None:
    with (
        proxied(database_url) as proxy,
        Database(settings_for(proxy.url)).connect() as conn,
    ):
        ask_over_another(database, conn)
        proxy.freeze(asking=lost == "asking", answering=lost == "answering")
        with pytest.raises(psycopg.OperationalError, match="has said nothing"):
            conn.execute("select pg_sleep(0.2)")


def copy_half(conn: psycopg.Connection, proxy: Proxy) -> None:
    """Begin a COPY, and end it when what is sent gets lost."""
    with conn.cursor().copy("copy workers (id) from stdin") as copy:
        copy.write_row(["half"])
        proxy.freeze(asking=True, answering=False)


def test_q18_a_copy_that_waits_for_its_client_is_given_up(
    database: Database, database_url: str
) -> None:
    with (
        proxied(database_url) as proxy,
        Database(settings_for(proxy.url)).connect() as conn,
    ):
        ask_over_another(database, conn)
        with pytest.raises(psycopg.OperationalError, match="has said nothing"):
            copy_half(conn, proxy)
        assert conn.closed


def test_a_server_that_goes_on_talking_may_take_its_time(database_url: str) -> None:
    slowly = "select repeat('x', 9000), pg_sleep(0.2) from generate_series(1, 6)"
    with Database(settings_for(database_url)).connect(read_timeout=0.6) as conn:
        assert len(conn.execute(slowly).fetchall()) == 6


def test_what_the_url_says_wins_over_our_defaults(database_url: str) -> None:
    url = make_conninfo(database_url, keepalives_idle=7, application_name="mine")

    given = conninfo_to_dict(Database(settings_for(url)).conninfo())

    assert given["keepalives_idle"] == "7"
    assert given["application_name"] == "mine"
    assert given["keepalives_interval"] == "5"


END_SESSIONS = """
select count(pg_terminate_backend(pid, 10000))
from pg_stat_activity
where application_name = 'planroom test' and datname = current_database()
"""


@pytest.mark.usefixtures("impatience")
def test_q16_a_server_that_goes_away_is_an_outage_and_its_return_is_noticed(
    database_url: str, connection: psycopg.Connection
) -> None:
    with (
        proxied(database_url) as proxy,
        proxied(database_url) as back,
        Database(settings_for(proxy.url), name="planroom test") as database,
    ):
        with database.connection() as conn:
            conn.execute("select 1")
        proxy.refuse()
        connection.execute(END_SESSIONS)

        for _ in range(2):
            with pytest.raises(psycopg.OperationalError) as caught, database.connection() as conn:
                conn.execute("select 1")
            assert is_outage(caught.value)

        database._settings = settings_for(back.url)  # pyright: ignore[reportPrivateUsage]
        with database.connection() as conn:
            assert conn.execute("select 1").fetchone() == (1,)


def test_q17_the_sessions_of_a_demoted_server_are_dropped(
    database_url: str, connection: psycopg.Connection
) -> None:
    with Database(settings_for(database_url), name="planroom test") as database:
        before = set[int]()
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                conn = stack.enter_context(database.connection())
                conn.execute("set default_transaction_read_only = on")
                before.add(conn.info.backend_pid)
        with (
            pytest.raises(psycopg.errors.ReadOnlySqlTransaction) as caught,
            database.connection() as conn,
        ):
            conn.execute("update maintenance_state set reason = 'x'")
        assert is_outage(caught.value)

        with database.connection() as conn:
            assert conn.info.backend_pid not in before
            conn.execute("update maintenance_state set reason = 'x'")


# ------------------------------------------------------------------------------ poolers


def test_q27_nothing_lasts_longer_than_a_transaction(database: Database) -> None:
    """Behind PgBouncer in transaction mode the next statement meets another session.

    So nothing is prepared on the server, and no session is left with a lock or a table.
    """
    with database.connection() as conn:
        for _ in range(20):
            conn.execute("select %s::int", (1,))
        assert conn.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)
        mine = "select count(*) from pg_locks where locktype = 'advisory'"
        assert conn.execute(mine).fetchone() == (0,)


def test_q27_behind_a_pooler_the_shared_session_s_settings_are_left_alone(
    database_url: str,
) -> None:
    """A pooler tells its client another process number than the one that answers."""
    with psycopg.connect(database_url, autocommit=True) as conn:
        before = conn.execute("show idle_in_transaction_session_timeout").fetchone()
        conn.execute(_SET_UP_SESSION, {"pid": conn.info.backend_pid + 1, "idle": "1000"})
        assert conn.execute("show idle_in_transaction_session_timeout").fetchone() == before


# ------------------------------------------------------------------------------ secrets

SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://anna:{SECRET}@127.0.0.1:1/planroom",
        f"postgresql://anna:x@{SECRET}@127.0.0.1:1/planroom",
        f"postgresql://anna:x/{SECRET}@127.0.0.1:1/planroom",
        f"postgresql://anna:12/{SECRET}@127.0.0.1:1/planroom",
        f"postgresql://anna:x?{SECRET}@127.0.0.1:1/planroom",
        f"postgresql://anna:x#{SECRET}@127.0.0.1:1/planroom",
        f"postgresql://anna:x:{SECRET}@127.0.0.1:1/planroom",
        f"postgresql://anna:%{SECRET}@127.0.0.1:1/planroom",
        f"postgresql//anna:{SECRET}@127.0.0.1:1/planroom",
        f"mysql://anna:{SECRET}@127.0.0.1:1/planroom",
        f"host=127.0.0.1 port=1 user=anna password=x {SECRET}",
        f"host=127.0.0.1 port={SECRET} user=anna",
        f"host=127.0.0.1 port=1 user=anna password={SECRET}",
    ],
)
def test_no_password_reaches_a_message_or_a_traceback(url: str) -> None:
    database = Database(settings_for(url))

    with pytest.raises(DatabaseUnusable) as caught:
        Database.open(settings_for(url))

    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown.replace(__file__, "")
    assert SECRET not in repr(caught.value)
    assert SECRET not in str(caught.value.hint)
    assert SECRET not in repr(database)
    assert caught.value.code in {"database_unreachable", "database_url_malformed"}


def test_the_embedded_server_is_started_and_migrated_by_itself() -> None:
    home = reachable_folder()
    values: dict[str, Any] = {"_env_file": None, "home": home}
    try:
        with Database.open(Settings(**values)) as database, database.connection() as conn:
            assert database.is_embedded
            assert conn.execute("select count(*) from files").fetchone() == (0,)
    finally:
        embedded.stop(home)
