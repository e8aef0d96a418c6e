"""A page is cut into chunks that cover it, in order, within the limit, the same everywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from itertools import pairwise

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planroom.chunk import ENCODING, RANKS_SHA256, ChunkParams, chunk_page, count_tokens
from planroom.model import Chunk

NOTES = (
    "GENERAL NOTES\n"
    "1. ALL DIMENSIONS TO BE VERIFIED ON SITE; DO NOT SCALE.\n"
    "2. SEE DETAIL 5/A-501 FOR HEAD, JAMB AND SILL.\n"
)

# Runs of one character, where tokens and characters part ways, between ordinary words.
_RUNS = st.tuples(
    st.sampled_from("a \n\t=^.漢😀\u00e9\u0301\u3000\x1c\ufffe"), st.integers(1, 700)
).map(lambda run: run[0] * run[1])
_PAGES = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
        st.sampled_from(["A-101 ", "DOOR SCHEDULE\n", " ", "\n\n", "<|endoftext|>", NOTES]),
        _RUNS,
    ),
    max_size=25,
).map("".join)


@st.composite
def _params(draw: st.DrawFn) -> ChunkParams:
    tokens_max = draw(st.sampled_from([16, 17, 31, 64, 256]))
    return ChunkParams(tokens_max, draw(st.integers(0, tokens_max // 2)))


def _tokens(text: str) -> int:
    return len(tiktoken.get_encoding(ENCODING).encode(text, disallowed_special=()))


def _check(text: str, params: ChunkParams) -> list[Chunk]:
    chunks = chunk_page(text, params)
    covered = 0
    for chunk in chunks:
        assert chunk.text == text[chunk.start : chunk.end]
        assert chunk.text == chunk.text.strip() != ""
        assert chunk.tokens == _tokens(chunk.text) <= params.tokens_max
        assert not text[covered : chunk.start].strip(), "characters between two chunks are lost"
        assert chunk.end > covered, "a chunk adds nothing to the one before"
        covered = chunk.end
    assert not text[covered:].strip(), "the end of the page is lost"
    assert all(one.start < other.start for one, other in pairwise(chunks))
    return chunks


@settings(max_examples=150, deadline=None)
@given(text=_PAGES, params=_params())
@example(text="a" + " " * 5000 + "b" * 5000 + " " * 5000 + "c", params=ChunkParams())
@example(text="x" * 30 + " " + "漢" * 300, params=ChunkParams(16, 8))
def test_chunks_cover_the_page_in_order_within_the_limit(text: str, params: ChunkParams) -> None:
    _check(text, params)


@settings(max_examples=50, deadline=None)
@given(text=_PAGES, params=_params())
def test_the_overlap_repeats_at_most_what_was_asked(text: str, params: ChunkParams) -> None:
    for one, other in pairwise(chunk_page(text, params)):
        repeated = text[other.start : one.end].strip() if other.start < one.end else ""
        # A slice counted alone may differ by the tokens at its two ends.
        assert _tokens(repeated) <= params.overlap_tokens + 4


@pytest.mark.parametrize("text", ["", " ", "\n", " \n\t\u3000\x0c " * 40_000])
def test_a_blank_page_has_no_chunk(text: str) -> None:
    assert chunk_page(text, ChunkParams()) == []


def test_a_short_page_is_one_chunk_without_the_white_space_around_it() -> None:
    text = f"\n\n  {NOTES}\n  "
    assert [chunk.text for chunk in chunk_page(text, ChunkParams())] == [NOTES.strip()]


def test_cuts_fall_between_lines() -> None:
    text = "".join(f"{number}. {NOTES}" for number in range(60))
    chunks = _check(text, ChunkParams())
    assert len(chunks) > 5
    starts = {0} | {at + 1 for at, character in enumerate(text) if character == "\n"}
    assert {chunk.start for chunk in chunks} <= starts
    assert {chunk.end + 1 for chunk in chunks} <= starts


def test_a_line_longer_than_a_chunk_is_cut_between_words() -> None:
    text = " ".join(f"TAG-{number}" for number in range(2000))
    chunks = _check(text, ChunkParams())
    words = set(text.split())
    assert len(chunks) > 5
    assert all(word in words for chunk in chunks for word in chunk.text.split())


def test_chunks_are_full_on_ordinary_text() -> None:
    text = NOTES * 100
    chunks = _check(text, ChunkParams(256, 0))
    assert len(chunks) <= 1.15 * _tokens(text) / 256


def test_each_chunk_repeats_the_last_lines_of_the_one_before() -> None:
    text = "".join(f"NOTE {number}: PROVIDE BLOCKING.\n" for number in range(200))
    for one, other in pairwise(_check(text, ChunkParams(64, 32))):
        repeated = text[other.start : one.end]
        assert 16 <= _tokens(repeated) <= 32
        assert repeated.startswith("NOTE")


def test_without_overlap_no_character_is_in_two_chunks() -> None:
    assert all(
        one.end <= other.start for one, other in pairwise(_check(NOTES * 50, ChunkParams(64, 0)))
    )


def test_d9_special_tokens_are_text() -> None:
    text = "SEE <|endoftext|> AND <|fim_prefix|>\n" * 40
    chunks = _check(text, ChunkParams())
    assert "".join(chunk.text for chunk in chunks).count("<|endoftext|>") >= 40
    assert count_tokens("<|endoftext|>") > 1


_ENDLESS: dict[str, Callable[[int], str]] = {
    "one character": lambda size: "a" * size,
    "no space": lambda size: "".join(chr(33 + (at * at) % 90) for at in range(size)),
    "han": lambda size: "漢字" * (size // 2),
    "emoji": lambda size: "😀" * size,
    "spaces around": lambda size: " " * size + "x" + " " * size,
    "spaces between": lambda size: "x" + " " * size + "x",
    "blank lines": lambda size: "x" + " \n" * size + "x",
    "lines of blanks": lambda size: ("x" + " " * 3000 + "\n") * (size // 3000),
    "long words": lambda size: ("x" * 5000 + " " * 5000) * (size // 10_000),
    "letters": lambda size: " x" * (size // 2),
    "line ends": lambda size: "x\n" * (size // 2),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", _ENDLESS)
def test_d10_a_hundred_thousand_characters_without_a_space_take_linear_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = tiktoken.Encoding.encode_ordinary

    def counted(self: tiktoken.Encoding, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(self, text)

    _check(_ENDLESS[kind](100_000), ChunkParams())
    text = _ENDLESS[kind](1_000_000)
    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", counted)
    chunk_page(text, ChunkParams())
    # Each character is given to the tokeniser a few times, and never in an endless piece. Were the
    # search for words quadratic, a million characters would outlast the timeout of this test.
    assert sum(encoded) <= 6 * len(text) + 100_000
    assert max(encoded) <= 100_000


@pytest.mark.parametrize("text", ["a" * 300_000, " " * 300_000, NOTES * 2000, "漢" * 50_000])
def test_counting_a_long_text_is_never_less_than_the_truth_and_hardly_more(text: str) -> None:
    truth = _tokens(text)
    assert truth <= count_tokens(text) <= 1.1 * truth + 8


def test_counting_a_long_text_of_words_is_exact() -> None:
    text = "".join(f"{number}.  {NOTES}\n\n" for number in range(1000))
    assert count_tokens(text) == _tokens(text)


def test_d20_the_same_notes_on_fifty_sheets_stay_fifty_chunks() -> None:
    chunks = [chunk for _ in range(50) for chunk in chunk_page(NOTES, ChunkParams())]
    assert len(chunks) == 50
    assert len({chunk.text_hash for chunk in chunks}) == 1


def _digest_of_chunks() -> str:
    text = "".join(f"{n} {NOTES}{'=' * n}<|endoftext|>漢字\u3000é {'x' * 900}\n" for n in range(60))
    digest = hashlib.sha256()
    for chunk in chunk_page(text, ChunkParams(64, 16)):
        digest.update(f"{chunk.start}:{chunk.end}:{chunk.tokens}:".encode())
        digest.update(chunk.text_hash)
    return digest.hexdigest()


@pytest.mark.parametrize(("seed", "lang"), [("0", "C"), ("1", "tr_TR.UTF-8"), ("77", "POSIX")])
def test_another_process_hash_seed_and_locale_cut_the_same(seed: str, lang: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "LANG": lang, "LC_ALL": lang}
    environment["PYTHONUTF8"] = "0"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    code = (
        "import importlib.util as u; s = u.spec_from_file_location('cases', r'" + __file__ + "');"
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m._digest_of_chunks())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == _digest_of_chunks()


def test_the_identity_names_the_version_the_encoding_and_the_parameters() -> None:
    identities = {ChunkParams(*values).identity for values in [(256, 32), (256, 0), (64, 32)]}
    assert len(identities) == 3
    assert ENCODING in ChunkParams().identity
    assert ChunkParams().identity == ChunkParams(256, 32).identity


def test_the_ranks_in_the_identity_are_those_installed() -> None:
    file = resources.files("tiktoken_ext") / "data" / "cl100k_base.tiktoken"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == RANKS_SHA256


def test_ordinary_text_is_cut_as_version_one_cuts_it() -> None:
    """Fails when chunking changes without CHUNKER_VERSION: then stored chunks would be mixed."""
    assert _digest_of_chunks() == "d32d2db9a752367656cfebadc7d67c4fc1c8e7c3336a9af178a0140fdeaa49c2"


@pytest.mark.parametrize("values", [(15, 0), (256, 129), (256, -1), (0, 0)])
def test_parameters_that_cannot_work_are_refused(values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        ChunkParams(*values)
