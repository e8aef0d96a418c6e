"""SIGKILL at every named point, one by one: another worker resumes, and the result is the same.

The names are collected from the sources, so a new point is under test from its first day.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from _pytest.mark.structures import ParameterSet
from psycopg import sql

import leasequeue
from support.embedding_server import Fault, rate_limited
from support.fleet import (
    ALIVE_SECONDS,
    BATCH_UNITS,
    PAGE_GROUP,
    ROOT,
    Calm,
    Fleet,
    Process,
    await_true,
    make_document,
)

Connection = psycopg.Connection[Any]

_CALL = re.compile(r'crash_point\("([a-z_.]+)"\)')
SOURCES = [ROOT / "indexer" / "planroom", ROOT / "queue" / "leasequeue"]
NAMES = sorted(
    name
    for source in SOURCES
    for module in source.rglob("*.py")
    for name in _CALL.findall(module.read_text())
)


def names_of(*groups: str) -> list[str]:
    """The points whose first word is one of these."""
    return [name for name in NAMES if name.split(".")[0] in groups]


INGESTION = names_of("claim", "ingest", "pages", "batch", "finish", "renew", "seal")
INTAKE = names_of("intake")
LETTING_GO = names_of("requeue", "release")
RUNS = names_of(
    "claim", "promote", "purge", "release", "renew", "requeue", "result", "schedule", "seal"
)
# Those that the default suite goes through; the slow one takes them all, and each twice.
IMPORTANT = [
    "pages.written",
    "batch.embedded",
    "batch.written",
    "finish.tail_deleted",
    "finish.sealed",
]
ONCE = ("claim", "finish", "ingest", "seal")
"""Points that a document passes once, unless its worker is killed."""


def test_every_point_in_the_sources_is_under_test() -> None:
    assert set(NAMES) == {*INGESTION, *INTAKE, *LETTING_GO, *RUNS}
    assert set(IMPORTANT) <= set(INGESTION)


@pytest.fixture(scope="session")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document of these tests: 12 sheets, two of them scans, about 100 units."""
    return make_document(tmp_path_factory.mktemp("document") / "set.pdf")


def check(fleet: Fleet, calm: Calm, kills: int) -> None:
    """The promise of the ingestion path, as seen from outside."""
    fleet.check_invariants()
    assert fleet.outcomes() == {"set.pdf": calm.outcome}
    assert fleet.server.embedded <= calm.embedded + kills * BATCH_UNITS
    again = sum(fleet.pages_read().values()) - calm.pages
    assert 0 <= again <= kills * PAGE_GROUP


def committed_counts(fleet: Fleet) -> dict[str, int]:
    """How often each text that is committed by now has been embedded by now."""
    return {key: fleet.server.counts[key] for key in fleet.committed_texts()}


def cases() -> list[ParameterSet]:
    """Every point, on its first and second visit, and on the first visits of two workers."""
    return [
        pytest.param(
            name, visits, marks=() if name in IMPORTANT and visits == "first" else pytest.mark.slow
        )
        for name in INGESTION
        for visits in ("first", "second", "twice")
    ]


def but_slow(names: list[str], *quick: str) -> list[ParameterSet]:
    """All of the names, for the slow suite but for the quick ones."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]


@pytest.mark.parametrize(("name", "visits"), cases())
def test_a_worker_killed_at_any_point_is_resumed_by_another(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm], name: str, visits: str
) -> None:
    calm = calm_run(document)
    fleet.take_in(document)
    kills = 0
    for crash_at in {"first": [1], "second": [2], "twice": [1, 1]}[visits]:
        victim = fleet.worker(crash_at=f"{name}:{crash_at}")
        status = victim.wait()
        if status == 0:
            assert name.split(".")[0] in ONCE, f"{name} was never passed"
            assert crash_at == 2 or kills == 1, victim.said()
            continue
        assert status == -signal.SIGKILL, victim.said()
        kills += 1
        fleet.check_invariants()
        fleet.expire_leases(victim)
    committed = committed_counts(fleet)
    fleet.finish()
    check(fleet, calm, kills)
    assert committed == {key: fleet.server.counts[key] for key in committed}


@pytest.mark.parametrize("name", but_slow(INTAKE, "intake.before_commit"))
def test_an_intake_killed_at_any_point_is_repeated_without_a_trace(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm], name: str
) -> None:
    victim = fleet.add(document, crash_at=name)
    assert victim.wait() == -signal.SIGKILL, victim.said()
    fleet.check_invariants()
    fleet.take_in(document)
    fleet.finish()
    check(fleet, calm_run(document), 0)
    found = [path for path in (fleet.folder / "home" / "blobs").rglob("*") if path.is_file()]
    # Besides the empty file that the store locks.
    assert [s for p in found if (s := p.stat().st_size)] == [document.stat().st_size]


@pytest.mark.parametrize("name", but_slow(LETTING_GO, "requeue.after", "release.before"))
def test_a_worker_killed_while_it_lets_go_of_a_document_is_resumed_by_another(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm], name: str
) -> None:
    """It lets go because the embedding service asked it to come back later, or at SIGTERM."""
    retried = name.startswith("requeue")
    fault = rate_limited(3600) if retried else Fault("hang")
    fleet.take_in(document)
    fleet.server.fail_next(None, fault)
    victim = fleet.worker(crash_at=name)
    if not retried:
        fleet.server.wait_for_requests(2)
        victim.send(signal.SIGTERM)
    assert victim.wait() == -signal.SIGKILL, victim.said()
    fleet.server.release()
    fleet.check_invariants()
    fleet.expire_leases(victim)
    fleet.hurry()
    fleet.finish()
    check(fleet, calm_run(document), 1)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_a_worker_killed_at_any_point_of_a_run_is_resumed_by_another(
    fleet: Fleet, name: str
) -> None:
    """A scheduled sync that fails once and is purged; see support.sync_process."""
    with fleet.connect() as conn:
        conn.execute("create table notes (connection_id bigint not null, number integer not null)")
        workspace = leasequeue.ensure_workspace(conn, "default")
        leasequeue.add_connection(conn, workspace, "bucket", "s3", interval_seconds=3600)
        held = ["--hold-at", "2"] if name.startswith("release") else []
        victim = fleet.run(*held, module="support.sync_process", crash_at=name)
        if held:
            await_true(lambda: count(conn, "notes") == 2, f"it never began; see {victim.log}")
            victim.send(signal.SIGTERM)
        see_through(conn, victim)
        assert victim.wait() == -signal.SIGKILL, victim.said()
        another = fleet.run(module="support.sync_process")
        see_through(conn, another)
        assert another.wait() == 0, another.said()
        check_purged(conn)


def see_through(conn: Connection, process: Process) -> None:
    """Wait for the process; meanwhile what waits is due at once, and what the dead held is free."""

    def ended() -> bool:
        conn.execute(
            "update connection_runs set queued_at = now() where status = 'queued' and failures > 0"
        )
        return not process.is_alive

    await_true(ended, f"it did not end:\n{process.said()}", ALIVE_SECONDS)
    conn.execute(
        "update connection_runs set lease_expires_at = now() - interval '1 s'"
        " where status = 'running'"
    )


def count(conn: Connection, table: LiteralString) -> int:
    """How many rows the table has."""
    row = conn.execute(sql.SQL("select count(*) from {}").format(sql.Identifier(table))).fetchone()
    assert row is not None
    return row[0]


def check_purged(conn: Connection) -> None:
    """One sync and one purge have ended, and every note was written once and deleted once."""
    runs = conn.execute(
        "select kind, status, payload, attempts from connection_runs order by id"
    ).fetchall()
    (_, synced, notes, _), (_, purged, purge, _) = runs
    assert [kind for kind, *_ in runs] == ["sync", "purge"]
    # A sync whose worker dies after the purge was asked for is not begun again.
    assert synced in ("succeeded", "cancelled")
    assert purged == "succeeded"
    assert purge["deleted"] == notes["done"]
    assert count(conn, "notes") == 0
    assert conn.execute("select 1 from run_attempts where ended_at is null").fetchone() is None
    assert count(conn, "run_attempts") == sum(attempts for *_, attempts in runs)
