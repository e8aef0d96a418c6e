"""The one place where text is cleaned, and where noise is told from text.

Both parsers, and labels, bookmarks and annotations as well, pass through `normalise` once. What
comes out can be stored by Postgres, encoded as UTF-8 and hashed, and normalising it again changes
nothing.
"""

from __future__ import annotations

import re
import unicodedata

_NONCHARACTERS = "\ufdd0-\ufdef" + "".join(
    f"{chr(plane * 0x10000 + 0xFFFE)}{chr(plane * 0x10000 + 0xFFFF)}" for plane in range(17)
)
# Ranges only, because a class of many single characters takes ten times as long to search: nearly
# every page has none of these, and is done with one look.
_SUSPECT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\uffff\U0001fffe-\U0010ffff]"
)
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_STRIPPED = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff{_NONCHARACTERS}]")
# A replacement character is a parser's own word for "no mapping", as a control is.
_NOISE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")
# Glyph names printed for want of characters: by PDFium as /g145, by others as (cid:12).
_GLYPH_NAMES = re.compile(
    r"/(?:g|G|cid|glyph|index)\d+(?:\s*/(?:g|G|cid|glyph|index)\d+)+|\(cid:\d+\)(?:\s*\(cid:\d+\))+"
)

NOISE_SHARE_MAX = 0.05
_NOISE_CHARACTERS_MIN = 3
"""Two stray controls on a page of ten characters say nothing about its fonts."""


def normalise(text: str) -> str:
    """Clean text as it comes from a parser; idempotent.

    CRLF and CR become LF; U+FFFE, PDFium's hyphen at a line end, becomes `-`; NUL and other C0 and
    C1 controls except tab and newline, noncharacters and lone surrogates go; the rest is NFC.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufffe", "-")
    if _SUSPECT.search(text):
        text = _STRIPPED.sub("", _SURROGATE_PAIR.sub(_joined, text))
    return unicodedata.normalize("NFC", text)


def normalise_line(text: str, *, length_max: int = 500) -> str | None:
    """A name (label, bookmark, title) as one clean line, or None when nothing is left of it."""
    return " ".join(normalise(text).split())[:length_max].rstrip() or None


def is_bad_encoding(raw: str) -> bool:
    """Whether `raw`, not yet normalised, is noise: its fonts have no usable mapping to Unicode.

    True when more than 5 % of it are controls, or when that much is runs of glyph names.
    """
    noise = len(_NOISE.findall(raw))
    if noise >= _NOISE_CHARACTERS_MIN and noise > NOISE_SHARE_MAX * len(raw):
        return True
    named = sum(len(run) for run in _GLYPH_NAMES.findall(raw))
    return named > NOISE_SHARE_MAX * len(raw)


def _joined(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le")
