"""Verify: whatever is wrong with what is stored, it is found; and nothing is where all is well."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import psutil
import pytest

from planroom.config import Settings
from planroom.errors import DocumentFailed, NotFound, PlanroomError
from planroom.verify import Verification, verify
from support.drawing_set import make_set
from support.pdf import PdfPage, slow, write_pdf
from support.room import Bench, notes, notes_pdf


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with Bench.open(settings.model_copy(update={"chunk_tokens": 16, "chunk_overlap": 0})) as bench:
        yield bench


@pytest.fixture
def file_id(bench: Bench, tmp_path: Path) -> int:
    """Three pages with 40 chunks each."""
    return bench.index(notes_pdf(tmp_path / "notes.pdf", 3, lines=20))["file_id"]


def check(bench: Bench, file_id: int) -> Verification:
    return verify(bench.conn, bench.blobs, bench.settings, bench.workspace, file_id)


def test_a_file_that_was_indexed_well_verifies(bench: Bench, file_id: int) -> None:
    result = check(bench, file_id)
    assert result.ok
    assert (result.pages, result.units, result.reread) == (3, 120, True)


def test_a_real_set_verifies_and_its_progress_is_told(settings: Settings, tmp_path: Path) -> None:
    with Bench.open(settings) as bench:
        made = make_set(tmp_path / "set.pdf", sheets=12)
        row = bench.index(made.path)
        told: list[tuple[int, int]] = []
        result = verify(
            bench.conn,
            bench.blobs,
            bench.settings,
            bench.workspace,
            row["file_id"],
            lambda done, total: told.append((done, total)),
        )
        assert result.problems == []
        assert (result.pages, result.units) == (12, row["total_units"])
        assert told == [(page, 12) for page in range(1, 13)]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("delete from chunks where chunk_index = 57", "Chunk 57 is missing"),
        ("delete from chunks where chunk_index = 119", "Chunk 119 is missing"),
        (
            """
            insert into chunks (ingestion_id, chunk_index, workspace_id, page_index, embedder_id,
                                tokens, text_hash, text, embedding)
            select ingestion_id, 120, workspace_id, page_index, embedder_id, tokens, text_hash,
                   text, embedding
              from chunks where chunk_index = 0
            """,
            "1 chunks stand past the last",
        ),
        (
            "update chunks set text = 'other' where chunk_index = 3",
            "Chunk 3 does not have the text",
        ),
        (
            "update chunks set text = 'other', text_hash = sha256('other') where chunk_index = 3",
            "Chunk 3 has another text than its page gives",
        ),
        ("update chunks set page_index = 2 where chunk_index = 3", "Chunk 3 is filed under page 3"),
        (
            "update chunks set embedding = array_fill(0.5, '{256}')::halfvec where chunk_index = 9",
            "Chunk 9 has a vector of length 8.000",
        ),
        (
            "update chunks set embedding = '[1,0,0]' where chunk_index = 9",
            "Chunk 9 was embedded by another embedder",
        ),
        ("update pages set text = 'X' || text where page_index = 1", "Page 2 has another text"),
        ("update pages set chunk_count = 39 where page_index = 1", "Page 2 counts 39 chunks"),
        ("delete from pages where page_index = 1", "Page 2 has no row"),
        (
            """
            update pages set status = 'image_only', text = '', chunk_count = 0
             where page_index = 1
            """,
            "Page 2 is stored as image_only, not text",
        ),
        (
            """
            update file_ingestions
               set total_units = 119, planned_units = 119, processed_units = 119
            """,
            "The plan counts 119 chunks and the pages give 120",
        ),
    ],
)
def test_damage_is_found_and_named(
    bench: Bench, file_id: int, damage: LiteralString, said: str
) -> None:
    bench.conn.execute(damage)
    result = check(bench, file_id)
    assert not result.ok
    assert any(said in problem for problem in result.problems), result.problems


def test_bytes_that_rotted_in_the_store_are_found(bench: Bench, file_id: int) -> None:
    path = bench.blobs.path(bench.file(file_id)["sha256"])
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    result = check(bench, file_id)
    assert any("blob store" in problem for problem in result.problems)
    path.unlink()
    with pytest.raises(DocumentFailed) as missing:
        check(bench, file_id)
    assert missing.value.code == "blob_missing"


def test_a_page_that_failed_on_the_day_is_counted_and_not_compared(
    bench: Bench, tmp_path: Path
) -> None:
    document = write_pdf(tmp_path / "set.pdf", [PdfPage(notes(1, 5)), slow(24_000_000)])
    row = bench.with_settings(page_seconds=0.3).index(document)
    assert row["failed_pages"] == 1
    result = check(bench, row["file_id"])
    assert result.problems == []
    assert result.pages_not_compared == 1


def test_what_another_version_made_is_checked_without_reading_again(
    bench: Bench, file_id: int
) -> None:
    other = bench.with_settings(chunk_tokens=64)
    result = check(other, file_id)
    assert (result.ok, result.reread, result.units) == (True, False, 120)
    bench.conn.execute("delete from chunks where chunk_index = 57")
    assert check(other, file_id).problems == ["Chunk 57 is missing."]


def test_nothing_to_verify_is_said(bench: Bench, tmp_path: Path) -> None:
    taken = bench.take(notes_pdf(tmp_path / "queued.pdf", 1))
    with pytest.raises(NotFound):
        check(bench, taken.file_id)
    with pytest.raises(NotFound):
        check(bench.elsewhere("other"), taken.file_id)


def test_a_version_that_is_superseded_meanwhile_is_no_false_alarm(
    bench: Bench, file_id: int
) -> None:
    def remove(done: int, total: int) -> None:
        if done == 2:
            with bench.database.connect() as conn:
                conn.execute("update files set published_ingestion_id = null")

    with pytest.raises(PlanroomError) as superseded:
        verify(bench.conn, bench.blobs, bench.settings, bench.workspace, file_id, remove)
    assert superseded.value.code == "superseded"


def test_a_verification_that_ends_early_leaves_no_child_behind(bench: Bench, file_id: int) -> None:
    bench.conn.execute("delete from pages where page_index = 1")
    children = psutil.Process().children()
    gc.disable()
    try:
        assert not check(bench, file_id).ok
        assert psutil.Process().children() == children
    finally:
        gc.enable()
