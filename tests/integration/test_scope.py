"""What happens to an ingestion while the world around it changes: versions, projects, removal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from leasequeue import Ended, LeaseLost, Settled, settle
from planroom import files, ingestions, intake
from planroom.config import Settings
from planroom.errors import NotFound, PlanroomError
from planroom.files import cancel_ingestions, move_file
from planroom.intake import Outcome
from planroom.projects import ensure_project, set_project_settings
from planroom.status import list_files
from support.engine import await_blocked, in_background, scalar
from support.room import Bench, HookedEmbedder, notes_pdf

NO_GRACE = timedelta(0)
SMALL = {"chunk_tokens": 16, "chunk_overlap": 0, "batch_units": 40}


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with Bench.open(settings.model_copy(update=SMALL)) as bench:
        yield bench


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """Two pages, 160 chunks: four batches of 40."""
    return notes_pdf(tmp_path / "notes.pdf", 2)


# Versions


def test_a_new_version_is_searched_when_it_is_whole_and_the_old_one_until_then(
    bench: Bench, document: Path
) -> None:
    first = bench.index(document)
    seen: list[tuple[list[int], bool]] = []

    def look(batch: int) -> None:
        with bench.database.connect() as conn:
            hits = replace(bench, conn=conn).search("ANCHOR 101A", k=3)
            new = replace(bench, conn=conn).search("ANCHOR 701A", k=3)
            seen.append(([hit.page for hit in hits[:1]], "701A" in new[0].snippet))

    bench.embedder.before = look
    second = bench.index(notes_pdf(document, 2, first=7))
    assert second["version"] == 2
    assert seen == [([1], False)] * 4
    assert "701A" in bench.search("ANCHOR 701A")[0].snippet
    assert not any("101A" in hit.snippet for hit in bench.search("ANCHOR 101A"))
    assert bench.row(first["id"])["status"] == "ready"
    assert bench.row(first["id"])["unread_at"] is not None


def test_q25_changed_bytes_during_an_ingestion_end_it_and_get_their_own(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    lease = bench.held()
    again: list[intake.Taken] = []

    def change(batch: int) -> None:
        if batch == 2:
            with bench.database.connect() as conn:
                again.append(replace(bench, conn=conn).take(notes_pdf(document, 2, first=7)))

    bench.embedder.before = change
    assert bench.work(lease) == "cancelled"
    row = bench.row(taken.ingestion_id)
    assert (row["status"], row["error_code"], row["version"]) == ("cancelled", "superseded", 1)
    assert (again[0].outcome, again[0].version) == (Outcome.NEW_VERSION, 2)
    assert bench.file(taken.file_id)["published_ingestion_id"] is None

    bench.drain()
    row = bench.latest(taken.file_id)
    assert (row["status"], row["version"]) == ("ready", 2)
    assert bench.file(taken.file_id)["published_ingestion_id"] == row["id"]
    assert "701A" in bench.search("ANCHOR 701A")[0].snippet


def test_q25_changed_bytes_before_the_resume_are_not_mixed_with_the_checkpoint(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    assert bench.work(bench.held(), bench.stop_after(2)) == "queued"
    bench.embedder.before = lambda batch: None
    second = bench.index(notes_pdf(document, 2, first=7))
    assert second["id"] != taken.ingestion_id
    assert bench.row(taken.ingestion_id)["error_code"] == "superseded"
    [attempt] = bench.attempts(second["id"])
    assert (attempt["first_page"], attempt["first_unit"]) == (0, 0)
    assert all("10" not in chunk["text"].split()[0] for chunk in bench.chunks(second["id"])[:1])
    assert second["status"] == "ready"


def test_changed_bytes_at_the_very_end_are_seen_by_the_finish(bench: Bench, document: Path) -> None:
    taken = bench.take(document)

    def change(batch: int) -> None:
        if batch == 4:
            with bench.database.connect() as conn:
                # Not by an intake, which would also ask the ingestion to end.
                conn.execute("update files set version = 2, sha256 = sha256(sha256)")

    bench.embedder.after = change
    assert bench.finish() == "cancelled"
    assert bench.row(taken.ingestion_id)["error_code"] == "superseded"
    assert bench.file(taken.file_id)["published_ingestion_id"] is None


def test_the_same_bytes_again_during_their_ingestion_join_it(bench: Bench, document: Path) -> None:
    taken = bench.take(document)
    bench.held()
    again = bench.take(document)
    assert (again.outcome, again.ingestion_id) == (Outcome.RESUMED, taken.ingestion_id)
    assert bench.row(taken.ingestion_id)["cancel_requested_at"] is None


# Cancel, and again


def test_a_cancel_keeps_what_was_done_and_index_goes_on_from_there(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    lease = bench.held()

    def cancel(batch: int) -> None:
        if batch == 2:
            with bench.database.connect() as conn:
                cancel_ingestions(conn, bench.workspace, taken.file_id)

    bench.embedder.before = cancel
    assert bench.work(lease) == "cancelled"
    assert bench.row(taken.ingestion_id)["processed_units"] == 80
    bench.embedder.before = lambda batch: None
    again = bench.take(document)
    assert again.outcome is Outcome.RETRIED
    assert bench.finish() == "ready"
    [attempt] = bench.attempts(again.ingestion_id)
    assert (attempt["pages_read"], attempt["units_reused"]) == (0, 80)
    assert not bench.embedder.twice


def test_index_after_a_cancel_that_has_not_ended_yet_is_not_lost(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    lease = bench.held()
    assert cancel_ingestions(bench.conn, bench.workspace, taken.file_id) == {
        taken.ingestion_id: "running"
    }
    again = bench.take(document)
    assert again.outcome is Outcome.RETRIED
    assert bench.work(lease) == "cancelled"
    assert ingestions.any_pending(bench.conn, [taken.file_id])
    bench.drain()
    assert bench.latest(taken.file_id)["status"] == "ready"


def test_a_retry_after_a_cancel_that_has_not_ended_yet_is_not_lost(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    lease = bench.held()
    assert intake.retry(bench.conn, bench.workspace, taken.file_id) is None
    cancel_ingestions(bench.conn, bench.workspace, taken.file_id)
    assert intake.retry(bench.conn, bench.workspace, taken.file_id) == taken.ingestion_id
    assert bench.work(lease) == "cancelled"
    bench.drain()
    assert bench.latest(taken.file_id)["status"] == "ready"


def test_a_cancel_also_takes_back_the_version_that_waits_for_its_turn(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    lease = bench.held()
    bench.take(notes_pdf(document, 2, first=7))
    cancel_ingestions(bench.conn, bench.workspace, taken.file_id)
    assert bench.work(lease) == "cancelled"
    assert not ingestions.any_pending(bench.conn)
    bench.drain()
    assert bench.latest(taken.file_id)["id"] == taken.ingestion_id
    assert bench.take(document).outcome is Outcome.NEW_VERSION


# Projects


def test_a_file_moved_while_it_is_indexed_is_published_in_its_new_project(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    annex = ensure_project(bench.conn, bench.workspace, "annex")

    def move(batch: int) -> None:
        if batch == 2:
            with bench.database.connect() as conn:
                move_file(conn, bench.workspace, taken.file_id, annex)

    bench.embedder.before = move
    assert bench.finish() == "ready"
    row = bench.row(taken.ingestion_id)
    assert (row["project_id"], row["attempts"]) == (annex, 1)
    assert bench.search("ANCHOR 101A") == []
    assert bench.search("ANCHOR 101A", project_id=annex)[0].page == 1
    assert not ingestions.any_pending(bench.conn)


def test_a_file_moved_to_other_settings_is_made_again_from_its_pages(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    annex = ensure_project(bench.conn, bench.workspace, "annex")
    set_project_settings(bench.conn, bench.workspace, annex, {"chunk_tokens": 32}, bench.settings)

    def move(batch: int) -> None:
        if batch == 2:
            with bench.database.connect() as conn:
                move_file(conn, bench.workspace, taken.file_id, annex)

    bench.embedder.before = move
    assert bench.finish() == "queued"
    row = bench.row(taken.ingestion_id)
    assert (row["error_code"], row["failures"], row["project_id"]) == ("moved", 0, annex)
    assert bench.file(taken.file_id)["published_ingestion_id"] is None
    assert bench.finish("bob") == "ready"
    row = bench.row(taken.ingestion_id)
    assert "max=32" in row["chunker"]
    assert len(bench.chunks(row["id"])) == row["total_units"] < 160
    first, second = bench.attempts(row["id"])
    assert (first["outcome"], first["error_code"]) == ("released", "moved")
    # Made again because other settings hold, not because anything was lost.
    assert (second["pages_read"], second["units_embedded_again"]) == (0, 0)


def test_a_file_moved_before_its_turn_is_made_once_with_the_new_settings(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    annex = ensure_project(bench.conn, bench.workspace, "annex")
    set_project_settings(bench.conn, bench.workspace, annex, {"chunk_tokens": 32}, bench.settings)
    move_file(bench.conn, bench.workspace, taken.file_id, annex)
    assert bench.finish() == "ready"
    row = bench.row(taken.ingestion_id)
    assert (row["attempts"], row["project_id"]) == (1, annex)
    assert "max=32" in row["chunker"]


def test_an_indexed_file_moved_to_other_settings_is_indexed_again(
    bench: Bench, document: Path
) -> None:
    first = bench.index(document)
    same = ensure_project(bench.conn, bench.workspace, "same")
    move_file(bench.conn, bench.workspace, first["file_id"], same)
    assert not ingestions.any_pending(bench.conn)
    other = ensure_project(bench.conn, bench.workspace, "other")
    set_project_settings(bench.conn, bench.workspace, other, {"chunk_tokens": 32}, bench.settings)
    move_file(bench.conn, bench.workspace, first["file_id"], other)
    assert bench.search("ANCHOR 101A", project_id=other)[0].page == 1
    bench.drain()
    second = bench.latest(first["file_id"])
    assert second["id"] != first["id"]
    assert (second["status"], second["project_id"]) == ("ready", other)
    assert "max=32" in second["chunker"]


def test_a_move_to_where_the_name_is_taken_or_to_nowhere_is_refused(
    bench: Bench, document: Path
) -> None:
    row = bench.index(document)
    annex = ensure_project(bench.conn, bench.workspace, "annex")
    bench.take(document, project=annex)
    with pytest.raises(PlanroomError, match=r"notes\.pdf") as refused:
        move_file(bench.conn, bench.workspace, row["file_id"], annex)
    assert refused.value.code == "name_taken"
    with pytest.raises(NotFound):
        move_file(bench.conn, bench.workspace, row["file_id"], 10**9)
    assert bench.file(row["file_id"])["project_id"] == bench.project


def test_settings_that_make_no_sense_are_refused(bench: Bench) -> None:
    for wrong in ({"embedder": "none"}, {"chunk_tokens": 8}, {"chunk_overlap": 15}, {"home": "/"}):
        with pytest.raises(PlanroomError):
            set_project_settings(bench.conn, bench.workspace, bench.project, wrong, bench.settings)
    assert scalar(bench.conn, "select settings from projects") == {}


# Removal


def test_d18_a_file_removed_during_its_ingestion_leaves_nothing(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    lease = bench.held()
    bench.embedder.before = lambda batch: remove_at(bench, taken.file_id, batch, 3)
    ending = bench.attempt(lease)
    assert settle(bench.conn, lease, ending) == "cancelled"
    assert bench.search("ANCHOR 101A") == []
    while ingestions.sweep(bench.conn, grace=NO_GRACE):
        pass
    assert bench.count("select count(*) from chunks") == 0
    assert bench.count("select count(*) from pages") == 0
    # A late word of the same attempt brings nothing back.
    assert isinstance(bench.attempt(lease), LeaseLost)
    assert settle(bench.conn, lease, Settled("ready")) == "ready"
    assert bench.row(taken.ingestion_id)["status"] == "cancelled"
    assert bench.row(taken.ingestion_id)["error_code"] == "file_removed"
    assert bench.file(taken.file_id)["published_ingestion_id"] is None
    assert bench.count("select count(*) from chunks") == 0


def remove_at(bench: Bench, file_id: int, batch: int, at: int) -> None:
    if batch == at:
        with bench.database.connect() as conn:
            assert replace(bench, conn=conn).remove(file_id)


def test_d18_a_file_removed_after_the_last_batch_is_not_published(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    bench.embedder.after = lambda batch: remove_at(bench, taken.file_id, batch, 4)
    assert bench.finish() == "cancelled"
    assert bench.file(taken.file_id)["published_ingestion_id"] is None


def test_a_removed_file_is_out_of_search_at_once_and_its_dead_worker_cannot_come_back(
    bench: Bench, document: Path
) -> None:
    row = bench.index(document)
    assert bench.remove(row["file_id"])
    assert not bench.remove(row["file_id"])
    assert bench.search("ANCHOR 101A") == []
    again = bench.take(document)
    assert (again.outcome, again.file_id == row["file_id"]) == (Outcome.NEW, False)
    with pytest.raises(NotFound):
        intake.retry(bench.conn, bench.workspace, row["file_id"])


def test_an_expired_ingestion_of_a_removed_file_is_ended_by_the_claim(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    lease = bench.held()
    bench.remove(taken.file_id)
    bench.expire(lease)
    assert isinstance(bench.claim("bob"), Ended)
    assert bench.row(taken.ingestion_id)["status"] == "cancelled"


# Meeting


def test_d24_two_workers_with_the_same_texts_do_not_block_each_other(
    bench: Bench, tmp_path: Path
) -> None:
    """Both write the same texts in one workspace, batch by batch at the same time."""
    bench.take(notes_pdf(tmp_path / "a.pdf", 3))
    bench.take(notes_pdf(tmp_path / "a.pdf", 3), "b.pdf")
    barrier = threading.Barrier(2, timeout=20)

    def meet(batch: int) -> None:
        if batch <= 4:
            barrier.wait()

    statuses: list[str] = []

    def work(owner: str) -> None:
        with bench.database.connect() as conn:
            embedder = HookedEmbedder()
            embedder.after = meet
            mine = replace(bench, conn=conn, embedder=embedder)
            statuses.append(mine.finish(owner))

    with in_background(lambda: work("alice")):
        work("bob")
    assert statuses == ["ready", "ready"]
    assert bench.count("select count(distinct ingestion_id) from chunks") == 2


def test_an_intake_and_a_finish_that_meet_wait_for_each_other_in_one_order(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    lease = bench.held()
    with bench.database.connect() as conn:
        statuses: list[str] = []

        def work() -> None:
            statuses.append(replace(bench, conn=conn).work(lease))

        with ExitStack() as stack, bench.conn.transaction():
            # As an intake of other bytes does: the file first, then its ingestions.
            files.lock_file(bench.conn, bench.workspace, taken.file_id)
            stack.enter_context(in_background(work))
            with bench.database.connect() as watcher:
                await_blocked(watcher, conn.info.backend_pid)
            files.end_ingestions(bench.conn, bench.workspace, taken.file_id)
    assert statuses == ["cancelled"]


def test_d25_a_file_behind_a_big_one_is_queued_and_not_stalled(
    bench: Bench, tmp_path: Path
) -> None:
    big = bench.take(notes_pdf(tmp_path / "big.pdf", 3))
    small = bench.take(notes_pdf(tmp_path / "small.pdf", 1))
    states: list[dict[int, str]] = []

    def look(batch: int) -> None:
        with bench.database.connect() as conn:
            conn.execute(
                "update file_ingestions set queued_at = now() - interval '9 hours',"
                " created_at = now() - interval '9 hours' where status = 'queued'"
            )
            rows = list_files(conn, bench.workspace)
            states.append({row["id"]: row["state"] for row in rows})

    bench.embedder.before = look
    assert bench.finish() == "ready"
    assert {state[small.file_id] for state in states} == {"queued"}
    assert {state[big.file_id] for state in states} <= {"reading", "embedding"}
    bench.embedder.before = lambda batch: None
    assert bench.finish() == "ready"
