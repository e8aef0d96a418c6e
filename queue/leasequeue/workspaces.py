"""Workspaces: the tenants. Everything else belongs to exactly one."""

from __future__ import annotations

from typing import Any, cast

import psycopg

# The no-op update is what makes `returning` answer for a name that exists already; the plain
# read before it keeps the common case from writing at all.
_FIND = "select id from workspaces where name = %(name)s"
_ENSURE = """
    insert into workspaces (name) values (%(name)s)
    on conflict (name) do update set name = excluded.name
    returning id
"""


def ensure_workspace(conn: psycopg.Connection[Any], name: str) -> int:
    """The id of the workspace of this name, made if it is new."""
    row = conn.execute(_FIND, {"name": name}).fetchone()
    if row is None:
        row = conn.execute(_ENSURE, {"name": name}).fetchone()
    return cast(int, cast(tuple[Any, ...], row)[0])


# The strength matters: `no key update` does not block inserting rows that reference the
# workspace, which take `key share`; plain `for update` would (rule L12, case Q22).
_LOCK = """
    select current_setting('transaction_isolation')
      from workspaces
     where id = %(workspace_id)s
       for no key update
"""


def lock_workspace(conn: psycopg.Connection[Any], workspace_id: int) -> None:
    """Hold the workspace until the transaction ends, to decide what may run in it.

    The statement after this one sees everything that the lock's earlier holders committed, which
    is only so under READ COMMITTED: any other isolation is refused.
    """
    row = conn.execute(_LOCK, {"workspace_id": workspace_id}).fetchone()
    if row is not None:
        _check_isolation(row[0])


_TRY_LOCK = _LOCK + " skip locked"


def try_lock_workspace(conn: psycopg.Connection[Any], workspace_id: int) -> bool:
    """Lock the workspace as `lock_workspace` does, or say False at once: another holds it."""
    row = conn.execute(_TRY_LOCK, {"workspace_id": workspace_id}).fetchone()
    if row is None:
        return False
    _check_isolation(row[0])
    return True


def _check_isolation(level: str) -> None:
    if level != "read committed":
        raise ValueError(f"claims need READ COMMITTED transactions, not {level}")
