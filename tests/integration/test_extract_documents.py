"""What documents that are damaged, locked or no PDF at all come to."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from planroom.errors import DocumentFailed
from planroom.extract import ExtractLimits, PageReader
from planroom.extract.child import Document
from planroom.extract.fallback import FallbackDocument
from planroom.extract.pdfium import PdfiumDocument, PdfiumError, Reading
from planroom.extract.sheet import Heading
from planroom.model import Page, PageStatus
from support.pdf import (
    ARCH_D,
    PdfBookmark,
    PdfPage,
    annotation,
    break_xref,
    drawing,
    encrypt,
    labels,
    text,
    truncate,
    write_pdf,
)


def read(path: Path) -> list[Page]:
    pages: list[Page] = []
    with PageReader(path) as reader:
        for page in reader:
            pages.append(page)
            reader.committed(page.index + 1)
    return pages


def failure(path: Path, limits: ExtractLimits | None = None) -> DocumentFailed:
    with (
        pytest.raises(DocumentFailed) as failed,
        PageReader(path, limits=limits, name="PLANS.pdf"),
    ):
        pytest.fail("it opened")
    assert str(failed.value).startswith("PLANS.pdf ")
    assert failed.value.hint
    return failed.value


def three_pages(path: Path) -> Path:
    pages = [PdfPage(text(f"SHEET {i}", 72, 700)) for i in range(3)]
    return write_pdf(path / "three.pdf", pages)


def test_d11_a_user_password_is_asked_for_and_nothing_is_retried(tmp_path: Path) -> None:
    path = encrypt(three_pages(tmp_path), user="secret", owner="owner")

    assert failure(path).code == "password_required"


def test_an_owner_password_alone_does_not_matter(tmp_path: Path) -> None:
    path = encrypt(three_pages(tmp_path), user="", owner="owner")

    assert [page.text for page in read(path)] == ["SHEET 0", "SHEET 1", "SHEET 2"]


def test_d12_a_broken_cross_reference_is_recovered(tmp_path: Path) -> None:
    path = break_xref(three_pages(tmp_path))

    assert [page.text for page in read(path)] == ["SHEET 0", "SHEET 1", "SHEET 2"]


def test_a_truncated_file_is_called_truncated(tmp_path: Path) -> None:
    failed = failure(truncate(three_pages(tmp_path), 0.1))

    assert failed.code == "unreadable"
    assert "truncated" in str(failed)


@pytest.mark.parametrize(
    "data",
    [b"", b"<html><body>Sign in</body></html>", b"%PDF-1.7\n", b"\0" * 4096, b"%PDF-1.7 %%EOF"],
    ids=["empty", "html", "header", "zeros", "nothing in it"],
)
def test_what_is_no_pdf_is_unreadable(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "no.pdf"
    path.write_bytes(data)

    assert failure(path).code == "unreadable"


def test_a_document_without_pages_is_unreadable(tmp_path: Path) -> None:
    failed = failure(write_pdf(tmp_path / "none.pdf", []))

    assert failed.code == "unreadable"
    assert "no pages" in str(failed)


def test_too_many_pages_says_both_numbers_and_the_setting(tmp_path: Path) -> None:
    failed = failure(three_pages(tmp_path), ExtractLimits(pages_max=2))

    assert failed.code == "too_many_pages"
    assert "3 pages" in str(failed)
    assert "2" in str(failed)
    assert failed.hint is not None
    assert "PLANROOM_PAGES_MAX" in failed.hint


def test_a_file_that_is_not_there_is_the_callers_business(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), PageReader(tmp_path / "gone.pdf"):
        pytest.fail("it opened")


def test_flipped_bits_never_cost_more_than_their_own_pages(tmp_path: Path) -> None:
    path = write_pdf(
        tmp_path / "set.pdf", [PdfPage(drawing(f"A-{i}", "PLAN"), ARCH_D) for i in range(100, 112)]
    )
    data = bytearray(path.read_bytes())
    chance = random.Random(7)
    for _ in range(200):
        data[chance.randrange(1000, len(data) - 1000)] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(data))
    pages = read(path)

    assert [page.index for page in pages] == list(range(12))
    assert all(page.reason is not None for page in pages if page.status is PageStatus.FAILED)
    assert sum(page.status is PageStatus.TEXT for page in pages) >= 6


def test_a_name_with_spaces_dashes_and_bytes_that_are_no_utf8_opens(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/-- \xff caf\xc3\xa9 'x'"))
    folder.mkdir()
    path = three_pages(tmp_path).rename(folder / "-r.pdf")

    assert len(read(path)) == 3


def test_pypdf_reads_whole_what_pdfium_cannot_open(tmp_path: Path) -> None:
    # PDFium does not look for a header beyond the first 1,024 bytes.
    path = write_pdf(
        tmp_path / "late.pdf",
        [PdfPage(text(f"NOTE {i}", 72, 700)) for i in range(12)],
        root=labels(*(f"A-{101 + i}" for i in range(12))),
        outline=[PdfBookmark("(A-101 ROOF PLAN)", 0)],
    )
    path.write_bytes(b"%" + b"x" * 2000 + b"\n" + path.read_bytes())
    pages = read(path)

    assert [page.parser for page in pages] == ["pypdf"] * 12
    assert [page.text for page in pages] == [f"NOTE {i}" for i in range(12)]
    assert [page.sheet_number for page in pages] == [f"A-{101 + i}" for i in range(12)]
    assert pages[0].sheet_title == "ROOF PLAN"
    assert (pages[0].width, pages[0].height) == (612.0, 792.0)


def test_a_page_that_neither_parser_can_read_says_what_both_said(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "kid.pdf", [PdfPage(text(f"P{i}", 72, 72)) for i in range(3)])
    # The second page's object becomes a number: PDFium reports it, and pypdf finds no page.
    data = path.read_bytes()
    start = data.index(b"12 0 obj")
    end = data.index(b"endobj", start)
    body = b"12 0 obj\n42"
    path.write_bytes(data[:start] + body.ljust(end - start) + data[end:])
    pages = read(path)

    assert [page.status for page in pages] == [
        PageStatus.TEXT,
        PageStatus.FAILED,
        PageStatus.TEXT,
    ]
    assert pages[1].detail is not None
    assert "PDFium" in pages[1].detail
    assert "pypdf" in pages[1].detail


def test_a_page_on_which_pdfium_reports_an_error_is_read_by_pypdf_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = three_pages(tmp_path)
    read_by_pdfium = PdfiumDocument.read

    def failing(self: PdfiumDocument, index: int, heading: Heading) -> Reading:
        if index == 1:
            raise PdfiumError("the page's text cannot be loaded")
        return read_by_pdfium(self, index, heading)

    monkeypatch.setattr(PdfiumDocument, "read", failing)
    document = Document(path, 25)
    readings = [document.read(index, document.heading(index)) for index in range(3)]
    document.close()

    assert [parser for parser, _ in readings] == ["pdfium", "pypdf", "pdfium"]
    assert [reading.text.strip() for _, reading in readings] == ["SHEET 0", "SHEET 1", "SHEET 2"]


@pytest.mark.parametrize("rotate", [0, 90, 180, 270])
def test_both_parsers_put_annotations_in_the_same_order(tmp_path: Path, rotate: int) -> None:
    notes = tuple(
        annotation("Square", said, x, y)
        for said, x, y in [("B", 400, 700), ("C", 100, 200), ("A", 100, 700), ("D", 400, 200)]
    )
    path = write_pdf(
        tmp_path / "notes.pdf", [PdfPage(text("X", 72, 72), rotate=rotate, annotations=notes)]
    )
    document = FallbackDocument(path)
    reading = document.read(0)
    document.close()

    (page,) = read(path)
    assert page.text.split("\n")[-4:] == [a.text for a in reading.annotations]


_HASH = """
import hashlib, json, sys
from pathlib import Path
from planroom.extract import PageReader
with PageReader(Path(sys.argv[1])) as reader:
    for page in reader:
        reader.committed(page.index + 1)
        print(hashlib.sha256(repr(page).encode("utf-8", "backslashreplace")).hexdigest())
"""


def test_every_process_reads_the_same_whatever_its_hash_seed_and_locale(tmp_path: Path) -> None:
    notes = tuple(annotation("Square", f"N{i}", 50 * i, 700) for i in range(9))
    path = write_pdf(
        tmp_path / "set.pdf",
        [PdfPage(drawing(f"A-{i}", "PLAN É"), ARCH_D, annotations=notes) for i in range(100, 106)],
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", _HASH, path],
            env=os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": locale, "LANG": locale},
            capture_output=True,
            check=True,
        ).stdout
        for seed, locale in (("0", "C"), ("1", "C.UTF-8"), ("4242", "POSIX"))
    }
    expected = [hashlib.sha256(repr(page).encode()).hexdigest() for page in read(path)]

    assert said == {"".join(f"{line}\n" for line in expected).encode()}


_QUIET = """
import json, sys
from pathlib import Path
from planroom.errors import DocumentFailed
from planroom.extract import PageReader
for path in map(Path, json.loads(sys.argv[1])):
    try:
        with PageReader(path) as reader:
            for page in reader:
                reader.committed(page.index + 1)
    except DocumentFailed:
        pass
"""


def test_no_parser_ever_writes_to_the_terminal(tmp_path: Path) -> None:
    good = three_pages(tmp_path).read_bytes()
    files = {
        "empty": b"",
        "html": b"<html>",
        "cut": good[: len(good) // 2],
        "late": b"%" + b"x" * 2000 + b"\n" + good,
        "garbled": good.replace(b"Tj", b"\x80j").replace(b"/F1", b"/F\xff"),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    paths = json.dumps([str(tmp_path / name) for name in files])
    done = subprocess.run(
        [sys.executable, "-c", _QUIET, paths], capture_output=True, check=True, text=True
    )

    assert (done.stdout, done.stderr) == ("", "")
