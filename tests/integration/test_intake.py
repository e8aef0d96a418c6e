"""Intake: known bytes are known again, others are a version, and a failure leaves nothing."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from planroom.config import Settings
from planroom.errors import InputRefused
from planroom.files import cancel_ingestions
from planroom.intake import Outcome, Taken, find_pdfs
from planroom.projects import ensure_project
from support.engine import await_blocked, in_background
from support.room import Bench, notes_pdf


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with Bench.open(settings) as bench:
        yield bench


@pytest.fixture
def document(tmp_path: Path) -> Path:
    return notes_pdf(tmp_path / "set.pdf", 1)


def test_an_intake_keeps_the_blob_and_queues_one_ingestion(bench: Bench, document: Path) -> None:
    taken = bench.take(document)
    assert taken == Taken("set.pdf", taken.file_id, 1, taken.ingestion_id, Outcome.NEW)
    file, row = bench.file(taken.file_id), bench.row(taken.ingestion_id)
    assert bench.blobs.path(file["sha256"]).read_bytes() == document.read_bytes()
    assert (file["size_bytes"], file["queued_version"]) == (document.stat().st_size, 1)
    assert (row["status"], row["sha256"], row["version"]) == ("queued", file["sha256"], 1)


def test_the_life_of_a_file_by_what_each_intake_comes_to(bench: Bench, document: Path) -> None:
    outcomes = [bench.take(document).outcome]
    outcomes.append(bench.take(document).outcome)
    bench.drain()
    outcomes.append(bench.take(document).outcome)
    other_settings = bench.with_settings(chunk_tokens=64)
    outcomes.append(other_settings.take(document).outcome)
    other_settings.drain()
    outcomes.append(other_settings.take(document).outcome)
    notes_pdf(document, 1, first=5)
    outcomes.append(other_settings.take(document).outcome)
    cancel_ingestions(bench.conn, bench.workspace, bench.take(document).file_id)
    outcomes.append(other_settings.take(document).outcome)
    assert outcomes == [
        Outcome.NEW,
        Outcome.RESUMED,
        Outcome.ALREADY_INDEXED,
        Outcome.REINDEXED,
        Outcome.ALREADY_INDEXED,
        Outcome.NEW_VERSION,
        Outcome.RETRIED,
    ]


def test_bytes_that_come_back_are_a_version_of_their_own(bench: Bench, document: Path) -> None:
    original = document.read_bytes()
    bench.index(document)
    bench.index(notes_pdf(document, 1, first=5))
    document.write_bytes(original)
    row = bench.index(document)
    assert (row["version"], row["status"]) == (3, "ready")
    assert "101A" in bench.search("ANCHOR 101A")[0].snippet
    assert len(list(bench.blobs.hashes())) == 2


def test_the_same_name_in_two_projects_is_two_files(bench: Bench, document: Path) -> None:
    annex = ensure_project(bench.conn, bench.workspace, "annex")
    first, second = bench.take(document), bench.take(document, project=annex)
    assert first.file_id != second.file_id
    assert len(list(bench.blobs.hashes())) == 1


def test_an_intake_whose_rows_cannot_be_written_leaves_no_row(bench: Bench, document: Path) -> None:
    bench.conn.execute("alter table file_ingestions add constraint none check (id < 0) not valid")
    with pytest.raises(psycopg.errors.CheckViolation):
        bench.take(document)
    assert bench.count("select count(*) from files") == 0


def test_two_intakes_of_one_name_at_once_are_one_file_and_one_ingestion(
    bench: Bench, document: Path
) -> None:
    taken: list[Taken] = []
    with bench.database.connect() as rival, ExitStack() as stack, bench.conn.transaction():
        taken.append(bench.take(document))
        second = replace(bench, conn=rival)
        stack.enter_context(in_background(lambda: taken.append(second.take(document))))
        with bench.database.connect() as watcher:
            await_blocked(watcher, rival.info.backend_pid)
    assert [each.outcome for each in taken] == [Outcome.NEW, Outcome.RESUMED]
    assert taken[0].ingestion_id == taken[1].ingestion_id
    assert bench.count("select count(*) from file_ingestions") == 1


# Names


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("A-101.pdf", "A-101.pdf"),
        ("Level 1/Étage – 2′.pdf", "Level 1/Étage – 2′.pdf"),
        ("two\N{NO-BREAK SPACE}words\N{NARROW NO-BREAK SPACE}x.pdf", "two words x.pdf"),
        ("tab\tnewline\n.pdf", "tab\N{REPLACEMENT CHARACTER}newline\N{REPLACEMENT CHARACTER}.pdf"),
        ("\x1b[31mred.pdf", "\N{REPLACEMENT CHARACTER}[31mred.pdf"),
        ("\udcff\udcfe.pdf", "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}.pdf"),
        ("gpj.\N{RIGHT-TO-LEFT OVERRIDE}fdp.pdf", "gpj.\N{REPLACEMENT CHARACTER}fdp.pdf"),
        ("план этажа.pdf", "план этажа.pdf"),
        ("می\N{ZERO WIDTH NON-JOINER}شود.pdf", "می\N{ZERO WIDTH NON-JOINER}شود.pdf"),
    ],
)
def test_a_name_is_cleaned_and_no_further_than_needed(
    bench: Bench, document: Path, name: str, kept: str
) -> None:
    taken = bench.take(document, name)
    assert taken.name == kept
    assert bench.file(taken.file_id)["name"] == kept


def test_one_name_in_two_unicode_forms_is_one_file(bench: Bench, document: Path) -> None:
    composed = bench.take(document, unicodedata.normalize("NFC", "Café.pdf"))
    decomposed = bench.take(document, unicodedata.normalize("NFD", "Café.pdf"))
    assert decomposed.file_id == composed.file_id


@pytest.mark.parametrize("name", [" ", "\N{NO-BREAK SPACE}", "ж" * 501 + ".pdf", "x" * 5000])
def test_a_name_that_is_none_or_endless_is_refused(bench: Bench, document: Path, name: str) -> None:
    with pytest.raises(InputRefused) as refused:
        bench.take(document, name)
    assert refused.value.code == "name_invalid"
    assert bench.count("select count(*) from files") == 0
    assert list(bench.blobs.hashes()) == []


# Folders


def test_a_folder_gives_its_pdfs_under_its_own_name_in_order(tmp_path: Path) -> None:
    root = tmp_path / "tower"
    for name in ("b.pdf", "a/z.PDF", "a/readme.txt", ".hidden/c.pdf", "a/.d.pdf"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%PDF-1.4")
    outside = tmp_path / "outside.pdf"
    outside.write_bytes(b"%PDF-1.4")
    (root / "link.pdf").symlink_to(outside)
    (root / "again.pdf").symlink_to(root / "b.pdf")
    (root / "loop").symlink_to(root)
    names = [name for _, name in find_pdfs(root)]
    assert names == ["tower/a/z.PDF", "tower/again.pdf", "tower/b.pdf"]


def test_a_file_is_found_under_its_own_name_and_a_folder_without_pdfs_is_refused(
    tmp_path: Path, document: Path
) -> None:
    assert list(find_pdfs(document)) == [(document, "set.pdf")]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputRefused, match="without any PDF"):
        list(find_pdfs(empty))
