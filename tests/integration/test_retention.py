"""Old history goes, live history stays, and neither slows the claim (cases Q20 and Q21)."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg import sql

import leasequeue
from leasequeue import Lease, LeaseTable, Worker, runs, stages
from leasequeue.lease import _CLAIM, NOTHING_MORE, compose  # pyright: ignore[reportPrivateUsage]
from planroom.ingestions import INGESTIONS
from support.engine import NOON, World, after

Connection = psycopg.Connection[Any]
DAY = 86_400.0


@pytest.fixture
def world(connection: Connection) -> World:
    return World.new(connection)


def _finished(world: World, name: str, at: float) -> int:
    run = world.run(name, name, now=after(at))
    held = world.held(now=after(at))
    leasequeue.record_result(world.conn, held, "files", upserted=1, now=after(at))
    leasequeue.seal(world.conn, held, "succeeded", now=after(at))
    return run


def _ids(world: World) -> list[int]:
    rows = world.conn.execute("select id from connection_runs order by id").fetchall()
    return [row[0] for row in rows]


# Retention


def test_finished_runs_go_after_the_setting_with_their_attempts_and_results(world: World) -> None:
    _finished(world, "old", 0)
    young = _finished(world, "young", 2 * DAY)
    live = world.run("live", "live", now=NOON)
    assert runs.remove_old_runs(world.conn, 90, now=after(90 * DAY)) == 0
    assert runs.remove_old_runs(world.conn, 90, now=after(91 * DAY)) == 1
    assert _ids(world) == [young, live]
    for table in ("run_attempts", "run_results"):
        count = sql.SQL("select count(distinct run_id) from {}").format(sql.Identifier(table))
        row = world.conn.execute(count).fetchone()
        assert row == (1,)


def test_old_runs_go_in_bounded_batches_oldest_first(world: World) -> None:
    made = [_finished(world, str(n), n) for n in range(5)]
    removed = [runs.remove_old_runs(world.conn, 1, 2, now=after(9 * DAY)) for _ in range(2)]
    assert removed == [2, 2]
    assert _ids(world) == made[4:]


def test_a_run_that_is_being_removed_by_another_worker_is_passed_over(
    world: World, database_url: str
) -> None:
    made = [_finished(world, str(n), n) for n in range(2)]
    with psycopg.connect(database_url) as other:
        other.execute("select 1 from connection_runs where id = %s for update", [made[0]])
        assert runs.remove_old_runs(world.conn, 1, now=after(9 * DAY)) == 1


def test_l15_the_stage_removes_one_batch_a_poll_and_looks_once_an_hour(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "REMOVED_PER_POLL", 2)
    monkeypatch.setattr(stages, "seldom", lambda run, every: run)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    for n in range(5):
        _finished(world, str(n), n)
    now = after(100 * DAY)
    worker = Worker(lambda: world.conn, _lending(world), clock=lambda: now)
    worker.stages = leasequeue.engine_stages(worker, _lending(world), {}, retention_days=90)
    assert [worker.poll().done for _ in range(4)] == [2, 2, 1, 0]
    _finished(world, "another", 6)
    assert worker.poll().done == 0
    now += timedelta(hours=1)
    assert worker.poll().done == 1


def _lending(world: World) -> stages.Lend:
    @contextmanager
    def lend() -> Generator[Connection]:
        yield world.conn

    return lend


# Q21: the claim and its index

_MILLION: LiteralString = """
    insert into connection_runs (workspace_id, connection_id, provider, kind, status, attempts,
           queued_at, started_at, finished_at)
    select %(workspace)s, %(connection)s, 'folder', 'sync', 'succeeded', 1,
           %(noon)s, %(noon)s, %(noon)s
      from generate_series(1, %(rows)s)
"""
_MILLION_INGESTIONS: LiteralString = """
    with project as (
        insert into projects (workspace_id, name) values (%(workspace)s, 'p') returning id
    ), file as (
        insert into files (workspace_id, project_id, name, sha256, size_bytes)
        select %(workspace)s, id, 'a.pdf', sha256('a'), 1 from project
        returning id, project_id
    )
    insert into file_ingestions (workspace_id, project_id, file_id, version, sha256, size_bytes,
           status, attempts, queued_at, started_at, finished_at)
    select %(workspace)s, project_id, file.id, 1, sha256('a'), 1,
           'cancelled', 1, %(noon)s, %(noon)s, %(noon)s
      from file, generate_series(1, %(rows)s)
"""


def _explain(
    conn: Connection, statement: sql.Composed, values: Mapping[str, Any], options: LiteralString
) -> dict[str, Any]:
    explained = sql.SQL("explain ({}, format json) ").format(sql.SQL(options)) + statement
    with conn.transaction(force_rollback=True):
        row = conn.execute(explained, values).fetchone()
    assert row is not None
    return cast(dict[str, Any], row[0][0]["Plan"])


def _scans(plan: Mapping[str, Any], table: str) -> list[tuple[str, str | None]]:
    """How the plan reads a table: the node and, if there is one, the index."""
    found = [
        (plan["Node Type"], plan.get("Index Name"))
        for _ in [0]
        if plan.get("Relation Name") == table and "Scan" in plan["Node Type"]
    ]
    for part in plan.get("Plans", []):
        found += _scans(part, table)
    return found


def _claim_values(conn: Connection) -> dict[str, Any]:
    return {
        "owner": "alice",
        "lease": timedelta(seconds=120),
        "crashes_max": 3,
        "skip": [],
        "now": None,
        "kinds": ["sync", "purge"],
        "workspace_id": 1,
        "tried": [],
        "limit": runs.CANDIDATES_PER_LOOK,
    }


@pytest.mark.parametrize("rows", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("table", [leasequeue.RUNS, INGESTIONS], ids=lambda t: t.table)
def test_q21_with_a_million_finished_rows_the_claim_stays_on_its_index(
    world: World, table: LeaseTable, rows: int
) -> None:
    """Q21. A plan that read the table would touch them all; this one touches a few pages."""
    fill = _MILLION if table is leasequeue.RUNS else _MILLION_INGESTIONS
    connection = world.connection("many")
    with world.conn.transaction():
        world.conn.execute("set local session_replication_role = replica")
        world.conn.execute(
            fill,
            {"workspace": world.workspace, "connection": connection, "noon": NOON, "rows": rows},
        )
    world.conn.execute(sql.SQL("analyze {}").format(sql.Identifier(table.table)))
    values = _claim_values(world.conn)
    statements = [compose(_CLAIM, table, NOTHING_MORE)]
    if table is leasequeue.RUNS:
        statements = [
            compose(_CLAIM, table, runs._ADMITTED_IN_WORKSPACE),  # pyright: ignore[reportPrivateUsage]
            sql.Composed([sql.SQL(runs._CANDIDATES)]),  # pyright: ignore[reportPrivateUsage]
            sql.Composed([sql.SQL(runs._WAITING)]),  # pyright: ignore[reportPrivateUsage]
        ]
    for statement in statements:
        plan = _explain(world.conn, statement, values, "analyze, buffers")
        scans = _scans(plan, table.table)
        assert all(index is not None for _, index in scans), scans
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 60, json.dumps(plan)
    used = {
        index
        for statement in statements[:2]
        for _, index in _scans(_explain(world.conn, statement, values, "costs off"), table.table)
    }
    assert f"{table.table}_claim" in used
    # What the limiter decides under the workspace's lock, it decides among that workspace's runs.
    assert ("connection_runs_claim_in_workspace" in used) == (table is leasequeue.RUNS)
    # And so it does for a row that is there to be claimed, and for one that is not analyzed yet.
    if table is leasequeue.RUNS:
        run = leasequeue.enqueue(world.conn, world.workspace, connection)
        claimed = runs.claim(world.conn, "alice", 120, ["sync"])
        assert isinstance(claimed, Lease)
        assert claimed.id == run


# Q20: a snapshot that is held


def test_q20_a_claim_under_a_held_snapshot_reads_a_bounded_number_of_pages(
    world: World, database_url: str
) -> None:
    """Q20. What finished since the snapshot cannot be cleaned up, and the claim steps over it.

    Each finished run leaves a dead entry for each place it had in the index; the bound is a few
    pages a run that finished meanwhile, for runs that last minutes, and never the whole history.
    """
    for n in range(200):
        _finished(world, f"before {n % 7}", n)
    values = {**_claim_values(world.conn), "now": after(10_000)}
    claim = compose(_CLAIM, leasequeue.RUNS, runs._ADMITTED_IN_WORKSPACE)  # pyright: ignore[reportPrivateUsage]

    def pages() -> int:
        plan = _explain(world.conn, claim, values, "analyze, buffers")
        return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]

    with psycopg.connect(database_url) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("select count(*) from connection_runs")
        finished = 300
        for n in range(finished):
            _finished(world, f"during {n % 7}", 1000 + n)
        held = pages()
    assert held < 4 * finished
    world.conn.execute("vacuum connection_runs")
    assert pages() < 60
