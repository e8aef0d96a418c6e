#!/usr/bin/env python3
"""Makes the pictures of the README from a real run: real commands, in a real terminal.

    python docs/make_terminal_svg.py

A made-up drawing set is indexed by `planroom` on a pseudo-terminal into a database of its own,
which is removed again. What the commands write is kept as a terminal would show it: once in the
middle of the work, once at the end.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from planroom import embedded

DOCS = Path(__file__).parent
ROOT = DOCS.parent
COLUMNS, LINES = 96, 40
SHEETS = 240

# What rich writes: text and colours; carriage return, line feed; cursor up; erase the line.
_STEP = re.compile(r"\r|\n|\x1b\[(\d*)A|\x1b\[2K|\x1b\[\?25[lh]|\x1b\[[\d;]*m|[^\r\n\x1b]+")


class Screen:
    """The lines that a terminal shows, with their colours as they were written."""

    def __init__(self) -> None:
        self.lines = [""]
        self._at = 0

    def write(self, text: str) -> None:
        """Take in what a program wrote."""
        for step in _STEP.finditer(text):
            match step.group():
                case "\n":
                    self._at += 1
                    if self._at == len(self.lines):
                        self.lines.append("")
                case "\r" | "\x1b[?25l" | "\x1b[?25h":
                    pass  # After a carriage return rich always erases the line first.
                case "\x1b[2K":
                    self.lines[self._at] = ""
                case said if said.endswith("A") and said.startswith("\x1b["):
                    self._at = max(0, self._at - int(step.group(1) or 1))
                case said:
                    self.lines[self._at] += said

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(self.lines).rstrip()


def run(command: Sequence[str], home: Path, folder: Path) -> Iterator[str]:
    """Run a command on a pseudo-terminal; what the screen shows after each thing it wrote."""
    master, slave = pty.openpty()
    ioctl(master, TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PLANROOM_", "COLUMNS"))}
    environment = {**kept, "PLANROOM_HOME": str(home), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env=environment,
    )
    os.close(slave)
    screen = Screen()
    with os.fdopen(master, "rb", buffering=0) as terminal:
        while written := _read(terminal.fileno()):
            screen.write(written)
            yield screen.text
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{screen.text}")


def _read(descriptor: int) -> str:
    """What comes next; Linux reports the end of a pseudo-terminal as an error."""
    try:
        return os.read(descriptor, 1 << 20).decode()
    except OSError:
        return ""


def save(name: str, title: str, shown: Sequence[tuple[str, str]]) -> None:
    """Draw commands, each with what the screen showed, as `docs/NAME`."""
    console = Console(file=StringIO(), record=True, width=COLUMNS, force_terminal=True)
    for at, (command, text) in enumerate(shown):
        if at:
            console.print()
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(text))
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id=f"planroom-{Path(name).stem}")
    # A picture loads nothing from elsewhere: any fixed-width font does.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)
    svg = svg.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")
    (DOCS / name).write_text(re.sub(r"[ \t]+$", "", svg, flags=re.M), "utf-8")


def main() -> None:
    """Make the set, index it, search it, and draw both pictures."""
    folder = Path(tempfile.mkdtemp(prefix="planroom-docs-", dir="/tmp"))
    folder.chmod(0o711)
    home = folder / "home"
    try:
        subprocess.run(
            [
                *(sys.executable, ROOT / "fixtures" / "make_drawing_set.py"),
                *(folder / "riverside.pdf", "--sheets", str(SHEETS)),
            ],
            check=True,
        )
        # Starting the embedded database for the first time is another picture.
        list(run(["planroom", "status"], home, folder))
        index = "planroom index riverside.pdf"
        frames = list(run(index.split(), home, folder))
        bars = [frame for frame in frames if frame.count(" left") == 2]
        save("progress.svg", "planroom index", [(index, bars[len(bars) // 2])])
        question = "sprinkler density in the remote area"
        search = list(run(["planroom", "search", question, "-k", "3"], home, folder))
        save(
            "terminal.svg",
            "planroom",
            [(index, frames[-1]), (f'planroom search "{question}" -k 3', search[-1])],
        )
    finally:
        embedded.stop(home)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
