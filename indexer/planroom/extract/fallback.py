"""pypdf: the parser for what PDFium reports it cannot read.

A document that PDFium does not open is read by pypdf whole; a page on which PDFium reports an error
is read by pypdf alone. It is imported only then. It keeps what it has parsed (2 MB a page), so it
is opened again every 10 pages, always on an open file: given a path it reads the whole file.

It knows no places of characters, so a sheet's name comes from label and bookmark only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planroom.extract.annotation import Annotation, in_order
from planroom.extract.outline import Bookmark
from planroom.extract.pdfium import Reading

_REOPEN_PAGES = 10
_BOOKMARKS_MAX = 100_000
_TEXT_FIELDS = ("/Tx", "/Ch")


class PasswordRequired(Exception):
    """The document opens with a password only."""


class FallbackDocument:
    """A document read by pypdf; opened by the first question, and again every 10 pages read.

    Whatever pypdf raises escapes: its errors have no common base, and a damaged file raises
    anything, so callers catch Exception.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._reader: Any = None
        self._pages_read = 0

    def close(self) -> None:
        """Give everything back that was parsed."""
        if self._file is not None:
            self._file.close()
        self._file = self._reader = None

    @property
    def page_count(self) -> int:
        """How many pages there are; PasswordRequired."""
        return len(self._opened().pages)

    def labels(self) -> list[str]:
        """The label of every page, or none at all when they are damaged."""
        return [str(label) for label in self._opened().page_labels]

    def bookmarks(self) -> Iterator[Bookmark]:
        """The outline in its own order, without what points outside the document."""
        reader = self._opened()
        stack: list[tuple[int, Any]] = [(0, iter(reader.outline))]
        count = 0
        while stack and count < _BOOKMARKS_MAX:
            level, items = stack[-1]
            item = next(items, None)
            count += 1
            if item is None:
                stack.pop()
            elif isinstance(item, list):
                stack.append((level + 1, iter(item)))  # pyright: ignore[reportUnknownArgumentType]
            else:
                index = reader.get_destination_page_number(item)
                if index is not None and index >= 0:
                    yield Bookmark(int(index), level, str(item.title))

    def read(self, index: int) -> Reading:
        """Read a page."""
        if self._pages_read == _REOPEN_PAGES:
            self.close()
            self._pages_read = 0
        self._pages_read += 1
        page = self._opened().pages[index]
        rotation = int(page.rotation or 0) % 360
        box = page.cropbox
        width, height = abs(float(box.width)), abs(float(box.height))
        if rotation in (90, 270):
            width, height = height, width
        text = str(page.extract_text())
        annotations = in_order(_annotations(page, rotation))
        return Reading(text, annotations, width, height, rotation)

    def _opened(self) -> Any:
        if self._reader is None:
            # Costs 0.1 s and 20 MB, and most documents never need it.
            import logging
            import warnings

            import pypdf

            # It says something about every oddity of a file, and none of that is news.
            logging.getLogger("pypdf").setLevel(logging.CRITICAL + 1)
            warnings.filterwarnings("ignore", module=r"pypdf\b")

            self._file = self._path.open("rb")
            reader = pypdf.PdfReader(self._file, strict=False)
            if reader.is_encrypted and not reader.decrypt(""):
                raise PasswordRequired
            self._reader = reader
        return self._reader


def _annotations(page: Any, rotation: int) -> Iterator[Annotation]:
    """The same strings in the same order as PDFium's annotation calls give."""
    for reference in page.get("/Annots") or ():
        annotation = reference.get_object()
        text = _annotation_text(annotation)
        if not text.strip():
            continue
        try:
            left, bottom, right, top = (float(side) for side in annotation["/Rect"])
        except (KeyError, TypeError, ValueError):
            yield Annotation(0, 0, text)
            continue
        one = _displayed(page, rotation, left, bottom)
        other = _displayed(page, rotation, right, top)
        x, y = min(one[0], other[0]), min(one[1], other[1])
        size = min(abs(right - left), abs(top - bottom))
        yield Annotation(round(1000 * y), round(1000 * x), text, size)


def _annotation_text(annotation: Any) -> str:
    kind = annotation.get("/Subtype")
    if kind == "/Popup":
        return ""
    if kind != "/Widget":
        return str(annotation.get("/Contents") or "")
    while annotation is not None:
        if annotation.get("/FT") in _TEXT_FIELDS and "/V" in annotation:
            return str(annotation["/V"])
        parent = annotation.get("/Parent")
        # A field inherits from its parent only what it does not have.
        annotation = parent.get_object() if parent is not None else None
    return ""


def _displayed(page: Any, rotation: int, x: float, y: float) -> tuple[float, float]:
    """A point as fractions of the page as displayed, from its upper left corner."""
    box = page.cropbox
    width, height = float(box.width) or 1.0, float(box.height) or 1.0
    across = min(max((x - float(box.left)) / width, -10.0), 10.0)
    down = min(max((float(box.top) - y) / height, -10.0), 10.0)
    return {
        90: (1 - down, across),
        180: (1 - across, 1 - down),
        270: (down, 1 - across),
    }.get(rotation, (across, down))
