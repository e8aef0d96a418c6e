"""Pause and resume: one row that stops claiming everywhere at once (rule L18).

Running jobs go on. The state is in the database, so it outlives workers and deploys.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import psycopg

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Who paused the fleet, when, and why."""

    at: datetime
    by: str
    reason: str | None


_PAUSE = """
    update maintenance_state
       set paused_at = coalesce(paused_at, %(now)s, now()), paused_by = %(by)s, reason = %(reason)s
"""


def pause(
    conn: Connection, by: str, reason: str | None = None, *, now: datetime | None = None
) -> None:
    """Stop claiming on every worker from its next poll on."""
    conn.execute(_PAUSE, {"by": by, "reason": reason, "now": now})


_RESUME = """
    update maintenance_state
       set paused_at = null, paused_by = null, reason = null
     where paused_at is not null
    returning pg_notify('leasequeue', 'resume')
"""


def resume(conn: Connection) -> bool:
    """Let claiming go on; True if it was paused."""
    return conn.execute(_RESUME).fetchone() is not None


_PAUSED = "select paused_at, paused_by, reason from maintenance_state where paused_at is not null"


def paused(conn: Connection) -> Pause | None:
    """The pause in force, or None while claiming goes on."""
    row = conn.execute(_PAUSED).fetchone()
    return None if row is None else Pause(*cast(tuple[datetime, str, str | None], row))
