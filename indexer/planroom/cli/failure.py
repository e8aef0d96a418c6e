"""How an error is told: its code, one sentence, what to do, and the exit code it ends with.

Nothing here quotes a value that was set, for it may be a secret.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import typer

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

DEBUG = "PLANROOM_DEBUG"


class Terminated(BaseException):
    """SIGTERM came: end in order, as after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it is told."""

    code: str
    message: str
    hint: str | None = None
    exit_code: int = EXIT_FAILED


def explain(error: Exception) -> Failure:
    """Tell any error; one that nobody foresaw is named by its type."""
    if isinstance(error, typer.TyperException):
        return _usage(error)
    # Whoever raised one of these has imported its module already.
    from planroom.errors import PlanroomError

    if isinstance(error, PlanroomError):
        return Failure(error.code, str(error), error.hint)
    from leasequeue import LeaseQueueError

    if isinstance(error, LeaseQueueError):
        return Failure(error.code, str(error), error.hint)
    return _foreign(error)


def _usage(error: typer.TyperException) -> Failure:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "planroom"
    text = " ".join(error.format_message().split())
    code = "usage" if error.exit_code == EXIT_USAGE else "failed"
    return Failure(code, f"{command}: {text}", f"Try: {command} --help", error.exit_code)


def _foreign(error: Exception) -> Failure:
    import psycopg
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return Failure("settings_invalid", _settings(error), exit_code=EXIT_USAGE)
    if isinstance(error, psycopg.Error):
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        return Failure(
            "database_error",
            f"The database answered: {first_line}",
            "planroom doctor looks for the cause.",
        )
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return Failure("os_error", f"{where}{error.strerror or error}")
    return Failure(
        "unexpected",
        f"Unexpected: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
        f"Set {DEBUG}=1 to see where.",
    )


def _settings(error: Exception) -> str:
    """Each setting that is wrong and why, without the value that it was given."""
    from pydantic import ValidationError

    assert isinstance(error, ValidationError)
    said: list[str] = []
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        name = "_".join(str(part) for part in detail["loc"])
        setting = f"PLANROOM_{name.upper()}: " if name else ""
        said.append(setting + detail["msg"])
    return "; ".join(said)


def wants_traceback() -> bool:
    """Whether PLANROOM_DEBUG is set."""
    return bool(os.environ.get(DEBUG))
