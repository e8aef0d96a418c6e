"""Text that stands in annotations: AutoCAD's SHX strings, FreeText, stamps, form fields.

AutoCAD draws SHX fonts as strokes and keeps the string in an annotation, so on some sheets nearly
all text is here. It is appended to the page's own text under a line that says where it is from, in
the order in which it is displayed: from the top, then from the left, then by the text.

Every string is kept, even where the page's text has the same one: two doors with the same tag are
two doors. Only an annotation that is listed twice, at the same place with the same text, is one.
A Popup is skipped: it is the window in which the text of its parent is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ANNOTATION_MARK = "[annotations]"
"""The line between a page's own text and that of its annotations."""


@dataclass(frozen=True, slots=True, order=True)
class Annotation:
    """A string at a place: `y` and `x` of its upper left corner in thousandths of the page as
    displayed, and `size`, the shorter side of its box in points."""

    y: int
    x: int
    text: str
    size: float = 0.0


def in_order(annotations: Iterable[Annotation]) -> list[Annotation]:
    """As they are displayed, each once."""
    return sorted(set(annotations))


def appended(text: str, annotations: list[Annotation]) -> str:
    """The page's text followed by that of its annotations; both not yet normalised."""
    if not annotations:
        return text
    head = f"{text.rstrip()}\n\n" if text.strip() else ""
    return "\n".join([head + ANNOTATION_MARK, *(a.text for a in annotations)])
