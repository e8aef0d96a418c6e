"""The keeper, rules L4 to L6: renewals that nothing starves, and a worker that stops in time.

Leases here last a second or so of real time, since a keeper renews in real time; each test waits
for an event in the database or in the worker, never for time to pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool, PoolTimeout

import leasequeue
from leasequeue import AbortSignal, Cancelled, Keeper, Lease, LeaseLost, ShuttingDown, runs
from support.engine import World, await_true, scalar
from support.tcp_proxy import proxied

Connection = psycopg.Connection[Any]

LEASE = 1.5


@pytest.fixture
def world(connection: Connection) -> World:
    return World.new(connection)


def _claim(world: World, seconds: float = LEASE) -> Lease:
    held = leasequeue.claim(world.conn, leasequeue.RUNS, "alice", seconds)
    assert isinstance(held, Lease)
    return held


@contextmanager
def _keeping(
    url: str, lease: Lease, *, control_seconds: float = 0.05
) -> Generator[tuple[AbortSignal, list[Exception]]]:
    """A keeper at work on this lease; the signal it sets, and the errors it met."""
    errors: list[Exception] = []
    keeper = Keeper(
        lambda: leasequeue.connect(url),
        lease.owner,
        on_error=errors.append,
        control_seconds=control_seconds,
    )
    abort = AbortSignal(lease_seconds=lease.seconds)
    with keeper, keeper.keep(lease, abort):
        yield abort, errors


def _expiry(world: World, lease: Lease) -> Callable[[], float]:
    """Seconds by which the lease has been extended beyond its first end."""
    return lambda: scalar(
        world.conn,
        "select extract(epoch from lease_expires_at - started_at)::float - %s"
        " from connection_runs where id = %s",
        lease.seconds,
        lease.id,
    )


def _await_extended(world: World, lease: Lease, by: float) -> None:
    extended = _expiry(world, lease)
    await_true(lambda: extended() > by, "it was not renewed")


def test_l4_q4_work_that_blocks_for_three_leases_keeps_its_lease(
    world: World, database_url: str
) -> None:
    """Q4. The work never looks up; renewals go on beside it."""
    run = world.run("a")
    lease = _claim(world, 0.6)
    with _keeping(database_url, lease) as (abort, errors):
        _await_extended(world, lease, 3 * 0.6)
        assert not abort.is_set()
        assert world.claim("bob") is None
    assert errors == []
    assert leasequeue.seal(world.conn, lease, "succeeded") == world.status(run) == "succeeded"


def test_l4_a_renewal_is_due_at_a_third(world: World, database_url: str) -> None:
    """After some renewals: each a third of the lease after the one before, none closer."""
    world.run("a")
    lease = _claim(world, 0.9)
    world.conn.execute("""
        create table renewals (at timestamptz);
        create function note() returns trigger language plpgsql as
            $$begin insert into renewals values (new.lease_expires_at); return new; end$$;
        create trigger note before update of lease_expires_at on connection_runs
            for each row execute function note();
    """)
    with _keeping(database_url, lease):
        await_true(
            lambda: scalar(world.conn, "select count(*) >= 4 from renewals"), "it was not renewed"
        )
    gaps = [
        row[0]
        for row in world.conn.execute(
            "select extract(epoch from at - lag(at) over (order by at))::float from renewals"
        ).fetchall()
        if row[0] is not None
    ]
    assert min(gaps) >= 0.25


def test_l4_q5_renewals_go_on_while_every_pooled_connection_is_busy(
    world: World, database_url: str
) -> None:
    """Q5. All four are lent; the keeper has one of its own."""
    world.run("a")
    lease = _claim(world, 0.6)
    pool: ConnectionPool[Connection] = ConnectionPool(
        database_url, min_size=1, max_size=4, open=True
    )
    with pool, ExitStack() as busy:
        for _ in range(4):
            busy.enter_context(pool.connection())
        with pytest.raises(PoolTimeout), pool.connection(timeout=0.01):
            pass
        with _keeping(database_url, lease) as (abort, _):
            _await_extended(world, lease, 2 * 0.6)
            assert not abort.is_set()


def test_l4_q6_a_worker_whose_renewals_only_raise_errors_stops_itself(
    world: World, database_url: str
) -> None:
    """Q6. Errors, not zero rows, until past the expiry: the clock says that the lease is over."""
    world.run("a")
    lease = _claim(world, 0.6)
    world.conn.execute("alter table connection_runs rename to elsewhere")
    with _keeping(database_url, lease) as (abort, errors):
        assert abort.wait(20)
        assert isinstance(abort.reason, LeaseLost)
        assert any(isinstance(error, psycopg.errors.UndefinedTable) for error in errors)


def test_l4_a_worker_stops_itself_no_later_than_its_lease_ends_in_the_database(
    world: World, database_url: str
) -> None:
    world.run("a")
    lease = _claim(world, 0.6)
    abort = AbortSignal(lease_seconds=lease.claimed_at + lease.seconds - time.monotonic())
    assert abort.wait(20)
    # Asked right after the worker knew: the row is not yet another's, or only just.
    late = scalar(
        world.conn,
        "select extract(epoch from now() - lease_expires_at)::float from connection_runs",
    )
    assert late < 0.5


def test_l4_a_keeper_whose_connection_dies_reconnects_and_renews(
    world: World, database_url: str
) -> None:
    world.run("a")
    lease = _claim(world)
    with _keeping(database_url, lease) as (abort, errors):
        _await_extended(world, lease, 0)
        world.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'leasequeue' and datname = current_database()"
        )
        await_true(lambda: len(errors) > 0, "it did not notice")
        _await_extended(world, lease, _expiry(world, lease)() + 0.1)
        assert not abort.is_set()
    assert scalar(world.conn, "select count(*) from workers") == 0


def test_q18_a_half_open_connection_is_noticed_and_replaced_before_the_lease_expires(
    world: World, database_url: str
) -> None:
    """Q18. The network swallows all; nobody closes anything. The lease is kept all the same."""
    world.run("a")
    lease = _claim(world, 3.0)
    with proxied(database_url) as proxy, _keeping(proxy.url, lease) as (abort, errors):
        await_true(
            lambda: scalar(world.conn, "select count(*) = 1 from workers"), "it did not register"
        )
        assert proxy.freeze() == 1
        frozen_at = time.monotonic()
        await_true(lambda: proxy.connections() == 2, "it did not notice")
        assert time.monotonic() - frozen_at < lease.seconds
        _await_extended(world, lease, _expiry(world, lease)() + 0.1)
        assert not abort.is_set()
        assert leasequeue.is_outage(errors[0])


def test_q18_without_a_way_to_reconnect_the_worker_stops_before_another_takes_over(
    world: World, database_url: str
) -> None:
    """Q18. The cut is on the worker's side: no new connection either."""
    world.run("a")
    lease = _claim(world, 1.0)
    with proxied(database_url) as proxy, _keeping(proxy.url, lease) as (abort, _):
        await_true(
            lambda: scalar(world.conn, "select count(*) = 1 from workers"), "it did not register"
        )
        proxy.freeze()
        proxy.refuse()
        assert abort.wait(20)
        assert isinstance(abort.reason, LeaseLost)


def test_l5_a_cancel_reaches_the_job_at_the_next_control_check(
    world: World, database_url: str
) -> None:
    run = world.run("a")
    lease = _claim(world, 60)
    with _keeping(database_url, lease) as (abort, _):
        world.cancel(run)
        assert abort.wait(20)
        assert isinstance(abort.reason, Cancelled)


def test_l5_a_lost_lease_reaches_the_job_at_the_next_control_check(
    world: World, database_url: str
) -> None:
    world.run("a")
    lease = _claim(world, 60)
    with _keeping(database_url, lease) as (abort, _):
        world.conn.execute("update connection_runs set lease_token = nextval('lease_tokens')")
        assert abort.wait(20)
        assert isinstance(abort.reason, LeaseLost)


def test_l5_the_attempt_says_when_its_worker_was_last_seen(world: World, database_url: str) -> None:
    world.run("a")
    lease = _claim(world, 60)
    with _keeping(database_url, lease):
        await_true(
            lambda: scalar(world.conn, "select seen_at > started_at from run_attempts"),
            "it was not seen",
        )


def test_a_job_that_ignores_its_end_is_renewed_no_longer_than_a_lease(
    world: World, database_url: str
) -> None:
    """Cancelled, and deaf: the lease runs out, and a claim ends the row."""
    run = world.run("a")
    lease = _claim(world, 0.6)
    with _keeping(database_url, lease) as (abort, _):
        world.cancel(run)
        assert abort.wait(20)
        await_true(
            lambda: isinstance(runs.claim(world.conn, "bob", 60, ["sync"]), leasequeue.Ended),
            "the row was kept for ever",
        )
        await_true(lambda: isinstance(abort.reason, LeaseLost), "it still believes in its lease")
    assert world.status(run) == "cancelled"


def test_the_heartbeat_says_what_the_worker_works_on(world: World, database_url: str) -> None:
    run = world.run("a")
    lease = _claim(world, 60)
    keeper = Keeper(lambda: leasequeue.connect(database_url), "alice")

    def working_on(what: str | None) -> None:
        await_true(
            lambda: [w["working_on"] for w in leasequeue.list_workers(world.conn)] == [what],
            f"it never said {what}",
        )

    with keeper:
        working_on(None)
        with keeper.keep(lease, AbortSignal()):
            working_on(f"connection_runs {run}")
        working_on(None)
    assert leasequeue.list_workers(world.conn) == []


def test_a_worker_that_was_forgotten_enters_itself_again(world: World, database_url: str) -> None:
    keeper = Keeper(lambda: leasequeue.connect(database_url), "alice", heartbeat_seconds=0.05)
    known: Callable[[], bool] = lambda: scalar(world.conn, "select count(*) = 1 from workers")  # noqa: E731
    with keeper:
        await_true(known, "it did not register")
        world.conn.execute("delete from workers")
        await_true(known, "it did not register again")


def test_a_keeper_that_cannot_connect_tries_again_and_still_ends(database_url: str) -> None:
    tried = threading.Semaphore(0)

    def refuse() -> Connection:
        tried.release()
        raise psycopg.OperationalError("refused")

    with Keeper(refuse, "alice"):
        assert all(tried.acquire(timeout=20) for _ in range(3))


# L6: the signal as the keeper sets it


def test_l6_a_lost_lease_overrides_a_shutdown_and_nothing_else_overrides_anything() -> None:
    abort = AbortSignal()
    abort.set(ShuttingDown("stop"))
    abort.set(Cancelled("cancelled"))
    assert isinstance(abort.reason, ShuttingDown)
    abort.set(LeaseLost("lost"))
    assert isinstance(abort.reason, LeaseLost)
    abort.set(ShuttingDown("stop"))
    assert isinstance(abort.reason, LeaseLost)
