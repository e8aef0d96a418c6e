"""The application: which commands there are, and how whatever they raise ends.

A new group of commands is a module with a `commands` of its own and a line in `_GROUPS`.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from typing import Annotated

import typer

from planroom.cli import documents, fleet, indexing, searching, showing, sources, upkeep
from planroom.cli.failure import EXIT_INTERRUPTED, Terminated, explain, wants_traceback
from planroom.cli.option import examples, paragraphs
from planroom.cli.output import Output, prepare_streams

_GROUPS = (indexing, searching, showing, documents, sources, fleet, upkeep)

app = typer.Typer(
    name="planroom",
    help="Index construction drawing sets into Postgres, resumably, and find the sheet.",
    epilog=examples("planroom index drawings/", 'planroom search "fire rating of the stair doors"'),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
for group in _GROUPS:
    for command in group.commands.registered_commands:
        command.help = paragraphs(inspect.getdoc(command.callback) or "")
    app.add_typer(group.commands)


def _show_version(wanted: bool) -> None:
    if wanted:
        from planroom.version import version

        typer.echo(f"planroom {version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _planroom(  # pyright: ignore[reportUnusedFunction]
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 usage, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    prepare_streams()
    output = Output(as_json="--json" in given)
    try:
        code = app(given, prog_name="planroom", standalone_mode=False)
    except (KeyboardInterrupt, Terminated):
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - this is where every error is told to a person
        if wants_traceback():
            traceback.print_exc()
        failure = explain(error)
        output.complain(failure.code, failure.message, failure.hint)
        return failure.exit_code
    return code if isinstance(code, int) else 0
