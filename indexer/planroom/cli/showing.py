"""`status`: what there is, how far it is, what is missing from it, and what every kill has cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planroom.cli.coverage import count, coverage, gap_count, gap_lines
from planroom.cli.opening import open_room
from planroom.cli.option import JsonOption, ProjectOption, examples
from planroom.cli.output import Output, clean, indented, to_json
from planroom.cli.progress import duration, position
from planroom.cli.table import ago, said_of_pause, size, table

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import RenderableType
    from rich.text import Text

    from leasequeue import Pause
    from planroom.room import PlanRoom

Row = dict[str, Any]

commands = typer.Typer()

WATCH_SECONDS = 1.0

_COLOURS = {"ready": "green", "failed": "red", "cancelled": "yellow"}


@commands.command(
    rich_help_panel="Drawing sets",
    epilog=examples(
        "planroom status",
        "planroom status riverside.pdf",
        "planroom status --watch",
        "planroom status --json",
    ),
)
def status(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Its name, the end of its path, or its number."),
    ] = None,
    project: ProjectOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on showing it, until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the files: progress, pages without text, errors.

    Of one FILE also which pages, and the ledger: every attempt, what it did, what it had to do
    again, what was lost, and why it ended. With --json: one document, `files`; of one file also
    `coverage` and `attempts`. With --watch one document for every change.
    """
    output = Output(as_json)
    with open_room() as room:
        if watch:
            _watch(room, output, file, project)
        else:
            document, shown = _look(room, file, project)
            output.document(document)
            output.say(*shown)


def _look(
    room: PlanRoom, file: str | None, project: str | None
) -> tuple[Row, list[RenderableType]]:
    """What there is, for machines and for people."""
    if file is None:
        rows = room.status(project=project, all_projects=project is None)
        pause = room.paused()
        return {"files": rows, "paused": pause}, show_all(rows, pause)
    row = room.status(file, project=project)[0]
    gaps, attempts = room.gaps(row["id"]), room.attempts(row["id"])
    document = {"files": [row], "coverage": coverage(row, gaps), "attempts": attempts}
    return document, show_one(row, gaps, attempts)


def _watch(room: PlanRoom, output: Output, file: str | None, project: str | None) -> None:
    """Look again and again; where no screen is, only what has changed is written."""
    if output.live:
        from rich.console import Group
        from rich.live import Live

        with Live(console=output.console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(Group(*_look(room, file, project)[1]), refresh=True)
                time.sleep(WATCH_SECONDS)
    told = ""
    while not output.closed:
        document, shown = _look(room, file, project)
        if (now := to_json(_without_clocks(document))) != told:
            told = now
            output.document(document)
            output.say(*shown)
        time.sleep(WATCH_SECONDS)


def _without_clocks(document: Row) -> Row:
    """What counts as a change: not that time has passed, and not that a lease was renewed."""
    clocks = ("waits_seconds", "lease_expires_at")
    files = [{k: v for k, v in row.items() if k not in clocks} for row in document["files"]]
    return {"files": files, "paused": document.get("paused")}


# -- every file ----------------------------------------------------------------------------------


def show_all(rows: Sequence[Row], pause: Pause | None = None) -> list[RenderableType]:
    """A table of files, and below it what is wrong with which."""
    from rich.text import Text

    shown: list[RenderableType] = []
    if pause is not None:
        shown.append(Text(said_of_pause(pause), style="bold yellow"))
    if not rows:
        return [*shown, "No files yet. planroom index PATH... adds some."]
    several = len({row["project"] for row in rows}) > 1
    columns = ["file", *(["project"] if several else []), "state", ">pages", ">chunks", ">no text"]
    cells = [
        [row["name"], *([row["project"]] if several else []), _state(row), *_numbers(row)]
        for row in rows
    ]
    shown.append(table(columns, cells))
    return [*shown, *_what_is_wrong(rows)]


def _what_is_wrong(rows: Sequence[Row]) -> list[RenderableType]:
    """Each error once, and below it the files that have it."""
    from rich.text import Text

    files: dict[str, list[str]] = {}
    for row in rows:
        if row["error"] or row["error_code"]:
            files.setdefault(_error(row), []).append(clean(row["name"]))
    shown: list[RenderableType] = []
    for error, names in files.items():
        shown += ["", Text(error, style="red"), indented(", ".join(names), 4)]
    return shown


def _error(row: Row) -> str:
    code = f"[{row['error_code']}]"
    return f"{clean(row['error'])} {code}" if row["error"] else code


def _numbers(row: Row) -> list[str]:
    if row["page_count"] is None:
        return ["", "", ""]
    pages, units = f"{row['processed_pages']:,}", f"{row['processed_units']:,}"
    if row["status"] != "ready":
        total = row["total_units"]
        pages = f"{pages}/{row['page_count']:,}"
        units = f"{units}/{'?' if total is None else format(total, ',')}"
    gaps = gap_count(row)
    return [pages, units, f"{gaps:,}" if gaps else ""]


def _state(row: Row) -> Text:
    from rich.text import Text

    state = row["state"]
    if row["published_version"] and row["status"] != "ready":
        state += f" (version {row['published_version']} is searchable)"
    return Text(clean(state), style=_COLOURS.get(row["status"], "cyan"))


# -- one file ------------------------------------------------------------------------------------


def show_one(row: Row, gaps: Sequence[Row], attempts: Sequence[Row]) -> list[RenderableType]:
    """All that is known of a file."""
    from rich.text import Text

    head = Text.assemble((clean(row["name"]), "bold"), "  ", _state(row))
    facts = [f"number {row['id']}, project {clean(row['project'])}, version {row['version']}"]
    facts[0] += f", {size(row['size_bytes'])}"
    if row["page_count"]:
        facts.append(_how_far(row))
    if row["lease_owner"]:
        facts.append(f"held by {row['lease_owner']} until {_clock(row['lease_expires_at'])}")
    shown: list[RenderableType] = [head, *(indented(fact, 2) for fact in facts)]
    if row["error"] or row["error_code"]:
        shown.append(indented(_error(row), 2, "red"))
    if gaps:
        pages = count(row["page_count"], "page")
        verb = "gives" if len(gaps) == 1 else "give"
        said = f"  {len(gaps):,} of {pages} {verb} no text:"
        shown.append(Text(said, style="bold yellow"))
        shown += [indented(line, 4, "yellow") for line in gap_lines(gaps)]
    if attempts:
        shown += show_attempts(attempts)
    return shown


def _how_far(row: Row) -> str:
    if row["status"] == "ready":
        chunks = count(row["total_units"], "chunk")
        return f"{count(row['page_count'], 'page')}, {chunks}, ready {ago(row['finished_at'])}"
    return position(row)


def _clock(at: datetime) -> str:
    return at.astimezone().strftime("%H:%M:%S")


def show_attempts(attempts: Sequence[Row]) -> list[RenderableType]:
    """The ledger: what every attempt did, what it did again, what its end has cost."""
    from rich.text import Text

    shown: list[RenderableType] = [Text("  attempts", style="dim")]
    for attempt in attempts:
        head = f"{attempt['attempt']}. {_clock(attempt['started_at'])}  {_ending(attempt)}"
        shown.append(indented(f"{head}, by {attempt['worker']}", 4))
        shown.append(indented(_work(attempt), 7))
    return shown


def _ending(attempt: Row) -> str:
    """`expired after 7.1 s, 2.0 s lost: …`."""
    took = duration(float(attempt["seconds"]))
    if attempt["outcome"] is None:
        return f"running for {took}"
    said = f"{attempt['outcome']} after {took}"
    lost = float(attempt["seconds_lost"] or 0)
    said += f", {duration(lost)} lost" if lost >= 0.1 else ""
    reason = attempt["error"] or attempt["error_code"]
    return f"{said}: {reason}" if reason else said


def _work(attempt: Row) -> str:
    """`160 pages read, 1,809 chunks embedded, 12 reused; again: 4 pages, 200 chunks`."""
    done = [f"{count(attempt['pages_read'], 'page')} read"]
    done.append(f"{count(attempt['units_embedded'], 'chunk')} embedded")
    if attempt["units_reused"]:
        done.append(f"{attempt['units_reused']:,} reused")
    again = [
        count(number, name)
        for number, name in (
            (attempt["pages_read_again"], "page"),
            (attempt["units_embedded_again"], "chunk"),
        )
        if number
    ]
    said = ", ".join(done)
    return f"{said}; at most again: {', '.join(again)}" if again else said
