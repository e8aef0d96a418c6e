"""Connections: configured sources with a provider and, if they have one, a schedule (rule L14)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

Connection = psycopg.Connection[Any]


# The lock comes in a statement of its own: the next sees the purge that its last holder added.
_LOCK_NAMED = """
    select 1
      from connections
     where workspace_id = %(workspace_id)s and name = %(name)s
       for no key update
"""
_ADD = """
    insert into connections (workspace_id, name, provider, config, interval_seconds, next_run_at)
    values (%(workspace_id)s, %(name)s, %(provider)s, %(config)s, %(interval)s,
            case when %(interval)s::integer is not null then coalesce(%(now)s, now()) end)
    on conflict (workspace_id, name) do update
       set provider = excluded.provider, config = excluded.config, status = 'active',
           interval_seconds = excluded.interval_seconds, next_run_at = excluded.next_run_at
     where connections.status <> 'deleting'
        or not exists (
            select 1
              from connection_runs as purge
             where purge.connection_id = connections.id
               and purge.kind = 'purge'
               and purge.status in ('waiting', 'queued', 'running')
        )
    returning id
"""


def add_connection(
    conn: Connection,
    workspace_id: int,
    name: str,
    provider: str,
    config: Mapping[str, Any] | None = None,
    *,
    interval_seconds: int | None = None,
    now: datetime | None = None,
) -> int | None:
    """Configure a source, or change and reconnect the one of this name; returns its id.

    With an interval its first run is due at once. None while a purge of it is under way; one that
    failed or was cancelled is not.
    """
    parameters = {
        "workspace_id": workspace_id,
        "name": name,
        "provider": provider,
        "config": Jsonb(dict(config or {})),
        "interval": interval_seconds,
        "now": now,
    }
    with conn.transaction():
        conn.execute(_LOCK_NAMED, parameters)
        row = conn.execute(_ADD, parameters).fetchone()
    return None if row is None else cast(int, row[0])


_PURGED = """
    update connections
       set status = 'disconnected', next_run_at = null
     where id = %(id)s and workspace_id = %(workspace_id)s and status = 'deleting'
"""


def mark_purged(conn: Connection, workspace_id: int, connection_id: int) -> None:
    """Nothing of the source is left: call this in the transaction that seals its purge."""
    conn.execute(_PURGED, {"id": connection_id, "workspace_id": workspace_id})


_LIST = """
    select id, name, provider, config, status, interval_seconds, next_run_at, created_at
      from connections
     where workspace_id = %(workspace_id)s
     order by name
"""


def list_connections(conn: Connection, workspace_id: int) -> list[dict[str, Any]]:
    """The workspace's connections, by name."""
    with conn.cursor(row_factory=dict_row) as cursor:
        cursor.execute(_LIST, {"workspace_id": workspace_id})
        return cursor.fetchall()
