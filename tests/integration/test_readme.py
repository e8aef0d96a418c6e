"""The README is true: its code runs, its tables are those of the code, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planroom.cli import failure
from planroom.cli.app import app
from planroom.config import Settings
from support.drawing_set import make_set

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def section(title: str) -> str:
    """The part of the README under a heading."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_python_runs_as_it_stands(settings: Settings, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    made = make_set(tmp_path / "riverside.pdf", sheets=24)
    assert settings.database_url is not None
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PLANROOM_")}

    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={
            **kept,
            "PLANROOM_DATABASE_URL": settings.database_url.get_secret_value(),
            "PLANROOM_HOME": str(settings.home),
            "PLANROOM_EMBEDDER": "hashing",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    scans = [page.index + 1 for page in made.pages if page.scanned]
    assert lines[0] == "riverside.pdf: 24 pages, ready"
    assert lines[1 : 1 + len(scans)] == [f"page {page} has no text: image_only" for page in scans]
    assert len(lines) == 1 + len(scans) + 6


def test_every_setting_is_in_the_table_with_its_default() -> None:
    expected: list[list[str]] = []
    for name, field in Settings.model_fields.items():
        default = "unset" if field.default is None else f"`{field.default}`"
        if name == "home":
            default = "`~/.local/share/planroom`; root: `/var/lib/planroom`"
        expected.append([f"`PLANROOM_{name.upper()}`", default, field.description or ""])

    assert rows("Settings") == expected


def test_the_default_home_is_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)

    homes = {"0": Path("/var/lib/planroom"), "1000": Path("~/.local/share/planroom").expanduser()}
    for user, home in homes.items():
        monkeypatch.setattr("os.geteuid", lambda user=user: int(user))
        factory = Settings.model_fields["home"].default_factory
        assert callable(factory)
        assert factory() == home  # pyright: ignore[reportCallIssue]


def test_every_command_is_in_the_table() -> None:
    listed = [row[0].strip("`").split()[0] for row in rows("Commands")]
    known = [
        info.name or info.callback.__name__
        for group in app.registered_groups
        if group.typer_instance is not None
        for info in group.typer_instance.registered_commands
        if info.callback is not None
    ]

    assert sorted(listed) == sorted(known)


def test_every_option_that_the_table_of_commands_names_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command, does in rows("Commands"):
        name = command.strip("`").split()[0]
        app([name, "--help"], prog_name="planroom", standalone_mode=False)
        shown = capsys.readouterr().out
        for option in re.findall(r"`(-[-a-z]+)", does):
            assert option in shown, f"{name} {option}"


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [t for t in targets if "://" not in t and not (ROOT / t).exists()]

    assert targets
    assert missing == []


def test_the_exit_codes_are_those_of_the_code() -> None:
    said = section("Commands")
    for code in (
        failure.EXIT_DONE,
        failure.EXIT_FAILED,
        failure.EXIT_USAGE,
        failure.EXIT_INTERRUPTED,
    ):
        assert re.search(rf"\b{code}: ", said)
