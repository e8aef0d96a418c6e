"""The log: JSON in a fleet, colours in a terminal, always on standard error.

planroom logs through structlog; the engine and the pool log through the standard library, and
come out in the same form. Standard error is looked up at each line, so that a progress bar that
has taken its place for a while keeps the lines above itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor

from planroom.config import Settings

_OURS = ("planroom", "leasequeue")


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


def set_up_log(
    settings: Settings, *, at_least: Literal["debug", "info", "warning", "error"] = "debug"
) -> None:
    """Send every logger of the process to standard error, as the settings say.

    `at_least` raises the level for a command whose output is not its log.
    """
    as_json = settings.log_format == "json" or (
        settings.log_format == "auto" and not sys.stderr.isatty()
    )
    levels = logging.getLevelNamesMapping()
    level = max(levels[settings.log_level.upper()], levels[at_least.upper()])
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True)
        if as_json
        else structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
    ]
    handler = _StandardError()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_to_json() if as_json else _to_console()),
            ],
        )
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Others are heard when something is wrong; what an HTTP client says of each request is not.
    root.setLevel(max(level, logging.WARNING))
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
    # An outage is the worker's to report, about once a second; the pool would tell each try.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


def _to_json() -> list[Processor]:
    return [
        structlog.processors.EventRenamer("message"),
        structlog.processors.dict_tracebacks,
        structlog.processors.JSONRenderer(),
    ]


def _to_console() -> list[Processor]:
    return [
        _only_printable,
        structlog.dev.ConsoleRenderer(
            colors=_wants_colours(), exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _wants_colours() -> bool:
    import os

    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def _only_printable(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Keep what a drawing or a server said from steering the terminal."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "".join(
                c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in value
            )
    return event
