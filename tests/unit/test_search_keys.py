"""What in a query may name a sheet, and how marked words are read from a headline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planroom.search import QUERY_CHARACTERS_MAX, clean_query, read_marks, sheet_keys


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("A-101", "A101"),
        ("a101", "A101"),
        ("a 101", "A101"),
        ("A – 101", "A101"),
        ("sheet A-101", "A101"),
        ("what is on A-101?", "A101"),
        ("(A-101)", "A101"),
        ("A-101.", "A101"),
        ("A-101/A-102", "A102"),
        ('"A-101"', "A101"),
        ("A1.01", "A1.01"),
        ("a1.01 roof", "A1.01"),
        ("fp 501", "FP501"),
        ("E3.8.1", "E3.8.1"),
        ("A103A", "A103A"),
        ("L04-A04D02-CHP-16-00-DWG-SP-10001", "L04A04D02CHP1600DWGSP10001"),
        ("where is l04-a04d02-chp-16-00-dwg-sp-10001", "L04A04D02CHP1600DWGSP10001"),
        ("П-12", "П12"),
    ],
)
def test_a_sheet_number_is_seen_in_a_query_however_it_is_written(query: str, key: str) -> None:
    assert key in sheet_keys(query)


@pytest.mark.parametrize(
    "query",
    ["", "   ", "roof plan", "101", "3 1/2", "2026", "door and window schedule", "''", "&|!():*"],
)
def test_a_query_without_a_sheet_number_names_none(query: str) -> None:
    assert sheet_keys(query) == []


@given(st.text())
def test_any_query_gives_keys_of_letters_digits_and_dots(query: str) -> None:
    for key in sheet_keys(query):
        assert 0 < len(key) <= 64
        assert all(c.isalnum() or c == "." for c in key)


@given(st.text(alphabet=st.characters(), max_size=50))
def test_any_query_can_be_sent_to_postgres(query: str) -> None:
    clean = clean_query(query)
    assert "\x00" not in clean
    assert clean.encode().decode() == clean
    assert clean == clean.strip()


def test_a_query_of_any_length_is_bounded() -> None:
    assert len(clean_query("x" * 10**6)) == QUERY_CHARACTERS_MAX


def test_marks_are_spans_of_the_snippet() -> None:
    snippet, marks = read_marks("  a \x02roof\x03\n drain … of the \x02roof\x03 ")
    assert snippet == "a roof drain … of the roof"
    assert [snippet[start:stop] for start, stop in marks] == ["roof", "roof"]


@given(st.lists(st.tuples(st.booleans(), st.text(alphabet="ab …", min_size=1, max_size=5))))
def test_marks_lose_no_word(parts: list[tuple[bool, str]]) -> None:
    marked = "".join(f"\x02{said}\x03" if is_marked else said for is_marked, said in parts)
    snippet, marks = read_marks(marked)
    assert "".join(snippet.split()) == "".join("".join(said for _, said in parts).split())
    assert len(marks) == sum(is_marked for is_marked, _ in parts)
    assert all(0 <= start <= stop <= len(snippet) for start, stop in marks)
