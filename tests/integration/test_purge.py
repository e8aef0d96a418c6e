"""Purges drain, rule L13: asked for while a sync runs, a purge waits, then runs alone."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import leasequeue
from leasequeue import Ended, runs
from support.engine import (
    LEASE_SECONDS,
    NOON,
    World,
    after,
    await_blocked,
    begun,
    in_background,
    scalar,
)

Connection = psycopg.Connection[Any]


@pytest.fixture
def world(connection: Connection) -> World:
    return World.new(connection)


def _purge(world: World, connection: int, at: float = 0.0) -> int:
    purge = leasequeue.request_purge(world.conn, world.workspace, connection, now=after(at))
    assert purge is not None
    return purge


def _connection_of(world: World, run: int) -> int:
    return world.row(run)["connection_id"]


def _connection_status(world: World, connection: int) -> str:
    return scalar(world.conn, "select status from connections where id = %s", connection)


def test_l13_q15_a_purge_waits_for_the_running_sync_and_is_then_promoted(world: World) -> None:
    """Q15. However long the sync takes, the purge neither fights it nor is forgotten."""
    sync = world.run("a")
    held = world.held()
    purge = _purge(world, _connection_of(world, sync), 1)
    assert world.status(purge) == "waiting"
    assert leasequeue.check_control(world.conn, held, now=after(2)) is False
    assert leasequeue.promote(world.conn, now=after(3)) == 0
    assert world.claim("bob", now=after(3)) is None
    leasequeue.seal(world.conn, held, "succeeded", now=after(36_000))
    assert leasequeue.promote(world.conn, now=after(36_001)) == 1
    assert world.held("bob", now=after(36_001)).id == purge


def test_l13_a_purge_of_an_idle_connection_is_queued_at_once(world: World) -> None:
    connection = world.connection("a", interval_seconds=60)
    purge = _purge(world, connection)
    assert world.status(purge) == "queued"
    [row] = leasequeue.list_connections(world.conn, world.workspace)
    assert (row["status"], row["next_run_at"]) == ("deleting", None)


def test_l13_a_purge_cancels_the_queued_sync(world: World) -> None:
    sync = world.run("a")
    purge = _purge(world, _connection_of(world, sync))
    assert (world.status(sync), world.status(purge)) == ("cancelled", "queued")
    assert world.row(sync)["error_code"] == "purged"


def test_l11_a_second_request_returns_the_pending_purge(world: World) -> None:
    connection = world.connection("a")
    purge = _purge(world, connection)
    assert _purge(world, connection) == purge
    world.held()
    assert _purge(world, connection) == purge


def test_l11_two_requests_at_once_make_one_purge(world: World, database_url: str) -> None:
    connection = world.connection("a")
    with (
        begun(database_url) as one,
        psycopg.connect(database_url, autocommit=True) as other,
    ):
        first = leasequeue.request_purge(one, world.workspace, connection)
        got: list[int | None] = []
        with in_background(
            lambda: got.append(leasequeue.request_purge(other, world.workspace, connection))
        ):
            await_blocked(world.conn, other.info.backend_pid)
            one.commit()
    assert got == [first]


def test_l13_a_purge_that_meets_an_enqueue_in_flight_cancels_it(
    world: World, database_url: str
) -> None:
    """The sync is written but not committed: invisible to the purge, yet in its way."""
    connection = world.connection("a")
    with (
        begun(database_url) as user,
        psycopg.connect(database_url, autocommit=True) as other,
    ):
        sync = leasequeue.enqueue(user, world.workspace, connection)
        got: list[int | None] = []
        with in_background(
            lambda: got.append(leasequeue.request_purge(other, world.workspace, connection))
        ):
            await_blocked(world.conn, other.info.backend_pid)
            user.commit()
    assert sync is not None
    [purge] = got
    assert purge is not None
    assert (world.status(sync), world.status(purge)) == ("cancelled", "queued")


def test_l13_a_purge_asked_for_while_a_claim_is_under_way_waits(
    world: World, database_url: str
) -> None:
    sync = world.run("a")
    connection = _connection_of(world, sync)
    with (
        begun(database_url) as worker,
        psycopg.connect(database_url, autocommit=True) as other,
    ):
        runs.claim(worker, "alice", 120, ["sync"], now=NOON)
        got: list[int | None] = []
        with in_background(
            lambda: got.append(leasequeue.request_purge(other, world.workspace, connection))
        ):
            await_blocked(world.conn, other.info.backend_pid)
            worker.commit()
    [purge] = got
    assert purge is not None
    assert (world.status(sync), world.status(purge)) == ("running", "waiting")


def test_l13_a_purge_behind_a_dead_sync_is_promoted_once_that_has_ended(world: World) -> None:
    sync = world.run("a")
    world.held()
    purge = _purge(world, _connection_of(world, sync), 1)
    at = after(LEASE_SECONDS + 1)
    assert leasequeue.promote(world.conn, now=at) == 0
    ended = world.claim("bob", now=at)
    assert isinstance(ended, Ended)
    assert (world.status(sync), world.outcomes(sync)) == ("cancelled", ["expired"])
    assert leasequeue.promote(world.conn, now=at) == 1
    assert world.held("bob", now=at).id == purge


def test_l13_one_purge_that_cannot_be_promoted_holds_up_no_other(
    world: World, database_url: str
) -> None:
    """A sync slips in beside the first: L11's unique index refuses that promotion alone."""
    stuck, free = world.connection("a", "a"), world.connection("b", "b")
    for connection in (stuck, free):
        run = leasequeue.enqueue(world.conn, world.workspace, connection, now=NOON)
        assert run is not None
        held = world.held(now=NOON)
        _purge(world, connection)
        leasequeue.seal(world.conn, held, "succeeded", now=NOON)
    with (
        begun(database_url) as user,
        psycopg.connect(database_url, autocommit=True) as worker,
    ):
        # As an enqueue would that read the connection before it was `deleting`.
        user.execute(
            "insert into connection_runs (workspace_id, connection_id, provider, kind)"
            " values (%s, %s, 'a', 'sync')",
            [world.workspace, stuck],
        )
        got: list[int] = []
        with in_background(lambda: got.append(leasequeue.promote(worker, now=after(1)))):
            await_blocked(world.conn, worker.info.backend_pid)
            user.commit()
    assert got == [1]
    statuses = dict(
        world.conn.execute(
            "select connection_id, status from connection_runs where kind = 'purge'"
        ).fetchall()
    )
    assert statuses == {stuck: "waiting", free: "queued"}
    purged = world.held(now=after(2))
    leasequeue.seal(world.conn, purged, "succeeded", now=after(3))
    # The sync that slipped in is ended by a claim, since its connection is being deleted.
    world.conn.execute("update connection_runs set queued_at = %s where status = 'queued'", [NOON])
    assert isinstance(world.claim(now=after(4)), Ended)
    assert leasequeue.promote(world.conn, now=after(5)) == 1


def test_l13_a_sync_that_slipped_in_before_a_purge_is_ended_by_the_claim(world: World) -> None:
    connection = world.connection("a")
    world.conn.execute("update connections set status = 'deleting'")
    world.conn.execute(
        "insert into connection_runs (workspace_id, connection_id, provider, kind, queued_at)"
        " values (%s, %s, 'folder', 'sync', %s)",
        [world.workspace, connection, NOON],
    )
    purge = _purge(world, connection)
    # The request itself has cancelled it; had it come later still, the claim would.
    assert world.status(purge) == "queued"
    assert (
        scalar(world.conn, "select status from connection_runs where kind = 'sync'") == "cancelled"
    )


def test_l13_a_cancelled_sync_leaves_the_way_free(world: World) -> None:
    sync = world.run("a")
    held = world.held()
    purge = _purge(world, _connection_of(world, sync), 1)
    world.cancel(sync, now=after(2))
    leasequeue.seal(world.conn, held, "cancelled", now=after(3))
    assert leasequeue.promote(world.conn, now=after(4)) == 1
    assert world.status(purge) == "queued"


@pytest.mark.parametrize("claimed", [False, True])
def test_l7_a_purge_can_be_cancelled_and_asked_for_again(world: World, claimed: bool) -> None:
    connection = world.connection("a")
    purge = _purge(world, connection)
    if claimed:
        held = world.held()
        world.cancel(purge)
        leasequeue.seal(world.conn, held, "cancelled", now=NOON)
    else:
        world.cancel(purge)
    assert world.status(purge) == "cancelled"
    again = _purge(world, connection)
    assert again != purge
    assert world.held().id == again


def test_a_connection_is_not_configured_anew_while_its_purge_is_under_way(world: World) -> None:
    connection = world.connection("a")
    purge = _purge(world, connection)
    add = lambda: leasequeue.add_connection(world.conn, world.workspace, "a", "s3", now=NOON)  # noqa: E731
    assert add() is None
    world.cancel(purge)
    assert add() == connection
    assert _connection_status(world, connection) == "active"


def test_a_connection_added_while_its_purge_is_being_asked_for_stays_purged(
    world: World, database_url: str
) -> None:
    """The purge is not yet committed when the other looks; it must look again under the lock."""
    connection = world.connection("a")
    with (
        begun(database_url) as one,
        psycopg.connect(database_url, autocommit=True) as other,
    ):
        leasequeue.request_purge(one, world.workspace, connection)
        got: list[int | None] = []
        with in_background(
            lambda: got.append(leasequeue.add_connection(other, world.workspace, "a", "s3"))
        ):
            await_blocked(world.conn, other.info.backend_pid)
            one.commit()
    assert got == [None]
    assert _connection_status(world, connection) == "deleting"


def test_another_workspace_purges_nothing(world: World) -> None:
    connection = world.connection("a")
    other = World.new(world.conn, "Other").workspace
    assert leasequeue.request_purge(world.conn, other, connection) is None
    assert _connection_status(world, connection) == "active"
