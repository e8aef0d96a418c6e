"""The stages of a planroom worker: what one poll does, in order (rules L15 and L17)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from leasequeue import (
    RUNS,
    AbortSignal,
    Lease,
    Settled,
    Stage,
    Worker,
    due,
    engine_stages,
    evict_stage,
    expire,
    seldom,
)
from planroom import ingestions
from planroom.blobs import BlobStore
from planroom.config import Settings
from planroom.database import Database
from planroom.embed import Embedder, open_embedder
from planroom.ingest import ingest
from planroom.orphans import delete_orphans
from planroom.presence import find_dead, forget
from planroom.sync import purge, sync
from planroom.vector_index import build_vector_indexes

UNQUEUED_PER_POLL = 50
SWEEP_ROWS = 5000
INDEX_EVERY = timedelta(minutes=10)
INDEX_SECONDS_MAX = 6 * 3600
ORPHANS_PER_POLL = 500
ORPHANS_EVERY = timedelta(hours=1)


class Embedders:
    """The embedders of one process, each opened once: projects may differ in theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Embedder] = {}

    def open(self, settings: Settings) -> Embedder:
        """The embedder that the settings name."""
        with self._lock:
            if settings.embedder not in self._open:
                self._open[settings.embedder] = open_embedder(settings)
            return self._open[settings.embedder]

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            for embedder in self._open.values():
                embedder.close()
            self._open.clear()


def ingest_stages(
    worker: Worker,
    database: Database,
    blobs: BlobStore,
    settings: Settings,
    embedders: Embedders,
    files: Sequence[int] | None = None,
) -> list[Stage]:
    """Free what this machine's dead held, queue what changed, work on one ingestion.

    Where `files` are given, only on theirs.
    """

    def bury() -> int:
        dead = find_dead(settings.home)
        if dead:
            with database.connection() as conn:
                for table in (ingestions.INGESTIONS, RUNS):
                    expire(conn, table, dead)
            forget(settings.home, dead)
        return len(dead)

    def enqueue() -> int:
        with database.connection() as conn:
            return ingestions.enqueue_unqueued(conn, UNQUEUED_PER_POLL)

    def work_on_one() -> int:
        with database.connection() as conn:
            claimed = ingestions.claim(conn, worker.name, settings.lease_seconds, files)
        if isinstance(claimed, Lease):
            worker.perform(claimed, lambda abort: work(claimed, abort))
        return 0 if claimed is None else 1

    def work(lease: Lease, abort: AbortSignal) -> Settled:
        with database.connection() as conn:
            return ingest(conn, blobs, settings, embedders.open, lease, abort)

    return [
        Stage("bury", bury),
        evict_stage(worker, database.connection, ingestions.INGESTIONS),
        Stage("enqueue", enqueue),
        Stage("ingest", work_on_one),
    ]


def upkeep_stages(worker: Worker, database: Database, blobs: BlobStore) -> list[Stage]:
    """Remove what no search can reach, and build a vector index where exact search is outgrown."""

    def sweep_rows() -> int:
        with database.connection() as conn:
            return ingestions.sweep(conn, SWEEP_ROWS)

    def sweep_blobs() -> int:
        return blobs.sweep()

    walk: Iterator[bytes] | None = None

    def sweep_orphans() -> int:
        """Some blobs of the walk under way; a walk begins once in a while across the fleet."""
        nonlocal walk
        with database.connection() as conn:
            if walk is None:
                if not due(conn, "sweep_orphans", ORPHANS_EVERY):
                    return 0
                walk = blobs.hashes()
            some = list(itertools.islice(walk, ORPHANS_PER_POLL))
            if not some:
                walk = None
            delete_orphans(conn, blobs, some)
        return len(some)

    def index_vectors() -> int:
        with database.connection() as conn:
            if not due(conn, "index_vectors", INDEX_EVERY):
                return 0
        # It also waits for the transactions of others, however long they are.
        with database.connect(read_timeout=INDEX_SECONDS_MAX) as conn:
            return build_vector_indexes(conn, stopping=lambda: worker.stopping)

    return [
        Stage("sweep_rows", _until_empty(sweep_rows, timedelta(seconds=30))),
        Stage("sweep_blobs", seldom(sweep_blobs, timedelta(hours=1))),
        Stage("sweep_orphans", _until_empty(sweep_orphans, timedelta(minutes=5))),
        Stage("index_vectors", seldom(index_vectors, timedelta(minutes=5))),
    ]


def _until_empty(run: Callable[[], int], pause: timedelta) -> Callable[[], int]:
    """`run` at every poll while it finds something, and otherwise once in `pause`."""
    gated = seldom(run, pause)
    busy = False

    def gate() -> int:
        nonlocal busy
        done = run() if busy else gated()
        busy = done > 0
        return done

    return gate


def all_stages(
    worker: Worker,
    database: Database,
    blobs: BlobStore,
    settings: Settings,
    embedders: Embedders,
) -> list[Stage]:
    """What `planroom worker` does."""
    engine = engine_stages(
        worker,
        database.connection,
        {
            "sync": lambda run: sync(run, database.connection, blobs, settings, embedders.open),
            "purge": lambda run: purge(run, database.connection),
        },
        lease_seconds=settings.lease_seconds,
        retention_days=settings.retention_days,
    )
    return [
        *ingest_stages(worker, database, blobs, settings, embedders),
        *engine,
        *upkeep_stages(worker, database, blobs),
    ]
