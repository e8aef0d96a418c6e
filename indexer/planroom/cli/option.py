"""Options and arguments that several commands share, and how `--help` shows examples."""

from __future__ import annotations

from typing import Annotated

import typer

JsonOption = Annotated[
    bool, typer.Option("--json", help="One line of JSON for machines instead of a table.")
]
ProjectOption = Annotated[
    str | None,
    typer.Option(
        "--project", "-p", metavar="NAME", help="The project; PLANROOM_PROJECT if not given."
    ),
]
FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="Its name, the end of its path, or its number.")
]


def examples(*lines: str) -> str:
    """The end of a command's help: each example on a line of its own."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n\n".join([title, *(f"\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}{line}" for line in lines)])


def paragraphs(docstring: str) -> str:
    """A docstring without the line breaks inside its paragraphs: the terminal makes its own."""
    return "\n\n".join(" ".join(part.split()) for part in docstring.split("\n\n"))
