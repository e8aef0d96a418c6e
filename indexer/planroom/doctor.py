"""Look at everything planroom needs, one thing after another, and say what to do about each.

Every check stands alone: what it cannot find out because of another one's finding it leaves out.
Nothing is changed, but that the embedded server is started, as any command would.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import psycopg

import leasequeue
from leasequeue import LeaseQueueError
from planroom import embedded
from planroom.blobs import BlobStore
from planroom.config import Settings
from planroom.database import Database
from planroom.embed import open_embedder
from planroom.errors import PlanroomError
from planroom.migrate import check_server, pending
from planroom.version import version

Connection = psycopg.Connection[Any]

FREE_BYTES_MIN = 200_000_000
FREE_BYTES_WARNING = 2_000_000_000
BLOBS_LOOKED_AT = 1000


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `hint` is what to do."""

    name: str
    status: Status
    message: str
    hint: str | None = None


def examine(settings: Settings) -> Iterator[Check]:
    """Every check, as it is made."""
    yield _python()
    yield _caught("home", lambda: _home(settings.home))
    yield _caught("disk", lambda: _disk(settings.home))
    yield _caught("embedder", lambda: _embedder(settings))
    yield from _database(settings)


def _caught(name: str, check: Callable[[], Check]) -> Check:
    """A check that fails is a finding."""
    try:
        return check()
    except (PlanroomError, LeaseQueueError) as error:
        return Check(name, Status.BROKEN, str(error), error.hint)
    except psycopg.Error as error:
        return Check(name, Status.BROKEN, str(error).strip().partition("\n")[0])
    except (OSError, ValueError, ImportError) as error:
        return Check(name, Status.BROKEN, f"{type(error).__name__}: {error}")


def _python() -> Check:
    message = f"planroom {version()}, Python {platform.python_version()}, {platform.platform()}"
    return Check("python", Status.OK, message)


def _home(home: Path) -> Check:
    """The folder of the blobs and the embedded database can be written."""
    hint = "Give this user the folder, or set PLANROOM_HOME to one of its own."
    folder = home
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return Check("home", Status.BROKEN, f"{folder} cannot be written", hint)
    if folder != home:
        return Check("home", Status.OK, f"{home} will be made at first use")
    blobs = BlobStore(home / "blobs").root
    place = blobs if blobs.is_dir() else home
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"planroom doctor")
    except OSError as error:
        return Check("home", Status.BROKEN, f"{place} cannot be written: {error.strerror}", hint)
    return Check("home", Status.OK, f"{home} can be written")


def _disk(home: Path) -> Check:
    folder = home
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    message = f"{free / 1e9:.1f} GB free at {folder}"
    hint = "Make room, or set PLANROOM_HOME to a folder on another disk."
    if free < FREE_BYTES_MIN:
        return Check("disk", Status.BROKEN, message, hint)
    if free < FREE_BYTES_WARNING:
        return Check("disk", Status.WARNING, message, hint)
    return Check("disk", Status.OK, message)


def _embedder(settings: Settings) -> Check:
    """The model loads and answers; one over the network is asked for a single vector."""
    embedder = open_embedder(settings)
    try:
        vectors = embedder.embed(["planroom doctor"])
        return Check("embedder", Status.OK, f"{embedder.identity}, {vectors.shape[1]} dimensions")
    finally:
        embedder.close()


def _database(settings: Settings) -> Iterator[Check]:
    """The server, what it offers, its schema, and how it is reached."""
    if settings.database_url is None:
        yield _caught("programs", lambda: _programs(settings.home))
    database = Database(settings, name="planroom doctor")
    try:
        conn = database.connect(vectors=False)
    except (PlanroomError, psycopg.Error, OSError) as error:
        hint = getattr(error, "hint", None)
        said = str(error).strip().replace("\n", " ")
        hint = hint or "Is the server up, and is PLANROOM_DATABASE_URL right?"
        yield Check("database", Status.BROKEN, said, hint)
        return
    with conn:
        yield _caught("database", lambda: _server(conn, database))
        schema = _caught("schema", lambda: _schema(conn, database))
        yield schema
        yield _caught("connections", lambda: _connections(conn))
        if schema.status is Status.OK and not pending(conn):
            store, workspace = BlobStore(settings.home / "blobs"), settings.workspace
            yield _caught("blobs", lambda: _blobs(conn, store, workspace))
            yield _caught("fleet", lambda: _fleet(conn))


def _programs(home: Path) -> Check:
    found = embedded.status(home)
    running = f"runs as process {found.pid}" if found.running else "starts at first use"
    return Check("programs", Status.OK, f"embedded Postgres {running}; its log is in {found.log}")


_VECTOR = "select extversion from pg_extension where extname = 'vector'"


def _server(conn: Connection, database: Database) -> Check:
    check_server(conn)
    row = conn.execute(_VECTOR).fetchone()
    number = conn.info.server_version
    kind = "embedded" if database.is_embedded else f"{conn.info.dbname} at {conn.info.host}"
    extension = f"vector {row[0]}" if row else "vector"
    message = f"Postgres {number // 10000}.{number % 10000}, {extension} ({kind})"
    return Check("database", Status.OK, message)


def _schema(conn: Connection, database: Database) -> Check:
    missing = pending(conn)
    if not missing:
        return Check("schema", Status.OK, "up to date")
    message = f"{len(missing)} migrations are to be applied, from {missing[0]} on"
    if database.is_embedded:
        return Check("schema", Status.OK, f"{message}; the next command does so")
    return Check("schema", Status.BROKEN, message, "Run `planroom migrate`.")


_BACKEND = "select pg_backend_pid()"


def _connections(conn: Connection) -> Check:
    """Whether the session is ours, or a pooler's that it may lend to others in between."""
    row = conn.execute(_BACKEND).fetchone()
    if row is not None and row[0] == conn.info.backend_pid:
        return Check("connections", Status.OK, "direct: workers are woken at once")
    return Check(
        "connections",
        Status.OK,
        "through a pooler: workers find new work by polling, within PLANROOM_POLL_SECONDS",
    )


_PUBLISHED = """
    select files.name, files.sha256
      from files
      join workspaces on workspaces.id = files.workspace_id
     where workspaces.name = %(workspace)s
       and files.status = 'ready'
     order by files.updated_at desc
     limit %(limit)s
"""


def _blobs(conn: Connection, blobs: BlobStore, workspace: str) -> Check:
    """The bytes of the workspace's newest files are where this machine looks for them."""
    parameters = {"limit": BLOBS_LOOKED_AT, "workspace": workspace}
    rows = conn.execute(_PUBLISHED, parameters).fetchall()
    files = cast("list[tuple[str, bytes]]", rows)
    missing = [name for name, sha256 in files if not blobs.path(sha256).is_file()]
    if not missing:
        return Check("blobs", Status.OK, f"the bytes of all files are in {blobs.root}")
    return Check(
        "blobs",
        Status.WARNING,
        f"the bytes of {len(missing):,} of {len(files):,} files are not in {blobs.root}, for "
        f"instance of {missing[0]}",
        "Workers on several machines need PLANROOM_HOME/blobs on a shared disk.",
    )


def _fleet(conn: Connection) -> Check:
    alive = [row for row in leasequeue.list_workers(conn) if row["alive"]]
    pause = leasequeue.paused(conn)
    message = f"{len(alive)} {'worker' if len(alive) == 1 else 'workers'} running"
    if pause is None:
        return Check("fleet", Status.OK, message)
    why = f": {pause.reason}" if pause.reason else ""
    hint = "`planroom resume` lets it go on."
    return Check("fleet", Status.WARNING, f"{message}; paused by {pause.by}{why}", hint)
