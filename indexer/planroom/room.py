"""The plan room: everything the command line does, as one object in Python.

One workspace and one project of one database. The commands are thin wrappers around this class, so
a program that embeds planroom can do whatever they do.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
import psycopg
from numpy.typing import NDArray

import leasequeue
from leasequeue import LeaseQueueError, Pause, Worker, ensure_workspace
from planroom import files, ingestions, intake, status
from planroom.blobs import BlobStore
from planroom.config import Settings
from planroom.connectors import open_connector
from planroom.database import Database
from planroom.embed import LOCAL, name_of
from planroom.errors import NotFound, PlanroomError
from planroom.ingest import current_fingerprint
from planroom.intake import Taken
from planroom.model import Fingerprint
from planroom.presence import Presence
from planroom.projects import (
    embedders_set,
    ensure_project,
    find_project,
    project_settings,
)
from planroom.search import Hit, Mode, Scope, clean_query, list_embedders, search
from planroom.stages import Embedders, all_stages, ingest_stages
from planroom.verify import Verification, verify
from planroom.version import version

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

log = logging.getLogger("planroom")

QUERY_SECONDS = 10.0
"""How long a search waits for the vector of its query."""


class PlanRoom:
    """A workspace's drawing sets; a context manager. Make one with `planroom.open`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = Database.open(settings)
        self.blobs = BlobStore(settings.home / "blobs")
        self._embedders = Embedders()
        self._presences = contextlib.ExitStack()
        with self.database.connection() as conn:
            self.workspace_id = ensure_workspace(conn, settings.workspace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close connections and models; the embedded server goes on."""
        self._presences.close()
        self._embedders.close()
        self.database.close()

    # -- taking in and indexing ------------------------------------------------------------------

    def add(self, path: Path | str, *, name: str | None = None) -> Taken:
        """Take one PDF in and queue it. Raises InputRefused, and then nothing is left of it."""
        source = Path(path)
        with self.database.connection() as conn:
            project_id = ensure_project(conn, self.workspace_id, self.settings.project)
            return intake.take(
                conn,
                self.blobs,
                source,
                workspace_id=self.workspace_id,
                project_id=project_id,
                name=name or source.name,
                bytes_max=self.settings.file_bytes_max,
                fingerprint=self._fingerprint(conn, project_id),
            )

    def index(
        self, path: Path | str, *, on_progress: Callable[[Row], None] = lambda row: None
    ) -> Row:
        """Take one PDF in, see it through, and return its final status row (as `status` gives).

        Raises as `add` and `work_on` do, and NotFound for a file that was removed meanwhile.
        """
        file_id = self.add(path).file_id

        def one(rows: list[Row]) -> None:
            for row in rows:
                on_progress(row)

        rows = self.work_on([file_id], on_progress=one)
        if not rows:
            raise NotFound(f"{path} was removed while it was being indexed.")
        return rows[0]

    def _fingerprint(self, conn: Connection, project_id: int) -> Fingerprint:
        settings = project_settings(conn, self.workspace_id, project_id, self.settings)
        return current_fingerprint(settings, self._embedders.open(settings))

    def work_on(
        self,
        file_ids: Sequence[int],
        *,
        on_progress: Callable[[list[Row]], None] = lambda rows: None,
        progress_seconds: float = 0.2,
    ) -> list[Row]:
        """Work until these files are done, whoever does them, and return their status rows.

        This process works on them itself, and so may any other worker. `on_progress` is called
        with the rows, from another thread, a few times a second.

        In the main thread, SIGINT and SIGTERM give the lease back first and then do what they did
        before: so Ctrl-C raises KeyboardInterrupt here, with everything committed kept. In other
        threads signals are left alone, and the process's end is the lease's.
        """
        worker = self.worker(file_ids)
        with _stops_on_signals(worker), self._watch(file_ids, on_progress, progress_seconds):
            worker.run(idle=lambda: self._is_idle(file_ids))
        with self.database.connection() as conn:
            return status.list_files(conn, self.workspace_id, files=file_ids)

    def _is_idle(self, file_ids: Sequence[int] | None = None) -> bool:
        with self.database.connection() as conn:
            return not ingestions.any_pending(conn, file_ids)

    @contextmanager
    def _watch(
        self, file_ids: Sequence[int], on_progress: Callable[[list[Row]], None], seconds: float
    ) -> Generator[None]:
        """Report progress from a thread of its own while the block runs, and once at its end.

        What is reported is what is committed, so it is the same whoever does the work.
        """
        done = threading.Event()

        def report() -> None:
            with self.database.connection() as conn:
                on_progress(status.list_files(conn, self.workspace_id, files=file_ids))

        def watch() -> None:
            while not done.wait(seconds):
                # A database that is away is the worker's to report.
                with contextlib.suppress(psycopg.Error):
                    report()

        thread = threading.Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            with contextlib.suppress(psycopg.Error):
                report()

    def worker(self, file_ids: Sequence[int] | None = None) -> Worker:
        """A worker of this process: for everything, or for some files alone."""
        worker = Worker(
            self.database.connect,
            self.database.connection,
            version=version(),
            poll_seconds=self.settings.poll_seconds,
            # Whoever waits for certain files has been interrupted; a fleet's worker was told to go.
            forced_exit_code=0 if file_ids is None else 128 + signal.SIGINT,
        )
        self._presences.enter_context(Presence(self.settings.home, worker.name))
        if file_ids is None:
            worker.stages = all_stages(
                worker, self.database, self.blobs, self.settings, self._embedders
            )
        else:
            worker.stages = ingest_stages(
                worker, self.database, self.blobs, self.settings, self._embedders, file_ids
            )
        return worker

    # -- finding ---------------------------------------------------------------------------------

    def search(
        self,
        query: str,
        *,
        k: int = 10,
        project: str | None = None,
        file: str | int | None = None,
        sheet: str | None = None,
        mode: Mode | str = Mode.HYBRID,
        all_projects: bool = False,
    ) -> list[Hit]:
        """The `k` sheets that answer best, of what is published in this project.

        `project` names another; `file`, of any project, and `sheet` narrow it; `all_projects`
        widens it to the workspace. What was indexed with an embedder that cannot be had here is
        searched by its words, with a warning in the log; in `vector` mode that is an error. Raises
        NotFound for a file or project that is not there.
        """
        mode = Mode(mode)
        with self.database.connection() as conn:
            project_id = None
            file_id = None if file is None else self._find(conn, file, project)
            if file_id is not None:
                project_id = self._project_of(conn, file_id)
            elif not all_projects:
                project_id = find_project(conn, self.workspace_id, project or self.settings.project)
        scope = Scope(self.workspace_id, project_id, file_id, sheet)
        words = clean_query(query)
        vectors = {} if mode is Mode.TEXT or not words else self._vectors_of(words, scope, mode)
        with self.database.connection() as conn:
            return search(conn, scope, query, vectors=vectors, k=k, mode=mode)

    def _vectors_of(self, words: str, scope: Scope, mode: Mode) -> dict[str, NDArray[np.float32]]:
        """A query's vectors by the embedders of the scope that can be had, by their identities.

        No connection is held while a service is asked.
        """
        with self.database.connection() as conn:
            identities = list_embedders(conn, scope)
            names = embedders_set(conn, self.workspace_id, scope.project_id, self.settings)
        vectors: dict[str, NDArray[np.float32]] = {}
        for identity in identities:
            try:
                vectors[identity] = self._embed(words, identity, names)
            except (PlanroomError, LeaseQueueError) as error:
                if mode is Mode.VECTOR:
                    raise
                log.warning("Some of it is searched by words alone: %s", error)
        return vectors

    def _embed(self, words: str, identity: str, names: set[str]) -> NDArray[np.float32]:
        """The vector of a query by the embedder that documents were indexed with.

        No query is sent to a service that nothing here is set to use.
        """
        name = name_of(identity)
        if name not in LOCAL | names:
            raise PlanroomError(
                f"It was indexed with {identity}, which is not set here.",
                code="embedder_not_set",
                hint="Set PLANROOM_EMBEDDER to it, or index again.",
            )
        embedder = self._embedders.open(self.settings.model_copy(update={"embedder": name}))
        if embedder.identity != identity:
            raise PlanroomError(
                f"It was indexed with {identity}; the embedder is {embedder.identity} by now.",
                code="embedder_changed",
                hint="Index again what was indexed before, or set the embedder as it was.",
            )
        until = time.monotonic() + QUERY_SECONDS

        def check() -> None:
            if time.monotonic() >= until:
                raise PlanroomError(
                    f"The embedding service did not answer within {QUERY_SECONDS:g} s.",
                    code="embedder_unreachable",
                )

        return embedder.embed([words], check)[0]

    # -- looking after ---------------------------------------------------------------------------

    def _find(self, conn: Connection, file: str | int, project: str | None = None) -> int:
        """The id of a file given by its id, name, number in words, or the end of its path."""
        if isinstance(file, int):
            return file
        return files.find_file(conn, self.workspace_id, file, project)

    def status(
        self,
        file: str | int | None = None,
        *,
        project: str | None = None,
        all_projects: bool = False,
    ) -> list[Row]:
        """Files with their progress and gaps: one, this project's, or the workspace's.

        A name is looked for in `project`, or else in every project; a number is a file's id.
        """
        with self.database.connection() as conn:
            if file is not None:
                found = [self._find(conn, file, project)]
                return status.list_files(conn, self.workspace_id, files=found)
            of = None if all_projects else project or self.settings.project
            return status.list_files(conn, self.workspace_id, project=of)

    def gaps(self, file: str | int, *, project: str | None = None) -> list[Row]:
        """The pages of a file that gave no text, and why."""
        rows = self.status(file, project=project)
        if not rows or rows[0]["ingestion_id"] is None:
            return []
        with self.database.connection() as conn:
            return status.list_gaps(conn, self.workspace_id, rows[0]["ingestion_id"])

    def attempts(self, file: str | int, *, project: str | None = None) -> list[Row]:
        """Every attempt at a file: who held it, what was done, what again, and how it ended."""
        with self.database.connection() as conn:
            found = self._find(conn, file, project)
            return status.list_attempts(conn, self.workspace_id, found)

    def verify(
        self,
        file: str | int,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        project: str | None = None,
    ) -> Verification:
        """Derive a file's chunk list from its bytes again and compare it with what is stored."""
        with self.database.connection() as conn:
            file_id = self._find(conn, file, project)
            settings = self._settings_of(conn, file_id)
            return verify(conn, self.blobs, settings, self.workspace_id, file_id, progress)

    def _settings_of(self, conn: Connection, file_id: int) -> Settings:
        """The settings in force for a file: those of its project."""
        project_id = self._project_of(conn, file_id)
        return project_settings(conn, self.workspace_id, project_id, self.settings)

    def _project_of(self, conn: Connection, file_id: int) -> int:
        rows = status.list_files(conn, self.workspace_id, files=[file_id])
        if not rows:
            raise NotFound(f"There is no file {file_id} in this workspace.")
        return find_project(conn, self.workspace_id, rows[0]["project"])

    def cancel(self, file: str | int, *, project: str | None = None) -> dict[int, str]:
        """Cancel what is queued or running for a file: {ingestion id: status now}."""
        with self.database.connection() as conn:
            found = self._find(conn, file, project)
            return files.cancel_ingestions(conn, self.workspace_id, found)

    def retry(self, file: str | int, *, project: str | None = None) -> int | None:
        """Queue a file again; None when it is being worked on already."""
        with self.database.connection() as conn:
            return intake.retry(conn, self.workspace_id, self._find(conn, file, project))

    def remove(self, file: str | int, *, project: str | None = None) -> bool:
        """Take a file away: not searchable from now on; its rows and bytes go a little later."""
        with self.database.connection() as conn:
            return files.remove_file(conn, self.workspace_id, self._find(conn, file, project))

    # -- sources ---------------------------------------------------------------------------------

    def connect(
        self, provider: str, path: Path | str, *, name: str, every_seconds: int | None = None
    ) -> int:
        """Keep a folder indexed in this project; returns the connection's id.

        Raises PlanroomError for an unknown provider, and while a purge of the name is under way.
        """
        config = {"path": str(Path(path).resolve()), "project": self.settings.project}
        open_connector(provider, config)
        with self.database.connection() as conn:
            added = leasequeue.add_connection(
                conn, self.workspace_id, name, provider, config, interval_seconds=every_seconds
            )
        if added is None:
            raise PlanroomError(
                f"{name} is being purged.", code="purging", hint="Try again when that is done."
            )
        return added

    def connections(self) -> list[Row]:
        """The workspace's sources, by name."""
        with self.database.connection() as conn:
            return leasequeue.list_connections(conn, self.workspace_id)

    def _connection(self, name: str) -> int:
        for row in self.connections():
            if row["name"] == name:
                return row["id"]
        raise NotFound(f"There is no connection {name!r}.", hint="planroom connections lists them.")

    def sync(self, name: str) -> int:
        """Ask for a sync of a source: the run's id, or that of the one under way."""
        with self.database.connection() as conn:
            run_id = leasequeue.enqueue(conn, self.workspace_id, self._connection(name))
        if run_id is None:
            raise PlanroomError(
                f"{name} is not connected any more.",
                code="disconnected",
                hint="planroom connect connects it again.",
            )
        return run_id

    def disconnect(self, name: str, *, purge: bool = False) -> int | None:
        """Stop syncing a source. With `purge` all it brought is removed: the id of that run."""
        connection_id = self._connection(name)
        with self.database.connection() as conn:
            if purge:
                return leasequeue.request_purge(conn, self.workspace_id, connection_id)
            leasequeue.disconnect(conn, self.workspace_id, connection_id)
            return None

    # -- the fleet -------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether nothing is queued or running, in any workspace."""
        return self._is_idle()

    def workers(self) -> list[Row]:
        """Every worker that registered and did not leave."""
        with self.database.connection() as conn:
            return leasequeue.list_workers(conn)

    def pause(self, by: str, reason: str | None = None) -> None:
        """Stop claiming everywhere; what runs goes on."""
        with self.database.connection() as conn:
            leasequeue.pause(conn, by, reason)

    def resume(self) -> bool:
        """Let claiming go on; True if it was paused."""
        with self.database.connection() as conn:
            return leasequeue.resume(conn)

    def paused(self) -> Pause | None:
        """The pause in force, or None while claiming goes on."""
        with self.database.connection() as conn:
            return leasequeue.paused(conn)

    def runs(self, *, status: str | None = None, limit: int = 50) -> list[Row]:
        """The newest connection runs first."""
        with self.database.connection() as conn:
            return leasequeue.list_runs(conn, self.workspace_id, status=status, limit=limit)

    def run_history(self, run_id: int) -> Row:
        """One run with its `lease_history` and `results`. Raises NotFound."""
        with self.database.connection() as conn:
            run = leasequeue.run_history(conn, self.workspace_id, run_id)
        if run is None:
            raise NotFound(f"There is no run {run_id} in this workspace.")
        return run


@contextmanager
def _stops_on_signals(worker: Worker) -> Generator[None]:
    """Let SIGINT and SIGTERM stop the worker in order, and act as before once it has stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        stop = stops[number]
        if callable(stop):
            stop(number, frame)

    with worker.signals():
        stops = {int(n): signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        for number in stops:
            signal.signal(number, note)
        yield
    if received:
        signal.raise_signal(received[0])
