"""The commands for sources, as a person uses them, on a real folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planroom.cli import main
from planroom.config import Settings
from support.pdf import PdfPage, drawing, write_pdf


@pytest.fixture
def folder(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one set, and an environment in which commands use the test's database."""
    assert settings.database_url is not None
    monkeypatch.setenv("PLANROOM_HOME", str(settings.home))
    monkeypatch.setenv("PLANROOM_DATABASE_URL", settings.database_url.get_secret_value())
    monkeypatch.setenv("PLANROOM_EMBEDDER", "hashing")
    root = tmp_path / "plans"
    root.mkdir()
    write_pdf(root / "set.pdf", [PdfPage(drawing("A-101", "FLOOR PLAN"))])
    return root


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command with --json and return the last line that it printed."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_connected_folder_is_synced_searched_and_purged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    connected = ask(capsys, "connect", "folder", str(folder))
    assert connected["name"] == "plans"
    run_id = ask(capsys, "sync", "plans")["run_id"]
    assert main(["worker", "--until-idle"]) == 0
    capsys.readouterr()
    history = ask(capsys, "run", str(run_id))
    assert (history["status"], history["results"][0]["upserted"]) == ("succeeded", 1)
    assert ask(capsys, "search", "floor plan")["hits"][0]["file"] == "plans/set.pdf"

    purge_id = ask(capsys, "disconnect", "plans", "--purge")["run_id"]
    assert main(["worker", "--once"]) == 0
    capsys.readouterr()

    assert ask(capsys, "run", str(purge_id))["status"] == "succeeded"
    assert ask(capsys, "status")["files"] == []
    (connection,) = ask(capsys, "connections")["connections"]
    assert connection["status"] == "disconnected"


def test_a_schedule_is_due_at_once_and_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "folder", str(folder), "--every", "15"]) == 0
    assert main(["connections"]) == 0

    shown = capsys.readouterr().out
    assert "15 min" in shown
    assert shown.splitlines()[-1].split()[-1] == "now"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("connect", "ftp", "/tmp"), "provider_unknown"),
        (("sync", "nothing"), "not_found"),
        (("disconnect", "nothing"), "not_found"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: str
) -> None:
    assert main([*arguments, "--json"]) == 1

    assert json.loads(capsys.readouterr().err)["error"]["code"] == code
