"""Status: every file is live, waiting for a reason, or over; the ledger says what a kill cost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString

import pytest

import leasequeue
from leasequeue import Retryable, settle
from planroom import intake
from planroom.config import Settings
from planroom.files import cancel_ingestions
from planroom.projects import ensure_project
from planroom.status import list_attempts, list_files
from support.room import Bench, notes_pdf

SMALL = {"chunk_tokens": 16, "chunk_overlap": 0, "batch_units": 40, "page_group": 2}
LATER = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with Bench.open(settings.model_copy(update=SMALL)) as bench:
        yield bench


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """Two pages, 160 chunks: four batches of 40."""
    return notes_pdf(tmp_path / "notes.pdf", 2)


def state(bench: Bench) -> str:
    [row] = list_files(bench.conn, bench.workspace)
    return row["state"]


def test_d27_every_state_of_a_file_has_a_name_of_its_own(bench: Bench, document: Path) -> None:
    taken = bench.take(document)
    seen = [state(bench)]
    leasequeue.pause(bench.conn, "tester", "a test")
    seen.append(state(bench))
    leasequeue.resume(bench.conn)
    lease = bench.held()
    seen.append(state(bench))
    bench.expire(lease)
    seen.append(state(bench))
    lease = bench.held()
    settle(bench.conn, lease, Retryable("busy", code="embedder_busy"))
    seen.append(state(bench))
    lease = bench.held(now=LATER)
    leasequeue.release(bench.conn, lease)
    bench.conn.execute("update file_ingestions set queued_at = now()")
    seen.append(state(bench))
    lease = bench.held()
    embedding: list[str] = []
    bench.embedder.before = lambda batch: embedding.append(state_elsewhere(bench))
    assert bench.work(lease) == "ready"
    seen += [embedding[-1], state(bench)]

    bench.take(notes_pdf(document, 1, first=9))
    seen.append(state(bench))
    lease = bench.held()
    bench.take(notes_pdf(document, 1, first=11))
    seen.append(state(bench))
    bench.embedder.before = lambda batch: None
    bench.work(lease)
    seen.append(state(bench))
    cancel_ingestions(bench.conn, bench.workspace, taken.file_id)
    seen.append(state(bench))
    assert seen == [
        "queued",
        "paused",
        "reading",
        "taken over next",
        "waiting to retry",
        "queued to resume",
        "embedding",
        "ready",
        "queued",
        "cancelling",
        "queued",
        "cancelled",
    ]


def state_elsewhere(bench: Bench) -> str:
    with bench.database.connect() as conn:
        [row] = list_files(conn, bench.workspace)
        return row["state"]


STATES = {
    "live": {"reading", "embedding"},
    "waiting": {
        "queued",
        "paused",
        "waiting to retry",
        "queued to resume",
        "cancelling",
        "taken over next",
    },
    "over": {"ready", "failed", "cancelled"},
}


@pytest.mark.parametrize("cancelled", [None, "now()"], ids=["wanted", "cancelled"])
@pytest.mark.parametrize("paused", [False, True], ids=["going", "paused"])
@pytest.mark.parametrize("minutes", [-5, 5], ids=["past", "future"])
def test_d27_whatever_a_row_holds_its_state_says_what_comes_of_it(
    bench: Bench, document: Path, cancelled: str | None, paused: bool, minutes: int
) -> None:
    bench.take(document)
    if paused:
        leasequeue.pause(bench.conn, "tester", "a test")
    values = {"time": timedelta(minutes=minutes), "cancel": None if cancelled is None else NOW}
    seen = {
        "queued": state_after(bench, QUEUED, values),
        "running": state_after(bench, RUNNING, values),
    }
    assert seen["queued"] in STATES["waiting"]
    expected = STATES["waiting"] if cancelled or minutes < 0 else STATES["live"]
    assert seen["running"] in expected
    for status in ("failed", "cancelled"):
        assert state_after(bench, OVER, {**values, "status": status}) == status


NOW = datetime.now(UTC)
QUEUED = """
    update file_ingestions set queued_at = now() + %(time)s, cancel_requested_at = %(cancel)s
"""
RUNNING = """
    update file_ingestions
       set status = 'running', lease_owner = 'a', lease_token = 1, started_at = now(),
           lease_expires_at = now() + %(time)s, cancel_requested_at = %(cancel)s
"""
OVER = """
    update file_ingestions
       set status = %(status)s, lease_owner = null, lease_token = null, lease_expires_at = null,
           finished_at = now(), error_code = 'test', cancel_requested_at = %(cancel)s
"""


def state_after(bench: Bench, statement: LiteralString, values: dict[str, Any]) -> str:
    bench.conn.execute(statement, values)
    return state(bench)


def test_the_row_of_a_file_says_how_far_it_is(bench: Bench, document: Path) -> None:
    bench.take(document)
    rows: list[dict[str, object]] = []

    def look(batch: int) -> None:
        with bench.database.connect() as conn:
            rows.extend(list_files(conn, bench.workspace))

    bench.embedder.before = look
    bench.finish()
    assert [row["processed_units"] for row in rows] == [0, 40, 80, 120]
    assert rows[-1]["total_units"] == 160
    assert rows[-1]["page_count"] == 2
    assert rows[-1]["published_version"] is None
    final = list_files(bench.conn, bench.workspace)[0]
    assert (final["published_version"], final["processed_units"]) == (1, 160)


def test_files_are_listed_by_project_and_name_and_removed_ones_are_not(
    bench: Bench, document: Path
) -> None:
    annex = ensure_project(bench.conn, bench.workspace, "annex")
    bench.take(document, "b.pdf")
    bench.take(document, "a.pdf")
    gone = bench.take(document, "c.pdf")
    bench.take(document, "d.pdf", project=annex)
    bench.remove(gone.file_id)
    names = [(row["project"], row["name"]) for row in list_files(bench.conn, bench.workspace)]
    assert names == [("annex", "d.pdf"), ("default", "a.pdf"), ("default", "b.pdf")]
    only = list_files(bench.conn, bench.workspace, project="annex")
    assert [row["name"] for row in only] == ["d.pdf"]


# The kill ledger


def test_the_ledger_of_a_run_without_a_kill_has_nothing_done_again(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    bench.finish()
    [attempt] = list_attempts(bench.conn, bench.workspace, taken.file_id)
    assert (attempt["outcome"], attempt["attempt"], attempt["worker"]) == ("ready", 1, "alice")
    assert (attempt["first_page"], attempt["pages_read"], attempt["pages_read_again"]) == (0, 2, 0)
    assert (attempt["first_unit"], attempt["units_embedded"]) == (0, 160)
    assert (attempt["units_embedded_again"], attempt["seconds_lost"]) == (0, 0)
    assert attempt["seconds"] > 0


def test_the_ledger_bounds_what_a_killed_attempt_left_undone(bench: Bench, tmp_path: Path) -> None:
    taken = bench.take(notes_pdf(tmp_path / "set.pdf", 6))

    def die(batch: int) -> None:
        if batch in (3, 4, 6):
            raise SystemError("killed")

    bench.embedder.after = die
    for _ in range(3):
        lease = bench.held()
        assert isinstance(bench.attempt(lease), SystemError)
        # The last sign of life came five seconds after the last commit.
        bench.conn.execute(
            "update ingestion_attempts set seen_at = committed_at + interval '5 seconds'"
            " where lease_token = %s",
            (lease.token,),
        )
        bench.expire(lease)
    assert bench.finish() == "ready"
    attempts = list_attempts(bench.conn, bench.workspace, taken.file_id)
    assert [a["outcome"] for a in attempts] == ["expired"] * 3 + ["ready"]
    assert [a["first_unit"] for a in attempts] == [0, 80, 80, 120]
    assert [a["units_embedded"] for a in attempts] == [80, 0, 40, 360]
    assert [a["units_embedded_again"] for a in attempts] == [0, 40, 40, 40]
    assert [float(a["seconds_lost"]) for a in attempts] == [5.0, 5.0, 5.0, 0.0]
    assert sum(a["pages_read"] for a in attempts) == 6
    assert all(a["pages_read_again"] <= 2 for a in attempts)
    # The bound is tight here: each kill came when a batch had just been embedded.
    assert bench.embedder.embedded == 480 + sum(a["units_embedded_again"] for a in attempts)


def test_an_attempt_that_died_before_it_began_hides_nothing(bench: Bench, document: Path) -> None:
    taken = bench.take(document)

    def die(batch: int) -> None:
        if batch == 2:
            raise SystemError("killed")

    bench.embedder.after = die
    first = bench.held()
    bench.attempt(first)
    bench.expire(first)
    bench.expire(bench.held("bob"))
    assert bench.finish("carol") == "ready"
    attempts = list_attempts(bench.conn, bench.workspace, taken.file_id)
    assert [a["units_embedded_again"] for a in attempts] == [0, 0, 40]


def test_pages_that_were_being_read_are_counted_as_read_again(bench: Bench, tmp_path: Path) -> None:
    taken = bench.take(notes_pdf(tmp_path / "set.pdf", 9))
    lease = bench.held()
    bench.conn.execute("alter table pages add constraint none check (page_index < 4) not valid")
    bench.attempt(lease)
    bench.expire(lease)
    bench.conn.execute("alter table pages drop constraint none")
    assert bench.finish() == "ready"
    first, second = list_attempts(bench.conn, bench.workspace, taken.file_id)
    assert (first["pages_read"], second["first_page"]) == (4, 4)
    assert (second["pages_read"], second["pages_read_again"]) == (5, 2)


def test_every_ingestion_of_a_file_is_in_its_ledger(bench: Bench, document: Path) -> None:
    taken = bench.take(document)
    bench.embedder.spoil = lambda vectors: vectors[:-1]
    bench.drain()
    bench.embedder.spoil = lambda vectors: vectors
    intake.retry(bench.conn, bench.workspace, taken.file_id)
    bench.drain()
    attempts = list_attempts(bench.conn, bench.workspace, taken.file_id)
    assert [(a["attempt"], a["outcome"]) for a in attempts] == [(1, "failed"), (1, "ready")]
    assert attempts[0]["error_code"] == "embedding_invalid"
