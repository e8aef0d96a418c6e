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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    sentence,
)
from planroom import ingestions
from planroom.blobs import BlobStore
from planroom.chunk import ChunkParams, chunk_page
from planroom.chunks import (
    ChunkRow,
    any_from,
    delete_tail,
    ensure_embedder,
    find_embedded,
    write_batch,
)
from planroom.config import Settings
from planroom.embed import Embedder, EmbeddingInvalid
from planroom.errors import DocumentFailed, PlanroomError
from planroom.extract import ExtractionAborted, ExtractLimits, PageReader, extractor_identity
from planroom.files import File, find_project_of, lock_file, publish
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
JOIN_SECONDS = 2.0
"""How long the end of a job waits for its threads; one that hangs in a request is left behind."""
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
    workspace_id, file_id = lease.row["workspace_id"], lease.row["file_id"]
    project_id = find_project_of(conn, workspace_id, file_id)
    settings = project_settings(conn, workspace_id, project_id, defaults)
    embedder = _opened(open_embedder, settings)
    begin(conn, lease, project_id, settings, current_fingerprint(settings, embedder), abort)
    crash_point("ingest.begun")
    _Ingestion(conn, blobs, settings, embedder, lease, abort).run()
    return finish(conn, lease, defaults, open_embedder)


def _opened(open_embedder: OpenEmbedder, settings: Settings) -> Embedder:
    """The embedder; one that cannot be used here is this worker's trouble, not the document's."""
    try:
        return open_embedder(settings)
    except PlanroomError as error:
        raise Retryable(str(error), code=error.code, hint=error.hint) from error


def begin(
    conn: Connection,
    lease: Lease,
    project_id: int,
    settings: Settings,
    fingerprint: Fingerprint,
    abort: AbortSignal,
) -> None:
    """Store project and fingerprint, and go back as far as a changed one demands (case D23)."""
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
        check_chunks_max(sum(counts.values()), settings)
    with conn.transaction():
        renew(conn, lease)
        if restart is Restart.PAGES:
            ingestions.forget_pages(conn, lease)
        elif restart is not Restart.NOTHING:
            ingestions.forget_units(conn, lease)
        if restart is Restart.RECHUNK:
            set_chunk_counts(conn, lease.id, counts)
            ingestions.replan(conn, lease)
        ingestions.store_fingerprint(conn, lease, project_id, fingerprint)
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


def check_chunks_max(planned: int, settings: Settings) -> None:
    """Raise DocumentFailed when a plan of so many chunks is over the cap."""
    if planned > settings.chunks_max:
        raise DocumentFailed(
            f"The document has at least {planned:,} chunks;"
            f" at most {settings.chunks_max:,} are taken.",
            code="too_many_chunks",
            hint="Raise PLANROOM_CHUNKS_MAX.",
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


class _Over(Exception):
    """The job has ended without the thread that raises this, which is to end too."""


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
        self._size_bytes: int = row["size_bytes"]
        self._params = chunk_params(settings)
        self._page_count: int | None = row["page_count"]
        self._pages: int = row["processed_pages"]
        self._image_only: int = row["image_only_pages"]
        self._failed: int = row["failed_pages"]
        self._planned: int = row["planned_units"]
        self._units: int = row["processed_units"]
        self._embedder_id = ensure_embedder(conn, embedder.identity, embedder.dimensions)
        self._replaces = any_from(conn, lease.id, self._units)
        self._stream = UnitStream(
            lease.id, self._params, self._units, HELD_BATCHES * settings.batch_units
        )
        self._events: queue.Queue[_Event] = queue.Queue()
        self._group: list[Page] = []
        self._group_since = 0.0
        self._batch: Batch | None = None
        self._reader: PageReader | None = None
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

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
            self._over.set()
            if self._reader is not None:
                self._reader.close()
            for thread in self._threads:
                thread.join(JOIN_SECONDS)

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
                if page_count == 0:
                    raise DocumentFailed("The document has no pages.", code="unreadable")
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
        path = self._find_blob()
        reader = self._reader = PageReader(
            path,
            first=self._pages,
            ahead=self._settings.page_group,
            limits=limits,
            name="The document",
            abort=self._abort.is_set,
        )
        self._spawn("reader", lambda: self._read(reader))

    def _find_blob(self) -> Path:
        """Where the document's bytes are, if they were ever kept and this worker has them."""
        size, cap = self._size_bytes, self._settings.file_bytes_max
        if size > cap:
            raise DocumentFailed(
                f"The file has {size:,} bytes; at most {cap:,} are taken.",
                code="too_many_bytes",
                hint="Raise PLANROOM_FILE_BYTES_MAX, then add it again.",
            )
        path = self._blobs.path(self._sha256)
        if not path.is_file():
            raise Retryable(
                "The bytes of this file are not in the blob store of this worker.",
                code="blob_missing",
                hint="Add the file again; workers on several machines need PLANROOM_HOME/blobs on "
                "a shared disk.",
            )
        return path

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
        check_chunks_max(planned, self._settings)
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
        if planned > self._units:
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

    # -- units -----------------------------------------------------------------------------------

    def _start_batch(self) -> None:
        """Begin the next batch, if its pages are committed: embed those texts that are new."""
        size = self._settings.batch_units
        ready = self._planned - self._units
        if ready == 0 or (ready < size and not self._all_pages):
            return
        units = self._stream.take(self._conn, size, self._pages)
        if len(units) != min(size, ready):
            raise RuntimeError(f"{ready} units are planned from {self._units}, not {len(units)}")
        batch = self._batch = self._look_up(units)
        crash_point("batch.begun")
        if batch.new:
            self._spawn("embedder", lambda: self._embed(batch))
        else:
            self._events.put(_Embedded(np.empty((0, self._embedder.dimensions), np.float32)))

    def _look_up(self, units: Sequence[Unit]) -> Batch:
        """Part a batch into texts whose vectors the workspace has already, and new ones."""
        hashes = [chunk.text_hash for _, chunk in units]
        texts = {key: chunk.text for key, (_, chunk) in zip(hashes, units, strict=True)}
        known = find_embedded(self._conn, self._workspace_id, self._embedder_id, texts)
        new = {key: text for key, text in texts.items() if key not in known}
        return Batch(self._units, units, hashes, known, new)

    def _embed(self, batch: Batch) -> None:
        try:
            vectors = self._embedder.embed(list(batch.new.values()), self._check)
        except EmbeddingInvalid as error:
            raise _name_chunk(error, batch) from error
        crash_point("batch.embedded")
        self._events.put(_Embedded(vectors))

    def _check(self) -> None:
        """For the embedder, who is on another thread: raise when the job is over."""
        self._abort.check()
        if self._over.is_set():
            raise _Over

    def _commit_batch(self, vectors: Vectors) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        stored = batch.vectors(vectors, self._embedder.dimensions)
        begun = min(self._planned, batch.stop + self._settings.batch_units)
        crash_point("batch.before")
        cancel = commit_batch(
            self._conn,
            self._lease,
            self._embedder_id,
            batch,
            stored,
            begun=begun,
            replace=self._replaces,
        )
        crash_point("batch.committed")
        self._units = batch.stop
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
            except (ExtractionAborted, _Over):
                pass
            except BaseException as error:  # noqa: BLE001 - it is raised again by the loop
                self._events.put(_Broke(error))

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        self._threads[-1].start()


@dataclass(frozen=True, slots=True)
class Batch:
    """Units in hand; `known` texts have vectors already, `new` ones are being embedded."""

    start: int
    units: Sequence[Unit]
    hashes: Sequence[bytes]
    known: dict[bytes, HalfVector]
    new: dict[bytes, str]

    @property
    def stop(self) -> int:
        """The number of the first unit after these."""
        return self.start + len(self.units)

    def vectors(self, embedded: Vectors, dimensions: int) -> list[HalfVector]:
        """One vector a unit, in order; `embedded` has a row for each of `new`, in its order.

        Raises EmbeddingInvalid for anything else, whoever embedded (cases D15 and D16).
        """
        if embedded.shape != (len(self.new), dimensions):
            raise EmbeddingInvalid(
                f"the embedder returned {embedded.shape[0]} vectors of {embedded.shape[-1]}"
                f" dimensions for {len(self.new)} chunks and {dimensions} dimensions"
            )
        unusable = np.flatnonzero(~np.isfinite(embedded).all(axis=1))
        if unusable.size:
            error = EmbeddingInvalid(
                "the embedder returned a vector that is not finite", position=int(unusable[0])
            )
            raise _name_chunk(error, self)
        made = dict(zip(self.new, map(HalfVector, embedded.astype(np.float16)), strict=True))
        return [self.known[key] if key in self.known else made[key] for key in self.hashes]

    def rows(self, vectors: Sequence[HalfVector]) -> Iterator[ChunkRow]:
        """What is stored of each unit."""
        for (page, chunk), text_hash, vector in zip(self.units, self.hashes, vectors, strict=True):
            yield page, chunk.tokens, text_hash, chunk.text, vector


def commit_batch(
    conn: Connection,
    lease: Lease,
    embedder_id: int,
    batch: Batch,
    vectors: Sequence[HalfVector],
    *,
    begun: int,
    replace: bool,
) -> bool:
    """One transaction: the fence with the new checkpoint, and the chunks it stands for.

    `begun` is how far the attempt may go before its next commit; `replace` says that a longer
    attempt may have left chunks where these go. True when cancel was asked for.
    """
    with conn.transaction():
        cancel = checkpoint(conn, lease, {"processed_units": batch.stop})
        crash_point("batch.fenced")
        write_batch(
            conn,
            lease.id,
            lease.row["workspace_id"],
            embedder_id,
            batch.start,
            batch.rows(vectors),
            replace=replace,
        )
        ingestions.note_progress(
            conn,
            lease,
            units_embedded=len(batch.new),
            units_reused=len(batch.units) - len(batch.new),
            units_begun=begun,
        )
        crash_point("batch.written")
    return cancel


def _name_chunk(error: EmbeddingInvalid, batch: Batch) -> EmbeddingInvalid:
    """The error with the chunk and page at fault instead of a place in a batch (case D16)."""
    if error.position is None:
        first, last = batch.start, batch.start + len(batch.units) - 1
        where = f"among chunks {first} to {last}"
    else:
        at = batch.hashes.index(list(batch.new)[error.position])
        where = f"for chunk {batch.start + at}, on page {batch.units[at][0] + 1}"
    return EmbeddingInvalid(f"{error} ({where})", position=error.position, hint=error.hint)


def finish(
    conn: Connection, lease: Lease, defaults: Settings, open_embedder: OpenEmbedder
) -> Settled:
    """One transaction: lock the file, fence, delete the tail, look at the scope again, publish.

    The file comes first because every transaction locks it before its ingestions. What its project
    wants is found out before, since opening an embedder takes time; a file that was moved between
    the two is looked at again.
    """
    workspace_id, file_id = lease.row["workspace_id"], lease.row["file_id"]
    status = None
    while status is None:
        project_id = find_project_of(conn, workspace_id, file_id)
        settings = project_settings(conn, workspace_id, project_id, defaults)
        wanted = current_fingerprint(settings, _opened(open_embedder, settings))
        crash_point("finish.before")
        with conn.transaction():
            file = lock_file(conn, workspace_id, file_id)
            if file.project_id == project_id:
                status = _finish_locked(conn, lease, file, wanted)
                crash_point("finish.sealed")
    crash_point("finish.committed")
    return Settled(status)


def _finish_locked(conn: Connection, lease: Lease, file: File, wanted: Fingerprint) -> str:
    cancel = renew(conn, lease)
    row = ingestions.reload(conn, lease)
    crash_point("finish.fenced")
    delete_tail(conn, lease.id, row["total_units"])
    crash_point("finish.tail_deleted")
    if cancel:
        return seal(conn, lease, "cancelled")
    if file.status != "ready":
        return seal(conn, lease, "cancelled", error_code="file_removed")
    if file.version != row["version"]:
        return seal(conn, lease, "cancelled", error_code="superseded")
    if file.project_id != row["project_id"]:
        # Moved while this ran: it goes on from the plan where other settings hold.
        ingestions.move_to_project(conn, lease, file.project_id)
        if wanted != Fingerprint(row["extractor"], row["chunker"], row["embedder"]):
            return release(conn, lease, error_code="moved")
    if row["total_units"] == 0:
        error = _nothing_readable(conn, lease, row)
        return seal(conn, lease, "failed", error_code=error.code, error=sentence(error))
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
        unread = "Its only page could not" if pages == 1 else f"None of its {pages} pages could"
        return DocumentFailed(f"{unread} be read.{why}", code="unreadable")
    bare = "Its only page has no text." if pages == 1 else f"None of its {pages} pages has text."
    some = f" {failed} of them could not be read." if failed else ""
    return DocumentFailed(
        bare + some,
        code="no_text",
        hint="Scans need their text recognised (OCR) before they can be searched.",
    )
