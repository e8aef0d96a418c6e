"""Tables, times and sizes for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from planroom.cli.output import clean
from planroom.cli.progress import duration

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from leasequeue import Pause


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table without lines. A column whose name starts with `>` is of numbers.

    The first column gives way when the screen is narrow, by folding: a name is never cut.
    """
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for at, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        made.add_column(name.lstrip(">"), justify=justify, overflow="fold", no_wrap=at > 0)
    for row in rows:
        made.add_row(*(clean(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def size(count: int) -> str:
    """`236 MB`."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if amount >= 10 or unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def ago(at: datetime | None, now: datetime | None = None) -> str:
    """`4 min 10 s ago`; nothing for no time."""
    if at is None:
        return ""
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    if seconds < -1:
        return f"in {duration(-seconds)}"
    if seconds < 1:
        return "now"
    if seconds < 86400:
        return f"{duration(round(seconds))} ago".replace(".0 s", " s")
    return at.astimezone().strftime("%Y-%m-%d %H:%M")


def said_of_pause(pause: Pause) -> str:
    """Who paused the fleet, and why."""
    why = f": {pause.reason}" if pause.reason else ""
    return f"Claiming is paused by {pause.by}, {ago(pause.at)}{why}"
