"""The words of the product as values: a page, a chunk, the identity of what made them.

Pure data. Everything that crosses from one floor to another is one of these.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class PageStatus(StrEnum):
    """What reading a page came to; every page of a document has exactly one."""

    TEXT = "text"
    """Text was found: the page is searchable."""
    IMAGE_ONLY = "image_only"
    """Opened, but no text layer and no annotation text: a scan, bare vectors, or a blank page."""
    FAILED = "failed"
    """Not read; `Page.reason` says why."""


class PageReason(StrEnum):
    """Why a page failed."""

    TIMEOUT = "timeout"
    """The parser used more than its processor seconds, or hung."""
    MEMORY = "memory"
    """The parser outgrew its memory."""
    CRASHED = "crashed"
    """The parser's process died otherwise."""
    PARSER_ERROR = "parser_error"
    """Both parsers reported an error on the page."""
    BAD_ENCODING = "bad_encoding"
    """The fonts have no usable mapping to Unicode: the text would be noise."""


class SheetSource(StrEnum):
    """Where a sheet number came from, best first."""

    LABEL = "label"
    BOOKMARK = "bookmark"
    TITLE_BLOCK = "title_block"


@dataclass(frozen=True, slots=True)
class Page:
    """One page as it was read, ready to be stored.

    `text` is normalised (see `extract.normalise`) and empty unless `status` is `TEXT`. `index`
    counts from 0; `width` and `height` are points as displayed, after rotation. `parser` is
    `pdfium` or `pypdf`, never a mixture. `detail` is the parser's own message, for people.
    """

    index: int
    status: PageStatus
    text: str = ""
    reason: PageReason | None = None
    detail: str | None = None
    parser: str = "pdfium"
    label: str | None = None
    bookmark: str | None = None
    sheet_number: str | None = None
    sheet_title: str | None = None
    sheet_source: SheetSource | None = None
    width: float = 0.0
    height: float = 0.0
    rotation: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one page: `text` is `page.text[start:end]`, `tokens` its length in tokens."""

    text: str
    start: int
    end: int
    tokens: int

    @property
    def text_hash(self) -> bytes:
        """SHA-256 of the UTF-8 text: the key under which an embedding can be used again."""
        return hashlib.sha256(self.text.encode()).digest()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of everything that decides the chunk list and the vectors.

    Three parts, because a change costs as much as what it touches: another `extractor` reads the
    pages again; another `chunker` or `embedder` keeps the pages and starts at unit 0.
    """

    extractor: str
    chunker: str
    embedder: str
