"""What of a document cannot be searched, in words: which pages, and why. Pure.

`ready` with gaps is said everywhere; that a page is a scan must never be found out by a search
that finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

_WHY = {
    "image_only": "no text: a scan, lines only, or blank",
    "timeout": "took too long to read",
    "memory": "needed too much memory",
    "crashed": "crashed the reader",
    "parser_error": "damaged: could not be parsed",
    "bad_encoding": "its fonts do not say which characters they show",
}


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 page`, `1,400 pages`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def ranges(pages: Iterable[int]) -> str:
    """Sorted page numbers in as few words as they need: `5, 9-11`."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], page)
        else:
            runs.append((page, page))
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def gap_lines(gaps: Sequence[Row]) -> list[str]:
    """One line a reason, with all its pages: the reader of a set has to know each of them."""
    by_reason: dict[str, list[int]] = {}
    for gap in gaps:
        by_reason.setdefault(gap["reason"] or gap["status"], []).append(gap["page"])
    return [
        f"{'page' if len(pages) == 1 else 'pages'} {ranges(pages)}: {_WHY.get(reason, reason)}"
        for reason, pages in by_reason.items()
    ]


def gap_count(row: Row) -> int:
    """How many pages of a file, as `status` gives it, gave no text."""
    return int(row["image_only_pages"] or 0) + int(row["failed_pages"] or 0)


def coverage(row: Row, gaps: Sequence[Row]) -> Row:
    """For machines: pages in all, with text, and each that gave none."""
    without = gap_count(row)
    return {
        "pages": row["page_count"],
        "pages_with_text": (row["processed_pages"] or 0) - without,
        "image_only_pages": row["image_only_pages"] or 0,
        "failed_pages": row["failed_pages"] or 0,
        "gaps": list(gaps),
    }
