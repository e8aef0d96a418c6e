"""`index` and `add`: take drawing sets in, and see them through."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planroom.cli.coverage import count, coverage, gap_count, gap_lines
from planroom.cli.failure import EXIT_FAILED, EXIT_INTERRUPTED, Terminated
from planroom.cli.opening import open_room
from planroom.cli.option import JsonOption, ProjectOption, examples
from planroom.cli.output import Output, clean, indented
from planroom.cli.progress import Followed, duration, is_over, position, resumes_at
from planroom.cli.table import said_of_pause

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planroom.errors import PlanroomError
    from planroom.intake import Taken
    from planroom.room import PlanRoom

Row = dict[str, Any]

commands = typer.Typer()

PathsArgument = Annotated[
    list[Path], typer.Argument(metavar="PATH", help="PDF files, and folders of them.")
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", help="Enter the one file under this name instead of its own."),
]


@commands.command(
    rich_help_panel="Drawing sets",
    epilog=examples(
        "planroom index riverside.pdf",
        "planroom index ~/projects/riverside --project riverside",
    ),
)
def index(
    paths: PathsArgument,
    project: ProjectOption = None,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add drawing sets, and work until they are searchable.

    Stop it whenever you like, or pull the plug: the same command again goes on where it stopped.
    Other workers may take part. With --json there is a line an event: refused, taken, progress,
    ended, summary.
    """
    output = Output(as_json)
    with _terminated_like_interrupted(), open_room(project=project) as room:
        indexing = _Indexing(room, output)
        try:
            indexing.take_in(paths, name)
            indexing.work()
        except (KeyboardInterrupt, Terminated):
            indexing.say_how_to_go_on()
            raise typer.Exit(EXIT_INTERRUPTED) from None
        indexing.summarise()
    if indexing.failed:
        raise typer.Exit(EXIT_FAILED)


@commands.command(
    rich_help_panel="Drawing sets",
    epilog=examples("planroom add riverside.pdf", "planroom add drawings/ --json"),
)
def add(
    paths: PathsArgument,
    project: ProjectOption = None,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add drawing sets and queue them, for workers to index.

    With --json there is a line an event: refused, taken, summary.
    """
    output = Output(as_json)
    with _terminated_like_interrupted(), open_room(project=project) as room:
        indexing = _Indexing(room, output)
        try:
            indexing.take_in(paths, name, tell_all=True)
        except (KeyboardInterrupt, Terminated):
            indexing.say_how_to_go_on()
            raise typer.Exit(EXIT_INTERRUPTED) from None
        output.document(
            {"event": "summary", "taken": len(indexing.taken), "refused": indexing.refused}
        )
    if indexing.failed:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _terminated_like_interrupted() -> Generator[None]:
    """SIGTERM ends the command in order, as Ctrl-C does."""

    def end(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Indexing:
    """One command's files: what was taken in, what became of each."""

    def __init__(self, room: PlanRoom, output: Output) -> None:
        self.taken: list[Taken] = []
        self.refused = 0
        self.failed = False
        self._room = room
        self._output = output
        self._began = time.monotonic()
        self._ended: dict[int, Row] = {}
        self._gaps: dict[int, list[Row]] = {}

    # -- taking in -------------------------------------------------------------------------------

    def take_in(self, paths: Sequence[Path], name: str | None, *, tell_all: bool = False) -> None:
        """Take every path in; what is refused is said, and the others go on."""
        from planroom.cli.paths import find_named
        from planroom.errors import InputRefused, PlanroomError

        files, refused = find_named(paths)
        if name is not None and len(files) != 1:
            raise typer.BadParameter(
                f"a name is for one file, and these are {len(files)}", param_hint="--name"
            )
        for path in refused:
            self._refuse(path.path, path.error)
        for file in files:
            try:
                taken = self._room.add(file.path, name=name or file.name)
            except InputRefused as error:
                self._refuse(file.path, error)
            else:
                self._take(file.path, taken, tell_all)
        if not self.taken and not self.refused:
            raise PlanroomError("There is nothing to take in.", code="no_pdf")

    def _refuse(self, path: Path, error: PlanroomError) -> None:
        self.refused += 1
        self.failed = True
        if self._output.as_json:
            said = {"code": error.code, "message": str(error), "hint": error.hint}
            self._output.document({"event": "refused", "path": str(path), "error": said})
        else:
            hint = f" {error.hint}" if error.hint else ""
            self._output.complain(error.code, f"refused: {error}{hint}")

    def _take(self, path: Path, taken: Taken, tell_all: bool) -> None:
        self.taken.append(taken)
        self._output.document(
            {
                "event": "taken",
                "path": str(path),
                "file": taken.name,
                "file_id": taken.file_id,
                "version": taken.version,
                "ingestion_id": taken.ingestion_id,
                "outcome": taken.outcome,
            }
        )
        row = self._room.status(taken.file_id)[0]
        resumes = None if is_over(row) else resumes_at(row)
        if resumes:
            self._output.say(f"{taken.name}: resuming at {resumes}")
        elif tell_all or taken.outcome in _WORTH_SAYING:
            self._output.say(f"{taken.name}: {_OUTCOMES[taken.outcome]}")

    # -- working ---------------------------------------------------------------------------------

    def work(self) -> None:
        """Work until every file that was taken in is over."""
        waiting = [taken.file_id for taken in self.taken if taken.outcome != "already_indexed"]
        for taken in self.taken:
            if taken.outcome == "already_indexed":
                self._note_end(self._room.status(taken.file_id)[0])
        if not waiting:
            return
        followed = Followed(self._output, self._end, self._paused)
        with followed.shown():
            rows = self._room.work_on(waiting, on_progress=followed.tell)
        for row in rows:
            if row["id"] not in self._ended:
                self._end(row, 0.0)
        for gone in set(waiting) - {row["id"] for row in rows}:
            self.failed = True
            name = next(taken.name for taken in self.taken if taken.file_id == gone)
            self._output.complain("removed", f"{name} was removed while it was being indexed.")

    def _paused(self) -> str | None:
        pause = self._room.paused()
        return None if pause is None else f"{said_of_pause(pause)}; planroom resume ends that"

    def _note_end(self, row: Row) -> None:
        self._ended[row["id"]] = row
        self._gaps[row["id"]] = self._room.gaps(row["id"]) if gap_count(row) else []
        if row["status"] != "ready":
            self.failed = True

    def _end(self, row: Row, seconds: float) -> None:
        """A file is over: one line."""
        self._note_end(row)
        self._output.document(
            {
                "event": "ended",
                "file": row["name"],
                "file_id": row["id"],
                "status": row["status"],
                "error_code": row["error_code"],
                "error": row["error"],
                "chunks": row["total_units"],
                "seconds": round(seconds, 3),
                **coverage(row, self._gaps[row["id"]]),
            }
        )
        self._output.say(*_end_lines(row, seconds, folded=self._output.live))

    # -- the end ---------------------------------------------------------------------------------

    def summarise(self) -> None:
        """What came of it, and loudly what cannot be found by a search."""
        rows = list(self._ended.values())
        ready = [row for row in rows if row["status"] == "ready"]
        pages = sum(row["page_count"] or 0 for row in ready)
        chunks = sum(row["total_units"] or 0 for row in ready)
        gaps = sum(map(gap_count, ready))
        self._output.document(
            {
                "event": "summary",
                "files": len(rows),
                "ready": len(ready),
                "refused": self.refused,
                "pages": pages,
                "pages_without_text": gaps,
                "chunks": chunks,
                "seconds": round(time.monotonic() - self._began, 3),
            }
        )
        for row in ready:
            if gap_count(row):
                self._say_gaps(row)
        if len(rows) + self.refused > 1:
            failed = len(rows) - len(ready)
            said = [f"{len(ready):,} of {count(len(rows) + self.refused, 'file')} searchable"]
            said += [f"{failed:,} failed"] if failed else []
            said += [f"{self.refused:,} refused"] if self.refused else []
            took = duration(time.monotonic() - self._began)
            self._output.say(
                f"{', '.join(said)}; {count(pages, 'page')}, {count(chunks, 'chunk')}, in {took}"
            )

    def _say_gaps(self, row: Row) -> None:
        from rich.text import Text

        gaps, pages = gap_count(row), row["page_count"]
        verb = "is" if gaps == 1 else "are"
        self._output.say(
            Text(
                f"{row['name']}: {gaps:,} of {count(pages, 'page')} {verb} not searchable",
                style="bold yellow",
            ),
            *(indented(line, 2, "yellow") for line in gap_lines(self._gaps[row["id"]])),
        )

    def say_how_to_go_on(self) -> None:
        """After Ctrl-C: what is kept, and what to type."""
        ids = [t.file_id for t in self.taken if t.outcome != "already_indexed"]
        rows = [row for file_id in ids for row in self._room.status(file_id)]
        left = [row for row in rows if not is_over(row)]
        self._output.document(
            {
                "event": "interrupted",
                "left": [{"file": row["name"], "file_id": row["id"]} for row in left],
            }
        )
        for row in left:
            begun = row["page_count"] is not None
            said = f"stopped at {position(row)}; all of that is kept" if begun else "not begun yet"
            self._output.say(f"{row['name']}: {said}")
        self._output.say("Interrupted. The same command again goes on from there.")


_OUTCOMES = {
    "new": "queued",
    "new_version": "queued as a new version",
    "already_indexed": "already indexed",
    "resumed": "queued already",
    "retried": "queued again",
    "reindexed": "queued again, for its settings have changed",
    "too_large": "too large",
}
_WORTH_SAYING = ("already_indexed", "new_version", "reindexed")


def _end_lines(row: Row, seconds: float, *, folded: bool) -> list[RenderableType]:
    """`indexed riverside.pdf: 24 pages, 310 chunks, 4.1 s`; why it failed, set off if `folded`."""
    from rich.text import Text

    name = Text(clean(row["name"]), style="bold")
    if row["status"] == "ready":
        gaps = gap_count(row)
        said = f": {count(row['page_count'], 'page')}, {count(row['total_units'], 'chunk')}"
        line = Text.assemble(("indexed ", "green"), name, f"{said}, {duration(seconds)}")
        if gaps:
            line.append(f"; {count(gaps, 'page')} without text", style="yellow")
        return [line]
    if row["status"] == "cancelled":
        return [Text.assemble(("cancelled ", "yellow"), name)]
    error = f"{clean(row['error'] or '')} [{row['error_code']}]".lstrip()
    line = Text.assemble(("failed ", "red"), name, ": ", "" if folded else error)
    return [line, indented(error, 4)] if folded else [line]
