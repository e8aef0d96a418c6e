"""What the commands say: page ranges, durations, sizes, tables. All pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasequeue import Pause
from planroom.cli.coverage import count, coverage, gap_lines, ranges
from planroom.cli.progress import duration, position, resumes_at, short
from planroom.cli.searching import show_hit
from planroom.cli.showing import show_all, show_one
from planroom.cli.table import ago, size, table
from planroom.search import Hit
from support.shown import file_row, shown

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)


@given(st.sets(st.integers(1, 400)))
def test_ranges_name_every_page_once_and_in_order(pages: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, ranges(sorted(pages)).split(", ")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)

    assert named == sorted(pages)


def test_d5_gaps_are_listed_by_their_reason_with_every_page() -> None:
    gaps = [
        {"page": 5, "status": "image_only", "reason": None},
        {"page": 9, "status": "failed", "reason": "timeout"},
        {"page": 10, "status": "image_only", "reason": None},
        {"page": 11, "status": "image_only", "reason": None},
    ]

    assert gap_lines(gaps) == [
        "pages 5, 10-11: no text: a scan, lines only, or blank",
        "page 9: took too long to read",
    ]


def test_coverage_for_machines_counts_and_lists() -> None:
    row = file_row(processed_pages=320, image_only_pages=2, failed_pages=1)

    assert coverage(row, []) == {
        "pages": 320,
        "pages_with_text": 317,
        "image_only_pages": 2,
        "failed_pages": 1,
        "gaps": [],
    }


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"),
        (4.12, "4.1 s"),
        (12.4, "12 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3840, "1 h 04 min"),
    ],
)
def test_durations_are_as_precise_as_anyone_needs(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_guess_is_said_roughly() -> None:
    assert [short(s) for s in (0.2, 42.4, 59.7, 130, 4000)] == [
        *("1 s", "42 s", "1 min", "2 min", "1 h 06 min")
    ]


def test_times_are_said_as_how_long_ago() -> None:
    def at(**back: float) -> datetime:
        return NOW - timedelta(**back)

    assert ago(None) == ""
    assert ago(at(), NOW) == "now"
    assert ago(at(seconds=4), NOW) == "4 s ago"
    assert ago(at(minutes=4, seconds=10), NOW) == "4 min 10 s ago"
    assert ago(at(seconds=-30), NOW) == "in 30 s"
    assert ago(at(days=3), NOW).startswith("2026-11-2")


def test_sizes_and_counts() -> None:
    assert [size(n) for n in (12, 1_500, 236_000_000, 4_200_000_000)] == [
        *("12 B", "1.5 kB", "236 MB", "4.2 GB")
    ]
    assert (count(1, "page"), count(1400, "page")) == ("1 page", "1,400 pages")


def test_where_a_file_stands_and_where_it_resumes() -> None:
    reading = file_row()
    embedding = file_row(processed_pages=320, total_units=5210)
    begun = file_row(page_count=None, processed_pages=0, processed_units=0)

    assert position(reading) == "page 120 of 320, chunk 1,400"
    assert resumes_at(reading) == "page 121 of 320, chunk 1,401"
    assert position(embedding) == "all 320 pages read, chunk 1,400 of 5,210"
    assert resumes_at(embedding) == "chunk 1,401 of 5,210; all 320 pages are read"
    assert resumes_at(begun) is None


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_table_keeps_to_the_screen_and_cuts_no_name(width: int) -> None:
    long = "projects/riverside/2026-11-30 issued for construction/A-series " * 2 + "final.pdf"
    rows = [file_row(name=long), file_row(name="b.pdf", status="ready", state="ready")]

    lines = shown(*show_all(rows), width=width)

    assert all(len(line) <= width for line in lines)
    assert "".join("".join(lines).split()).count("final.pdf") == 1
    assert any("120/320" in line and "1,400/?" in line for line in lines)


def test_status_says_each_error_once_with_the_files_that_have_it() -> None:
    error: dict[str, Any] = {"status": "failed", "state": "failed", "page_count": None}
    error |= {"error_code": "password_required", "error": "It needs a password."}
    rows = [file_row(name=name, **error) for name in ("a.pdf", "b.pdf")]

    lines = shown(*show_all(rows))

    assert lines[-2:] == ["It needs a password. [password_required]", "    a.pdf, b.pdf"]


def test_status_says_that_and_why_claiming_is_paused() -> None:
    pause = Pause(datetime.now(UTC), "ann@host", "moving house")

    assert shown(*show_all([], pause))[0] == "Claiming is paused by ann@host, now: moving house"


def test_a_version_that_is_searchable_while_the_next_is_made_is_named() -> None:
    lines = shown(*show_all([file_row(published_version=3)]))

    assert any("reading (version 3 is searchable)" in line for line in lines)


def test_the_ledger_says_what_each_end_has_cost() -> None:
    attempt: dict[str, Any] = {
        "attempt": 1,
        "worker": "host:1:ab",
        "started_at": NOW,
        "seconds": 42.0,
        "pages_read": 120,
        "pages_read_again": 0,
        "units_embedded": 1400,
        "units_reused": 12,
        "units_embedded_again": 0,
        "seconds_lost": 2.5,
        "outcome": "expired",
        "error_code": None,
        "error": None,
    }
    second = attempt | {"attempt": 2, "pages_read_again": 4, "units_embedded_again": 200}
    second |= {"outcome": None, "seconds_lost": 0, "units_reused": 0}

    lines = shown(*show_one(file_row(), [], [attempt, second]))

    assert [line.strip() for line in lines[-4:]] == [
        f"1. {NOW.astimezone():%H:%M:%S}  expired after 42 s, 2.5 s lost, by host:1:ab",
        "120 pages read, 1,400 chunks embedded, 12 reused",
        f"2. {NOW.astimezone():%H:%M:%S}  running for 42 s, by host:1:ab",
        "120 pages read, 1,400 chunks embedded; at most again: 4 pages, 200 chunks",
    ]


def hit(snippet: str, marks: list[tuple[int, int]], **changed: Any) -> Hit:
    """A hit on sheet A-601."""
    values: dict[str, Any] = {
        "file_id": 1,
        "file": "set.pdf",
        "project": "default",
        "page": 15,
        "page_count": 24,
        "sheet_number": "A-601",
        "sheet_title": "DOOR SCHEDULE",
        "sheet_source": "label",
        "label": "A-601",
        "snippet": snippet,
        "marks": marks,
        "score": 0.5,
        "exact_sheet": False,
        **changed,
    }
    return Hit(**values)


def test_in_a_pipe_the_words_are_marked_and_neighbours_are_one() -> None:
    found = hit("FIRE RATED DOOR AT STAIRS", [(0, 4), (5, 10), (19, 25)])

    assert shown(*show_hit(2, found, plain=True)) == [
        " 2  A-601  DOOR SCHEDULE  set.pdf, page 15 of 24",
        "    *FIRE RATED* DOOR AT *STAIRS*",
    ]


def test_a_hit_without_number_title_or_text_is_still_a_page() -> None:
    found = hit("", [], sheet_number=None, sheet_title=None)

    assert shown(*show_hit(1, found, plain=False)) == [" 1  set.pdf, page 15 of 24"]


def test_nothing_is_read_as_markup_and_no_control_character_is_shown() -> None:
    found = hit("A [red]B[/red] \x9b31m", [], sheet_title="[bold]\x1b[2J", file="[link=x]y.pdf")

    said = "\n".join(shown(*show_hit(1, found, plain=True)))

    assert "[red]B[/red]" in said
    assert "[link=x]y.pdf" in said
    assert "\x1b" not in said
    assert "\x9b" not in said


def test_a_long_snippet_is_folded_under_itself() -> None:
    lines = shown(*show_hit(1, hit("WORD " * 40, []), plain=True), width=60)

    assert all(line.startswith("    WORD") for line in lines[1:])


def test_numbers_are_right_and_words_left() -> None:
    lines = shown(table(["name", ">pages"], [["a", "1"], ["bcd", "1,000"]]))

    assert lines == ["name  pages", "a         1", "bcd   1,000"]
