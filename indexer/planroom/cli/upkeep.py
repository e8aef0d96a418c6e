"""`migrate` and `doctor`: bring the database up to date, and look for what is wrong."""

from __future__ import annotations

import typer

from planroom.cli.failure import EXIT_FAILED
from planroom.cli.opening import read_settings
from planroom.cli.option import JsonOption, examples
from planroom.cli.output import Output, clean

commands = typer.Typer()


@commands.command(
    rich_help_panel="Upkeep",
    epilog=examples("PLANROOM_DATABASE_URL=postgresql://... planroom migrate"),
)
def migrate(as_json: JsonOption = False) -> None:
    """Bring the database's schema to what this version needs.

    The embedded database is migrated by itself. Safe to run from many machines at once. With
    --json: `applied`, the names of the migrations.
    """
    from planroom.database import Database

    output = Output(as_json)
    applied = Database(read_settings()).migrate()
    output.document({"applied": applied})
    if applied:
        output.say(*(f"applied {name}" for name in applied))
    else:
        output.say("The schema is up to date.")


@commands.command(rich_help_panel="Upkeep", epilog=examples("planroom doctor"))
def doctor(as_json: JsonOption = False) -> None:
    """Check everything planroom needs, and say what to do about what is missing.

    Exit code 1 when something is broken. With --json: `ok`, and `checks` with name, status (ok,
    warning or broken), message and hint.
    """
    from rich.text import Text

    from planroom.doctor import Status, examine

    output = Output(as_json)
    colours = {Status.OK: "green", Status.WARNING: "yellow", Status.BROKEN: "bold red"}
    checks = list(examine(read_settings()))
    for check in checks:
        mark = Text(f"{check.status:<8}", style=colours[check.status])
        output.say(Text.assemble(mark, f"{check.name}: {clean(check.message)}"))
        if check.hint:
            output.say(f"        {check.hint}")
    broken = any(check.status is Status.BROKEN for check in checks)
    output.document({"ok": not broken, "checks": checks})
    if broken:
        raise typer.Exit(EXIT_FAILED)
