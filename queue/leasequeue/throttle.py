"""Stages that need to run seldom: a durable marker lets a whole fleet run one once (rule L15)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import psycopg

# Insert or advance in one statement: of two workers that ask at once, the second waits for the
# first's row, then finds its condition false.
_DUE = """
    insert into stage_markers (name, ran_at)
    values (%(name)s, coalesce(%(now)s, now()))
    on conflict (name) do update
       set ran_at = excluded.ran_at
     where stage_markers.ran_at <= excluded.ran_at - %(every)s::interval
    returning name
"""


def due(
    conn: psycopg.Connection[Any], name: str, every: timedelta, *, now: datetime | None = None
) -> bool:
    """True for one caller in every `every`, across the fleet and across restarts."""
    row = conn.execute(_DUE, {"name": name, "every": every, "now": now}).fetchone()
    return row is not None
