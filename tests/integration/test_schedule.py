"""Schedules, rule L14: due connections are enqueued once, however long nobody looked."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import leasequeue
from leasequeue import runs
from support.engine import NOON, World, after, await_blocked, begun, in_background, scalar

Connection = psycopg.Connection[Any]


@pytest.fixture
def world(connection: Connection) -> World:
    return World.new(connection)


def _next(world: World, connection: int) -> object:
    return scalar(world.conn, "select next_run_at from connections where id = %s", connection)


def _runs(world: World) -> int:
    return scalar(world.conn, "select count(*) from connection_runs")


def test_l14_a_due_connection_is_enqueued_and_its_next_time_counts_from_now(world: World) -> None:
    connection = world.connection("a", interval_seconds=900)
    world.connection("unscheduled")
    assert runs.enqueue_due(world.conn, now=after(1)) == 1
    assert (_runs(world), _next(world, connection)) == (1, after(901))
    assert runs.enqueue_due(world.conn, now=after(2)) == 0
    row = world.row(1)
    assert (row["kind"], row["status"], row["queued_at"]) == ("sync", "queued", after(1))


@pytest.mark.parametrize("minutes", [78, 360])
def test_l14_q24_after_a_long_suspension_there_is_one_run(world: World, minutes: int) -> None:
    """Q24. 78 minutes suspended, or six hours down, on a 15-minute schedule."""
    connection = world.connection("a", interval_seconds=900)
    runs.enqueue_due(world.conn, now=NOON)
    leasequeue.seal(world.conn, world.held(), "succeeded", now=NOON)
    awake = minutes * 60.0
    assert runs.enqueue_due(world.conn, now=after(awake)) == 1
    assert runs.enqueue_due(world.conn, now=after(awake)) == 0
    assert (_runs(world), _next(world, connection)) == (2, after(awake + 900))


def test_l14_a_connection_whose_run_is_live_gets_no_second(world: World) -> None:
    connection = world.connection("a", interval_seconds=900)
    leasequeue.enqueue(world.conn, world.workspace, connection, now=NOON)
    assert runs.enqueue_due(world.conn, now=after(1)) == 1
    assert (_runs(world), _next(world, connection)) == (1, after(901))


def test_l14_many_due_connections_are_enqueued_in_bounded_batches(world: World) -> None:
    for n in range(5):
        world.connection(f"c{n}", interval_seconds=60)
    done = [runs.enqueue_due(world.conn, 2, now=after(1)) for _ in range(4)]
    assert done == [2, 2, 1, 0]
    assert _runs(world) == 5


def test_l14_two_schedulers_at_once_share_the_work(world: World, database_url: str) -> None:
    for n in range(4):
        world.connection(f"c{n}", interval_seconds=60)
    with begun(database_url) as other:
        assert runs.enqueue_due(other, 3, now=after(1)) == 3
        assert runs.enqueue_due(world.conn, 3, now=after(1)) == 1
        other.commit()
    assert _runs(world) == 4
    assert scalar(world.conn, "select count(distinct connection_id) from connection_runs") == 4


def test_l14_a_scheduler_and_an_enqueue_of_the_same_connection_do_not_deadlock(
    world: World, database_url: str
) -> None:
    """The enqueue has its row and then references the connection that the scheduler holds."""
    connection = world.connection("a", interval_seconds=60)
    with (
        begun(database_url) as user,
        psycopg.connect(database_url, autocommit=True) as worker,
    ):
        user.execute("set constraints all deferred")
        run = leasequeue.enqueue(user, world.workspace, connection)
        with in_background(lambda: runs.enqueue_due(worker)):
            await_blocked(world.conn, worker.info.backend_pid)
            # What the foreign key's check of one more row does.
            user.execute("set local lock_timeout = '10s'")
            user.execute("select 1 from connections where id = %s for key share", [connection])
            user.commit()
    assert _runs(world) == 1
    assert run is not None


def test_l14_a_disconnected_connection_is_not_scheduled(world: World) -> None:
    connection = world.connection("a", interval_seconds=60)
    leasequeue.disconnect(world.conn, world.workspace, connection)
    assert runs.enqueue_due(world.conn, now=after(100)) == 0
    with pytest.raises(psycopg.errors.CheckViolation):
        world.conn.execute("update connections set next_run_at = now()")


def test_l14_a_disconnect_under_way_is_passed_over(world: World, database_url: str) -> None:
    connection = world.connection("a", interval_seconds=60)
    with begun(database_url) as user:
        leasequeue.disconnect(user, world.workspace, connection)
        assert runs.enqueue_due(world.conn, now=after(1)) == 0
        user.commit()
    assert _runs(world) == 0


def test_l14_what_a_schedule_enqueued_is_announced(world: World, database_url: str) -> None:
    world.connection("a", interval_seconds=60)
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute("listen leasequeue")
        runs.enqueue_due(world.conn, now=after(1))
        [heard] = listener.notifies(timeout=20, stop_after=1)
        assert heard.payload == "connection_runs"
