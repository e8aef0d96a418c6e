"""Progress of `index`, for whoever looks: bars in a terminal, plain lines in a log, JSON lines.

What is shown is what is committed, so it moves whichever worker does the work. It is told from a
thread of its own, a few times a second.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from planroom.cli.coverage import count
from planroom.cli.output import Output, clean

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live
    from rich.progress import Progress, TaskID

Row = dict[str, Any]

LINE_SECONDS = 10.0
"""How often a log that nobody watches is told how far a file is."""
EVENT_SECONDS = 1.0
HELD_SECONDS = 5.0
"""Without any progress for so long, it is said who holds a file: that worker may be dead."""
KEPT_FREE = 6
"""Columns at the right edge that no bar reaches."""
PACE_SECONDS = 20.0
"""How far back a rate looks."""
SHOWN_MAX = 3
"""Files with bars of their own at once; a fleet may be working on many more."""

TERMINAL = ("ready", "failed", "cancelled")


def is_over(row: Row) -> bool:
    """Whether nothing more happens to a file; superseded bytes are followed by newer ones."""
    return row["status"] in TERMINAL and row["error_code"] != "superseded"


class Followed:
    """Tells of files until they are over: `tell` is given every new set of status rows."""

    def __init__(
        self,
        output: Output,
        on_end: Callable[[Row, float], None],
        waiting: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output = output
        self._on_end = on_end
        self._waiting = waiting
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._ended: set[int] = set()
        self._told: dict[int, tuple[float, tuple[int, int]]] = {}
        self._moved: dict[int, tuple[float, tuple[int, int]]] = {}
        self._held: set[int] = set()
        self._bars = Bars() if output.live else None

    def shown(self) -> AbstractContextManager[object]:
        """Bars on the screen while the block runs, where a person watches."""
        return nullcontext() if self._bars is None else self._bars.on(self._output)

    def tell(self, rows: Sequence[Row]) -> None:
        """Show how far the files are, and say of each once that it is over."""
        now = self._clock()
        for row in rows:
            if row["status"] == "running":
                self._begun.setdefault(row["id"], now)
            if is_over(row) and row["id"] not in self._ended:
                self._ended.add(row["id"])
                if self._bars is not None:
                    self._bars.drop(row)
                self._on_end(row, _seconds(row, now - self._begun.get(row["id"], now)))
        going_on = [row for row in rows if not is_over(row)]
        waiting = self._waiting() if going_on else None
        for row in going_on:
            if row["status"] == "running":
                self._tell_one(row, now)
                waiting = waiting or self._held_by(row, now)
        if self._bars is not None:
            self._bars.update(going_on, len(rows), waiting)

    def _tell_one(self, row: Row, now: float) -> None:
        """A line, or an event, when there is news and the last one is a while ago."""
        at = (row["processed_pages"], row["processed_units"])
        told_at, told = self._told.setdefault(row["id"], (now, at))
        seconds = EVENT_SECONDS if self._output.as_json else LINE_SECONDS
        if told == at or now - told_at < seconds:
            return
        self._told[row["id"]] = (now, at)
        self._output.document({"event": "progress", **progress_of(row)})
        if self._bars is None:
            self._output.say(f"{row['name']}: {position(row)}")

    def _held_by(self, row: Row, now: float) -> str | None:
        """Who holds a file that stands still, if it is not this process."""
        at = (row["processed_pages"], row["processed_units"])
        since, stood_at = self._moved.get(row["id"], (now, None))
        if stood_at != at:
            self._moved[row["id"]] = (now, at)
            return None
        ours = f"{socket.gethostname()}:{os.getpid()}:"
        if now - since < HELD_SECONDS or row["lease_owner"].startswith(ours):
            return None
        left = max(0.0, (row["lease_expires_at"] - datetime.now(UTC)).total_seconds())
        said = (
            f"{clean(row['name'])} is held by worker {row['lease_owner']}; should that be dead,"
            f" it is taken over in {short(left)}"
        )
        if self._bars is None and row["id"] not in self._held:
            self._held.add(row["id"])
            self._output.say(said)
        return said


def _seconds(row: Row, seen: float) -> float:
    """How long a file took: by the database, or what was seen if it stood still in between."""
    if row["attempts"] == 1 and row["started_at"] and row["finished_at"]:
        return (row["finished_at"] - row["started_at"]).total_seconds()
    return seen


def progress_of(row: Row) -> Row:
    """How far a file is, for machines."""
    names = ("page_count", "processed_pages", "total_units", "processed_units", "lease_owner")
    return {
        "file": row["name"],
        "file_id": row["id"],
        "state": row["state"],
        **{name: row[name] for name in names},
    }


def position(row: Row) -> str:
    """How far a file is, in a sentence: `page 120 of 320, chunk 1,400 of 5,210`."""
    units = row["processed_units"]
    if row["total_units"] is not None:
        pages = count(row["page_count"], "page")
        return f"all {pages} read, chunk {units:,} of {row['total_units']:,}"
    if row["page_count"] is None:
        return "the start"
    page = f"page {row['processed_pages']:,} of {row['page_count']:,}"
    return f"{page}, chunk {units:,}" if units else page


def resumes_at(row: Row) -> str | None:
    """Where work on a file goes on, if it has begun before: `page 121 of 320, chunk 1,401`."""
    pages, units = row["processed_pages"], row["processed_units"]
    if not pages and not units:
        return None
    chunk = f"chunk {units + 1:,}"
    if row["total_units"] is not None:
        return f"{chunk} of {row['total_units']:,}; all {count(row['page_count'], 'page')} are read"
    page = f"page {pages + 1:,} of {row['page_count']:,}"
    return f"{page}, {chunk}" if units else page


class Bars:
    """Two bars a file that is being worked on, and a line on the rest."""

    def __init__(self) -> None:
        self._files: dict[int, _FileBars] = {}
        self._rest = ""
        self._live: Live | None = None

    @contextmanager
    def on(self, output: Output) -> Generator[None]:
        """Show the bars at the bottom of the screen while the block runs."""
        from rich.live import Live

        # Drawn by the thread that prints the lines above them, and by no other: two threads would
        # now and then draw over each other's lines.
        with Live(
            get_renderable=self.render,
            console=output.console,
            auto_refresh=False,
            transient=True,
            # Lines for another place than this screen must get there.
            redirect_stderr=sys.stderr.isatty(),
        ) as self._live:
            yield

    def drop(self, row: Row) -> None:
        """A file is over."""
        self._files.pop(row["id"], None)

    def update(self, going_on: Sequence[Row], files: int, waiting: str | None) -> None:
        """Move the bars of the files that are being worked on."""
        running = [row for row in going_on if row["status"] == "running"]
        for row in running:
            if row["id"] in self._files or len(self._files) < SHOWN_MAX:
                self._files.setdefault(row["id"], _FileBars(row)).update(row)
        for gone in set(self._files) - {row["id"] for row in running}:
            del self._files[gone]
        self._rest = _rest(going_on, files, waiting)
        if self._live is not None:
            self._live.refresh()

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        rows: list[RenderableType] = []
        for bars in list(self._files.values()):
            rows += [Text(bars.name, style="bold", overflow="ellipsis", no_wrap=True), bars.bars]
        if self._rest:
            rows.append(Text(self._rest, style="dim"))
        # The terminal itself writes ^C where the cursor stands; at the right edge that would begin
        # a new line, and what is drawn next would be off by one.
        return _ShortOfTheEdge(Group(*rows))


@dataclass(frozen=True, slots=True)
class _ShortOfTheEdge:
    """Keeps what it shows away from the right edge."""

    shown: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width - KEPT_FREE)
        yield from console.render(self.shown, options.update_width(width))


def _rest(going_on: Sequence[Row], files: int, waiting: str | None) -> str:
    """What there is to say on the files without bars."""
    said: list[str] = []
    if files > 1:
        said.append(f"{files - len(going_on):,} of {count(files, 'file')} done")
    if waiting:
        said.append(waiting)
    elif going_on and not any(row["status"] == "running" for row in going_on):
        said.append(waits(going_on[0]))
    return ". ".join(said)


def waits(row: Row) -> str:
    """Why nobody works on a file at this moment."""
    name = clean(row["name"])
    if row["state"] == "waiting to retry":
        why = clean(f": {row['error']}") if row["error"] else ""
        return f"{name}: trying again in {float(row['waits_seconds']):.0f} s{why}"
    if row["state"] == "cancelling":
        return f"{name}: being cancelled"
    return f"{name}: waiting for a worker"


class Pace:
    """How fast a count has grown lately. Rich's own forgets all whenever the total changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, done: int) -> None:
        """So much is done now."""
        now = self._clock()
        if not self._seen or done != self._seen[-1][1]:
            self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[0][0] < now - PACE_SECONDS:
            self._seen.popleft()

    @property
    def per_second(self) -> float | None:
        """The rate, from the second change on."""
        if len(self._seen) < 2:
            return None
        (began, before), (last, done) = self._seen[0], self._seen[-1]
        return (done - before) / (last - began) if last > began else None

    def left(self, remaining: float) -> float | None:
        """Seconds until so many more are done."""
        pace = self.per_second
        return remaining / pace if pace else None


class _FileBars:
    """One file's bars: its pages, then its chunks."""

    def __init__(self, row: Row) -> None:
        self.name = clean(row["name"])
        self.bars: Progress = _progress()
        self._tasks = {what: self._add(what) for what in ("pages", "chunks")}
        self._paces = {what: Pace() for what in self._tasks}

    def _add(self, what: str) -> TaskID:
        return self.bars.add_task(what, total=1, amount="", rate="", left="")

    def update(self, row: Row) -> None:
        """Move both bars; while pages are still read, the chunks to come are guessed."""
        pages, page_count = row["processed_pages"], row["page_count"]
        planned, total = row["planned_units"], row["total_units"]
        guess = round(planned * page_count / pages) if pages and planned else None
        self._move("pages", pages, page_count, "")
        self._move("chunks", row["processed_units"], total or guess, "" if total else "~")

    def _move(self, what: str, done: int, total: int | None, about: str) -> None:
        pace = self._paces[what]
        pace.note(done)
        amount = f"{done:,}" if total is None else f"{done:,}/{about}{total:,}"
        rate, left = pace.per_second, None if total is None else pace.left(total - done)
        over = total is not None and not about and done >= total
        self.bars.update(
            self._tasks[what],
            completed=done,
            # An empty bar where the total is not known: Rich would draw a full one that pulses.
            total=total or 1,
            amount=amount,
            rate="" if rate is None else f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s",
            left="done" if over else "" if left is None else f"{short(left)} left",
        )


def _progress() -> Progress:
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[amount]}", justify="right"),
        TextColumn("{task.fields[rate]}", justify="right", style="cyan"),
        TextColumn("{task.fields[left]}"),
        expand=True,
    )


def short(seconds: float) -> str:
    """A duration that is only a guess: `4 s`, `2 min`, `1 h 04 min`."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 3600:
        return f"{round(seconds / 60)} min"
    return duration(seconds)


def duration(seconds: float) -> str:
    """`4.1 s`, `2 min 05 s`, `1 h 04 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
