"""The ingestion path, design §4: interrupted anywhere, it goes on where the last commit left it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import psycopg
import pytest

from leasequeue import AbortSignal, LeaseLost, Settled, ShuttingDown, settle
from planroom.chunk import ChunkParams, chunk_page
from planroom.config import Settings
from planroom.embed import no_abort
from planroom.verify import verify
from support.pdf import PdfPage, text, write_pdf
from support.room import Bench, HookedEmbedder, Vectors, notes, notes_pdf

SMALL = {"chunk_tokens": 16, "chunk_overlap": 0}


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with Bench.open(settings.model_copy(update=SMALL)) as bench:
        yield bench


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """Six pages, 480 chunks: three batches."""
    return notes_pdf(tmp_path / "notes.pdf", 6)


def undisturbed(bench: Bench, document: Path) -> list[tuple[object, ...]]:
    """The chunks of a run in a workspace of its own that nothing interrupts."""
    other = bench.elsewhere("undisturbed")
    return contents(other, other.index(document)["id"])


def contents(bench: Bench, ingestion_id: int) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in bench.chunks(ingestion_id)]


# Batches and the checkpoint


def test_a_document_becomes_pages_and_chunks_in_batches_of_200(
    bench: Bench, document: Path
) -> None:
    row = bench.index(document)
    assert row["status"] == "ready"
    assert (row["page_count"], row["processed_pages"]) == (6, 6)
    assert row["processed_units"] == row["total_units"] == row["planned_units"] > 400
    assert [len(batch) for batch in bench.embedder.batches] == [
        200,
        200,
        row["total_units"] - 400,
    ]
    assert bench.file(row["file_id"])["published_ingestion_id"] == row["id"]
    expected = [
        (page["page_index"], chunk.text, chunk.text_hash)
        for page in bench.pages(row["id"])
        for chunk in chunk_page(page["text"], ChunkParams(16, 0))
    ]
    assert [
        (chunk["page_index"], chunk["text"], chunk["text_hash"])
        for chunk in bench.chunks(row["id"])
    ] == expected


def test_a_checkpoint_and_its_chunks_commit_together_or_not_at_all(
    bench: Bench, document: Path
) -> None:
    seen: list[tuple[int, int]] = []
    with bench.database.connect() as watcher:

        def look(batch: int) -> None:
            row = watcher.execute(
                "select processed_units, (select count(*) from chunks where ingestion_id = job.id)"
                " from file_ingestions as job"
            ).fetchone()
            assert row is not None
            seen.append((row[0], row[1]))

        bench.embedder.before = look
        bench.index(document)
    assert seen == [(0, 0), (200, 200), (400, 400)]


def test_a_batch_that_cannot_be_written_leaves_its_checkpoint_behind(
    bench: Bench, document: Path
) -> None:
    bench.conn.execute(
        "alter table chunks add constraint refused check (chunk_index <> 250) not valid"
    )
    taken = bench.take(document)
    assert bench.finish() == "queued"
    row = bench.latest(taken.file_id)
    assert (row["processed_units"], len(bench.chunks(row["id"]))) == (200, 200)
    assert row["error_code"] == "unexpected"
    assert row["failures"] == 1


# Going on


def test_a_stopped_worker_gives_the_lease_back_and_another_goes_on(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    assert bench.work(bench.held("alice"), bench.stop_after(1)) == "queued"
    row = bench.row(taken.ingestion_id)
    assert (row["processed_units"], row["processed_pages"]) == (200, 6)
    assert (row["failures"], row["crashes"], row["attempts"]) == (0, 0, 1)
    before = contents(bench, row["id"])

    bench.embedder.before = lambda batch: None
    assert bench.finish("bob") == "ready"
    assert not bench.embedder.twice
    assert contents(bench, row["id"])[:200] == before
    assert contents(bench, row["id"]) == undisturbed(bench, document)
    first, second = bench.attempts(row["id"])
    assert (first["outcome"], first["units_embedded"], first["pages_read"]) == ("released", 200, 6)
    assert (second["first_unit"], second["first_page"]) == (200, 6)
    assert second["pages_read"] == 0
    assert second["units_embedded"] == row["planned_units"] - 200


def test_an_expired_lease_is_taken_over_and_nothing_committed_is_done_again(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    dead = bench.held("alice")
    # The worker dies while its second batch is being embedded.
    bench.embedder.after = die_at(2)
    assert isinstance(bench.attempt(dead), SystemError)
    bench.expire(dead)
    bench.embedder.after = lambda batch: None

    assert bench.finish("bob") == "ready"
    row = bench.row(taken.ingestion_id)
    assert len(bench.embedder.twice) == 200
    assert contents(bench, row["id"]) == undisturbed(bench, document)
    first, second = bench.attempts(row["id"])
    assert (first["outcome"], second["outcome"]) == ("expired", "ready")
    assert (second["first_page"], second["pages_read"]) == (6, 0)
    assert (second["first_unit"], second["units_embedded_again"]) == (200, 200)


def die_at(batch: int) -> Callable[[int], None]:
    def die(current: int) -> None:
        if current == batch:
            raise SystemError("the test kills this worker")

    return die


def test_a_page_that_is_committed_is_not_read_again(bench: Bench, tmp_path: Path) -> None:
    document = notes_pdf(tmp_path / "notes.pdf", 40)
    bench = bench.with_settings(page_group=4, batch_units=50)
    taken = bench.take(document)
    lease = bench.held("alice")
    bench.embedder.before = die_at(1)
    assert isinstance(bench.attempt(lease), SystemError)
    stopped_at = bench.row(taken.ingestion_id)["processed_pages"]
    assert 0 < stopped_at < 40
    before = bench.rows("select ctid::text, page_index from pages order by page_index")
    bench.expire(lease)
    bench.embedder.before = lambda batch: None

    assert bench.finish("bob") == "ready"
    after = bench.rows("select ctid::text, page_index from pages order by page_index")
    assert after[:stopped_at] == before
    [_, second] = bench.attempts(taken.ingestion_id)
    assert (second["first_page"], second["pages_read"]) == (stopped_at, 40 - stopped_at)
    assert second["pages_read_again"] <= 4
    assert contents(bench, taken.ingestion_id) == undisturbed(bench, document)


def test_many_interruptions_give_the_chunks_of_an_undisturbed_run(
    bench: Bench, document: Path
) -> None:
    bench = bench.with_settings(batch_units=40, page_group=2)
    taken = bench.take(document)
    interruptions = 0
    while True:
        lease = bench.held(f"worker {interruptions}")
        stop_at = len(bench.embedder.batches) + 2
        bench.embedder.after = die_at(stop_at)
        if isinstance(bench.attempt(lease), Settled):
            break
        interruptions += 1
        bench.expire(lease)
    assert interruptions > 5
    assert max(bench.embedder.counts.values()) == 2
    assert contents(bench, taken.ingestion_id) == undisturbed(bench, document)
    result = verify(bench.conn, bench.blobs, bench.settings, bench.workspace, taken.file_id)
    assert result.problems == []


def test_d17_a_worker_that_wakes_after_another_took_over_writes_nothing(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    stale = bench.held("alice")
    later = datetime.now(UTC) + timedelta(hours=1)
    rival = replace(bench, embedder=HookedEmbedder())

    def take_over(batch: int) -> None:
        if batch == 2:
            with bench.database.connect() as conn:
                rival.conn = conn
                assert rival.work(rival.held("bob", now=later)) == "ready"

    bench.embedder.after = take_over
    ending = bench.attempt(stale)
    assert isinstance(ending, LeaseLost)
    assert settle(bench.conn, stale, ending) == "lost"
    row = bench.row(taken.ingestion_id)
    assert (row["status"], row["attempts"]) == ("ready", 2)
    assert contents(bench, row["id"]) == undisturbed(bench, document)


def test_d19_a_shorter_version_leaves_no_tail(bench: Bench, tmp_path: Path) -> None:
    document = notes_pdf(tmp_path / "notes.pdf", 9)
    long = bench.index(document)
    short = bench.index(notes_pdf(document, 2))
    assert short["file_id"] == long["file_id"]
    assert short["total_units"] < long["total_units"]
    assert len(bench.chunks(short["id"])) == short["total_units"]
    assert {hit.page for hit in bench.search("ANCHOR 801A", k=50)} <= {1, 2}


def test_the_finish_deletes_what_a_longer_attempt_left(bench: Bench, document: Path) -> None:
    taken = bench.take(document)
    lease = bench.held()
    bench.embedder.after = die_at(3)
    bench.attempt(lease)
    # As after a change of the chunker: the rows of a plan that was longer.
    bench.conn.execute(
        "insert into chunks (ingestion_id, chunk_index, workspace_id, page_index, embedder_id,"
        " tokens, text_hash, text, embedding) select ingestion_id, chunk_index + 5000,"
        " workspace_id, page_index, embedder_id, tokens, text_hash, text, embedding from chunks"
    )
    bench.expire(lease)
    bench.embedder.after = lambda batch: None
    assert bench.finish("bob") == "ready"
    row = bench.row(taken.ingestion_id)
    assert [c["chunk_index"] for c in bench.chunks(row["id"])] == list(range(row["total_units"]))


# Fingerprints


def test_d23_another_chunker_at_mid_checkpoint_starts_the_chunks_again(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    assert bench.work(bench.held(), bench.stop_after(2)) == "queued"
    assert bench.row(taken.ingestion_id)["processed_units"] == 400
    bench.embedder.before = lambda batch: None

    newer = bench.with_settings(chunk_tokens=32)
    assert newer.finish("bob") == "ready"
    row = bench.row(taken.ingestion_id)
    assert row["chunker"] == ChunkParams(32, 0).identity
    assert contents(bench, row["id"]) == undisturbed(newer, document)
    assert len(bench.chunks(row["id"])) == row["total_units"]
    [_, second] = bench.attempts(row["id"])
    assert (second["first_page"], second["pages_read"], second["first_unit"]) == (6, 0, 0)
    assert (
        verify(bench.conn, bench.blobs, newer.settings, bench.workspace, taken.file_id).problems
        == []
    )


def test_d23_another_embedder_at_mid_checkpoint_never_mixes_vectors(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    assert bench.work(bench.held(), bench.stop_after(1)) == "queued"
    other = HookedEmbedder("hashing/other 256")
    bench.embedder = other
    assert bench.finish("bob") == "ready"
    row = bench.row(taken.ingestion_id)
    assert (row["embedder"], other.embedded) == (other.identity, row["total_units"])
    assert len({chunk["embedder_id"] for chunk in bench.chunks(row["id"])}) == 1


def test_d23_another_extractor_at_mid_checkpoint_reads_from_the_first_page(
    bench: Bench, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = bench.take(document)
    assert bench.work(bench.held(), bench.stop_after(1)) == "queued"
    bench.embedder.before = lambda batch: None
    monkeypatch.setattr("planroom.ingest.extractor_identity", lambda: "planroom-extract/next")
    assert bench.finish("bob") == "ready"
    row = bench.row(taken.ingestion_id)
    [_, second] = bench.attempts(row["id"])
    assert (second["first_page"], second["pages_read"]) == (0, 6)
    assert (row["extractor"], row["processed_pages"]) == ("planroom-extract/next", 6)
    # The texts are the same, so their vectors are found again and nothing is embedded twice.
    assert not bench.embedder.twice


# What a document may hold


def test_d20_the_same_notes_on_50_sheets_are_50_sheets_of_chunks(
    bench: Bench, tmp_path: Path
) -> None:
    document = write_pdf(tmp_path / "set.pdf", [PdfPage(notes(1, 20))] * 50)
    row = bench.index(document)
    per_page = len(bench.chunks(row["id"])) // 50
    assert per_page >= 20
    by_page = [chunk["page_index"] for chunk in bench.chunks(row["id"])]
    assert by_page == sorted(by_page)
    assert {page: by_page.count(page) for page in range(50)} == dict.fromkeys(range(50), per_page)
    assert bench.embedder.embedded == per_page
    assert {hit.page for hit in bench.search("ANCHOR 101A", k=50)} == set(range(1, 51))


def test_pages_without_text_between_pages_with_text_keep_the_order(
    bench: Bench, tmp_path: Path
) -> None:
    pages = [PdfPage(notes(i, 3)) if i % 3 == 0 else PdfPage() for i in range(31)]
    row = bench.index(write_pdf(tmp_path / "set.pdf", pages))
    assert row["image_only_pages"] == 20
    assert {c["page_index"] for c in bench.chunks(row["id"])} == set(range(0, 31, 3))


def test_d9_special_tokens_are_text_and_can_be_found(bench: Bench, tmp_path: Path) -> None:
    said = "STOP <|endoftext|> AND <|fim_prefix|> GO"
    row = bench.index(write_pdf(tmp_path / "tokens.pdf", [PdfPage(text(said, 40, 700))]))
    assert row["status"] == "ready"
    assert "".join(c["text"] for c in bench.chunks(row["id"])).replace(" ", "") == said.replace(
        " ", ""
    )


def test_time_is_the_databases(bench: Bench, document: Path) -> None:
    taken = bench.take(document)
    later = datetime.now(UTC) + timedelta(hours=1)
    first = bench.held("alice")
    second = bench.held("bob", now=later)
    assert (first.id, second.id) == (taken.ingestion_id, taken.ingestion_id)
    assert isinstance(bench.attempt(first, AbortSignal()), LeaseLost)


# What it leaves running, and what it holds


def test_no_thread_and_no_child_outlives_a_job_however_it_ends(
    bench: Bench, document: Path
) -> None:
    before = set(threading.enumerate())
    children = psutil.Process().children()
    bench.take(document)
    assert bench.work(bench.held(), bench.stop_after(1)) == "queued"
    bench.embedder.before = die_at(3)
    lease = bench.held()
    assert isinstance(bench.attempt(lease), SystemError)
    settle(bench.conn, lease, ShuttingDown("stopped"))
    bench.embedder.before = lambda batch: None
    assert bench.finish() == "ready"
    assert set(threading.enumerate()) == before
    assert psutil.Process().children() == children


def test_an_embedder_is_told_to_stop_when_the_job_fails_elsewhere(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    embedding, told = threading.Event(), threading.Event()
    small = bench.with_settings(page_group=2, batch_units=40)

    class Endless(HookedEmbedder):
        def embed(self, texts: Sequence[str], abort: Callable[[], None] = no_abort) -> Vectors:
            embedding.set()
            for _ in range(2000):
                try:
                    abort()
                except BaseException:
                    told.set()
                    raise
                told.wait(0.01)
            raise AssertionError("nobody told the embedder")

    small.embedder = Endless()
    bench.conn.execute("alter table pages add constraint none check (page_index < 4) not valid")
    ending = small.attempt(small.held())
    assert isinstance(ending, psycopg.errors.CheckViolation)
    assert embedding.is_set()
    assert told.is_set()
    assert bench.row(taken.ingestion_id)["processed_pages"] == 4


def test_a_plan_that_does_not_fit_its_pages_ends_in_an_error_and_not_in_a_loop(
    bench: Bench, document: Path
) -> None:
    taken = bench.take(document)
    assert bench.work(bench.held(), bench.stop_after(1)) == "queued"
    bench.embedder.before = lambda batch: None
    bench.conn.execute("update pages set text = 'SHORT' where page_index > 2")
    assert bench.finish() == "queued"
    row = bench.row(taken.ingestion_id)
    assert row["error_code"] == "unexpected"
    assert "are planned from" in row["error"]


@pytest.mark.slow
def test_d26_memory_is_flat_over_3000_pages(bench: Bench, tmp_path: Path) -> None:
    bench = bench.with_settings(chunk_tokens=256, chunk_overlap=32)
    bench.take(notes_pdf(tmp_path / "long.pdf", 3000))
    process = psutil.Process()
    resident: list[int] = []
    bench.embedder.after = lambda batch: resident.append(process.memory_info().rss)
    assert bench.finish() == "ready"
    assert len(resident) > 30
    # The memory of known words fills up over the first third and is bounded; from there it is flat.
    filled = resident[len(resident) // 3]
    assert max(resident) - filled < 16 * 1024 * 1024
    assert max(resident) - resident[0] < 100 * 1024 * 1024
