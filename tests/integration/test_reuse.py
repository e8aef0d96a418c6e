"""Nothing is embedded that this workspace has embedded before; nothing is done for no reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from planroom import intake
from planroom.chunks import ensure_embedder, find_embedded
from planroom.config import Settings
from planroom.intake import Outcome
from support.drawing_set import make_set
from support.engine import snapshot
from support.pdf import PdfPage, write_pdf
from support.room import Bench, HookedEmbedder, notes, notes_pdf

SMALL = {"chunk_tokens": 16, "chunk_overlap": 0}


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with Bench.open(settings.model_copy(update=SMALL)) as bench:
        yield bench


def test_d21_an_unchanged_file_again_embeds_nothing_and_changes_no_row(
    bench: Bench, tmp_path: Path
) -> None:
    document = notes_pdf(tmp_path / "notes.pdf", 6)
    row = bench.index(document)
    assert row["total_units"] > 400
    embedded = bench.embedder.embedded
    tables = ("files", "file_ingestions", "pages", "chunks", "ingestion_attempts")
    before = [snapshot(bench.conn, table) for table in tables]
    again = bench.take(document)
    assert (again.outcome, again.ingestion_id) == (Outcome.ALREADY_INDEXED, row["id"])
    assert bench.claim() is None
    assert bench.embedder.embedded == embedded
    assert [snapshot(bench.conn, table) for table in tables] == before


def test_d21_the_same_bytes_under_another_name_embed_nothing(bench: Bench, tmp_path: Path) -> None:
    document = notes_pdf(tmp_path / "notes.pdf", 6)
    first = bench.index(document)
    embedded = bench.embedder.embedded
    second = bench.index(document, "copy.pdf")
    assert second["id"] != first["id"]
    assert second["status"] == "ready"
    assert bench.embedder.embedded == embedded
    assert [c["embedding"] for c in bench.chunks(second["id"])] == [
        c["embedding"] for c in bench.chunks(first["id"])
    ]
    [attempt] = bench.attempts(second["id"])
    assert (attempt["units_embedded"], attempt["units_reused"]) == (0, second["total_units"])


def test_a_revised_set_with_3_changed_sheets_embeds_their_texts_alone(
    settings: Settings, tmp_path: Path
) -> None:
    with Bench.open(settings) as bench:
        document = tmp_path / "set.pdf"
        make_set(document, sheets=24, scans=2)
        first = bench.index(document)
        known = {chunk["text"] for chunk in bench.chunks(first["id"])}
        embedded = set(bench.embedder.counts)

        revised = make_set(document, sheets=24, scans=2, revision=1)
        assert len(revised.changed) == 3
        second = bench.index(document)
        assert (second["file_id"], second["version"]) == (first["file_id"], 2)
        assert second["status"] == "ready"
        new = set(bench.embedder.counts) - embedded
        changed_pages = {revised.sheet(number).index for number in revised.changed}
        by_page = {c["text"]: c["page_index"] for c in bench.chunks(second["id"])}
        assert new == set(by_page) - known
        # The cover lists revisions, so it may have changed with them.
        assert {by_page[text] for text in new} - {0} == changed_pages
        assert not bench.embedder.twice


def test_notes_that_stand_twice_in_one_batch_are_embedded_once(
    bench: Bench, tmp_path: Path
) -> None:
    document = write_pdf(tmp_path / "set.pdf", [PdfPage(notes(1, 10))] * 3)
    row = bench.index(document)
    assert row["total_units"] == 3 * bench.embedder.embedded
    assert not bench.embedder.twice


def test_vectors_of_another_embedder_are_not_used_again(bench: Bench, tmp_path: Path) -> None:
    document = notes_pdf(tmp_path / "notes.pdf", 1)
    bench.index(document)
    other = HookedEmbedder("hashing/other 256")
    bench.embedder = other
    row = bench.index(document)
    assert other.embedded == row["total_units"]
    assert row["status"] == "ready"


def test_another_workspace_has_nothing_to_use_again(bench: Bench, tmp_path: Path) -> None:
    document = notes_pdf(tmp_path / "notes.pdf", 1)
    row = bench.index(document)
    other = bench.elsewhere("other")
    other_row = other.index(document)
    assert other.embedder.embedded == other_row["total_units"] == row["total_units"]
    hashes = [chunk["text_hash"] for chunk in bench.chunks(row["id"])]
    third = bench.elsewhere("third")
    embedder_id = ensure_embedder(bench.conn, bench.embedder.identity, 256)
    assert len(find_embedded(bench.conn, bench.workspace, embedder_id, hashes)) == len(hashes)
    assert find_embedded(bench.conn, third.workspace, embedder_id, hashes) == {}


def test_a_text_with_a_thousand_rows_is_found_by_one_look_into_the_index(
    bench: Bench, tmp_path: Path
) -> None:
    row = bench.index(write_pdf(tmp_path / "set.pdf", [PdfPage(notes(1, 2))]))
    bench.conn.execute(
        "insert into chunks (ingestion_id, chunk_index, workspace_id, page_index, embedder_id,"
        " tokens, text_hash, text, embedding) select ingestion_id, chunk_index + 100 * n,"
        " workspace_id, page_index, embedder_id, tokens, text_hash, text, embedding"
        " from chunks, generate_series(1, 2000) as n"
    )
    bench.conn.execute("vacuum analyze chunks")
    hashes = [chunk["text_hash"] for chunk in bench.chunks(row["id"])[: row["total_units"]]]
    bench.conn.execute("select pg_stat_reset_single_table_counters('chunks'::regclass)")
    embedder_id = ensure_embedder(bench.conn, bench.embedder.identity, 256)
    with bench.conn.transaction():
        before = bench.count("select pg_stat_get_xact_tuples_fetched('chunks'::regclass)")
        assert len(find_embedded(bench.conn, bench.workspace, embedder_id, hashes)) == len(hashes)
        after = bench.count("select pg_stat_get_xact_tuples_fetched('chunks'::regclass)")
    assert after - before <= 2 * len(hashes)


def test_d22_a_re_index_that_fails_leaves_the_old_version_searchable_and_can_be_retried(
    bench: Bench, tmp_path: Path
) -> None:
    document = notes_pdf(tmp_path / "notes.pdf", 2)
    first = bench.index(document)

    other = HookedEmbedder("hashing/other 256")
    other.spoil = lambda vectors: vectors[:-1]
    bench.embedder, old = other, bench.embedder
    taken = bench.take(document)
    assert taken.outcome is Outcome.REINDEXED
    bench.drain()
    failed = bench.latest(first["file_id"])
    assert (failed["status"], failed["error_code"]) == ("failed", "embedding_invalid")
    assert bench.file(first["file_id"])["published_ingestion_id"] == first["id"]
    bench.embedder = old
    assert bench.search("ANCHOR 101A")[0].page == 1

    # The retry is no "already indexed": what it wants differs from what is published.
    bench.embedder = other
    other.spoil = lambda vectors: vectors
    again = bench.take(document)
    assert again.outcome is Outcome.RETRIED
    bench.drain()
    assert bench.latest(first["file_id"])["status"] == "ready"
    assert bench.file(first["file_id"])["published_ingestion_id"] == again.ingestion_id
    assert bench.take(document).outcome is Outcome.ALREADY_INDEXED


def test_d22_retry_is_not_skipped_and_takes_over_the_pages(bench: Bench, tmp_path: Path) -> None:
    document = notes_pdf(tmp_path / "notes.pdf", 3)
    taken = bench.take(document)
    bench.embedder.spoil = lambda vectors: vectors[:-1]
    assert bench.finish() == "failed"
    bench.embedder.spoil = lambda vectors: vectors
    ingestion_id = intake.retry(bench.conn, bench.workspace, taken.file_id)
    assert ingestion_id is not None
    assert ingestion_id != taken.ingestion_id
    assert bench.finish() == "ready"
    [attempt] = bench.attempts(ingestion_id)
    assert (attempt["first_page"], attempt["pages_read"]) == (3, 0)
    assert bench.row(ingestion_id)["processed_pages"] == 3
