"""THE HEART: one version of a file becomes pages and chunks, from wherever the last worker stopped.

What is done is what is committed. Pages are committed in small groups with `processed_pages`,
chunks in batches with `processed_units`, each under the fence of the lease; a worker that takes
over reads the checkpoint and goes on there. The finish deletes what a longer attempt left, looks
again where the file belongs, and publishes, in one transaction.

Three slow things overlap: a child process reads ahead, a thread embeds, and this thread, the only
one that writes, cuts chunks and commits. Overlap never reorders commits, and it is bounded twice:
no more than `page_group` pages are read beyond the committed ones, and a batch is embedded only
when the one before it is committed. So a kill wastes at most a group of pages and one batch.

Each commit stands between two crash points, by which the tests kill a worker there.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray
from pgvector import HalfVector

from leasequeue import (
    AbortSignal,
    Cancelled,
    Lease,
    Retryable,
    Settled,
    checkpoint,
    crash_point,
    release,
    renew,
    seal,
)
from planroom import ingestions
from planroom.blobs import BlobStore
from planroom.chunk import ChunkParams, chunk_page
from planroom.chunks import delete_tail, ensure_embedder, find_embedded, write_batch
from planroom.config import Settings
from planroom.embed import Embedder
from planroom.errors import DocumentFailed
from planroom.extract import ExtractionAborted, ExtractLimits, PageReader, extractor_identity
from planroom.files import File, lock_file, publish
from planroom.fingerprint import Restart, restart_point
from planroom.model import Fingerprint, Page, PageStatus
from planroom.pages import insert_pages, iterate_texts, set_chunk_counts
from planroom.projects import project_settings
from planroom.units import Unit, UnitStream

Connection = psycopg.Connection[Any]
Vectors = NDArray[np.float32]
OpenEmbedder = Callable[[Settings], Embedder]

HELD_BATCHES = 4
"""Batches of chunks kept in memory at most while reading is ahead of embedding."""
GROUP_SECONDS = 0.25
"""A page waits at most this long for others to be committed with it."""


def chunk_params(settings: Settings) -> ChunkParams:
    """How pages are cut under these settings."""
    return ChunkParams(tokens_max=settings.chunk_tokens, overlap_tokens=settings.chunk_overlap)


def current_fingerprint(settings: Settings, embedder: Embedder) -> Fingerprint:
    """What this process would make of a document under these settings."""
    return Fingerprint(extractor_identity(), chunk_params(settings).identity, embedder.identity)


def ingest(
    conn: Connection,
    blobs: BlobStore,
    defaults: Settings,
    open_embedder: OpenEmbedder,
    lease: Lease,
    abort: AbortSignal,
) -> Settled:
    """Work on a claimed ingestion until it is over; returns the status it was sealed with.

    `conn` is this job's alone while it runs. Raises what ends the attempt otherwise: LeaseLost,
    Cancelled, ShuttingDown and TimedOut from `abort`, DocumentFailed, Retryable.
    """
    settings = project_settings(conn, lease.row["workspace_id"], lease.row["project_id"], defaults)
    embedder = open_embedder(settings)
    begin(conn, lease, settings, current_fingerprint(settings, embedder), abort)
    crash_point("ingest.begun")
    _Ingestion(conn, blobs, settings, embedder, lease, abort).run()
    return finish(conn, lease, defaults, open_embedder)


def begin(
    conn: Connection,
    lease: Lease,
    settings: Settings,
    fingerprint: Fingerprint,
    abort: AbortSignal,
) -> None:
    """Store the fingerprint, and go back as far as a changed one demands (case D23)."""
    row = lease.row
    stored = None
    if row["extractor"] is not None:
        stored = Fingerprint(row["extractor"], row["chunker"], row["embedder"])
    restart = restart_point(stored, fingerprint)
    counts: dict[int, int] = {}
    if restart is Restart.RECHUNK:
        for index, text in iterate_texts(conn, lease.id):
            abort.check()
            counts[index] = len(chunk_page(text, chunk_params(settings)))
    with conn.transaction():
        renew(conn, lease)
        if restart is Restart.PAGES:
            ingestions.forget_pages(conn, lease)
        elif restart is not Restart.NOTHING:
            ingestions.forget_units(conn, lease)
        if restart is Restart.RECHUNK:
            set_chunk_counts(conn, lease.id, counts)
            ingestions.replan(conn, lease)
        ingestions.store_fingerprint(conn, lease, fingerprint)
        now = ingestions.reload(conn, lease)
        first_page, first_unit = now["processed_pages"], now["processed_units"]
        to_read = (now["page_count"] or first_page + settings.page_group) - first_page
        to_embed = now["planned_units"] - first_unit
        ingestions.note_progress(
            conn,
            lease,
            first_page=first_page,
            first_unit=first_unit,
            pages_begun=first_page + min(to_read, settings.page_group),
            units_begun=first_unit + min(to_embed, settings.batch_units),
        )


@dataclass(frozen=True, slots=True)
class _Opened:
    page_count: int


@dataclass(frozen=True, slots=True)
class _Embedded:
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class _Broke:
    """What a helper thread raised."""

    error: BaseException


_Event = _Opened | Page | _Embedded | _Broke


class _Ingestion:
    """The loop of one attempt: reader and embedder send events, and this thread commits."""

    def __init__(
        self,
        conn: Connection,
        blobs: BlobStore,
        settings: Settings,
        embedder: Embedder,
        lease: Lease,
        abort: AbortSignal,
    ) -> None:
        row = ingestions.reload(conn, lease)
        self._conn = conn
        self._blobs = blobs
        self._settings = settings
        self._embedder = embedder
        self._lease = lease
        self._abort = abort
        self._workspace_id: int = row["workspace_id"]
        self._sha256: bytes = row["sha256"]
        self._params = chunk_params(settings)
        self._page_count: int | None = row["page_count"]
        self._pages: int = row["processed_pages"]
        self._image_only: int = row["image_only_pages"]
        self._failed: int = row["failed_pages"]
        self._planned: int = row["planned_units"]
        self._units: int = row["processed_units"]
        self._embedder_id = ensure_embedder(conn, embedder.identity, embedder.dimensions)
        self._stream = UnitStream(
            lease.id, self._params, self._units, HELD_BATCHES * settings.batch_units
        )
        self._events: queue.Queue[_Event] = queue.Queue()
        self._group: list[Page] = []
        self._group_since = 0.0
        self._batch: _Batch | None = None
        self._reader: PageReader | None = None

    def run(self) -> None:
        """Read and embed until every page and every unit is committed."""
        if not self._all_pages:
            self._start_reading()
        try:
            while True:
                self._abort.check()
                if self._batch is None:
                    self._start_batch()
                if self._all_pages and self._batch is None:
                    return
                self._handle(self._next_event())
                if self._group_is_due():
                    self._commit_pages()
        finally:
            if self._reader is not None:
                self._reader.close()

    # -- events ----------------------------------------------------------------------------------

    def _next_event(self) -> _Event | None:
        """The next event; None when a group of pages has waited long enough, or after a second."""
        wait = 1.0
        if self._group:
            wait = max(0.0, self._group_since + GROUP_SECONDS - time.monotonic())
        try:
            return self._events.get(timeout=wait)
        except queue.Empty:
            return None

    def _handle(self, event: _Event | None) -> None:
        match event:
            case None:
                pass
            case _Opened(page_count):
                self._page_count = page_count
            case Page():
                if not self._group:
                    self._group_since = time.monotonic()
                self._group.append(event)
            case _Embedded(vectors):
                self._commit_batch(vectors)
            case _Broke(error):
                self._abort.check()
                raise error

    @property
    def _all_pages(self) -> bool:
        return self._page_count is not None and self._pages == self._page_count

    # -- pages -----------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        limits = ExtractLimits(
            memory_bytes=self._settings.extract_memory_bytes,
            page_seconds=self._settings.page_seconds,
            pages_max=self._settings.pages_max,
        )
        path = self._blobs.path(self._sha256)
        if not path.is_file():
            raise Retryable(
                "The bytes of this file are not in the blob store of this worker.",
                code="blob_missing",
                hint="Workers on several machines need PLANROOM_HOME/blobs on a shared disk.",
            )
        reader = self._reader = PageReader(
            path,
            first=self._pages,
            ahead=self._settings.page_group,
            limits=limits,
            name="The document",
            abort=self._abort.is_set,
        )
        self._spawn("reader", lambda: self._read(reader))

    def _read(self, reader: PageReader) -> None:
        with reader:
            self._events.put(_Opened(reader.page_count))
            for page in reader:
                self._events.put(page)

    def _group_is_due(self) -> bool:
        if not self._group or self._page_count is None:
            return False
        last = self._pages + len(self._group) == self._page_count
        full = 2 * len(self._group) >= self._settings.page_group
        return last or full or time.monotonic() >= self._group_since + GROUP_SECONDS

    def _commit_pages(self) -> None:
        """One transaction: the fence with the new checkpoint, and the pages it stands for."""
        group, self._group = self._group, []
        chunks = [chunk_page(page.text, self._params) for page in group]
        counts = [len(of_page) for of_page in chunks]
        pages, planned = self._pages + len(group), self._planned + sum(counts)
        self._check_chunks_max(planned)
        image_only = self._image_only + sum(p.status is PageStatus.IMAGE_ONLY for p in group)
        failed = self._failed + sum(page.status is PageStatus.FAILED for page in group)
        progress = {
            "page_count": self._page_count,
            "processed_pages": pages,
            "image_only_pages": image_only,
            "failed_pages": failed,
            "planned_units": planned,
            "total_units": planned if pages == self._page_count else None,
        }
        crash_point("pages.before")
        with self._conn.transaction():
            cancel = checkpoint(self._conn, self._lease, progress)
            crash_point("pages.fenced")
            insert_pages(self._conn, self._lease.id, self._workspace_id, group, counts)
            self._note_pages(len(group), pages, planned)
            crash_point("pages.written")
        crash_point("pages.committed")
        self._pages, self._planned = pages, planned
        self._image_only, self._failed = image_only, failed
        if self._reader is not None:
            self._reader.committed(pages)
        self._stream.locate(self._conn)
        for page, of_page in zip(group, chunks, strict=True):
            self._stream.offer(page.index, of_page)
        self._stop_if_cancelled(cancel)

    def _note_pages(self, read: int, pages: int, planned: int) -> None:
        count = self._page_count or pages
        ingestions.note_progress(
            self._conn,
            self._lease,
            pages_read=read,
            pages_begun=min(count, pages + self._settings.page_group),
            units_begun=min(planned, self._units + self._settings.batch_units),
        )

    def _check_chunks_max(self, planned: int) -> None:
        cap = self._settings.chunks_max
        if planned > cap:
            raise DocumentFailed(
                f"The document has more than {planned - 1:,} chunks; at most {cap:,} are taken.",
                code="too_many_chunks",
                hint="Raise PLANROOM_CHUNKS_MAX.",
            )

    # -- units -----------------------------------------------------------------------------------

    def _start_batch(self) -> None:
        """Begin the next batch, if its pages are committed: embed those texts that are new."""
        size = self._settings.batch_units
        ready = self._planned - self._units
        if ready == 0 or (ready < size and not self._all_pages):
            return
        units = self._stream.take(self._conn, size, self._pages)
        hashes = [chunk.text_hash for _, chunk in units]
        known = find_embedded(
            self._conn, self._workspace_id, self._embedder_id, dict.fromkeys(hashes)
        )
        new = {
            text_hash: chunk.text
            for text_hash, (_, chunk) in zip(hashes, units, strict=True)
            if text_hash not in known
        }
        self._batch = _Batch(self._units, units, hashes, known, list(new))
        crash_point("batch.begun")
        texts = list(new.values())
        if texts:
            self._spawn("embedder", lambda: self._embed(texts))
        else:
            self._events.put(_Embedded(np.empty((0, self._embedder.dimensions), np.float32)))

    def _embed(self, texts: Sequence[str]) -> None:
        vectors = self._embedder.embed(texts, self._abort.check)
        crash_point("batch.embedded")
        self._events.put(_Embedded(vectors))

    def _commit_batch(self, vectors: Vectors) -> None:
        """One transaction: the fence with the new checkpoint, and the chunks it stands for."""
        batch, self._batch = self._batch, None
        assert batch is not None
        stored = batch.vectors(vectors)
        done = batch.start + len(batch.units)
        crash_point("batch.before")
        with self._conn.transaction():
            cancel = checkpoint(self._conn, self._lease, {"processed_units": done})
            crash_point("batch.fenced")
            write_batch(
                self._conn,
                self._lease.id,
                self._workspace_id,
                self._embedder_id,
                batch.start,
                batch.units,
                stored,
            )
            ingestions.note_progress(
                self._conn,
                self._lease,
                units_embedded=len(batch.new),
                units_reused=len(batch.units) - len(batch.new),
                units_begun=min(self._planned, done + self._settings.batch_units),
            )
            crash_point("batch.written")
        crash_point("batch.committed")
        self._units = done
        self._stop_if_cancelled(cancel)

    # -- both ------------------------------------------------------------------------------------

    def _stop_if_cancelled(self, cancel: bool) -> None:
        if cancel:
            self._abort.set(Cancelled("the user cancelled the ingestion"))

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` on a thread of its own; what it raises comes back as an event.

        A daemon thread: one that hangs in a request must not keep the process from ending.
        """

        def run() -> None:
            try:
                work()
            except ExtractionAborted:
                pass
            except BaseException as error:  # noqa: BLE001 - it is raised again by the loop
                self._events.put(_Broke(error))

        threading.Thread(target=run, name=name, daemon=True).start()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Units in hand; `known` texts have vectors already, `new` ones are being embedded."""

    start: int
    units: Sequence[Unit]
    hashes: Sequence[bytes]
    known: dict[bytes, HalfVector]
    new: Sequence[bytes]

    def vectors(self, embedded: Vectors) -> list[HalfVector]:
        """One vector a unit, in order; `embedded` has a row for each of `new`."""
        if len(embedded) != len(self.new):
            raise DocumentFailed(
                f"The embedder returned {len(embedded)} vectors for {len(self.new)} chunks.",
                code="embedding_invalid",
            )
        made = {h: HalfVector(row) for h, row in zip(self.new, embedded, strict=True)}
        return [self.known[h] if h in self.known else made[h] for h in self.hashes]


def finish(
    conn: Connection, lease: Lease, defaults: Settings, open_embedder: OpenEmbedder
) -> Settled:
    """One transaction: lock the file, fence, delete the tail, look at the scope again, publish.

    The file comes first because every transaction locks it before its ingestions.
    """
    crash_point("finish.before")
    with conn.transaction():
        file = lock_file(conn, lease.row["workspace_id"], lease.row["file_id"])
        cancel = renew(conn, lease)
        row = ingestions.reload(conn, lease)
        crash_point("finish.fenced")
        delete_tail(conn, lease.id, row["total_units"])
        crash_point("finish.tail_deleted")
        if cancel:
            status = seal(conn, lease, "cancelled")
        elif file.status != "ready":
            status = seal(conn, lease, "cancelled", error_code="file_removed")
        elif file.version != row["version"]:
            status = seal(conn, lease, "cancelled", error_code="superseded")
        else:
            status = _publish_in_scope(conn, lease, row, file, defaults, open_embedder)
        crash_point("finish.sealed")
    crash_point("finish.committed")
    return Settled(status)


def _publish_in_scope(
    conn: Connection,
    lease: Lease,
    row: dict[str, Any],
    file: File,
    defaults: Settings,
    open_embedder: OpenEmbedder,
) -> str:
    """Publish; or, if the file was moved to where other settings hold, requeue for those."""
    if file.project_id != row["project_id"]:
        settings = project_settings(conn, file.workspace_id, file.project_id, defaults)
        ingestions.move_to_project(conn, lease, file.project_id)
        wanted = current_fingerprint(settings, open_embedder(settings))
        if wanted != Fingerprint(row["extractor"], row["chunker"], row["embedder"]):
            return release(conn, lease, delay=timedelta(0), error_code="moved")
    if row["total_units"] == 0:
        error = _nothing_readable(conn, lease, row)
        return seal(conn, lease, "failed", error_code=error.code, error=str(error))
    publish(conn, file, lease.id)
    crash_point("finish.published")
    return seal(conn, lease, "ready")


_FIRST_FAILURE = """
    select detail from pages
     where ingestion_id = %(id)s and status = 'failed'
     order by page_index
     limit 1
"""


def _nothing_readable(conn: Connection, lease: Lease, row: dict[str, Any]) -> DocumentFailed:
    """Why a document without a single unit failed."""
    pages, failed = row["page_count"], row["failed_pages"]
    if failed == pages:
        first = conn.execute(_FIRST_FAILURE, {"id": lease.id}).fetchone()
        why = "" if first is None or first[0] is None else f" The first one: {first[0]}"
        return DocumentFailed(f"None of its {pages} pages could be read.{why}", code="unreadable")
    return DocumentFailed(
        f"None of its {pages} pages has text: {row['image_only_pages']} are images only"
        f" and {failed} could not be read.",
        code="no_text",
    )
