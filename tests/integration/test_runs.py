"""The general queue: enqueue, the world a run needs, history, and what an observer can see."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

import leasequeue
from leasequeue import Ended, Lease, runs
from support.engine import (
    LEASE_SECONDS,
    NOON,
    World,
    after,
    await_blocked,
    begun,
    in_background,
    scalar,
    snapshot,
)

Connection = psycopg.Connection[Any]


@pytest.fixture
def world(connection: Connection) -> World:
    return World.new(connection)


# L11: uniqueness


def test_l11_an_enqueue_that_meets_a_live_run_returns_it(world: World) -> None:
    connection = world.connection("a")
    first = leasequeue.enqueue(world.conn, world.workspace, connection, payload={"n": 1}, now=NOON)
    assert leasequeue.enqueue(world.conn, world.workspace, connection) == first
    held = world.held()
    assert leasequeue.enqueue(world.conn, world.workspace, connection) == first
    leasequeue.seal(world.conn, held, "succeeded", now=NOON)
    second = leasequeue.enqueue(world.conn, world.workspace, connection, now=NOON)
    assert second not in (None, first)
    assert scalar(world.conn, "select count(*) from connection_runs") == 2


def test_l11_two_enqueues_at_once_make_one_run(world: World, database_url: str) -> None:
    connection = world.connection("a")
    with (
        begun(database_url) as one,
        psycopg.connect(database_url, autocommit=True) as other,
    ):
        first = leasequeue.enqueue(one, world.workspace, connection)
        got: list[int | None] = []
        with in_background(
            lambda: got.append(leasequeue.enqueue(other, world.workspace, connection))
        ):
            await_blocked(world.conn, other.info.backend_pid)
            one.commit()
    assert got == [first]


def test_l11_an_enqueue_whose_rival_rolls_back_goes_through(
    world: World, database_url: str
) -> None:
    connection = world.connection("a")
    with (
        begun(database_url) as one,
        psycopg.connect(database_url, autocommit=True) as other,
    ):
        leasequeue.enqueue(one, world.workspace, connection)
        got: list[int | None] = []
        with in_background(
            lambda: got.append(leasequeue.enqueue(other, world.workspace, connection))
        ):
            await_blocked(world.conn, other.info.backend_pid)
            one.rollback()
    [run] = got
    assert run is not None
    assert world.status(run) == "queued"


def test_l11_the_database_itself_refuses_a_second_active_run(world: World) -> None:
    run = world.run("a")
    with pytest.raises(psycopg.errors.UniqueViolation):
        world.conn.execute(
            "insert into connection_runs (workspace_id, connection_id, provider, kind)"
            " select workspace_id, connection_id, provider, kind from connection_runs"
            " where id = %s",
            [run],
        )


@pytest.mark.parametrize("why", ["disconnected", "deleting", "elsewhere", "absent"])
def test_a_connection_that_is_not_active_gets_no_run(world: World, why: str) -> None:
    connection, workspace = world.connection("a"), world.workspace
    match why:
        case "disconnected":
            leasequeue.disconnect(world.conn, workspace, connection)
        case "deleting":
            leasequeue.request_purge(world.conn, workspace, connection)
        case "elsewhere":
            workspace = World.new(world.conn, "Other").workspace
        case _:
            connection += 1
    assert leasequeue.enqueue(world.conn, workspace, connection) is None
    assert scalar(world.conn, "select count(*) from connection_runs where kind = 'sync'") == 0


def test_a_purge_is_not_enqueued_like_a_sync(world: World) -> None:
    with pytest.raises(ValueError, match="request_purge"):
        leasequeue.enqueue(world.conn, world.workspace, world.connection("a"), "purge")


def test_an_enqueue_announces_itself(world: World, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute("listen leasequeue")
        world.run("a")
        [heard] = listener.notifies(timeout=20, stop_after=1)
        assert (heard.channel, heard.payload) == ("leasequeue", "connection_runs")


# The world


def test_l8_a_requeue_re_checks_the_world_in_its_own_statement(world: World) -> None:
    run = world.run("a")
    connection = world.row(run)["connection_id"]
    held = world.held()
    leasequeue.disconnect(world.conn, world.workspace, connection)
    assert world.status(run) == "running"
    status = leasequeue.requeue(
        world.conn, held, timedelta(seconds=5), error_code="busy", error="busy", now=after(1)
    )
    assert status == world.status(run) == "cancelled"


@pytest.mark.parametrize("purge", [False, True])
def test_l8_a_disconnect_that_commits_while_a_requeue_is_under_way_still_ends_the_run(
    world: World, database_url: str, purge: bool
) -> None:
    """The requeue began before; whichever way they interleave, the run does not run again."""
    run = world.run("a")
    connection = world.row(run)["connection_id"]
    held = world.held()
    with (
        begun(database_url) as user,
        psycopg.connect(database_url, autocommit=True) as worker,
    ):
        if purge:
            leasequeue.request_purge(user, world.workspace, connection, now=after(1))
        else:
            leasequeue.disconnect(user, world.workspace, connection, now=after(1))
        leasequeue.requeue(
            worker, held, timedelta(seconds=5), error_code="busy", error="busy", now=after(1)
        )
        user.commit()
    claimed = world.claim(now=after(6))
    assert isinstance(claimed, Ended)
    assert world.status(run) == "cancelled"
    leasequeue.promote(world.conn, now=after(7))
    pending = world.claim(now=after(7))
    assert isinstance(pending, Lease) == purge


def test_a_disconnect_cancels_the_queued_run_at_once(world: World) -> None:
    run = world.run("a")
    connection = world.row(run)["connection_id"]
    assert leasequeue.disconnect(world.conn, world.workspace, connection, now=after(1)) is True
    row = world.row(run)
    assert (row["status"], row["error_code"]) == ("cancelled", "disconnected")
    assert leasequeue.disconnect(world.conn, world.workspace, connection) is False


def test_a_disconnect_lets_the_running_run_finish(world: World) -> None:
    run = world.run("a")
    held = world.held()
    leasequeue.disconnect(world.conn, world.workspace, world.row(run)["connection_id"])
    assert leasequeue.check_control(world.conn, held, now=after(1)) is False
    assert leasequeue.seal(world.conn, held, "succeeded", now=after(2)) == "succeeded"


def test_a_disconnected_connection_whose_worker_died_is_not_run_again(world: World) -> None:
    run = world.run("a")
    world.held()
    leasequeue.disconnect(world.conn, world.workspace, world.row(run)["connection_id"])
    assert isinstance(world.claim("bob", now=after(LEASE_SECONDS + 1)), Ended)
    assert (world.status(run), world.outcomes(run)) == ("cancelled", ["expired"])


def test_a_source_is_reconnected_by_adding_it_again(world: World) -> None:
    connection = world.connection("a")
    leasequeue.disconnect(world.conn, world.workspace, connection)
    assert world.connection("a", "bucket", interval_seconds=60) == connection
    [row] = leasequeue.list_connections(world.conn, world.workspace)
    assert (row["status"], row["provider"], row["next_run_at"]) == ("active", "bucket", NOON)


# Kinds


def test_q26_a_worker_leaves_kinds_it_does_not_know_alone(world: World) -> None:
    """Q26. An old worker meets a new kind: neither failed nor in the way of what it knows."""
    new = world.run("a", "a", kind="reindex")
    old = world.run("b", "b", now=after(1))
    held = world.held(now=after(2))
    assert held.id == old
    assert world.claim(now=after(2)) is None
    assert world.status(new) == "queued"
    claimed = runs.claim(world.conn, "new", LEASE_SECONDS, ["sync", "reindex"], now=after(2))
    assert isinstance(claimed, Lease)
    assert claimed.id == new


# L18: pause


def test_l18_a_pause_stops_claiming_everywhere_and_running_jobs_go_on(world: World) -> None:
    world.run("a", "a")
    world.run("b", "b", now=after(1))
    held = world.held(now=after(1))
    leasequeue.pause(world.conn, "Ada", "backup", now=after(2))
    assert world.claim("bob", now=after(3)) is None
    assert leasequeue.claim(world.conn, leasequeue.RUNS, "bob", 120, now=after(3)) is None
    assert leasequeue.renew(world.conn, held, now=after(4)) is False
    assert leasequeue.seal(world.conn, held, "succeeded", now=after(5)) == "succeeded"
    pause = leasequeue.paused(world.conn)
    assert pause is not None
    assert (pause.by, pause.reason, pause.at) == ("Ada", "backup", after(2))
    assert leasequeue.resume(world.conn) is True
    assert leasequeue.resume(world.conn) is False
    assert leasequeue.paused(world.conn) is None
    assert isinstance(world.claim("bob", now=after(6)), Lease)


def test_l18_there_is_one_maintenance_row_for_ever(world: World) -> None:
    with pytest.raises(psycopg.errors.UniqueViolation):
        world.conn.execute("insert into maintenance_state default values")
    with pytest.raises(psycopg.errors.CheckViolation):
        world.conn.execute("insert into maintenance_state (id) values (false)")


# History


def test_history_says_who_held_a_run_when_and_why_it_ended(world: World) -> None:
    run = world.run("a")
    world.held("alice")
    held = world.held("bob", now=after(200))
    leasequeue.record_result(world.conn, held, "files", upserted=2, failed=1, now=after(201))
    leasequeue.requeue(
        world.conn, held, timedelta(seconds=5), error_code="busy", error="busy", now=after(202)
    )
    held = world.held("carol", now=after(300))
    leasequeue.record_result(world.conn, held, "files", upserted=3, deleted=1, now=after(301))
    leasequeue.seal(world.conn, held, "succeeded", now=after(302))
    row = world.row(run)
    assert [
        (a["attempt"], a["worker"], a["outcome"], a["started_at"], a["ended_at"], a["retry_at"])
        for a in row["lease_history"]
    ] == [
        (1, "alice", "expired", NOON, after(200), None),
        (2, "bob", "retried", after(200), after(202), after(207)),
        (3, "carol", "succeeded", after(300), after(302), None),
    ]
    [result] = row["results"]
    assert (result["upserted"], result["deleted"], result["failed"]) == (3, 1, 0)
    assert [listed["id"] for listed in leasequeue.list_runs(world.conn, world.workspace)] == [run]
    assert leasequeue.list_runs(world.conn, world.workspace, status="failed") == []
    other = World.new(world.conn, "Other").workspace
    assert leasequeue.run_history(world.conn, other, run) is None


def test_the_views_for_dashboards_say_what_waits_what_runs_and_how_it_went(world: World) -> None:
    conn = world.conn
    world.run("a", "a")
    world.run("b", "b")
    world.run("c", "b")
    held = leasequeue.claim(conn, leasequeue.RUNS, "alice", 120)
    assert isinstance(held, Lease)
    leasequeue.register(conn, "alice", "1.0")
    depth = conn.execute(
        "select workspace, kind, provider, status, runs, oldest_seconds > 0 from engine_queue"
        " order by provider, status"
    ).fetchall()
    assert depth == [
        ("ACME", "sync", "a", "running", 1, True),
        ("ACME", "sync", "b", "queued", 2, True),
    ]
    [(run, owner, attempt, left)] = conn.execute(
        "select run_id, lease_owner, attempt, remaining_seconds from engine_leases"
    ).fetchall()
    assert (run, owner, attempt) == (held.id, "alice", 1)
    assert 0 < left <= 120
    leasequeue.seal(conn, held, "succeeded")
    assert conn.execute(
        "select kind, outcome, attempts from engine_attempts_hourly"
    ).fetchall() == [("sync", "succeeded", 1)]
    assert conn.execute("select id, alive, working_on from engine_workers").fetchall() == [
        ("alice", True, None)
    ]


# Workers


def test_workers_are_known_while_their_heart_beats(world: World) -> None:
    conn = world.conn
    leasequeue.register(conn, "alice", "1.0", now=NOON)
    leasequeue.register(conn, "bob", "1.0", now=NOON)
    assert leasequeue.heartbeat(conn, "alice", "connection_runs 1", now=after(60)) is True
    workers = {w["id"]: w["alive"] for w in leasequeue.list_workers(conn, now=after(60))}
    assert workers == {"alice": True, "bob": False}
    leasequeue.deregister(conn, "alice")
    assert leasequeue.heartbeat(conn, "alice", None) is False


def test_a_worker_that_was_silent_for_hours_registers_again(world: World) -> None:
    """Its own row is old enough to be dropped in the very statement that enters it."""
    leasequeue.register(world.conn, "alice", "1.0", now=NOON)
    leasequeue.register(world.conn, "gone", "1.0", now=NOON)
    leasequeue.register(world.conn, "alice", "1.0", now=after(4680))
    assert [w["id"] for w in leasequeue.list_workers(world.conn)] == ["alice"]


def test_workspaces_are_made_once(world: World) -> None:
    assert leasequeue.ensure_workspace(world.conn, "ACME") == world.workspace
    before = snapshot(world.conn, "workspaces")
    leasequeue.ensure_workspace(world.conn, "ACME")
    assert snapshot(world.conn, "workspaces") == before
