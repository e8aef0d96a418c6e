"""PDFium: the parser that reads, through its plain C interface.

It reads everything here: text, labels, bookmarks and annotations. pypdf could read the last three
too, but it needs 0.3 s to open a large set and 19 s and 410 MB for a page of 32,000 links, where
PDFium's annotation calls take 0.1 s and the same memory as the text alone; so pypdf is left as the
fallback (see `fallback`).

The document is opened by its path and closed and opened again every 25 pages, because PDFium keeps
what it has parsed. The library is used below pypdfium2's helpers: that starts twice as fast, and it
is initialised with no font folders, so that what is installed on a machine cannot change the text.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planroom.extract.annotation import Annotation, in_order
from planroom.extract.outline import Bookmark
from planroom.extract.sheet import (
    Candidate,
    Heading,
    Line,
    choose_number,
    choose_title,
    distinct_numbers,
    find_numbers,
    is_number_at,
    is_title_block_line,
    normalise_sheet_number,
)

ERROR_PASSWORD = 4
_ERRORS = {
    1: "unknown error",
    2: "not readable",
    3: "not a PDF or corrupt",
    5: "unknown encryption",
}

_BOOKMARKS_MAX = 100_000
_BOOKMARK_DEPTH_MAX = 30
_CHARACTERS_SAMPLED = 60
_CANDIDATES_MAX = 500
_TITLE_LINES_MAX = 200

# Where title blocks are, in fractions of the page as displayed (left, top, right, bottom): the
# strip along the right edge, and what is left of it in the lower right corner.
_TITLE_REGIONS = ((0.8, 0.0, 1.0, 1.0), (0.5, 0.8, 0.8, 1.0))


class PdfiumError(Exception):
    """PDFium reports that it cannot open the document or a page; `code` is its own."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Reading:
    """What a parser found on a page, not yet normalised; sizes in points as displayed."""

    text: str
    annotations: list[Annotation] = field(default_factory=list[Annotation])
    width: float = 0.0
    height: float = 0.0
    rotation: int = 0
    number: str | None = None
    title: str | None = None


def load_library() -> Any:
    """The C interface, initialised once a process. It is untyped, hence `Any`."""
    raw: Any = importlib.import_module("pypdfium2_raw")
    no_font_folders = (ctypes.POINTER(ctypes.c_char) * 1)()
    raw.FPDF_InitLibraryWithConfig(
        raw.FPDF_LIBRARY_CONFIG(version=2, m_pUserFontPaths=no_font_folders)
    )
    return raw


class PdfiumDocument:
    """An open document; `close` it. PdfiumError when it cannot be opened."""

    def __init__(self, raw: Any, path: Path) -> None:
        self._raw = raw
        self._document = raw.FPDF_LoadDocument(os.fsencode(path), None)
        if not self._document:
            code = int(raw.FPDF_GetLastError())
            raise PdfiumError(_ERRORS.get(code, f"error {code}"), code)
        self._form: Any = None
        self._form_info: Any = None
        if raw.FPDF_GetFormType(self._document) != raw.FORMTYPE_NONE:
            # The structure must live as long as the environment that refers to it.
            self._form_info = raw.FPDF_FORMFILLINFO(version=2)
            self._form = raw.FPDFDOC_InitFormFillEnvironment(self._document, self._form_info)
        self.page_count = int(raw.FPDF_GetPageCount(self._document))

    def close(self) -> None:
        """Give everything back that was parsed."""
        if self._form:
            self._raw.FPDFDOC_ExitFormFillEnvironment(self._form)
        self._raw.FPDF_CloseDocument(self._document)

    def label(self, index: int) -> str | None:
        """The page's label as printed, or None."""
        return (
            _string(
                lambda buffer, size: self._raw.FPDF_GetPageLabel(
                    self._document, index, buffer, size
                )
            )
            or None
        )

    def bookmarks(self) -> Iterator[Bookmark]:
        """The outline in its own order, without what points outside the document.

        Damaged outlines run in circles; depth and number are bounded.
        """
        raw = self._raw
        seen: set[int] = set()
        above: list[Any] = []
        node = raw.FPDFBookmark_GetFirstChild(self._document, None)
        while node or above:
            if not node:
                node = raw.FPDFBookmark_GetNextSibling(self._document, above.pop())
                continue
            address = ctypes.addressof(node.contents)
            if address in seen or len(seen) >= _BOOKMARKS_MAX:
                node = None
                continue
            seen.add(address)
            if (index := self._target(node)) >= 0:
                yield Bookmark(index, len(above), self._bookmark_title(node))
            above.append(node)
            deeper = len(above) < _BOOKMARK_DEPTH_MAX
            node = raw.FPDFBookmark_GetFirstChild(self._document, node) if deeper else None

    def read(self, index: int, heading: Heading) -> Reading:
        """Read a page; its title block only for what `heading` does not say. PdfiumError."""
        page = self._raw.FPDF_LoadPage(self._document, index)
        if not page:
            raise PdfiumError("the page cannot be loaded", int(self._raw.FPDF_GetLastError()))
        try:
            text_page = self._raw.FPDFText_LoadPage(page)
            if not text_page:
                raise PdfiumError("the page's text cannot be loaded")
            try:
                return _PageReading(self._raw, self._form, page, text_page).read(heading)
            finally:
                self._raw.FPDFText_ClosePage(text_page)
        finally:
            self._raw.FPDF_ClosePage(page)

    def _target(self, node: Any) -> int:
        raw = self._raw
        target = raw.FPDFBookmark_GetDest(self._document, node)
        if not target and (action := raw.FPDFBookmark_GetAction(node)):
            target = raw.FPDFAction_GetDest(self._document, action)
        return int(raw.FPDFDest_GetDestPageIndex(self._document, target)) if target else -1

    def _bookmark_title(self, node: Any) -> str:
        return _string(lambda buffer, size: self._raw.FPDFBookmark_GetTitle(node, buffer, size))


class _PageReading:
    """One loaded page: a short life, so that nothing of it outlives `FPDF_ClosePage`."""

    def __init__(self, raw: Any, form: Any, page: Any, text_page: Any) -> None:
        self._raw = raw
        self._form = form
        self._page = page
        self._text_page = text_page
        self._place = _Placement(raw, page)

    def read(self, heading: Heading) -> Reading:
        raw = self._raw
        text = self._text()
        annotations = in_order(self._annotations())
        number, title = heading.number, heading.title
        if number is None or title is None:
            number, title = self._title_block(text, annotations, heading)
        return Reading(
            text,
            annotations,
            float(raw.FPDF_GetPageWidthF(self._page)),
            float(raw.FPDF_GetPageHeightF(self._page)),
            int(raw.FPDFPage_GetRotation(self._page)) % 4 * 90,
            number,
            title,
        )

    def _text(self) -> str:
        count = int(self._raw.FPDFText_CountChars(self._text_page))
        if count < 0:
            raise PdfiumError("the page's text cannot be counted")
        buffer = (ctypes.c_ushort * (count + 1))()
        # What is written includes a terminating NUL.
        written = int(self._raw.FPDFText_GetText(self._text_page, 0, count, buffer))
        return _decoded(buffer, 2 * (written - 1))

    # -- annotations ---------------------------------------------------------------------------

    def _annotations(self) -> Iterator[Annotation]:
        raw = self._raw
        for position in range(int(raw.FPDFPage_GetAnnotCount(self._page))):
            annotation = raw.FPDFPage_GetAnnot(self._page, position)
            if not annotation:
                continue
            try:
                text = self._annotation_text(annotation)
                if text.strip():
                    yield self._placed(annotation, text)
            finally:
                raw.FPDFPage_CloseAnnot(annotation)

    def _annotation_text(self, annotation: Any) -> str:
        raw = self._raw
        kind = raw.FPDFAnnot_GetSubtype(annotation)
        if kind == raw.FPDF_ANNOT_POPUP:
            return ""
        if kind == raw.FPDF_ANNOT_WIDGET:
            return self._field_value(annotation)
        # Asking first is what makes thousands of links cheap.
        if not raw.FPDFAnnot_HasKey(annotation, b"Contents"):
            return ""
        return _string(
            lambda buffer, size: raw.FPDFAnnot_GetStringValue(annotation, b"Contents", buffer, size)
        )

    def _field_value(self, annotation: Any) -> str:
        raw = self._raw
        if not self._form:
            return ""
        # A button's value names its state; only these hold what somebody wrote or chose.
        if raw.FPDFAnnot_GetFormFieldType(self._form, annotation) not in (
            raw.FPDF_FORMFIELD_TEXTFIELD,
            raw.FPDF_FORMFIELD_COMBOBOX,
            raw.FPDF_FORMFIELD_LISTBOX,
        ):
            return ""
        return _string(
            lambda buffer, size: raw.FPDFAnnot_GetFormFieldValue(
                self._form, annotation, buffer, size
            )
        )

    def _placed(self, annotation: Any, text: str) -> Annotation:
        box = self._raw.FS_RECTF()
        if not self._raw.FPDFAnnot_GetRect(annotation, ctypes.byref(box)):
            return Annotation(0, 0, text)
        x, y = self._place.upper_left((box.left, box.bottom, box.right, box.top))
        size = min(abs(box.right - box.left), abs(box.top - box.bottom))
        return Annotation(round(1000 * _within(y)), round(1000 * _within(x)), text, size)

    # -- title block ---------------------------------------------------------------------------

    def _title_block(
        self, text: str, annotations: list[Annotation], heading: Heading
    ) -> tuple[str | None, str | None]:
        """Number and title, keeping what the heading has; a title only beside a number."""
        wanted = heading.number
        # What this collects has no line breaks where text is turned, so it only says which of the
        # page's numbers stand there, too.
        corner = [self._bounded(text, region) for region in _TITLE_REGIONS]
        numbers = {n for n in distinct_numbers(text) if any(n in part for part in corner)}
        if wanted is not None:
            key = normalise_sheet_number(wanted)
            numbers = {number for number in numbers if normalise_sheet_number(number) == key}
        printed = self._printed(text, numbers)
        candidates = [*printed.values(), *_annotated(annotations, wanted)]
        if not candidates:
            return heading.number, heading.title
        if wanted is not None:
            chosen = max(candidates, key=lambda c: (c.size, c.x + c.y))
        else:
            chosen = choose_number(candidates, self._other_size(text, printed))
        if chosen is None:
            return heading.number, heading.title
        title = heading.title or choose_title(self._lines_around(text, chosen), chosen)
        return heading.number or chosen.number, title

    def _printed(self, text: str, numbers: set[str]) -> dict[int, Candidate]:
        """Where in `text` the numbers of a title block's regions stand, how large, and where.

        The size of every character would cost more than reading the page; this asks only for the
        few that can be a sheet number.
        """
        found: dict[int, Candidate] = {}
        for number in sorted(numbers):
            start = text.find(number)
            while start >= 0 and len(found) < _CANDIDATES_MAX:
                character = self._character(start)
                place = self._character_place(character)
                if is_number_at(text, start, number) and place and _in_title_region(*place):
                    found[start] = Candidate(number, self._size(character), *place)
                start = text.find(number, start + len(number))
        return found

    def _other_size(self, text: str, printed: dict[int, Candidate]) -> float:
        """The size of the page's text besides the candidates, from a sample spread evenly."""
        taken = {
            index
            for start, candidate in printed.items()
            for index in range(start, start + len(candidate.number))
        }
        step = max(1, len(text) // _CHARACTERS_SAMPLED)
        sizes = [
            self._size(self._character(index))
            for index in range(0, len(text), step)
            if index not in taken and not text[index].isspace()
        ]
        sizes = sorted(size for size in sizes if size > 0)
        return sizes[len(sizes) // 2] if sizes else 0.0

    def _lines_around(self, text: str, number: Candidate) -> list[Line]:
        """The lines near the sheet number that a title is chosen from, in the parser's order."""
        box = (max(0.0, number.x - 0.2), max(0.0, number.y - 0.35), 1.0, 1.0)
        near = self._bounded(text, box)
        found: list[Line] = []
        looked_at = start = 0
        for line in text.split("\n"):
            clean = line.strip()
            # The cheapest question first: there are hundreds of lines, and PDFium's answer where
            # each of them stands would take longer than the page's text.
            wanted = len(clean) > 2 and clean in near and is_title_block_line(clean)
            if wanted and looked_at < _TITLE_LINES_MAX:
                looked_at += 1
                character = self._character(start + line.index(clean))
                place = self._character_place(character)
                if place is not None and _contains(box, *place):
                    found.append(Line(clean, self._size(character), *place))
            start += len(line) + 1
        return found

    def _bounded(self, text: str, region: tuple[float, float, float, float]) -> str:
        left, bottom, right, top = self._place.on_page(region)
        place = (self._text_page, left, top, right, bottom)
        # Asking for the length first would collect the text twice; it is seldom more than this.
        size = len(text) + 1
        buffer = (ctypes.c_ushort * size)()
        count = int(self._raw.FPDFText_GetBoundedText(*place, buffer, size))
        return _decoded(buffer, 2 * min(count, size)).rstrip("\0").replace("\r\n", "\n")

    def _character(self, text_index: int) -> int:
        return int(self._raw.FPDFText_GetCharIndexFromTextIndex(self._text_page, text_index))

    def _character_place(self, character: int) -> tuple[float, float] | None:
        left, right, bottom, top = (ctypes.c_double() for _ in range(4))
        if not self._raw.FPDFText_GetCharBox(self._text_page, character, left, right, bottom, top):
            return None
        return self._place.as_displayed(
            (left.value + right.value) / 2, (bottom.value + top.value) / 2
        )

    def _size(self, character: int) -> float:
        """Points as printed: the nominal font size is scaled by the text's matrix."""
        matrix = self._raw.FS_MATRIX()
        if not self._raw.FPDFText_GetMatrix(self._text_page, character, matrix):
            return 0.0
        nominal = float(self._raw.FPDFText_GetFontSize(self._text_page, character))
        return abs(nominal) * (matrix.c**2 + matrix.d**2) ** 0.5


class _Placement:
    """Between points on the page and fractions of it as displayed, whatever `/Rotate` and crop."""

    _PIXELS = 100_000

    def __init__(self, raw: Any, page: Any) -> None:
        n = self._PIXELS
        self._origin = self._point(raw, page, 0, 0)
        right = self._point(raw, page, n, 0)
        down = self._point(raw, page, 0, n)
        self._across = (right[0] - self._origin[0], right[1] - self._origin[1])
        self._down = (down[0] - self._origin[0], down[1] - self._origin[1])

    def _point(self, raw: Any, page: Any, x: int, y: int) -> tuple[float, float]:
        page_x, page_y = ctypes.c_double(), ctypes.c_double()
        size = self._PIXELS
        raw.FPDF_DeviceToPage(page, 0, 0, size, size, 0, x, y, page_x, page_y)
        return page_x.value, page_y.value

    def as_displayed(self, x: float, y: float) -> tuple[float, float]:
        """A point on the page as fractions of the displayed width and height."""
        dx, dy = x - self._origin[0], y - self._origin[1]
        return _along(dx, dy, self._across), _along(dx, dy, self._down)

    def upper_left(self, box: tuple[float, float, float, float]) -> tuple[float, float]:
        """The upper left corner, as displayed, of a box on the page."""
        one = self.as_displayed(box[0], box[1])
        other = self.as_displayed(box[2], box[3])
        return min(one[0], other[0]), min(one[1], other[1])

    def on_page(self, region: tuple[float, float, float, float]) -> tuple[float, ...]:
        """A region given in displayed fractions as left, bottom, right, top on the page."""
        corners = [
            (
                self._origin[0] + x * self._across[0] + y * self._down[0],
                self._origin[1] + x * self._across[1] + y * self._down[1],
            )
            for x, y in (region[:2], region[2:])
        ]
        xs, ys = [x for x, _ in corners], [y for _, y in corners]
        return min(xs), min(ys), max(xs), max(ys)


def _along(dx: float, dy: float, axis: tuple[float, float]) -> float:
    squared = axis[0] ** 2 + axis[1] ** 2
    return (dx * axis[0] + dy * axis[1]) / squared if squared > 0 else 0.0


def _within(fraction: float) -> float:
    """Clamped, because an annotation's box can be anything, NaN included."""
    return min(max(fraction, -10.0), 10.0) if fraction == fraction else 0.0


def _in_title_region(x: float, y: float) -> bool:
    return any(_contains(region, x, y) for region in _TITLE_REGIONS)


def _contains(box: tuple[float, float, float, float], x: float, y: float) -> bool:
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def _annotated(annotations: list[Annotation], wanted: str | None) -> Iterator[Candidate]:
    """Sheet numbers that AutoCAD has plotted as strokes, with the string in an annotation."""
    key = normalise_sheet_number(wanted) if wanted is not None else None
    for annotation in annotations:
        x, y = annotation.x / 1000, annotation.y / 1000
        text = annotation.text.strip()
        if not _in_title_region(x, y) or find_numbers(text) != [(0, text)]:
            continue
        if key is None or normalise_sheet_number(text) == key:
            yield Candidate(text, annotation.size, x, y)


def _string(fill: Callable[[Any, int], int]) -> str:
    """A string from a call that says how many bytes it needs, then writes UTF-16 with a NUL."""
    size = int(fill(None, 0))
    if size <= 2:
        return ""
    buffer = (ctypes.c_ushort * ((size + 1) // 2))()
    fill(buffer, size)
    return _decoded(buffer, size).rstrip("\0")


def _decoded(buffer: Any, size: int) -> str:
    # Lone surrogates pass here and are stripped by `normalise`, in the one place for it.
    return ctypes.string_at(buffer, max(0, size)).decode("utf-16-le", "surrogatepass")
