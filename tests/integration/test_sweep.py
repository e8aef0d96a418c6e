"""What nobody reads any more goes: rows first, a few at a time, then the bytes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from leasequeue import Worker
from planroom import ingestions, intake
from planroom.blobs import BlobStore
from planroom.config import Settings
from planroom.orphans import delete_orphans, mark_store
from planroom.stages import upkeep_stages
from support.engine import scalar
from support.room import Bench, notes_pdf

NO_GRACE = timedelta(0)
SMALL = {"chunk_tokens": 16, "chunk_overlap": 0}


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with Bench.open(settings.model_copy(update=SMALL)) as bench:
        yield bench


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """Two pages, 160 chunks."""
    return notes_pdf(tmp_path / "notes.pdf", 2)


def sweep(bench: Bench) -> None:
    while ingestions.sweep(bench.conn, grace=NO_GRACE):
        pass


def tidy(bench: Bench) -> int:
    """Delete the orphans among all blobs, however fresh they are."""
    return delete_orphans(bench.conn, bench.blobs, list(bench.blobs.hashes()), idle_seconds=0)


def rows(bench: Bench, ingestion_id: int) -> tuple[int, int]:
    return len(bench.pages(ingestion_id)), len(bench.chunks(ingestion_id))


# Rows


def test_a_superseded_version_is_swept_and_the_published_one_never(
    bench: Bench, document: Path
) -> None:
    first = bench.index(document)
    sweep(bench)
    assert rows(bench, first["id"]) == (2, 160)
    second = bench.index(notes_pdf(document, 1, first=7))
    sweep(bench)
    assert rows(bench, first["id"]) == (0, 0)
    assert rows(bench, second["id"]) == (1, 80)
    assert bench.row(first["id"])["swept_at"] is not None
    assert "701A" in bench.search("ANCHOR 701A")[0].snippet
    assert ingestions.sweep(bench.conn, grace=NO_GRACE) == 0


def test_a_version_that_a_search_may_still_read_is_left_for_a_while(
    bench: Bench, document: Path
) -> None:
    first = bench.index(document)
    bench.index(notes_pdf(document, 1, first=7))
    assert ingestions.sweep(bench.conn) == 0
    assert rows(bench, first["id"]) == (2, 160)
    later = datetime.now(UTC) + timedelta(minutes=2)
    assert ingestions.sweep(bench.conn, now=later) > 0


def test_a_sweep_removes_no_more_rows_at_once_than_it_may(bench: Bench, document: Path) -> None:
    first = bench.index(document)
    bench.remove(first["file_id"])
    steps: list[int] = []
    while removed := ingestions.sweep(bench.conn, 50, grace=NO_GRACE):
        steps.append(removed)
    assert steps == [50, 50, 50, 12]
    assert rows(bench, first["id"]) == (0, 0)


def test_unfinished_work_is_kept_for_a_retry_until_another_version_is_published(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    bench.embedder.spoil = lambda vectors: vectors[:-1]
    bench.drain()
    bench.embedder.spoil = lambda vectors: vectors
    sweep(bench)
    assert rows(bench, taken.ingestion_id)[0] == 2
    bench.index(notes_pdf(document, 1, first=7))
    sweep(bench)
    assert rows(bench, taken.ingestion_id) == (0, 0)


def test_what_still_runs_for_a_removed_file_is_swept_when_it_has_ended(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    assert bench.work(bench.held(), bench.stop_after(0)) == "queued"
    lease = bench.held()
    bench.remove(taken.file_id)
    sweep(bench)
    assert rows(bench, taken.ingestion_id)[0] == 2
    assert bench.work(lease) == "cancelled"
    sweep(bench)
    assert rows(bench, taken.ingestion_id) == (0, 0)


def test_two_sweeps_at_once_do_not_wait_for_each_other(bench: Bench, document: Path) -> None:
    first = bench.index(document)
    bench.remove(first["file_id"])
    with bench.database.connect() as rival, bench.conn.transaction():
        assert ingestions.sweep(bench.conn, 50, grace=NO_GRACE) == 50
        rival.execute("set lock_timeout = '2s'")
        assert ingestions.sweep(rival, 50, grace=NO_GRACE) == 0


def test_what_is_published_does_not_slow_the_search_for_what_is_not(
    bench: Bench, document: Path
) -> None:
    row = bench.index(document)
    with bench.conn.transaction():
        bench.conn.execute(
            "insert into files (workspace_id, project_id, name, sha256, size_bytes)"
            " select workspace_id, project_id, name || n, sha256, size_bytes"
            " from files, generate_series(1, 3000) as n"
        )
        bench.conn.execute(
            "insert into file_ingestions (workspace_id, project_id, file_id, version, sha256,"
            " size_bytes, status, finished_at, error_code) select workspace_id, project_id, id,"
            " version, sha256, size_bytes, 'failed', now(), 'test' from files where id <> %s",
            (row["file_id"],),
        )
    bench.conn.execute("vacuum analyze file_ingestions")
    with bench.conn.transaction():
        before = fetched(bench)
        assert ingestions.sweep(bench.conn, grace=NO_GRACE) == 0
        assert fetched(bench) - before < 10


def fetched(bench: Bench) -> int:
    return scalar(
        bench.conn,
        "select pg_stat_get_xact_tuples_fetched('file_ingestions'::regclass)"
        " + pg_stat_get_xact_tuples_returned('file_ingestions'::regclass)",
    )


# Bytes


def test_after_a_removal_nothing_is_left(bench: Bench, document: Path) -> None:
    row = bench.index(document)
    bench.remove(row["file_id"])
    sweep(bench)
    assert tidy(bench) == 1
    assert bench.count("select count(*) from pages") == 0
    assert bench.count("select count(*) from chunks") == 0
    assert list(bench.blobs.hashes()) == []


def test_bytes_stay_while_any_file_of_any_workspace_has_them(bench: Bench, document: Path) -> None:
    here = bench.index(document)
    copy = bench.index(document, "copy.pdf")
    there = bench.elsewhere("other")
    other = there.index(document)
    for owner, file_id in ((bench, here["file_id"]), (bench, copy["file_id"])):
        owner.remove(file_id)
        assert tidy(bench) == 0
    there.remove(other["file_id"])
    assert tidy(bench) == 1


def test_the_bytes_of_what_is_published_stay_while_the_next_version_is_made(
    bench: Bench, document: Path
) -> None:
    bench.index(document)
    bench.take(notes_pdf(document, 1, first=7))
    assert tidy(bench) == 0
    assert len(list(bench.blobs.hashes())) == 2
    bench.drain()
    assert tidy(bench) == 1
    [left] = bench.blobs.hashes()
    assert left == bench.rows("select sha256 from files")[0]["sha256"]


def test_the_bytes_of_a_removed_file_stay_while_its_ingestion_runs(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    lease = bench.held()
    bench.remove(taken.file_id)
    assert tidy(bench) == 0
    bench.work(lease)
    assert tidy(bench) == 1


def test_the_bytes_of_what_failed_stay_for_a_retry(bench: Bench, document: Path) -> None:
    taken = bench.take(document)
    bench.embedder.spoil = lambda vectors: vectors[:-1]
    bench.drain()
    bench.embedder.spoil = lambda vectors: vectors
    assert tidy(bench) == 0
    assert intake.retry(bench.conn, bench.workspace, taken.file_id) is not None
    bench.drain()
    assert bench.latest(taken.file_id)["status"] == "ready"


def test_a_blob_that_an_intake_has_just_met_is_left_alone(bench: Bench, document: Path) -> None:
    mark_store(bench.conn, bench.blobs)
    # An intake that was killed, or is about to write its rows: nobody can tell.
    blob = bench.blobs.put(document, bytes_max=10**9)
    assert delete_orphans(bench.conn, bench.blobs, [blob.sha256]) == 0
    long_ago = datetime.now(UTC).timestamp() - 7200
    os.utime(bench.blobs.path(blob.sha256), (long_ago, long_ago))
    assert delete_orphans(bench.conn, bench.blobs, [blob.sha256]) == 1


def test_a_folder_of_blobs_that_two_databases_use_is_left_alone(
    bench: Bench, document: Path
) -> None:
    row = bench.index(document)
    bench.remove(row["file_id"])
    # Another database, as a user has who changes PLANROOM_DATABASE_URL and keeps the home.
    bench.conn.execute("update installation set uuid = gen_random_uuid()")
    assert tidy(bench) == 0
    mark_store(bench.conn, bench.blobs)
    assert tidy(bench) == 0
    assert len(list(bench.blobs.hashes())) == 1


def test_hashes_names_every_blob_and_nothing_else(tmp_path: Path, bench: Bench) -> None:
    store = BlobStore(tmp_path / "store")
    assert list(store.hashes()) == []
    blobs = [
        store.put(notes_pdf(tmp_path / f"{i}.pdf", 1, first=i), bytes_max=10**9) for i in range(9)
    ]
    (store.root / "00" / "00").mkdir(parents=True, exist_ok=True)
    (store.root / "00" / "00" / "note.txt").write_text("not a blob")
    assert sorted(store.hashes()) == sorted(blob.sha256 for blob in blobs)


def test_the_stages_of_a_worker_remove_it_all_in_bounded_steps(
    bench: Bench, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planroom.stages.ORPHANS_PER_POLL", 1)
    row = bench.index(document)
    bench.index(notes_pdf(document, 1, first=7), "kept.pdf")
    bench.remove(row["file_id"])
    long_ago = datetime.now(UTC).timestamp() - 7200
    for sha256 in bench.blobs.hashes():
        os.utime(bench.blobs.path(sha256), (long_ago, long_ago))
    bench.conn.execute(
        "update file_ingestions set unread_at = unread_at - interval '1 hour',"
        " finished_at = finished_at - interval '1 hour'"
    )
    worker = Worker(bench.database.connect, bench.database.connection)
    worker.stages = upkeep_stages(worker, bench.database, bench.blobs)
    polls = list(itertools.takewhile(bool, (worker.poll().done for _ in range(20))))
    assert 2 <= len(polls) < 20
    assert rows(bench, row["id"]) == (0, 0)
    assert len(list(bench.blobs.hashes())) == 1
    # The next walk begins in an hour, whoever asks.
    other = Worker(bench.database.connect, bench.database.connection)
    other.stages = upkeep_stages(other, bench.database, bench.blobs)
    assert other.poll().done == 0
