"""`planroom` as a person runs it: in real processes, or within the test where that shows the same.

`Commands` starts a process for each command, `Inline` calls the command's own `main`; both have an
environment of their own and are called alike.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from planroom.cli import main
from planroom.config import Settings

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 90.0
ESCAPE = "\x1b"


@dataclass(frozen=True, slots=True)
class Said:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """Its lines of JSON; each line has to be one."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def document(self) -> dict[str, Any]:
        """Its one line of JSON."""
        (document,) = self.events
        return document

    @property
    def error(self) -> dict[str, Any]:
        """The error that it told a machine."""
        (line,) = self.err.splitlines()
        return json.loads(line)["error"]

    def of(self, event: str) -> list[dict[str, Any]]:
        """Its events of one kind."""
        return [found for found in self.events if found["event"] == event]


@dataclass(frozen=True)
class Commands:
    """Runs commands against one database, in a folder of their own."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def on(cls, settings: Settings, folder: Path, **changed: object) -> Commands:
        """On the database and the home of these settings; `changed` are further settings."""
        assert settings.database_url is not None
        chosen: dict[str, object] = {
            "home": settings.home,
            "database_url": settings.database_url.get_secret_value(),
            "embedder": settings.embedder,
            "poll_seconds": 0.1,
            **changed,
        }
        return cls(folder, {f"PLANROOM_{name.upper()}": str(v) for name, v in chosen.items()})

    def with_settings(self, **changed: object) -> Commands:
        """The same with other settings."""
        more = {f"PLANROOM_{name.upper()}": str(v) for name, v in changed.items()}
        return Commands(self.folder, {**self.environment, **more})

    def env(self) -> dict[str, str]:
        """The whole environment of a command."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PLANROOM_", "COLUMNS"))}
        return {**kept, "PYTHONWARNINGS": "error", **self.environment}

    def __call__(self, *arguments: str | Path, code: int = 0, stdin: str = "") -> Said:
        """Run a command to its end, which has to be with this exit code."""
        run = subprocess.run(
            self.line(*arguments),
            env=self.env(),
            cwd=self.folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert run.returncode == code, f"exit {run.returncode}\n{run.stdout}\n{run.stderr}"
        assert "Traceback" not in run.stderr
        return Said(run.returncode, run.stdout, run.stderr)

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start a command; the caller ends it."""
        return subprocess.Popen(
            self.line(*arguments),
            env=self.env(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self, *arguments: str | Path) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "planroom", *map(str, arguments)]


def end(process: subprocess.Popen[str]) -> Said:
    """Wait for a command that was started, and return what it said."""
    try:
        out, err = process.communicate(timeout=SECONDS_MAX)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return Said(process.returncode, out, err)


@dataclass(frozen=True)
class Inline:
    """Runs commands within the test's process: the same code, fifty times as fast."""

    commands: Commands
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def with_settings(self, **changed: object) -> Inline:
        """The same with other settings."""
        return Inline(self.commands.with_settings(**changed), self.monkeypatch, self.capsys)

    def __call__(self, *arguments: str | Path, code: int = 0) -> Said:
        """Run a command to its end, which has to be with this exit code."""
        with self.monkeypatch.context() as patched, kept_logging():
            patched.chdir(self.commands.folder)
            patched.delenv("COLUMNS", raising=False)
            for name, value in self.commands.environment.items():
                patched.setenv(name, value)
            self.capsys.readouterr()
            ended = main(list(map(str, arguments)))
            out, err = self.capsys.readouterr()
        assert ended == code, f"exit {ended}\n{out}\n{err}"
        return Said(ended, out, err)


@contextmanager
def kept_logging() -> Generator[None]:
    """Leave the loggers of the tests as they were: a command sets up its own."""
    names = ("", "planroom", "leasequeue", "psycopg.pool")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = list(logging.getLogger().handlers)
    try:
        yield
    finally:
        logging.getLogger().handlers[:] = handlers
        for logger, level in before:
            logger.setLevel(level)
