"""Cleaning text, and telling noise from it."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planroom.extract import normalise
from planroom.extract.text import is_bad_encoding, normalise_line

ANYTHING = st.text(st.characters(exclude_categories=()), max_size=200) | st.text(
    st.sampled_from("a\r\n\t\x00\x0b\x85\ufffe\uffff\ud83d\ude00\ufdd0\U0001ffffe\u0301é"),
    max_size=40,
)


@given(ANYTHING)
def test_normalising_again_changes_nothing(text: str) -> None:
    once = normalise(text)

    assert normalise(once) == once


@given(ANYTHING)
def test_what_is_normalised_can_be_stored_and_hashed(text: str) -> None:
    clean = normalise(text)

    clean.encode("utf-8")
    assert unicodedata.is_normalized("NFC", clean)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\t\n" for c in clean)
    assert not any(ord(c) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(c) <= 0xFDEF for c in clean)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert normalise(text) == text


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("one\r\ntwo\rthree\n", "one\ntwo\nthree\n"),
        ("12-port pre\ufffe29", "12-port pre-29"),
        ("tab\tstays", "tab\tstays"),
        ("bell\x07 del\x7f nel\x85", "bell del nel"),
        ("E\u0301LE\u0301VATION", "ÉLÉVATION"),
        ("non\uffff\ufdd0\U0010ffffcharacters", "noncharacters"),
        ("<|endoftext|>", "<|endoftext|>"),
    ],
)
def test_each_rule_of_cleaning(raw: str, clean: str) -> None:
    assert normalise(raw) == clean


def test_d7_nul_is_stripped() -> None:
    assert normalise("SHEET\x00 A-101") == "SHEET A-101"


def test_d8_lone_surrogates_go_and_pairs_are_joined() -> None:
    assert normalise("a\ud800b\udfffc") == "abc"
    assert normalise("\ud83d\ude00") == "\U0001f600"


def test_a_name_is_one_line_of_bounded_length() -> None:
    assert normalise_line(" FLOOR\r\n  PLAN\x00 ") == "FLOOR PLAN"
    assert normalise_line("\x00 \n") is None
    assert normalise_line("x" * 9999) == "x" * 500


@pytest.mark.parametrize(
    "noise",
    [
        "\x01\x02\x03\x04 text",
        "/g145/g146/g147/g148",
        "NOTES /g12 /g13 /g14 /g15",
        "(cid:12)(cid:13)(cid:14)",
        "\ufffd\ufffd\ufffd\ufffd A",
    ],
)
def test_noise_is_bad_encoding(noise: str) -> None:
    assert is_bad_encoding(noise)


@pytest.mark.parametrize(
    "sound",
    [
        "",
        "plain text\r\nwith\ttabs",
        "A\x01 b",  # One stray control is a tenth of a short page, and says nothing.
        "SEE 3/A-501 AND 4/A-502 /g1",
        "word " * 100 + "\x01\x02\x03\x04",
        "12-port pre\ufffe29",
    ],
)
def test_text_with_a_little_noise_is_text(sound: str) -> None:
    assert not is_bad_encoding(sound)
