"""A small plan room for tests of the ingestion path: one workspace, real blobs, a worker by hand.

`Bench` does with the real functions what a worker does, one step at a time: take a file in, claim
it, work on it, settle. What interrupts the work is said by an embedder that tests can hook.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, LiteralString, cast

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg.rows import dict_row

import leasequeue
from leasequeue import AbortSignal, Ended, Lease, ShuttingDown, ensure_workspace, settle
from planroom import ingestions, intake
from planroom.blobs import BlobStore
from planroom.config import Settings
from planroom.database import Database
from planroom.embed import no_abort
from planroom.embed.hashing import HashingEmbedder
from planroom.files import remove_file
from planroom.ingest import OpenEmbedder, current_fingerprint, ingest
from planroom.intake import Taken
from planroom.projects import ensure_project, project_settings
from planroom.search import Hit, Mode, Scope, search
from support.pdf import PdfPage, text, write_pdf

Connection = psycopg.Connection[Any]
Row = dict[str, Any]
Vectors = NDArray[np.float32]

LEASE_SECONDS = 120.0


class HookedEmbedder:
    """The hashing embedder, counting every text, with a hook before and after each batch.

    A hook gets the number of the batch, from 1, and may raise, wait, or do another worker's work.
    """

    def __init__(self, identity: str = HashingEmbedder.identity) -> None:
        self._inner = HashingEmbedder()
        self.identity = identity
        self.dimensions = self._inner.dimensions
        self.counts: Counter[str] = Counter()
        self.batches: list[list[str]] = []
        self.before: Callable[[int], None] = lambda batch: None
        self.after: Callable[[int], None] = lambda batch: None
        self.spoil: Callable[[Vectors], Vectors] = lambda vectors: vectors

    @property
    def embedded(self) -> int:
        """Texts embedded so far."""
        return self.counts.total()

    @property
    def twice(self) -> list[str]:
        """Texts embedded more than once."""
        return [said for said, count in self.counts.items() if count > 1]

    def embed(self, texts: Sequence[str], abort: Callable[[], None] = no_abort) -> Vectors:
        """Embed as the hashing embedder does."""
        self.batches.append(list(texts))
        batch = len(self.batches)
        self.before(batch)
        abort()
        vectors = self._inner.embed(texts, abort)
        self.counts.update(texts)
        self.after(batch)
        return self.spoil(vectors)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Bench:
    """One workspace and project, and what a test does there."""

    database: Database
    conn: Connection
    blobs: BlobStore
    settings: Settings
    workspace: int
    project: int
    embedder: HookedEmbedder = field(default_factory=HookedEmbedder)
    opens: OpenEmbedder | None = None

    @classmethod
    @contextmanager
    def open(cls, settings: Settings) -> Generator[Bench]:
        """A bench on the database that the settings name."""
        with Database(settings) as database, database.connect() as conn:
            workspace = ensure_workspace(conn, settings.workspace)
            project = ensure_project(conn, workspace, settings.project)
            blobs = BlobStore(settings.home / "blobs")
            yield cls(database, conn, blobs, settings, workspace, project)

    def elsewhere(self, workspace: str) -> Bench:
        """The same bench in another workspace, with an embedder of its own."""
        other = ensure_workspace(self.conn, workspace)
        project = ensure_project(self.conn, other, self.settings.project)
        return replace(self, workspace=other, project=project, embedder=HookedEmbedder())

    def with_settings(self, **changed: Any) -> Bench:
        """The same bench under other settings."""
        return replace(self, settings=self.settings.model_copy(update=changed))

    def open_embedder(self, settings: Settings) -> Any:
        """What the worker opens: the hooked embedder unless the test said otherwise."""
        return self.embedder if self.opens is None else self.opens(settings)

    # -- taking in -------------------------------------------------------------------------------

    def take(self, path: Path, name: str | None = None, *, project: int | None = None) -> Taken:
        """Take a file in, as the library does."""
        project = self.project if project is None else project
        settings = project_settings(self.conn, self.workspace, project, self.settings)
        return intake.take(
            self.conn,
            self.blobs,
            path,
            workspace_id=self.workspace,
            project_id=project,
            name=path.name if name is None else name,
            bytes_max=self.settings.file_bytes_max,
            fingerprint=current_fingerprint(settings, self.open_embedder(settings)),
        )

    def remove(self, file_id: int) -> bool:
        """Remove a file of this workspace."""
        return remove_file(self.conn, self.workspace, file_id)

    # -- working ---------------------------------------------------------------------------------

    def claim(self, owner: str = "alice", *, now: datetime | None = None) -> Lease | Ended | None:
        """Claim the next ingestion."""
        return ingestions.claim(self.conn, owner, LEASE_SECONDS, now=now)

    def held(self, owner: str = "alice", *, now: datetime | None = None) -> Lease:
        """A claim that must succeed."""
        claimed = self.claim(owner, now=now)
        assert isinstance(claimed, Lease), claimed
        return claimed

    def attempt(
        self, lease: Lease, abort: AbortSignal | None = None, conn: Connection | None = None
    ) -> BaseException | leasequeue.Settled:
        """Work on a claimed ingestion until it ends; how it ended, not yet settled."""
        abort = AbortSignal() if abort is None else abort
        try:
            return ingest(
                conn or self.conn, self.blobs, self.settings, self.open_embedder, lease, abort
            )
        except Exception as error:  # noqa: BLE001 - an ending, as in Worker
            return abort.reason or error

    def work(self, lease: Lease, abort: AbortSignal | None = None) -> str:
        """Work on a claimed ingestion and settle it, as a worker does; its status then."""
        return settle(self.conn, lease, self.attempt(lease, abort))

    def finish(self, owner: str = "alice") -> str:
        """Claim the next ingestion and see it through."""
        return self.work(self.held(owner))

    def index(self, path: Path, name: str | None = None) -> Row:
        """Take a file in and work until nothing is left to do; its ingestion's row."""
        taken = self.take(path, name)
        self.drain()
        return self.latest(taken.file_id)

    def drain(self) -> None:
        """Work until nothing is queued."""
        while True:
            ingestions.enqueue_unqueued(self.conn)
            claimed = self.claim()
            if claimed is None:
                return
            if isinstance(claimed, Lease):
                self.work(claimed)

    def stop_after(self, batches: int) -> AbortSignal:
        """A signal that shuts the worker down once so many batches have been embedded."""
        abort = AbortSignal()

        def stop(batch: int) -> None:
            if batch > batches:
                abort.set(ShuttingDown("the test stops the worker"))

        self.embedder.before = stop
        return abort

    def expire(self, lease: Lease) -> None:
        """Let the lease run out, by the database's clock."""
        self.conn.execute(
            "update file_ingestions set lease_expires_at = now() - interval '1 second'"
            " where id = %s and lease_token = %s",
            (lease.id, lease.token),
        )

    # -- looking ---------------------------------------------------------------------------------

    def rows(self, statement: LiteralString, *parameters: object) -> list[Row]:
        """The rows of a query, as dictionaries."""
        with self.conn.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(statement, parameters).fetchall()

    def row(self, ingestion_id: int) -> Row:
        """An ingestion's row."""
        return self.rows("select * from file_ingestions where id = %s", ingestion_id)[0]

    def latest(self, file_id: int) -> Row:
        """The row of a file's latest ingestion."""
        return self.rows(
            "select * from file_ingestions where file_id = %s order by id desc limit 1", file_id
        )[0]

    def file(self, file_id: int) -> Row:
        """A file's row."""
        return self.rows("select * from files where id = %s", file_id)[0]

    def chunks(self, ingestion_id: int) -> list[Row]:
        """An ingestion's chunks in order, as they are searched."""
        return self.rows(
            "select chunk_index, page_index, embedder_id, tokens, text_hash, text,"
            " embedding::text as embedding from chunks where ingestion_id = %s"
            " order by chunk_index",
            ingestion_id,
        )

    def pages(self, ingestion_id: int) -> list[Row]:
        """An ingestion's pages in order."""
        return self.rows(
            "select * from pages where ingestion_id = %s order by page_index", ingestion_id
        )

    def attempts(self, ingestion_id: int) -> list[Row]:
        """The ledger of an ingestion, oldest attempt first."""
        return self.rows(
            "select * from ingestion_ledger where ingestion_id = %s order by attempt", ingestion_id
        )

    def count(self, statement: LiteralString, *parameters: object) -> int:
        """The number that a query answers."""
        row = self.conn.execute(statement, parameters).fetchone()
        return cast(int, cast(tuple[Any, ...], row)[0])

    def search(
        self, query: str, *, k: int = 10, mode: Mode = Mode.HYBRID, **scope: Any
    ) -> list[Hit]:
        """Search this workspace and project."""
        vectors = {self.embedder.identity: HashingEmbedder().embed([query])[0]}
        narrowed: dict[str, Any] = {"project_id": self.project, **scope}
        where = Scope(self.workspace, **narrowed)
        return search(
            self.conn,
            where,
            query,
            vectors={} if mode is Mode.TEXT else vectors,
            k=k,
            mode=mode,
        )


# -- documents -----------------------------------------------------------------------------------


def notes(seed: int, lines: int = 40) -> bytes:
    """The content of a page of notes: no two of its chunks are the same, nor those of two seeds."""
    words = ("ANCHOR", "BOLT", "SLAB", "DUCT", "PIPE")
    numbers = [100 * seed + line for line in range(lines)]
    rows = [" ".join(f"{word} {number}{word[0]}" for word in words) for number in numbers]
    return b"".join(text(row, 40, 760 - 17 * i, 9) for i, row in enumerate(rows))


def notes_pdf(path: Path, pages: int, *, lines: int = 40, first: int = 1) -> Path:
    """A document of so many pages of notes, all different."""
    return write_pdf(path, [PdfPage(notes(first + i, lines)) for i in range(pages)])


def await_event(event: threading.Event, seconds: float = 20.0) -> None:
    """Return once the event is set; fail after `seconds`."""
    assert event.wait(seconds), "what the test waits for did not happen"
