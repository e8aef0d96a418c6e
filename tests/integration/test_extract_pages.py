"""What is read from a page, through a real child and the real parsers."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from planroom.extract import ANNOTATION_MARK, PageReader
from planroom.model import Page, PageReason, PageStatus, SheetSource
from support.pdf import (
    ARCH_D,
    PdfBookmark,
    PdfPage,
    annotation,
    drawing,
    image_page,
    labels,
    stream,
    text,
    upright,
    write_pdf,
)


def read(path: Path, first: int = 0) -> list[Page]:
    pages: list[Page] = []
    with PageReader(path, first=first) as reader:
        for page in reader:
            pages.append(page)
            reader.committed(page.index + 1)
    return pages


def read_one(path: Path, page: PdfPage, **document: object) -> Page:
    write_pdf(path / "one.pdf", [page], **document)  # type: ignore[arg-type]
    (only,) = read(path / "one.pdf")
    return only


def test_a_page_is_its_text_its_size_and_its_parser(tmp_path: Path) -> None:
    content = text("GENERAL NOTES", 72, 700) + text("VERIFY IN FIELD", 72, 680)
    page = read_one(tmp_path, PdfPage(content))

    assert page == Page(
        index=0,
        status=PageStatus.TEXT,
        text="GENERAL NOTES\nVERIFY IN FIELD",
        width=612.0,
        height=792.0,
    )


def test_reading_from_a_page_gives_the_rest_exactly_as_before(tmp_path: Path) -> None:
    path = write_pdf(
        tmp_path / "set.pdf",
        [PdfPage(drawing(f"A-{101 + i}", "FLOOR PLAN"), ARCH_D) for i in range(60)],
    )
    pages = read(path)

    assert [page.index for page in pages] == list(range(60))
    assert [page.sheet_number for page in pages] == [f"A-{101 + i}" for i in range(60)]
    assert read(path, first=37) == pages[37:]
    assert read(path, first=60) == []


@pytest.mark.parametrize("rotate", [0, 90, 180, 270])
def test_d6_words_of_turned_pages_and_turned_text_are_intact(tmp_path: Path, rotate: int) -> None:
    content = (
        drawing("A-101", "FIRST FLOOR PLAN")
        + text("CORRIDOR UPWARDS", 1200, 400, 12, 90)
        + text("CORRIDOR DOWNWARDS", 1300, 900, 12, 270)
        + text("CORRIDOR OVERHEAD", 1500, 900, 12, 180)
    )
    page = read_one(tmp_path, upright(content, rotate))

    for words in ("CORRIDOR UPWARDS", "CORRIDOR DOWNWARDS", "CORRIDOR OVERHEAD"):
        assert words in page.text
    assert (page.width, page.height, page.rotation) == (*ARCH_D, rotate)
    assert (page.sheet_number, page.sheet_title) == ("A-101", "FIRST FLOOR PLAN")
    assert page.sheet_source is SheetSource.TITLE_BLOCK


def test_a_title_block_that_runs_up_the_right_edge_is_read(tmp_path: Path) -> None:
    content = text("NOTES AND MORE NOTES", 100, 1600) * 9 + text("S-201", 2560, 1200, 40, 90)
    page = read_one(tmp_path, PdfPage(content, ARCH_D))

    assert page.sheet_number == "S-201"


def test_a_cropped_page_is_read_as_it_is_displayed(tmp_path: Path) -> None:
    # The title block stands in the corner of the crop, the middle of the sheet.
    content = text("NOTES AND MORE NOTES", 100, 500) * 9 + text("A-101", 1150, 420, 30)
    page = read_one(tmp_path, PdfPage(content, ARCH_D, extra="/CropBox [0 400 1296 1200]"))

    assert (page.width, page.height) == (1296.0, 800.0)
    assert page.sheet_number == "A-101"


def test_tags_in_the_corner_are_no_sheet_number(tmp_path: Path) -> None:
    tags = b"".join(
        text(f"A{100 + i}", 2300 + 40 * (i % 5), 100 + 20 * (i // 5)) for i in range(20)
    )
    page = read_one(
        tmp_path, PdfPage(text("SEE NOTES AND SPECIFICATIONS", 100, 900) * 9 + tags, ARCH_D)
    )

    assert page.status is PageStatus.TEXT
    assert (page.sheet_number, page.sheet_source) == (None, None)


def test_the_label_comes_before_the_bookmark_and_the_bookmark_before_the_title_block(
    tmp_path: Path,
) -> None:
    sheet = PdfPage(drawing("A-103", "PRINTED PLAN"), ARCH_D)
    outline = [PdfBookmark("(ARCHITECTURAL)", 0, (PdfBookmark("(A-102 BOOKMARKED PLAN)", 0),))]
    by_label = read_one(tmp_path, sheet, root=labels("A-101"), outline=outline)
    by_bookmark = read_one(tmp_path, sheet, root=labels("12"), outline=outline)
    by_block = read_one(tmp_path, sheet, root=labels("iv"))

    assert (by_label.sheet_number, by_label.sheet_source) == ("A-101", SheetSource.LABEL)
    assert (by_bookmark.sheet_number, by_bookmark.sheet_title) == ("A-102", "BOOKMARKED PLAN")
    assert by_bookmark.sheet_source is SheetSource.BOOKMARK
    assert (by_bookmark.label, by_bookmark.bookmark) == ("12", "A-102 BOOKMARKED PLAN")
    assert (by_block.sheet_number, by_block.sheet_title) == ("A-103", "PRINTED PLAN")
    assert by_block.sheet_source is SheetSource.TITLE_BLOCK


def test_a_label_takes_its_title_from_the_title_block(tmp_path: Path) -> None:
    sheet = PdfPage(drawing("A-101", "PRINTED PLAN"), ARCH_D)
    page = read_one(tmp_path, sheet, root=labels("A101"))

    assert (page.sheet_number, page.sheet_title) == ("A101", "PRINTED PLAN")
    assert page.sheet_source is SheetSource.LABEL


@pytest.mark.parametrize(
    "root",
    [
        "/PageLabels 99 0 R",
        "/PageLabels << /Nums [ (x) << /P 7 >> -3 ] >>",
        "/PageLabels << /Kids [1 0 R] >>",
        "/PageLabels << /Nums [ 0 << /S /D /St -2147483648 >> ] >>",
    ],
)
def test_malformed_labels_cost_no_page(tmp_path: Path, root: str) -> None:
    assert read_one(tmp_path, PdfPage(text("NOTES", 72, 72)), root=root).text == "NOTES"


def test_an_outline_that_runs_in_a_circle_ends(tmp_path: Path) -> None:
    loop = [
        b"<< /First 11 0 R /Last 11 0 R >>",
        b"<< /Title (A-101 LOOP) /Next 11 0 R /First 11 0 R /Dest [0 /Fit] >>",
    ]
    page = read_one(tmp_path, PdfPage(text("X", 9, 9)), root="/Outlines 10 0 R", objects=loop)

    assert page.bookmark == "A-101 LOOP"


def test_d7_nul_in_text_and_titles_never_leaves_the_extractor(tmp_path: Path) -> None:
    # The font maps A to NUL; the bookmark holds a NUL in UTF-16.
    cmap = (
        b"/CIDInit /ProcSet findresource begin 12 dict begin begincmap "
        b"1 begincodespacerange <00> <FF> endcodespacerange "
        b"2 beginbfchar <41> <0000> <42> <0042> endbfchar endcmap end end"
    )
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 11 0 R >>"
    title = "<FEFF" + "A-101 ROOF\x00 PLAN".encode("utf-16-be").hex() + ">"
    content = b"BT /F2 10 Tf 72 700 Td (BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBAB) Tj ET"
    page = read_one(
        tmp_path,
        PdfPage(content, extra="/Resources << /Font << /F2 10 0 R >> >>"),
        objects=[font, stream(cmap)],
        outline=[PdfBookmark(title, 0)],
    )

    assert page.status is PageStatus.TEXT
    assert "\x00" not in page.text
    assert page.bookmark == "A-101 ROOF PLAN"


def test_d8_a_lone_surrogate_is_cleaned_once(tmp_path: Path) -> None:
    lone = "<FEFF0041D8000042>"
    said = annotation("FreeText", "", 72, 700, extra=f"/Contents {lone}")
    page = read_one(
        tmp_path,
        PdfPage(text("NOTES", 72, 72), annotations=(said,)),
        outline=[PdfBookmark(lone, 0)],
    )

    assert page.text == f"NOTES\n\n{ANNOTATION_MARK}\nAB"
    assert page.bookmark == "AB"


def test_strings_that_autocad_plots_as_strokes_are_read_from_annotations(tmp_path: Path) -> None:
    shx = "/T (AutoCAD SHX Text)"
    page = read_one(
        tmp_path,
        PdfPage(
            text("PLOTTED", 72, 72),
            annotations=(
                annotation("Square", "LOWER", 100, 200, extra=shx),
                annotation("Square", "UPPER RIGHT", 400, 700, extra=shx),
                annotation("Square", "UPPER LEFT", 100, 700, extra=shx),
                annotation("Square", "UPPER LEFT", 100, 700, extra=shx),
            ),
        ),
    )

    assert page.text == f"PLOTTED\n\n{ANNOTATION_MARK}\nUPPER LEFT\nUPPER RIGHT\nLOWER"


def test_a_sheet_number_in_an_annotation_names_the_sheet(tmp_path: Path) -> None:
    number = annotation("Square", "E-401", 2450, 120, height=40, extra="/T (AutoCAD SHX Text)")
    tag = annotation("Square", "E-999", 2400, 900, height=8, extra="/T (AutoCAD SHX Text)")
    page = read_one(tmp_path, PdfPage(b"", ARCH_D, annotations=(tag, number)))

    assert (page.status, page.sheet_number) == (PageStatus.TEXT, "E-401")


def test_links_and_popups_add_nothing_and_a_comment_is_said_once(tmp_path: Path) -> None:
    page = read_one(
        tmp_path,
        PdfPage(
            text("NOTES", 72, 72),
            annotations=(
                annotation("Link", "", 10, 10),
                annotation("Text", "CHECK THIS", 100, 500),
                annotation("Popup", "CHECK THIS", 300, 500),
            ),
        ),
    )

    assert page.text == f"NOTES\n\n{ANNOTATION_MARK}\nCHECK THIS"


def test_what_is_filled_into_a_form_is_text_and_a_button_is_not(tmp_path: Path) -> None:
    widget = "/Type /Annot /Subtype /Widget"
    fields = [
        f"<< {widget} /FT /Tx /T (sheet) /V (FILLED IN) /Rect [72 600 200 620] >>".encode(),
        f"<< {widget} /FT /Btn /T (check) /V /Yes /AS /Yes /Rect [72 500 90 520] >>".encode(),
        f"<< {widget} /Parent 13 0 R /Rect [72 400 200 420] >>".encode(),
        b"<< /FT /Ch /T (choice) /V (CHOSEN) /Kids [12 0 R] >>",
    ]
    page = read_one(
        tmp_path,
        PdfPage(text("FORM", 72, 72), annotations=("10 0 R", "11 0 R", "12 0 R")),
        root="/AcroForm << /Fields [10 0 R 11 0 R 13 0 R] >>",
        objects=fields,
    )

    assert page.text == f"FORM\n\n{ANNOTATION_MARK}\nFILLED IN\nCHOSEN"


def test_d4_d5_scans_and_blank_pages_are_told_from_text(tmp_path: Path) -> None:
    blank = PdfPage(text("   ", 72, 72))
    path = write_pdf(
        tmp_path / "scan.pdf", [image_page(), PdfPage(text("NOTES", 72, 72)), blank, image_page()]
    )
    pages = read(path)

    assert [page.status for page in pages] == [
        PageStatus.IMAGE_ONLY,
        PageStatus.TEXT,
        PageStatus.IMAGE_ONLY,
        PageStatus.IMAGE_ONLY,
    ]
    assert all(page.text == "" for page in pages if page.status is PageStatus.IMAGE_ONLY)


def test_a_page_in_a_font_without_characters_is_bad_encoding(tmp_path: Path) -> None:
    page = read_one(tmp_path, PdfPage(text("/g145/g146/g147/g148/g149", 72, 72)))

    assert (page.status, page.reason) == (PageStatus.FAILED, PageReason.BAD_ENCODING)
    assert page.text == ""
    assert page.detail is not None


def test_d10_a_hundred_thousand_characters_without_a_space_are_one_text(tmp_path: Path) -> None:
    # A string in a content stream has at most 32,767 characters; these follow without a gap.
    piece = b"(" + b"X" * 10_000 + b") Tj "
    content = b"BT /F1 1 Tf 0 700 Td " + 10 * piece + b"ET"
    page = read_one(tmp_path, PdfPage(zlib.compress(content), filters="/FlateDecode"))

    assert page.text == "X" * 100_000


def test_special_tokens_are_ordinary_text(tmp_path: Path) -> None:
    assert read_one(tmp_path, PdfPage(text("<|endoftext|>", 72, 72))).text == "<|endoftext|>"


@pytest.mark.parametrize("size", [(595.0, 2147483648.0), (0.0, 0.0)])
def test_absurd_sizes_are_clamped(tmp_path: Path, size: tuple[float, float]) -> None:
    page = read_one(tmp_path, PdfPage(b"", size))

    assert 0 <= page.width <= 1_000_000
    assert 0 <= page.height <= 1_000_000
