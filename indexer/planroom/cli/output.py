"""Where a command's results go: a console for people, or JSON for machines.

Two rules hold for everything that is written. No control character of a file name, a drawing or
an error reaches the terminal. And a reader who goes away, as `head` does, ends the output and not
the work: the rest is dropped in silence.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDE = 1000
"""Columns where nobody looks: in a pipe or a file no line is broken, and none is cut."""


def clean(text: str) -> str:
    """The text with every control character, surrogate and direction mark shown as `�`."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def clean_lines(text: str) -> str:
    """As `clean`, keeping line breaks; tabs become spaces."""
    return "\n".join(clean(line.expandtabs(4)) for line in text.splitlines())


def indented(text: str, columns: int, style: str = "") -> RenderableType:
    """The text set in from the left, also where it is folded."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(clean_lines(text), style=style), (0, 0, 0, columns), expand=False)


def to_json(value: object) -> str:
    """One line of ASCII: times as ISO 8601, bytes as hexadecimal, durations in seconds."""
    return json.dumps(value, default=_jsonable, ensure_ascii=True, allow_nan=False)


def _jsonable(value: object) -> object:
    match value:
        case datetime() | date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
        case bytes():
            return value.hex()
        case Path():
            return str(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        case _:
            raise TypeError(f"{type(value).__name__} has no form in JSON")


class Output:
    """The output of one command. `as_json` says for whom it is."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.closed = False
        """Whether the reader has gone away."""
        self._console: Console | None = None

    @property
    def console(self) -> Console:
        """Rich's console on standard output; made at its first use, for rich is not free."""
        if self._console is None:
            self._console = _console(sys.stdout)
        return self._console

    @property
    def live(self) -> bool:
        """Whether a person watches: progress bars make sense."""
        return not self.as_json and self.console.is_terminal and not self.console.is_dumb_terminal

    def say(self, *parts: RenderableType) -> None:
        """Show each part to a person, a `str` as plain words. Machines are not told."""
        if self.as_json:
            return
        from rich.text import Text

        try:
            for part in parts:
                shown = Text(clean_lines(part)) if isinstance(part, str) else part
                # Words are folded where the screen ends, and only there.
                self.console.print(shown, soft_wrap=False)
            self.console.file.flush()
        except BrokenPipeError:
            self.closed = True
            _stop_writing(sys.stdout)

    def document(self, value: Mapping[str, Any]) -> None:
        """Give a machine one line of JSON. People are not shown it."""
        if not self.as_json:
            return
        try:
            sys.stdout.write(to_json(value) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            self.closed = True
            _stop_writing(sys.stdout)

    def complain(self, code: str, message: str, hint: str | None = None) -> None:
        """Say on standard error what is wrong, and what to do about it."""
        if self.as_json:
            error = {"code": code, "message": message, "hint": hint}
            _write_error(to_json({"error": error}))
            return
        _write_error(_folded(clean_lines(message)))
        if hint:
            _write_error(_folded(clean_lines(hint), indent="  "))


def _folded(text: str, indent: str = "") -> str:
    """The lines, each folded between words where a terminal ends."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else WIDE
    return "\n".join(
        textwrap.fill(
            line,
            width,
            initial_indent=indent,
            subsequent_indent=indent + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDE
    # Nothing is highlighted by guessing and nothing is read as markup: file names are full of
    # brackets and numbers.
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def _write_error(text: str) -> None:
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except BrokenPipeError:
        _stop_writing(sys.stderr)


def _stop_writing(stream: TextIO) -> None:
    """Let everything that is still to be written to a closed pipe vanish."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def prepare_streams() -> None:
    """Characters that the terminal's encoding lacks become `?` instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
