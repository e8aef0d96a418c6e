"""The log: one form for structlog and the standard library, on standard error."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from planroom.config import Settings
from planroom.log import set_up_log
from support.command import kept_logging


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    with kept_logging():
        yield
    structlog.reset_defaults()


def test_json_is_one_line_an_event_whoever_logs(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_log(Settings(log_format="json"))

    structlog.get_logger("planroom").info("worker started", worker="a:1")
    logging.getLogger("leasequeue").warning("%s: away", "keeper")
    try:
        raise ValueError("wrong\nvery")
    except ValueError:
        logging.getLogger("leasequeue").exception("stage failed")

    out, err = capsys.readouterr()
    started, away, failed = [json.loads(line) for line in err.splitlines()]
    assert out == ""
    assert (started["message"], started["worker"], started["level"]) == (
        *("worker started", "a:1", "info"),
    )
    assert (away["message"], away["logger"]) == ("keeper: away", "leasequeue")
    assert failed["exception"][0]["exc_type"] == "ValueError"


def test_others_are_heard_only_when_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_log(Settings(log_format="json"))

    logging.getLogger("httpx").info("POST http://x/?key=s3cret")
    logging.getLogger("asyncio").warning("a slow callback")
    logging.getLogger("psycopg.pool").warning("no connection, for the tenth time")

    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == [
        "a slow callback"
    ]


def test_a_command_whose_output_is_not_its_log_says_warnings_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_log(Settings(log_format="json"), at_least="warning")

    logging.getLogger("leasequeue").info("attempt 1: ready")
    structlog.get_logger("planroom").info("worker started")

    assert capsys.readouterr().err == ""


def test_the_console_s_log_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_log(Settings(log_format="console"))

    structlog.get_logger("planroom").info("said \x1b[2J", file="a\x07.pdf")

    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\x07" not in err


def test_lines_go_where_standard_error_is_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_log(Settings(log_format="json"))
    moved = io.StringIO()
    monkeypatch.setattr("sys.stderr", moved)

    logging.getLogger("leasequeue").warning("here")

    assert json.loads(moved.getvalue())["message"] == "here"
