"""Bookmarks: which one names a page.

Several can point at one page: a group (`ARCHITECTURAL`) and the sheet in it. The deepest is the
most specific, and one that holds a sheet number is better than any that does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planroom.extract.sheet import split_heading
from planroom.extract.text import normalise_line


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A bookmark as it stands in the document; `level` 0 is the outermost."""

    index: int
    level: int
    title: str


def title_by_page(bookmarks: Iterable[Bookmark]) -> dict[int, str]:
    """For each page that a bookmark points at, the title of the one that names it best.

    Among equals, the first in the outline's order.
    """
    best: dict[int, tuple[bool, int, str]] = {}
    for bookmark in bookmarks:
        title = normalise_line(bookmark.title)
        if title is None:
            continue
        rank = (split_heading(title)[0] is not None, bookmark.level)
        known = best.get(bookmark.index)
        if known is None or rank > known[:2]:
            best[bookmark.index] = (*rank, title)
    return {index: title for index, (_, _, title) in best.items()}
