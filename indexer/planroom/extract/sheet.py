r"""Sheet numbers and titles: what a page is called on a construction drawing.

Page labels and bookmarks name sheets better than any look at the page, so they come first, if
they look like a sheet number at all (a label `12` or `iv` does not). Only then is the title block
read: of the numbers printed in the lower right corner or the strip along the right edge, the one in
type that is larger than the page's other text. Where two different numbers are equally large it is
a list of sheets, not a title block, and no number is better than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planroom.extract.text import normalise_line
from planroom.model import SheetSource

# A-101, A101, A1.01, A-1.1, A103A, SP1, FP501, G-00, E3.8.1, and S-201-A.
_PLAIN = r"[A-Z]{1,3}-?\d{1,4}(?:\.\d{1,3}){0,2}(?:[A-Z]{1,2}|-[A-Z])?"
# L04-A04D02-CHP-16-00-DWG-SP-10001: five parts or more, digits in the last.
_AGENCY = r"(?=[A-Z0-9-]*[A-Z])[A-Z0-9]{1,8}(?:-[A-Z0-9]{1,8}){3,10}-[A-Z]{0,3}\d{1,8}[A-Z]?"
_AHEAD = r"(?![A-Za-z0-9/'\"%]|[.\-]\w)"
_IN_TEXT = re.compile(rf"(?<![\w/.#'\"$&-])(?:{_AGENCY}|{_PLAIN}){_AHEAD}")
_IN_HEADING = re.compile(
    r"(?:\[\d+\]\s*)?(?:(?:sheet|drawing|dwg)\b\.?\s*(?:(?:no|number)\b\.?|\#)?\s*[:\-]?\s*)?"
    rf"(?P<number>{_AGENCY}|{_PLAIN}|[A-Z]{{1,2}} \d{{2,4}}(?:\.\d{{1,3}})?)"
    r"(?![A-Za-z0-9/'\"%]|\.\w|-\d)",
    re.IGNORECASE,
)
# Letters that stand before a number for other reasons than a discipline.
_NOT_A_DISCIPLINE = re.compile(
    r"(?:JAN|FEB|MAR|APR|MAY|JUN|JUL|AUG|SEP|OCT|NOV|DEC|NOS?|REV|PH|TEL|FAX|EXT|STE|APT|BOX|RM|FL"
    r"|LVL|LEV|BLK|LOT|VOL|SEC|DIV|FIG|TAB|APP|PG|PP|CH|PT|VER|V|ISO|UL|IBC|NEC|IFC|USA|ZIP|HWY|RTE"
    r"|SR|US|CO|TO|OF|AT|BY|ON|IN)(?![A-Z])",
    re.IGNORECASE,
)
_CAPTION = re.compile(
    r"(?:(?:sheet|drawing|dwg\.?)\s+)?(?:title|name|contents?)\s*:?\s*(?P<rest>.*)", re.IGNORECASE
)
_TITLE_WORD = re.compile(
    r"\b(?:plans?|elevations?|sections?|details?|schedules?|diagrams?|notes|legends?|index|cover"
    r"|layouts?|isometrics?|risers?|specifications?|abbreviations|survey|profiles?|demolition"
    r"|perspectives?|views?)\b",
    re.IGNORECASE,
)
# What a title block says of other things than the drawing.
_OTHER_CAPTION = re.compile(
    r"(?:project|building|sheet|drawing|dwg|issue|scale|date|phase|revisions?|drawn|checked|job|title"
    r"|location|approved|key\s*plan)\b\.?\s*(?:$|by|no|num|title|date|name|description|:)",
    re.IGNORECASE,
)
_TITLE_WORDS_MAX = 12
# In fractions of the page: how far under its caption a title may begin, how far to its side, and
# how far apart its lines are.
_PARAGRAPH_HEIGHT = 0.04
_PARAGRAPH_LINES_MAX = 4
_INDENT = 0.05
_LINE_HEIGHT = 0.02
_SIZE_RATIO_MIN = 1.25
"""How much larger than the page's other text a number in a title block is, at least."""
_SAME_SIZE = 0.95


@dataclass(frozen=True, slots=True)
class Heading:
    """What a page is called, from its label and bookmark alone."""

    label: str | None = None
    bookmark: str | None = None
    number: str | None = None
    title: str | None = None
    source: SheetSource | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible sheet number on the page.

    `size` is in points as printed. `x` and `y` are fractions of the page as displayed, from its
    upper left corner.
    """

    number: str
    size: float
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text on the page: size in points, place of its first character as a fraction."""

    text: str
    size: float
    x: float
    y: float


def normalise_sheet_number(text: str) -> str:
    """The key for matching: `A-101`, `A101` and `a 101` are all `A101`; dots stay."""
    return "".join(c for c in text.upper() if c.isalnum() or c == ".")


def read_heading(label: str | None, bookmark: str | None) -> Heading:
    """Number and title from a page's label and bookmark, as far as they look like a sheet's."""
    number, title = split_heading(label)
    marked, marked_title = split_heading(bookmark)
    if number is not None:
        if marked is None or normalise_sheet_number(marked) == normalise_sheet_number(number):
            title = title or marked_title
        return Heading(label, bookmark, number, title, SheetSource.LABEL)
    if marked is not None:
        return Heading(label, bookmark, marked, marked_title, SheetSource.BOOKMARK)
    return Heading(label, bookmark)


def split_heading(text: str | None) -> tuple[str | None, str | None]:
    """`A-101 FLOOR PLAN` as (`A-101`, `FLOOR PLAN`); (None, text) where no number leads."""
    line = normalise_line(text) if text else None
    if line is None:
        return None, None
    found = _IN_HEADING.match(line)
    if found is None or _is_something_else(found["number"]):
        return None, line if any(c.isalpha() for c in line) else None
    rest = line[found.end() :].strip(" -–—:;,._|")
    return found["number"], rest if any(c.isalpha() for c in rest) else None


def find_numbers(text: str) -> list[tuple[int, str]]:
    """Everything in `text` that has the form of a sheet number, with where it starts."""
    return [
        (found.start(), found[0])
        for found in _IN_TEXT.finditer(text)
        if not _is_something_else(found[0])
    ]


def distinct_numbers(text: str) -> set[str]:
    """Everything in `text` that has the form of a sheet number, once each.

    Most words of a page have no digit, and leaving them out first takes a third of the time.
    """
    words = dict.fromkeys(text.split())
    return {number for _, number in find_numbers("\n".join(w for w in words if not w.isalpha()))}


def is_number_at(text: str, start: int, number: str) -> bool:
    """Whether `number` stands at `start` by itself, not as a part of something longer."""
    found = _IN_TEXT.match(text, start)
    return found is not None and found[0] == number


def choose_number(candidates: Iterable[Candidate], other_size: float) -> Candidate | None:
    """The sheet number of a title block, or None where none stands out.

    `other_size` is the size of the page's ordinary text; 0 where there is none.
    """
    large = [c for c in candidates if c.size >= _SIZE_RATIO_MIN * other_size]
    if not large:
        return None
    size = max(c.size for c in large)
    largest = [c for c in large if c.size >= _SAME_SIZE * size]
    if len({normalise_sheet_number(c.number) for c in largest}) > 1:
        return None
    return max(largest, key=lambda c: (c.x + c.y, c.x, c.number))


def is_title_block_line(line: str) -> bool:
    """Whether `choose_title` has any use for a line: a caption of a title, or perhaps a title."""
    return _CAPTION.fullmatch(line) is not None or _could_be_title(line)


def choose_title(lines: Sequence[Line], number: Candidate) -> str | None:
    """The drawing's title among the lines around a sheet number.

    What stands under a caption `SHEET TITLE`, else the largest line that names a kind of drawing,
    else None.
    """
    for caption in lines:
        if found := _CAPTION.fullmatch(caption.text):
            if found["rest"] and _could_be_title(found["rest"]):
                return normalise_line(found["rest"])
            if title := _paragraph_below(caption, lines):
                return normalise_line(title)
    named = [line for line in lines if _TITLE_WORD.search(line.text) and _could_be_title(line.text)]
    best = max(named, key=lambda line: (line.size, -_distance(line, number)), default=None)
    return normalise_line(best.text) if best is not None else None


def _paragraph_below(caption: Line, lines: Sequence[Line]) -> str:
    """The lines of one size that begin right under a caption, from the top."""
    below = [
        line
        for line in lines
        if _could_be_title(line.text)
        and 0 < line.y - caption.y < _PARAGRAPH_HEIGHT
        and abs(line.x - caption.x) < _INDENT
    ]
    below.sort(key=lambda line: line.y)
    paragraph: list[Line] = []
    for line in below:
        if paragraph and not (
            abs(line.size - paragraph[-1].size) < 0.1 * line.size
            and line.y - paragraph[-1].y < _LINE_HEIGHT
        ):
            break
        paragraph.append(line)
    return " ".join(line.text for line in paragraph[:_PARAGRAPH_LINES_MAX])


def _distance(line: Line, number: Candidate) -> float:
    return abs(line.x - number.x) + abs(line.y - number.y)


def _could_be_title(line: str) -> bool:
    letters = sum(c.isalpha() for c in line)
    return (
        letters >= 3
        and letters * 2 >= len(line.replace(" ", ""))
        and len(line.split()) <= _TITLE_WORDS_MAX
        and not line.endswith(":")
        and not _OTHER_CAPTION.match(line)
        and split_heading(line)[0] is None
    )


def _is_something_else(number: str) -> bool:
    return _NOT_A_DISCIPLINE.match(number) is not None
