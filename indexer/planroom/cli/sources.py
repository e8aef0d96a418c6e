"""`connect`, `connections`, `sync` and `disconnect`: folders that are kept indexed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from planroom.cli.opening import open_room
from planroom.cli.option import JsonOption, ProjectOption, examples
from planroom.cli.output import Output
from planroom.cli.progress import duration
from planroom.cli.table import ago, table

commands = typer.Typer()

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As `connections` lists it.")]


@commands.command(
    rich_help_panel="Sources",
    epilog=examples(
        "planroom connect folder /mnt/plans",
        "planroom connect folder /mnt/plans --name hospital --every 15",
    ),
)
def connect(
    provider: Annotated[str, typer.Argument(metavar="PROVIDER", help="What it is: folder.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder.")],
    name: Annotated[
        str | None, typer.Option("--name", help="What to call it; the folder's name if not given.")
    ] = None,
    every: Annotated[
        int | None, typer.Option("--every", min=1, metavar="MINUTES", help="Sync so often.")
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a folder indexed: new and changed files are taken in, missing ones removed.

    Workers do it, with --every by themselves, otherwise when `planroom sync` asks for it. Every
    worker must see the folder under this path. With --json: `connection_id` and `name`.
    """
    output = Output(as_json)
    with open_room(project=project) as room:
        called = name or path.resolve().name
        connection_id = room.connect(
            provider, path, name=called, every_seconds=None if every is None else 60 * every
        )
    output.document({"connection_id": connection_id, "name": called})
    output.say(f"{called} is connected.")
    if every is None:
        output.say(f"planroom sync {called} asks for its first sync; planroom worker does it.")


@commands.command(rich_help_panel="Sources", epilog=examples("planroom connections"))
def connections(as_json: JsonOption = False) -> None:
    """List the sources, their schedules, and when each is due next.

    With --json: one document, `connections`.
    """
    output = Output(as_json)
    with open_room() as room:
        rows = room.connections()
    output.document({"connections": rows})
    if not rows:
        output.say("Nothing is connected. planroom connect folder PATH connects a folder.")
        return
    cells = [
        [
            row["name"],
            row["provider"],
            str(row["config"].get("path", "")),
            row["status"],
            duration(row["interval_seconds"]) if row["interval_seconds"] else "when asked",
            _next(row["next_run_at"]),
        ]
        for row in rows
    ]
    output.say(table(["connection", "provider", "path", "status", "every", "next"], cells))


def _next(at: datetime | None) -> str:
    """When a schedule is due: what is overdue goes to the next worker that polls."""
    return "now" if at is not None and at <= datetime.now(UTC) else ago(at)


@commands.command(rich_help_panel="Sources", epilog=examples("planroom sync hospital"))
def sync(name: NameArgument, as_json: JsonOption = False) -> None:
    """Ask for a sync of a source now; a worker does it.

    While one is queued or running that one is meant. With --json: `run_id`.
    """
    output = Output(as_json)
    with open_room() as room:
        run_id = room.sync(name)
    output.document({"run_id": run_id})
    output.say(f"Run {run_id} is queued; planroom run {run_id} shows how it goes.")


@commands.command(
    rich_help_panel="Sources",
    epilog=examples("planroom disconnect hospital", "planroom disconnect hospital --purge"),
)
def disconnect(
    name: NameArgument,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove everything that it brought, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop syncing a source; what it brought stays, or goes with --purge.

    A purge waits for what is running, then leaves nothing; a worker does it. With --json:
    `run_id` of the purge, or null.
    """
    output = Output(as_json)
    with open_room() as room:
        run_id = room.disconnect(name, purge=purge)
    output.document({"run_id": run_id})
    if run_id is None:
        output.say(f"{name} is disconnected; its files stay.")
    else:
        output.say(f"{name} is being purged; planroom run {run_id} shows how it goes.")
