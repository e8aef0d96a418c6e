"""The limiter, rule L12: in one workspace a purge runs alone, and no provider runs twice.

The interleaving that a single statement loses is forced here, and the single statement is run
through it too: a test that could not fail would prove nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

import leasequeue
from leasequeue import Lease, lock_workspace, runs
from support import limiter_stress
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
Claim = Callable[[Connection, str], object]


@pytest.fixture
def world(connection: Connection) -> World:
    return World.new(connection)


# What may run beside what


def test_l12_two_runs_of_one_provider_never_run_at_once(world: World) -> None:
    first = world.run("a", "s3")
    second = world.run("b", "s3", now=after(1))
    held = world.held(now=after(2))
    assert held.id == first
    assert world.claim("bob", now=after(2)) is None
    leasequeue.seal(world.conn, held, "succeeded", now=after(3))
    assert world.held("bob", now=after(3)).id == second


def test_l12_different_providers_run_side_by_side(world: World) -> None:
    ids = {world.run(name, name) for name in ("s3", "gcs", "folder")}
    assert {world.held().id for _ in range(3)} == ids


def test_l12_workspaces_do_not_limit_each_other(world: World) -> None:
    other = World.new(world.conn, "Other")
    ids = {world.run("a", "s3"), other.run("a", "s3")}
    assert {world.held().id, world.held().id} == ids


def test_l12_a_purge_runs_alone(world: World) -> None:
    connection = world.connection("a", "s3")
    purge = leasequeue.request_purge(world.conn, world.workspace, connection, now=NOON)
    sync = world.run("b", "gcs", now=after(1))
    held = world.held(now=after(2))
    assert held.id == purge
    assert world.claim("bob", now=after(2)) is None
    leasequeue.seal(world.conn, held, "succeeded", now=after(3))
    assert world.held("bob", now=after(3)).id == sync


def test_l12_a_purge_waits_for_what_runs_and_new_syncs_wait_behind_it(world: World) -> None:
    """However many syncs keep coming, a purge is not starved."""
    world.run("a", "s3", now=NOON)
    running = world.held()
    connection = world.connection("b", "gcs")
    purge = leasequeue.request_purge(world.conn, world.workspace, connection, now=after(1))
    late = world.run("c", "folder", now=after(2))
    assert world.claim("bob", now=after(3)) is None
    leasequeue.seal(world.conn, running, "succeeded", now=after(4))
    held = world.held("bob", now=after(5))
    assert held.id == purge
    leasequeue.seal(world.conn, held, "succeeded", now=after(6))
    assert world.held("bob", now=after(7)).id == late


def test_l12_a_purge_and_a_dead_sync_do_not_wait_for_each_other(world: World) -> None:
    sync = world.run("a", "s3")
    world.held()
    connection = world.connection("b", "gcs")
    purge = leasequeue.request_purge(world.conn, world.workspace, connection, now=after(1))
    reclaimed = world.held("bob", now=after(LEASE_SECONDS + 1))
    assert reclaimed.id == sync
    assert world.claim("carol", now=after(LEASE_SECONDS + 1)) is None
    leasequeue.seal(world.conn, reclaimed, "succeeded", now=after(LEASE_SECONDS + 2))
    assert world.held("carol", now=after(LEASE_SECONDS + 3)).id == purge


def test_l12_q9_a_dead_workers_run_does_not_block_its_own_reclaim(world: World) -> None:
    """Q9. It fills its limit itself."""
    run = world.run("a", "s3")
    world.run("b", "s3", now=after(1))
    world.held()
    assert world.held("bob", now=after(LEASE_SECONDS + 1)).id == run


def test_l12_q7_a_lost_run_holds_its_place_until_it_is_taken_again(world: World) -> None:
    """Q7. Its worker may still be at work; both let go, and there was never more than one."""
    run = world.run("a", "s3")
    other = world.run("b", "s3", now=after(1))
    stale = world.held("alice")
    at = after(LEASE_SECONDS + 1)
    assert _running(world) == 1
    taken = world.held("bob", now=at)
    assert taken.id == run
    assert world.claim("carol", now=at) is None
    leasequeue.seal(world.conn, taken, "succeeded", now=at)
    with pytest.raises(leasequeue.LeaseLost):
        leasequeue.seal(world.conn, stale, "succeeded", now=at)
    assert world.held("carol", now=at).id == other
    assert _running(world) == 1
    assert world.claim("dave", now=at) is None


def _running(world: World) -> int:
    return scalar(world.conn, "select count(*) from connection_runs where status = 'running'")


def test_l12_a_busy_workspace_keeps_no_other_waiting(world: World, database_url: str) -> None:
    """Its lock is held, perhaps by a process that hangs: the next workspace comes first."""
    blocked = world.run("a", "s3", now=NOON)
    other = World.new(world.conn, "Other")
    free = other.run("a", "s3", now=after(1))
    with begun(database_url) as holder:
        lock_workspace(holder, world.workspace)
        assert world.held(now=after(2)).id == free
    assert world.held(now=after(2)).id == blocked


def test_l12_a_workspace_locked_for_long_is_an_outage_and_not_a_hang(
    world: World, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LOCK_SECONDS", 0.05)
    world.run("a", "s3")
    with begun(database_url) as holder:
        lock_workspace(holder, world.workspace)
        with pytest.raises(psycopg.errors.LockNotAvailable) as refused:
            world.claim(now=after(2))
    assert leasequeue.is_outage(refused.value)
    assert isinstance(world.claim(now=after(2)), Lease)


def test_l12_many_runs_that_may_not_start_hide_none_that_may(world: World) -> None:
    """More of them than are looked at in one go, in as many workspaces."""
    for n in range(runs.CANDIDATES_PER_LOOK + 5):
        crowded = World.new(world.conn, f"crowded {n}")
        crowded.run("a", "s3", now=NOON)
    assert len([world.held() for _ in range(runs.CANDIDATES_PER_LOOK + 5)]) == 25
    for n in range(runs.CANDIDATES_PER_LOOK + 5):
        crowded = World.new(world.conn, f"crowded {n}")
        crowded.run("b", "s3", now=after(1))
    free = world.run("c", "s3", now=after(2))
    assert world.held(now=after(3)).id == free


def test_l12_a_claim_under_another_isolation_is_refused(world: World, database_url: str) -> None:
    """Its second statement would decide on the first's snapshot."""
    world.run("a")
    with psycopg.connect(database_url) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(ValueError, match="READ COMMITTED"):
            runs.claim(conn, "alice", 120, ["sync"], now=NOON)


# Q22: the strength of the lock


def test_l12_q22_rows_that_reference_the_workspace_are_inserted_while_it_is_locked(
    world: World, database_url: str
) -> None:
    """Q22. Neither blocked nor a deadlock; with plain `for update` they would be blocked."""
    connection = world.connection("a")
    insert: LiteralString = (
        "insert into connections (workspace_id, name, provider) values (%s, %s, 'folder')"
    )
    with begun(database_url) as holder:
        lock_workspace(holder, world.workspace)
        world.conn.execute("set lock_timeout = '10s'")
        world.conn.execute(insert, [world.workspace, "b"])
        assert leasequeue.enqueue(world.conn, world.workspace, connection) is not None
    with begun(database_url) as holder:
        holder.execute("select 1 from workspaces where id = %s for update", [world.workspace])
        world.conn.execute("set lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            world.conn.execute(insert, [world.workspace, "c"])


# The interleaving

# Negative control: the claim as one statement that locks the workspace and decides. All parts of a
# statement see the snapshot taken when it began, which may be before the lock was had.
_SINGLE_STATEMENT: LiteralString = """
    with locked as materialized (
        select id from workspaces where id = 1 for no key update
    ), picked as (
        select job.id
          from connection_runs as job
          join locked on locked.id = job.workspace_id
         where job.status = 'queued'
           and not exists (
               select 1
                 from connection_runs as other
                where other.workspace_id = job.workspace_id
                  and other.status = 'running'
                  and other.provider = job.provider
           )
         order by job.queued_at, job.id
         limit 1
           for update of job skip locked
    )
    update connection_runs as job
       set status = 'running', attempts = attempts + 1, started_at = now(), lease_owner = %s,
           lease_token = nextval('lease_tokens'), lease_expires_at = now() + interval '120 s'
      from picked
     where job.id = picked.id
    returning job.id
"""


def _claim_in_one_statement(conn: Connection, owner: str) -> object:
    return conn.execute(_SINGLE_STATEMENT, [owner]).fetchone()


def _claim_as_the_engine(conn: Connection, owner: str) -> object:
    return runs.claim(conn, owner, 120, ["sync"])


@pytest.mark.parametrize(
    ("claim", "running"), [(_claim_in_one_statement, 2), (_claim_as_the_engine, 1)]
)
def test_l12_the_forced_interleaving_lets_two_run_in_one_statement_and_one_in_ours(
    world: World, database_url: str, claim: Claim, running: int
) -> None:
    """Alice holds the lock and has claimed; Bob's statement has begun and waits; Alice commits.

    Bob's snapshot is older than her commit. The first row of the table below is the proof that
    this test can fail; the second is the engine.
    """
    world.run("a", "s3")
    world.run("b", "s3")
    with (
        begun(database_url) as alice,
        psycopg.connect(database_url, autocommit=True) as bob,
    ):
        assert claim(alice, "alice") is not None
        with in_background(lambda: claim(bob, "bob")):
            await_blocked(world.conn, bob.info.backend_pid)
            alice.commit()
    assert _running(world) == running


def test_l12_the_forced_interleaving_with_a_purge(world: World, database_url: str) -> None:
    world.run("a", "s3")
    leasequeue.request_purge(world.conn, world.workspace, world.connection("b", "gcs"))
    with (
        begun(database_url) as alice,
        psycopg.connect(database_url, autocommit=True) as bob,
    ):
        assert runs.claim(alice, "alice", 120, ["sync", "purge"]) is not None
        got: list[object] = []
        with in_background(lambda: got.append(runs.claim(bob, "bob", 120, ["sync", "purge"]))):
            await_blocked(world.conn, bob.info.backend_pid)
            alice.commit()
    assert got == [None]
    assert _running(world) == 1


# Stress


def _stress(world: World, database_url: str, *, processes: int, rounds: int, lease: float) -> int:
    """Let processes race over 4 workspaces and 3 providers; the number of runs that ended."""
    world.conn.execute(limiter_stress.SCHEMA)
    for n in range(4):
        one = World.new(world.conn, f"stress {n}")
        for provider in ("s3", "gcs", "folder"):
            for m in range(3):
                connection = one.connection(f"{provider} {m}", provider)
                leasequeue.enqueue(world.conn, one.workspace, connection, payload={"left": rounds})
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "support.limiter_stress", database_url, f"w{n}", str(lease)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        for n in range(processes)
    ]
    try:
        assert [worker.wait(timeout=240) for worker in workers] == [0] * processes
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert scalar(world.conn, "select count(*) from connection_runs where finished_at is null") == 0
    assert snapshot(world.conn, "violations") == []
    assert snapshot(world.conn, "occupancy") == []
    assert scalar(world.conn, "select count(distinct run_id) from entered") == scalar(
        world.conn, "select count(*) from connection_runs where status = 'succeeded'"
    )
    return scalar(world.conn, "select count(*) from entered")


def test_l12_processes_that_race_never_exceed_the_limit(world: World, database_url: str) -> None:
    """36 connections, five syncs each and a purge of every third: 192 runs."""
    assert _stress(world, database_url, processes=4, rounds=5, lease=120) == 36 * 5 + 12


@pytest.mark.slow
def test_l12_eight_processes_and_thousands_of_claims_never_exceed_the_limit(
    world: World, database_url: str
) -> None:
    """Workers die on the way, too: their runs are claimed again ten seconds later."""
    ended = _stress(world, database_url, processes=8, rounds=80, lease=10)
    assert ended >= 36 * 80 + 12


def test_l12_the_stress_test_sees_two_that_run_at_once(world: World) -> None:
    """The check of the stress test can fail: two entries at once are counted."""
    world.conn.execute(limiter_stress.SCHEMA)
    for run, is_purge, provider in ((1, False, "s3"), (2, False, "gcs"), (3, False, "s3")):
        limiter_stress.enter(world.conn, run, 1, provider, is_purge=is_purge)
    limiter_stress.enter(world.conn, 4, 2, "s3", is_purge=False)
    limiter_stress.enter(world.conn, 5, 2, "gcs", is_purge=True)
    assert snapshot(world.conn, "violations") == [(3, 1), (5, 4)]
