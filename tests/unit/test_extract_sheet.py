"""Sheet numbers and titles from labels, bookmarks and what stands in the title block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planroom.extract import normalise_sheet_number
from planroom.extract.outline import Bookmark, title_by_page
from planroom.extract.sheet import (
    Candidate,
    Line,
    choose_number,
    choose_title,
    find_numbers,
    is_number_at,
    read_heading,
    split_heading,
)
from planroom.model import SheetSource

FORMS = [
    "A-101",
    "A101",
    "A1.01",
    "A-1.1",
    "A103A",
    "SP1",
    "FP501",
    "G-00",
    "E3.8.1",
    "S-201-A",
    "L04-A04D02-CHP-16-00-DWG-SP-10001",
]
NOT_SHEETS = [
    "12",
    "iv",
    "Cover",
    "12-01-2026",
    "MAY 22, 2020",
    "DEC-01",
    '1/8" = 1\'-0"',
    "555-0100",
    "3/A-501",
    "REV 3",
    "NO. 12",
    "PH-2",
    "CA 90210",
    "A-101/A-102",
]


@pytest.mark.parametrize("spelling", ["A-101", "A101", "a 101", " A‑101", "a–101"])
def test_spellings_of_a_number_match(spelling: str) -> None:
    assert normalise_sheet_number(spelling) == "A101"


def test_dots_tell_numbers_apart() -> None:
    assert normalise_sheet_number("A-1.01") == "A1.01" != normalise_sheet_number("A-101")


@given(st.text())
def test_normalising_a_number_again_changes_nothing(text: str) -> None:
    once = normalise_sheet_number(text)

    assert normalise_sheet_number(once) == once


@pytest.mark.parametrize("number", FORMS)
def test_every_form_is_found_as_label_in_bookmark_and_in_text(number: str) -> None:
    assert split_heading(number) == (number, None)
    assert split_heading(f"{number} FLOOR PLAN") == (number, "FLOOR PLAN")
    assert split_heading(f"{number} - FLOOR PLAN - LEVEL 2") == (number, "FLOOR PLAN - LEVEL 2")
    assert [found for _, found in find_numbers(f"NOTES\n{number}\nEND")] == [number]


@pytest.mark.parametrize("text", NOT_SHEETS)
def test_dates_scales_telephones_and_references_are_no_sheets(text: str) -> None:
    assert split_heading(text)[0] is None
    assert find_numbers(text) == []


def test_a_bookmark_may_say_sheet_first_or_use_a_space() -> None:
    assert split_heading("Sheet A-101: Floor Plan") == ("A-101", "Floor Plan")
    assert split_heading("A 101 Floor Plan") == ("A 101", "Floor Plan")
    assert split_heading("Level 2 plan") == (None, "Level 2 plan")


def test_the_label_wins_and_takes_its_title_from_the_bookmark() -> None:
    heading = read_heading("A-101", "A101 FLOOR PLAN")

    assert (heading.number, heading.title) == ("A-101", "FLOOR PLAN")
    assert heading.source is SheetSource.LABEL


def test_a_bookmark_without_a_number_gives_a_labelled_sheet_its_title() -> None:
    assert read_heading("A-101", "FLOOR PLAN").title == "FLOOR PLAN"


def test_a_bookmark_of_another_sheet_gives_no_title() -> None:
    assert read_heading("A-101", "A-999 OTHER").title is None


def test_decimal_and_roman_labels_are_kept_but_are_no_numbers() -> None:
    heading = read_heading("iv", "A-101 FLOOR PLAN")

    assert (heading.label, heading.number) == ("iv", "A-101")
    assert heading.source is SheetSource.BOOKMARK
    assert read_heading("12", None).number is None


def test_the_deepest_bookmark_that_names_a_sheet_names_the_page() -> None:
    bookmarks = [
        Bookmark(0, 0, "ARCHITECTURAL"),
        Bookmark(0, 1, "A-101 FLOOR PLAN"),
        Bookmark(0, 2, "Detail"),
        Bookmark(1, 0, "MECHANICAL"),
        Bookmark(1, 1, "Ducts"),
        Bookmark(2, 0, "\x00"),
    ]

    assert title_by_page(bookmarks) == {0: "A-101 FLOOR PLAN", 1: "Ducts"}


def test_the_number_in_the_largest_type_is_the_sheet() -> None:
    candidates = [
        Candidate("A101", 9, 0.85, 0.3),
        Candidate("A-201", 36, 0.9, 0.95),
        Candidate("B102", 9, 0.95, 0.99),
    ]

    assert choose_number(candidates, 9) == candidates[1]


def test_numbers_no_larger_than_the_text_are_tags() -> None:
    assert choose_number([Candidate("A101", 10, 0.9, 0.9)], 9) is None


def test_equally_large_numbers_are_a_list_of_sheets() -> None:
    candidates = [Candidate("A-101", 14, 0.9, 0.5), Candidate("A-102", 14, 0.9, 0.6)]

    assert choose_number(candidates, 8) is None


def test_the_same_number_twice_is_one_sheet() -> None:
    candidates = [Candidate("A-101", 36, 0.9, 0.2), Candidate("A101", 35.5, 0.9, 0.9)]

    assert choose_number(candidates, 8) == candidates[1]


def test_no_candidates_no_number() -> None:
    assert choose_number([], 8) is None


NUMBER = Candidate("A-101", 36, 0.9, 0.95)


def test_the_title_stands_under_its_caption_and_may_run_over_lines() -> None:
    lines = [
        Line("PROJECT TITLE", 8, 0.85, 0.80),
        Line("CITY HALL RENOVATION", 14, 0.85, 0.81),
        Line("Sheet Title", 8, 0.85, 0.88),
        Line("SCHEDULE", 12, 0.85, 0.90),
        Line("MATERIAL AND ROOM FINISH", 12, 0.85, 0.89),
        Line("A-101", 36, 0.9, 0.95),
    ]

    assert choose_title(lines, NUMBER) == "MATERIAL AND ROOM FINISH SCHEDULE"


def test_without_a_caption_the_largest_line_that_names_a_drawing_is_the_title() -> None:
    lines = [
        Line("GENERAL NOTES", 9, 0.85, 0.70),
        Line("SECOND FLOOR PLAN", 14, 0.85, 0.90),
        Line("ACME ARCHITECTS", 20, 0.85, 0.85),
    ]

    assert choose_title(lines, NUMBER) == "SECOND FLOOR PLAN"


def test_sentences_and_captions_are_no_titles() -> None:
    lines = [
        Line("DRAWING NUMBER", 8, 0.85, 0.9),
        Line(
            "THE CONTRACTOR SHALL VERIFY ON THE FLOOR PLAN ALL OF THE DIMENSIONS GIVEN HERE",
            9,
            0.8,
            0.8,
        ),
        Line("KEY PLAN", 9, 0.85, 0.7),
    ]

    assert choose_title(lines, NUMBER) is None


def test_a_number_inside_something_longer_does_not_count() -> None:
    assert is_number_at("SEE A-101 HERE", 4, "A-101")
    assert not is_number_at("SEE 3/A-101", 6, "A-101")
    assert not is_number_at("A-1012", 0, "A-101")
