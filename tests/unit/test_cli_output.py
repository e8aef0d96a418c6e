"""Output: clean text, JSON that is one line of ASCII, errors for both kinds of readers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import errors

from leasequeue import MigrationError
from planroom.cli.failure import Failure, explain
from planroom.cli.output import Output, clean, clean_lines, to_json
from planroom.config import Settings
from planroom.errors import NotFound


@given(st.text())
def test_what_is_clean_can_be_printed(text: str) -> None:
    assert clean(text).isprintable()
    assert len(clean(text)) == len(text)


def test_lines_are_kept_and_tabs_are_spaces() -> None:
    assert clean_lines("a\tb\r\nc\x1b[1m") == "a   b\nc\N{REPLACEMENT CHARACTER}[1m"


@given(st.text())
def test_json_is_one_line_of_ascii_and_says_the_same(text: str) -> None:
    line = to_json({"text": text})

    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == {"text": text}


def test_json_knows_what_the_database_gives() -> None:
    @dataclass
    class Thing:
        name: str

    at = datetime(2026, 12, 1, 12, tzinfo=UTC)
    values = [at, timedelta(seconds=1.5), Decimal("2.5"), b"\x0a", Path("/x"), Thing("y")]

    assert json.loads(to_json(values)) == [
        *("2026-12-01T12:00:00+00:00", 1.5, 2.5, "0a", "/x", {"name": "y"})
    ]
    with pytest.raises(TypeError):
        to_json(object())


def test_an_error_is_a_line_and_a_hint_or_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    Output().complain("gone", "It is gone.\x1b[2J", "Look elsewhere.")
    Output(as_json=True).complain("gone", "It is gone.", None)

    for_people, for_machines = capsys.readouterr().err.split("Look elsewhere.\n")
    assert for_people == "It is gone.\N{REPLACEMENT CHARACTER}[2J\n  "
    assert json.loads(for_machines) == {
        "error": {"code": "gone", "message": "It is gone.", "hint": None}
    }


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (NotFound("No file.", hint="Look."), Failure("not_found", "No file.", "Look.")),
        (MigrationError("Edited."), Failure("migration_failed", "Edited.")),
        (
            errors.DiskFull("no space\nDETAIL: secrets"),
            Failure(
                "database_error",
                "The database answered: no space",
                "planroom doctor looks for the cause.",
            ),
        ),
        (
            PermissionError(13, "Permission denied", "/x"),
            Failure("os_error", "/x: Permission denied"),
        ),
        (
            KeyError("x"),
            Failure(
                "unexpected", "Unexpected: KeyError: 'x'", "Set PLANROOM_DEBUG=1 to see where."
            ),
        ),
    ],
)
def test_every_error_is_told_in_one_line(error: Exception, failure: Failure) -> None:
    assert explain(error) == failure
    assert "\n" not in failure.message


def test_a_connection_that_was_refused_is_told_in_one_line() -> None:
    with pytest.raises(psycopg.OperationalError) as caught:
        psycopg.connect("postgresql://nobody:s3cret@127.0.0.1:1/x", connect_timeout=2)

    failure = explain(caught.value)

    assert failure.code == "database_error"
    assert "s3cret" not in failure.message


def test_a_wrong_setting_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANROOM_OPENAI_DIMENSIONS", "s3cret")
    monkeypatch.setenv("PLANROOM_EMBEDDER", "psychic")
    with pytest.raises(ValueError) as caught:
        Settings()

    failure = explain(caught.value)

    assert failure.exit_code == 2
    assert failure.message.startswith("PLANROOM_EMBEDDER: ")
    assert "PLANROOM_OPENAI_DIMENSIONS: " in failure.message
    assert "s3cret" not in failure.message
