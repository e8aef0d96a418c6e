"""Workers: who is alive and what they work on, for people to look at.

Nothing is decided from this table: a job's right to run is its lease and nothing else. A worker
registers when it starts, sends a heartbeat every 15 seconds and deregisters when it ends; the
rows of those that died are dropped after an hour by whoever starts next.
"""

from __future__ import annotations

import os
import secrets
import socket
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import dict_row

HEARTBEAT_SECONDS = 15.0
FORGOTTEN_AFTER = timedelta(hours=1)

Connection = psycopg.Connection[Any]


def worker_id() -> str:
    """A name for this worker that no other has: host, process, and a random end."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


_REGISTER = """
    with forgotten as (
        select id
          from workers
         where heartbeat_at < coalesce(%(now)s, now()) - %(forgotten)s and id <> %(id)s
           for update skip locked
    ), dropped as (
        delete from workers where id in (select id from forgotten)
    )
    insert into workers (id, host, pid, version, started_at, heartbeat_at)
    values (%(id)s, %(host)s, %(pid)s, %(version)s,
            coalesce(%(now)s, now()), coalesce(%(now)s, now()))
    on conflict (id) do update set heartbeat_at = excluded.heartbeat_at
"""


def register(conn: Connection, worker: str, version: str, *, now: datetime | None = None) -> None:
    """Enter this process as a worker."""
    conn.execute(
        _REGISTER,
        {
            "id": worker,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": version,
            "forgotten": FORGOTTEN_AFTER,
            "now": now,
        },
    )


_HEARTBEAT = """
    update workers
       set heartbeat_at = coalesce(%(now)s, now()), working_on = %(working_on)s
     where id = %(id)s
"""


def heartbeat(
    conn: Connection, worker: str, working_on: str | None, *, now: datetime | None = None
) -> bool:
    """Say that this worker lives and what it works on; False if its row is gone."""
    cursor = conn.execute(_HEARTBEAT, {"id": worker, "working_on": working_on, "now": now})
    return cursor.rowcount == 1


_DEREGISTER = "delete from workers where id = %(id)s"


def deregister(conn: Connection, worker: str) -> None:
    """Leave, as a worker does that ends in order."""
    conn.execute(_DEREGISTER, {"id": worker})


_LIST = """
    select id, host, pid, version, started_at, heartbeat_at, working_on,
           heartbeat_at > coalesce(%(now)s, now()) - %(silence)s as alive
      from workers
     order by started_at, id
"""


def list_workers(conn: Connection, *, now: datetime | None = None) -> list[dict[str, Any]]:
    """Every worker that registered and did not leave; `alive` is a heartbeat within 45 s."""
    silence = timedelta(seconds=3 * HEARTBEAT_SECONDS)
    with conn.cursor(row_factory=dict_row) as cursor:
        cursor.execute(_LIST, {"silence": silence, "now": now})
        return cursor.fetchall()
