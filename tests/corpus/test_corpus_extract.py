"""Real and nasty files: each ends as its README says, and none ends the reader."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from planroom.errors import DocumentFailed
from planroom.extract import ANNOTATION_MARK, PageReader
from planroom.model import Page, PageReason, PageStatus, SheetSource

CORPUS = Path(__file__).parents[3] / "shared" / "corpus"

pytestmark = pytest.mark.skipif(not CORPUS.is_dir(), reason="needs the corpus beside the checkout")

TEXT, IMAGE_ONLY, FAILED = PageStatus.TEXT, PageStatus.IMAGE_ONLY, PageStatus.FAILED


def read(name: str) -> list[Page]:
    pages: list[Page] = []
    with PageReader(CORPUS / name) as reader:
        for page in reader:
            pages.append(page)
            reader.committed(page.index + 1)
        assert reader.page_count == len(pages)
    return pages


@dataclass(frozen=True)
class Expected:
    """What a file comes to: the status of each page, and its characters with CRLF as PDFium's."""

    statuses: tuple[PageStatus, ...]
    characters: int | None = None


EXPECTED = {
    "AutoCad_Diagram.pdf": Expected((TEXT,), 1033),
    "AutoCad_Simple.pdf": Expected((TEXT,), 7),
    "bad-PageLabels.pdf": Expected((TEXT,), 34),
    "bomb2g.pdf": Expected((FAILED,), 0),
    "bug1978317.pdf": Expected((TEXT,), 16_542),
    "encrypted-r3-empty-password.pdf": Expected((TEXT,), 39),
    "encrypted-r4-owner-password.pdf": Expected((TEXT,), 39),
    "encrypted-r5-empty-password.pdf": Expected((TEXT,), 39),
    "encrypted-r6-owner-password.pdf": Expected((TEXT,), 39),
    "freetext_no_appearance.pdf": Expected((TEXT,)),
    "issue12810.pdf": Expected((TEXT,), 15),
    "issue19800.pdf": Expected((TEXT,), 429),
    "issue9418.pdf": Expected((TEXT,), 169),
    "layered-plan.pdf": Expected((IMAGE_ONLY,), 0),
    "multibuilding-set.pdf": Expected((TEXT,) * 5),
    "poppler-85140-0.pdf": Expected((IMAGE_ONLY,), 0),
    "poppler-90-0-fuzzed.pdf": Expected(
        tuple({2: TEXT, 9: TEXT, 13: FAILED}.get(index, IMAGE_ONLY) for index in range(16))
    ),
    "sample-finish-plan.pdf": Expected((TEXT, TEXT), 12_147),
    "scanned-plan.pdf": Expected((IMAGE_ONLY,), 0),
    "symbol-set.pdf": Expected((TEXT,) * 4),
    "xref_command_missing.pdf": Expected((TEXT,), 17),
}
LOCKED = (
    "encrypted-r2-user-password.pdf",
    "encrypted-r4-aes-user-password.pdf",
    "encrypted-r6-both-passwords.pdf",
    "encrypted-r6-user-password.pdf",
    "password-example.pdf",
)
NO_PDF = ("empty.pdf", "html.pdf")


def test_every_file_of_the_corpus_is_expected_to_end_somehow() -> None:
    named = {*EXPECTED, *LOCKED, *NO_PDF}

    assert named == {path.name for path in CORPUS.glob("*.pdf")}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_file_is_read_as_far_as_it_can_be(name: str) -> None:
    pages = read(name)
    expected = EXPECTED[name]

    assert tuple(page.status for page in pages) == expected.statuses
    assert [page.index for page in pages] == list(range(len(pages)))
    assert {page.parser for page in pages} == {"pdfium"}
    if expected.characters is not None:
        # The README counts a line end as two; stray trailing spaces it counts, we keep.
        assert sum(len(page.text) + page.text.count("\n") for page in pages) == expected.characters


@pytest.mark.parametrize("name", LOCKED)
def test_d11_a_locked_file_needs_its_password(name: str) -> None:
    with pytest.raises(DocumentFailed) as failed:
        read(name)
    assert failed.value.code == "password_required"


@pytest.mark.parametrize("name", NO_PDF)
def test_what_is_no_pdf_is_unreadable(name: str) -> None:
    with pytest.raises(DocumentFailed) as failed:
        read(name)
    assert failed.value.code == "unreadable"


def test_d2_the_bomb_fails_by_its_memory() -> None:
    (page,) = read("bomb2g.pdf")

    assert page.reason is PageReason.MEMORY
    assert page.detail == "It needed more than 1536 MiB of memory."


def test_the_fuzzed_page_of_controls_is_bad_encoding() -> None:
    assert read("poppler-90-0-fuzzed.pdf")[13].reason is PageReason.BAD_ENCODING


def test_the_real_sheets_are_named_by_their_title_blocks() -> None:
    named = [
        (page.sheet_number, page.sheet_title, page.sheet_source)
        for page in read("sample-finish-plan.pdf")
    ]

    assert named == [
        ("AF101", "FIRST FLOOR FINISH PLAN", SheetSource.TITLE_BLOCK),
        ("AF600", "MATERIAL AND ROOM FINISH SCHEDULE", SheetSource.TITLE_BLOCK),
    ]


@pytest.mark.parametrize("name", ["multibuilding-set.pdf", "symbol-set.pdf", "AutoCad_Diagram.pdf"])
def test_room_tags_and_sizes_are_not_taken_for_sheet_numbers(name: str) -> None:
    assert {page.sheet_number for page in read(name)} == {None}


def test_text_that_is_only_in_annotations_is_found() -> None:
    (page,) = read("freetext_no_appearance.pdf")

    assert page.text.startswith(ANNOTATION_MARK)
    assert len(page.text) > 100


def test_malformed_labels_do_no_harm() -> None:
    (page,) = read("bad-PageLabels.pdf")

    assert page.text == "PDF document with bad Page Labels."


def test_an_absurd_height_is_clamped() -> None:
    (page,) = read("poppler-85140-0.pdf")

    assert (page.width, page.height) == (595.0, 1_000_000.0)


def test_a_plot_that_is_turned_by_270_degrees_has_its_displayed_size() -> None:
    (page,) = read("AutoCad_Diagram.pdf")

    assert (page.width, page.height, page.rotation) == (1191.0, 842.0, 270)
