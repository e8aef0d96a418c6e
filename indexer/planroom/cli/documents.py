"""`cancel`, `retry`, `remove` and `verify`: what is done to one file."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import typer

from planroom.cli.coverage import count
from planroom.cli.failure import EXIT_FAILED
from planroom.cli.opening import open_room
from planroom.cli.option import FileArgument, JsonOption, ProjectOption, examples
from planroom.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from planroom.verify import Verification

commands = typer.Typer()


@commands.command(rich_help_panel="Files", epilog=examples("planroom cancel riverside.pdf"))
def cancel(file: FileArgument, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Stop indexing a file; what was read of it is kept for a retry.

    With --json: `file` and `ingestions`, each with the status it has now.
    """
    output = Output(as_json)
    with open_room() as room:
        ended = room.cancel(file, project=project)
    output.document({"file": file, "ingestions": {str(i): status for i, status in ended.items()}})
    if not ended:
        output.say(f"{file}: nothing is queued or running.")
    elif "running" in ended.values():
        output.say(f"{file}: asked to stop; its worker ends it within a few seconds.")
    else:
        output.say(f"{file}: cancelled.")


@commands.command(rich_help_panel="Files", epilog=examples("planroom retry riverside.pdf"))
def retry(file: FileArgument, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Queue a file again, whatever became of it; workers index it.

    With --json: `file` and `ingestion_id`, null when it is queued or running already.
    """
    output = Output(as_json)
    with open_room() as room:
        ingestion_id = room.retry(file, project=project)
    output.document({"file": file, "ingestion_id": ingestion_id})
    done = "queued again." if ingestion_id else "is being worked on already."
    output.say(f"{file}: {done}")


@commands.command(rich_help_panel="Files", epilog=examples("planroom remove riverside.pdf"))
def remove(file: FileArgument, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Take a file out of the plan room: no search finds it from now on.

    With --json: `file` and `removed`.
    """
    output = Output(as_json)
    with open_room() as room:
        removed = room.remove(file, project=project)
    output.document({"file": file, "removed": removed})
    output.say(f"{file}: {'removed.' if removed else 'was removed before.'}")


@commands.command(rich_help_panel="Files", epilog=examples("planroom verify riverside.pdf"))
def verify(file: FileArgument, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Read a file again from its bytes and compare the chunks with what is stored.

    Exit code 1 when anything differs. With --json: `ok`, `problems`, and how much was compared.
    """
    output = Output(as_json)
    shown, tell = _progress(output)
    with open_room() as room, shown:
        result = room.verify(file, tell, project=project)
    _say(output, file, result)
    if not result.ok:
        raise typer.Exit(EXIT_FAILED)


def _progress(
    output: Output,
) -> tuple[AbstractContextManager[object], Callable[[int, int], None]]:
    """A bar of pages, where a person watches."""
    if not output.live:
        return nullcontext(), lambda done, total: None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        "reading again",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=output.console,
        transient=True,
    )
    task = bar.add_task("", total=None)
    return bar, lambda done, total: bar.update(task, completed=done, total=total)


def _say(output: Output, file: str, result: Verification) -> None:
    output.document(
        {
            "file": file,
            "file_id": result.file_id,
            "ok": result.ok,
            "pages": result.pages,
            "chunks": result.units,
            "pages_not_compared": result.pages_not_compared,
            "reread": result.reread,
            "problems": result.problems,
        }
    )
    compared = f"{count(result.pages, 'page')} and {count(result.units, 'chunk')}"
    if result.ok:
        output.say(f"{file}: {compared} are what its bytes give.")
    else:
        output.say(f"{file}: {compared} compared; this is wrong:")
        output.say(*(f"  {problem}" for problem in result.problems))
    if not result.reread:
        output.say(
            "  Its pages were not read again: another version of the extractor or chunker made"
            " them. planroom retry indexes it anew."
        )
    if result.pages_not_compared:
        output.say(
            f"  {count(result.pages_not_compared, 'page')} could not be read at the time, and"
            " may be readable now; planroom retry tries."
        )
