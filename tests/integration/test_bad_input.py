"""What bad input gets: one test a row of the table in the design, through intake and ingestion."""

from __future__ import annotations

import resource
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from leasequeue import Worker
from planroom.config import Settings
from planroom.embed import Embedder
from planroom.embed.openai import OpenAIEmbedder
from planroom.errors import InputRefused
from planroom.ingestions import any_pending
from planroom.intake import Outcome
from planroom.search import Mode
from planroom.stages import Embedders, ingest_stages
from planroom.status import list_files, list_gaps
from support.embedding_server import EmbeddingServer, Fault, rate_limited
from support.pdf import (
    PdfBookmark,
    PdfPage,
    annotation,
    bomb,
    break_xref,
    drawing,
    encrypt,
    image_page,
    labels,
    slow,
    text,
    truncate,
    write_pdf,
)
from support.room import Bench, Row, notes, notes_pdf

MIB = 1024 * 1024


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with Bench.open(settings) as bench:
        yield bench


def blobs_of(bench: Bench) -> list[Path]:
    return [path for path in bench.blobs.root.glob("*/*/*") if path.is_file()]


def assert_nothing_is_left(bench: Bench) -> None:
    assert bench.count("select count(*) from files") == 0
    assert bench.count("select count(*) from file_ingestions") == 0
    assert blobs_of(bench) == []
    assert list((bench.blobs.root / "tmp").glob("*")) == []


def failed(row: Row, code: str) -> str:
    """The sentence of an ingestion that failed with this code, for good and at the first try."""
    assert (row["status"], row["error_code"], row["attempts"]) == ("failed", code, 1)
    assert row["finished_at"] is not None
    assert len(row["error"]) > 20
    return str(row["error"])


# "no such file, a folder, an empty file, HTML named .pdf | refused at intake"


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("nothing.pdf", None, "no_such_file"),
        ("empty.pdf", b"", "empty_file"),
        ("page.pdf", b"<!doctype html><html><body>404</body></html>", "not_a_pdf"),
        ("office.pdf", b"PK\x03\x04" + bytes(2000), "not_a_pdf"),
    ],
)
def test_what_is_no_pdf_is_refused_at_intake_with_no_row_and_no_blob(
    bench: Bench, tmp_path: Path, name: str, content: bytes | None, code: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputRefused) as refused:
        bench.take(path)
    assert refused.value.code == code
    assert "\n" not in str(refused.value)
    assert name in str(refused.value)
    assert_nothing_is_left(bench)


def test_a_folder_is_refused_at_intake_with_no_row_and_no_blob(
    bench: Bench, tmp_path: Path
) -> None:
    with pytest.raises(InputRefused, match="is a folder") as refused:
        bench.take(tmp_path)
    assert refused.value.code == "not_a_file"
    assert_nothing_is_left(bench)


# "over the cap in bytes, pages or chunks | failed, both numbers and the setting, never loaded"


def test_over_the_cap_in_bytes_is_a_row_that_names_both_numbers_and_the_setting(
    bench: Bench, tmp_path: Path
) -> None:
    document = notes_pdf(tmp_path / "big.pdf", 3)
    size = document.stat().st_size
    strict = bench.with_settings(file_bytes_max=1234)
    taken = strict.take(document)
    assert taken.outcome is Outcome.TOO_LARGE
    assert strict.claim() is None
    row = bench.row(taken.ingestion_id)
    assert (row["status"], row["error_code"]) == ("failed", "too_many_bytes")
    for part in (f"{size:,}", "1,234", "PLANROOM_FILE_BYTES_MAX"):
        assert part in row["error"]
    assert blobs_of(bench) == []
    assert list_files(bench.conn, bench.workspace)[0]["state"] == "failed"
    # Again: the same answer, and no second row.
    assert strict.take(document) == taken
    assert bench.count("select count(*) from file_ingestions") == 1
    # With the cap raised it is taken like any other.
    assert bench.index(document)["status"] == "ready"


def test_a_published_file_stays_searchable_when_its_next_version_is_over_the_cap(
    bench: Bench, tmp_path: Path
) -> None:
    document = notes_pdf(tmp_path / "set.pdf", 1)
    first = bench.index(document)
    strict = bench.with_settings(file_bytes_max=document.stat().st_size + 10)
    assert strict.take(notes_pdf(document, 3)).outcome is Outcome.TOO_LARGE
    assert bench.search("ANCHOR 101A")[0].page_count == 1
    assert bench.file(first["file_id"])["published_ingestion_id"] == first["id"]


def test_over_the_cap_in_pages_fails_with_both_numbers_and_the_setting(
    bench: Bench, tmp_path: Path
) -> None:
    row = bench.with_settings(pages_max=4).index(notes_pdf(tmp_path / "set.pdf", 5, lines=2))
    said = failed(row, "too_many_pages")
    assert "5 pages" in said
    assert "4" in said
    assert "PLANROOM_PAGES_MAX" in said


def test_over_the_cap_in_chunks_fails_with_both_numbers_and_the_setting(
    bench: Bench, tmp_path: Path
) -> None:
    strict = bench.with_settings(chunks_max=30, chunk_tokens=16, chunk_overlap=0, page_group=2)
    row = strict.index(notes_pdf(tmp_path / "set.pdf", 6, lines=10))
    said = failed(row, "too_many_chunks")
    assert "at most 30" in said
    assert "40 chunks" in said
    assert "PLANROOM_CHUNKS_MAX" in said
    # It was not read to its end to find that out.
    assert row["processed_pages"] < 6


# "needs a password | failed, password_required, no retry"


def test_a_password_ends_it_without_a_retry(bench: Bench, tmp_path: Path) -> None:
    document = encrypt(notes_pdf(tmp_path / "locked.pdf", 1), user="secret", owner="owner")
    failed(bench.index(document), "password_required")


def test_an_owner_password_alone_is_no_obstacle(bench: Bench, tmp_path: Path) -> None:
    document = encrypt(notes_pdf(tmp_path / "owned.pdf", 1), user="", owner="owner")
    assert bench.index(document)["status"] == "ready"


# "damaged | what can be read is; each unreadable page says why; nothing at all: unreadable"


def test_a_truncated_file_is_unreadable_and_says_that_it_is_truncated(
    bench: Bench, tmp_path: Path
) -> None:
    document = truncate(notes_pdf(tmp_path / "cut.pdf", 9), 0.3)
    said = failed(bench.index(document), "unreadable")
    assert "truncated" in said


def test_d12_a_broken_cross_reference_is_recovered(bench: Bench, tmp_path: Path) -> None:
    document = break_xref(notes_pdf(tmp_path / "set.pdf", 3))
    row = bench.index(document)
    assert (row["status"], row["page_count"], row["failed_pages"]) == ("ready", 3, 0)


def test_a_document_without_pages_is_unreadable(bench: Bench, tmp_path: Path) -> None:
    failed(bench.index(write_pdf(tmp_path / "none.pdf", [])), "unreadable")


# "a page that hangs, explodes in memory or crashes the parser | that page failed"


def test_a_page_that_hangs_or_explodes_is_failed_and_the_set_goes_on(
    bench: Bench, tmp_path: Path
) -> None:
    pages = [PdfPage(notes(1, 5)), slow(24_000_000), PdfPage(notes(3, 5)), bomb(768 * MIB)]
    document = write_pdf(tmp_path / "set.pdf", [*pages, PdfPage(notes(5, 5))])
    careful = bench.with_settings(page_seconds=0.4, extract_memory_bytes=400 * MIB)
    row = careful.index(document)
    gaps = list_gaps(bench.conn, bench.workspace, row["id"])
    assert (row["status"], row["page_count"], row["failed_pages"]) == ("ready", 5, 2), gaps
    assert [(gap["page"], gap["status"]) for gap in gaps] == [(2, "failed"), (4, "failed")]
    assert gaps[0]["reason"] == "timeout"
    assert gaps[1]["reason"] in ("memory", "crashed", "timeout")
    assert all(gap["detail"] for gap in gaps)
    assert {hit.page for hit in bench.search("ANCHOR")} == {1, 3, 5}


def test_every_page_unreadable_fails_and_says_what_the_first_one_said(
    bench: Bench, tmp_path: Path
) -> None:
    document = write_pdf(tmp_path / "set.pdf", [slow(24_000_000), slow(24_000_000)])
    row = bench.with_settings(page_seconds=0.5).index(document)
    said = failed(row, "unreadable")
    assert "2 pages" in said
    assert "processor time" in said


# "image-only pages | counted and listed; whole set image-only: failed, no_text"


def test_d5_image_only_pages_are_counted_and_listed(bench: Bench, tmp_path: Path) -> None:
    pages = [PdfPage(notes(1, 5)), image_page(), PdfPage(), PdfPage(notes(4, 5))]
    row = bench.index(write_pdf(tmp_path / "set.pdf", pages))
    assert (row["status"], row["image_only_pages"]) == ("ready", 2)
    gaps = list_gaps(bench.conn, bench.workspace, row["id"])
    assert [(gap["page"], gap["status"]) for gap in gaps] == [(2, "image_only"), (3, "image_only")]
    status = list_files(bench.conn, bench.workspace)[0]
    assert (status["image_only_pages"], status["failed_pages"]) == (2, 0)


@pytest.mark.parametrize(
    ("pages", "said"),
    [(1, "Its only page has no text."), (3, "None of its 3 pages has text.")],
)
def test_d4_a_set_of_images_alone_is_failed_no_text(
    bench: Bench, tmp_path: Path, pages: int, said: str
) -> None:
    row = bench.index(write_pdf(tmp_path / "scan.pdf", [image_page()] * pages))
    assert failed(row, "no_text").startswith(said)
    assert bench.search("anything") == []


# "NUL, lone surrogates, control characters in text | cleaned once; the batch lands"


def test_d7_d8_nul_and_surrogates_in_text_title_and_file_name_are_cleaned_once(
    bench: Bench, tmp_path: Path
) -> None:
    nasty = "VALVE\x00\x01 TAG\ud800 V-7\ufffe END"
    units = nasty.encode("utf-16-be", "surrogatepass").hex()
    title = "A-101 ROOF\x00 PLAN\udc00".encode("utf-16-be", "surrogatepass").hex()
    page = PdfPage(
        notes(1, 199), annotations=(annotation("Square", "", extra=f"/Contents <FEFF{units}>"),)
    )
    document = write_pdf(
        tmp_path / "set.pdf",
        [page],
        outline=[PdfBookmark(f"<FEFF{title}>", 0)],
        root=labels("A-101\\000"),
    )
    small = bench.with_settings(chunk_tokens=16, chunk_overlap=0)
    taken = small.take(document, "NUL\x00 and \udcff.pdf")
    small.drain()
    row = bench.latest(taken.file_id)
    assert (row["status"], row["attempts"]) == ("ready", 1)
    assert taken.name == "NUL\ufffd and \ufffd.pdf"
    [stored] = bench.pages(row["id"])
    assert (stored["sheet_number"], stored["sheet_title"]) == ("A-101", "ROOF PLAN")
    assert "VALVE TAG V-7- END" in stored["text"]
    hit = bench.search("VALVE TAG", mode=Mode.TEXT)[0]
    assert (hit.page, hit.sheet_number, hit.file) == (1, "A-101", taken.name)
    assert "\x00" not in hit.snippet


# "<|endoftext|> and other special tokens in text | ordinary text"


def test_special_tokens_are_ordinary_text(bench: Bench, tmp_path: Path) -> None:
    said = "SEE <|endoftext|> AND <|fim_middle|> HERE"
    row = bench.index(write_pdf(tmp_path / "tokens.pdf", [PdfPage(text(said, 40, 700))]))
    assert row["status"] == "ready"
    assert [chunk["text"] for chunk in bench.chunks(row["id"])] == [said]
    assert bench.search("endoftext", mode=Mode.TEXT)[0].page == 1


# "100,000 characters without a space | tokenised in linear time"


def test_d10_100000_characters_without_a_space_are_indexed_fast(
    bench: Bench, tmp_path: Path
) -> None:
    run = "".join("ABCDEFGHJKLMNPQRSTUVWXYZ"[(i * i + i // 7) % 24] for i in range(100_000))
    page = PdfPage(annotations=(annotation("Square", run),))
    document = write_pdf(tmp_path / "run.pdf", [page])
    started = time.process_time()
    row = bench.index(document)
    assert row["status"] == "ready"
    stored = "".join(line for line in bench.pages(row["id"])[0]["text"].splitlines())
    assert len(stored) >= 100_000
    assert row["total_units"] > 100
    # A quadratic tokeniser takes minutes for it.
    assert time.process_time() - started < 30


# "embedder: 429 or 5xx | retried with Retry-After honoured; earlier batches kept"


@contextmanager
def service(bench: Bench) -> Generator[EmbeddingServer]:
    with EmbeddingServer() as server:
        embedder = OpenAIEmbedder(
            base_url=server.url, model="test", dimensions=64, wait=lambda seconds: None
        )
        bench.opens = lambda settings: embedder
        with closing(embedder):
            yield server


def test_a_busy_embedder_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    with service(bench) as server:
        server.fail_next(rate_limited(3), Fault("status", 503))
        row = bench.index(notes_pdf(tmp_path / "set.pdf", 1))
        assert (row["status"], row["attempts"], server.requests) == ("ready", 1, 3)


# "embedder: wrong count, wrong dimension, NaN, shuffled | the batch fails, naming the chunk"


def test_a_lying_embedder_fails_the_batch_and_names_the_chunk(bench: Bench, tmp_path: Path) -> None:
    with service(bench) as server:
        server.fail_next(Fault("nan", position=1))
        said = failed(bench.index(notes_pdf(tmp_path / "set.pdf", 1)), "embedding_invalid")
        assert "for chunk 1, on page 1" in said
        assert bench.count("select count(*) from chunks") == 0


# "database restarts, fails over, drops the network | reconnects, carries on"


def test_every_connection_that_drops_in_mid_document_is_made_again(
    bench: Bench, tmp_path: Path
) -> None:
    small = bench.with_settings(chunk_tokens=16, chunk_overlap=0, batch_units=40, poll_seconds=0.1)
    taken = small.take(notes_pdf(tmp_path / "set.pdf", 2))

    def drop(batch: int) -> None:
        if batch in (2, 4):
            bench.conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )

    bench.embedder.before = drop

    class Hooked(Embedders):
        def open(self, settings: Settings) -> Embedder:
            return bench.embedder

    worker = Worker(bench.database.connect, bench.database.connection, poll_seconds=0.1)
    worker.stages = ingest_stages(
        worker, bench.database, bench.blobs, small.settings, Hooked(), [taken.file_id]
    )

    def is_over() -> bool:
        with bench.database.connection() as conn:
            return not any_pending(conn, [taken.file_id])

    worker.run(idle=is_over)
    row = bench.row(taken.ingestion_id)
    assert (row["status"], row["failures"]) == ("ready", 0)
    assert len(bench.chunks(row["id"])) == row["total_units"]
    assert max(bench.embedder.counts.values()) <= 2
    outcomes = [attempt["outcome"] for attempt in bench.attempts(row["id"])]
    assert outcomes[-1] == "ready"
    assert len(outcomes) >= 2


# "disk full at intake | refused with the cause; no partial blob stays"


@contextmanager
def files_of_at_most(size: int) -> Generator[None]:
    """As on a full disk: no file may grow beyond `size`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_at_intake_is_refused_with_the_cause_and_leaves_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    document = notes_pdf(tmp_path / "set.pdf", 30)
    size = document.stat().st_size
    assert size > 64 * 1024
    with files_of_at_most(32 * 1024), pytest.raises(InputRefused) as refused:
        bench.take(document)
    assert refused.value.code == "disk_full"
    assert refused.value.hint is not None
    assert_nothing_is_left(bench)
    assert bench.take(document).outcome is Outcome.NEW


# And what the table does not say


def test_a_blob_that_is_missing_is_retried_and_then_fails_with_what_to_do(
    bench: Bench, tmp_path: Path
) -> None:
    taken = bench.take(notes_pdf(tmp_path / "set.pdf", 1))
    for path in blobs_of(bench):
        path.unlink()
    statuses: list[str] = []
    while not statuses or statuses[-1] == "queued":
        bench.conn.execute("update file_ingestions set queued_at = now()")
        statuses.append(bench.finish())
    assert statuses == ["queued", "queued", "failed"]
    row = bench.row(taken.ingestion_id)
    assert row["error_code"] == "blob_missing"
    assert "Add the file again" in row["error"]
    assert bench.index(tmp_path / "set.pdf")["status"] == "ready"


def test_a_drawing_with_everything_at_once_is_one_clean_sheet(bench: Bench, tmp_path: Path) -> None:
    document = write_pdf(
        tmp_path / "sheet.pdf", [PdfPage(drawing("A-101", "FLOOR PLAN"), (2592.0, 1728.0))]
    )
    row = bench.index(document)
    assert row["status"] == "ready"
    assert bench.search("a 101")[0].sheet_number == "A-101"
