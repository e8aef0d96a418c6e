"""Files: a name in a project whose bytes have versions; found, moved, removed, published.

A file's row is locked before any row of its ingestions, always, so that an intake, a removal and
the finish of an ingestion may meet in any order without a deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import psycopg
from psycopg.rows import class_row, dict_row

from leasequeue import request_cancel
from planroom.blobs import Blob
from planroom.errors import NotFound, PlanroomError
from planroom.ingestions import INGESTIONS, retire

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class File:
    """A file's row: where it belongs, what bytes it is, what searchers see of it."""

    id: int
    workspace_id: int
    project_id: int
    name: str
    status: str
    sha256: bytes
    size_bytes: int
    version: int
    published_ingestion_id: int | None


_LOCK = """
    select id, workspace_id, project_id, name, status, sha256, size_bytes, version,
           published_ingestion_id
      from files
     where id = %(id)s and workspace_id = %(workspace_id)s
       for no key update
"""


def lock_file(conn: Connection, workspace_id: int, file_id: int) -> File:
    """Hold the file's row until the transaction ends. Raises NotFound."""
    with conn.cursor(row_factory=class_row(File)) as cursor:
        cursor.execute(_LOCK, {"id": file_id, "workspace_id": workspace_id})
        file = cursor.fetchone()
    if file is None:
        raise NotFound(f"There is no file {file_id} in this workspace.")
    return file


_PROJECT_OF = """
    select project_id from files where id = %(id)s and workspace_id = %(workspace_id)s
"""


def find_project_of(conn: Connection, workspace_id: int, file_id: int) -> int:
    """The project a file is in at this moment. Raises NotFound."""
    row = conn.execute(_PROJECT_OF, {"id": file_id, "workspace_id": workspace_id}).fetchone()
    if row is None:
        raise NotFound(f"There is no file {file_id} in this workspace.")
    return cast(int, row[0])


# The conflict's update is the lock: of two intakes of one name the second waits here and then
# sees the first one's row.
_TAKE = """
    insert into files (workspace_id, project_id, connection_id, name, sha256, size_bytes)
    values (%(workspace_id)s, %(project_id)s, %(connection_id)s, %(name)s, %(sha256)s, %(size)s)
    on conflict (project_id, name) where status = 'ready' do update
       set version = files.version + (files.sha256 <> excluded.sha256)::integer,
           updated_at = case when files.sha256 <> excluded.sha256 then now()
               else files.updated_at end,
           sha256 = excluded.sha256,
           size_bytes = excluded.size_bytes
    returning id
"""


def take_file(
    conn: Connection,
    workspace_id: int,
    project_id: int,
    name: str,
    blob: Blob,
    connection_id: int | None = None,
) -> File:
    """Enter these bytes under this name, as a new file or a new version, and lock the row."""
    row = conn.execute(
        _TAKE,
        {
            "workspace_id": workspace_id,
            "project_id": project_id,
            "connection_id": connection_id,
            "name": name,
            "sha256": blob.sha256,
            "size": blob.size,
        },
    ).fetchone()
    return lock_file(conn, workspace_id, cast(int, cast(tuple[Any, ...], row)[0]))


_FIND = """
    select files.id, files.name, projects.name as project
      from files
      join projects on projects.id = files.project_id
     where files.workspace_id = %(workspace_id)s
       and files.status = 'ready'
       and (%(project)s::text is null or projects.name = %(project)s)
       and (
           files.name = %(name)s
           or files.id::text = %(name)s
           or right(files.name, length(%(name)s) + 1) = '/' || %(name)s
       )
     order by files.name = %(name)s desc, files.id
"""


def find_file(conn: Connection, workspace_id: int, name: str, project: str | None = None) -> int:
    """The id of the one file of this name, number, or end of a path. Raises NotFound.

    A name that fits several files is refused, with their names, and never guessed.
    """
    with conn.cursor(row_factory=dict_row) as cursor:
        parameters = {"workspace_id": workspace_id, "name": name, "project": project}
        rows = cursor.execute(_FIND, parameters).fetchall()
    exact = [row for row in rows if row["name"] == name]
    chosen = exact if len(exact) == 1 else rows
    if not chosen:
        raise NotFound(f"There is no file {name!r} here.", hint="planroom status lists the files.")
    if len(chosen) > 1:
        names = ", ".join(f"{row['project']}/{row['name']} (number {row['id']})" for row in chosen)
        raise PlanroomError(
            f"{name!r} fits several files: {names}.",
            code="ambiguous",
            hint="Name one by its number, or give --project.",
        )
    return cast(int, chosen[0]["id"])


_ACTIVE = """
    select id
      from file_ingestions
     where file_id = %(id)s and workspace_id = %(workspace_id)s
       and status in ('queued', 'running')
"""


def end_ingestions(
    conn: Connection,
    workspace_id: int,
    file_id: int,
    *,
    reason: str | None = None,
    now: datetime | None = None,
) -> dict[int, str]:
    """End what is queued or running for a file, which the caller has locked: {id: status now}."""
    rows = conn.execute(_ACTIVE, {"id": file_id, "workspace_id": workspace_id}).fetchall()
    ids = [cast(int, row[0]) for row in rows]
    return request_cancel(conn, INGESTIONS, workspace_id, ids, reason=reason, now=now)


_LET_GO = "update files set queued_version = version where id = %(id)s"


def cancel_ingestions(
    conn: Connection, workspace_id: int, file_id: int, *, now: datetime | None = None
) -> dict[int, str]:
    """Cancel what is queued or running for a file: {ingestion id: its status now}.

    So is what waits for its turn behind that. Raises NotFound.
    """
    with conn.transaction():
        lock_file(conn, workspace_id, file_id)
        conn.execute(_LET_GO, {"id": file_id})
        return end_ingestions(conn, workspace_id, file_id, now=now)


_WAIT_FOR_TURN = "update files set queued_version = 0 where id = %(id)s"


def wait_for_turn(conn: Connection, file_id: int) -> None:
    """Have a locked file queued when the ingestion that is about to end has ended.

    `ingestions.enqueue_unqueued` does so.
    """
    conn.execute(_WAIT_FOR_TURN, {"id": file_id})


_REMOVE = """
    update files
       set status = 'removed', removed_at = coalesce(%(now)s, now()),
           published_ingestion_id = null
     where id = %(id)s and workspace_id = %(workspace_id)s and status = 'ready'
"""


def remove_file(
    conn: Connection, workspace_id: int, file_id: int, *, now: datetime | None = None
) -> bool:
    """Take a file away: unsearchable at once, its rows removed by a later stage.

    What is running for it ends `cancelled`, whatever it was about to write. False if it was
    removed before.
    """
    parameters = {"id": file_id, "workspace_id": workspace_id, "now": now}
    with conn.transaction():
        if lock_file(conn, workspace_id, file_id).status == "removed":
            return False
        end_ingestions(conn, workspace_id, file_id, reason="file_removed", now=now)
        conn.execute(_REMOVE, parameters)
        retire(conn, file_id, now=now)
        return True


# What is published there was made by the old project's settings; where the new one's differ, and
# no ingestion is under way that will find that out at its finish, it is queued to be made again.
_MOVE = """
    update files
       set project_id = target.id,
           updated_at = now(),
           queued_version = case
               when target.settings = origin.settings
                   or files.published_ingestion_id is null
                   or exists (
                       select 1 from file_ingestions as active
                        where active.file_id = files.id
                          and active.status in ('queued', 'running')
                   )
               then files.queued_version
               else 0
           end
      from projects as target, projects as origin
     where files.id = %(id)s
       and files.status = 'ready'
       and target.id = %(project_id)s
       and target.workspace_id = files.workspace_id
       and origin.id = files.project_id
"""


def move_file(conn: Connection, workspace_id: int, file_id: int, project_id: int) -> None:
    """Put a file into another project of its workspace; an ingestion under way follows it.

    Raises NotFound for a file or project that is not there, and refuses a name that is taken.
    """
    with conn.transaction():
        file = lock_file(conn, workspace_id, file_id)
        try:
            moved = conn.execute(_MOVE, {"id": file_id, "project_id": project_id}).rowcount
        except psycopg.errors.UniqueViolation as error:
            raise PlanroomError(
                f"There is a file {file.name!r} in that project already.", code="name_taken"
            ) from error
        if not moved:
            raise NotFound(f"{file.name!r} was removed, or there is no such project here.")


_PUBLISH = "update files set published_ingestion_id = %(ingestion_id)s where id = %(id)s"


def publish(conn: Connection, file: File, ingestion_id: int) -> None:
    """Let searchers see this ingestion and no longer the one before; the file is locked.

    The rows of the one before, and of unfinished ones before this, may go from now on.
    """
    conn.execute(_PUBLISH, {"id": file.id, "ingestion_id": ingestion_id})
    retire(conn, file.id, except_id=ingestion_id)
