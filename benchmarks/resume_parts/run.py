"""One run of the work: a fleet of real workers over some documents, killed so and so many times.

Everything is measured from outside: progress from the database, texts from the embedding server,
pages from the log of the readers. A kill falls due at a share of the work, not at a time, so that
every kill falls into it; whom it hits, and the jitter, come from a seed.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from planroom.migrate import migrate_database
from support.embedding_server import EmbeddingServer, text_key
from support.fleet import Fleet, Outcome, Process, await_true

SAMPLE_SECONDS = 0.05
PATIENCE_SECONDS = 600.0
DIMENSIONS = 64
ANSWER_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done, and by how many."""

    documents: tuple[Path, ...]
    workers: int
    latency_seconds: float
    lease_seconds: float
    batch_units: int
    apart: bool
    """Each worker as if on a machine of its own: only the lease tells that it is dead."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Where a document was at a time (seconds since the start), and which worker held it."""

    at: float
    document: int
    slot: int | None
    pid: int | None
    pages: int
    units: int
    total: int | None


@dataclass(slots=True)
class Kill:
    """One kill: when, whom, how far the document was, and what followed."""

    at: float
    slot: int
    document: int
    pages_committed: int
    units_committed: int
    worked_seconds: float
    """How long the document had been worked on until then, by all its workers."""
    blob: str
    committed: set[str]
    embedded: Counter[str]
    pages: Counter[str]
    reclaim_seconds: float = 0.0
    units_again: int = 0
    pages_again: int = 0


@dataclass(slots=True)
class Result:
    """What a run came to."""

    seconds: float
    embedded: int
    pages_read: int
    outcomes: dict[str, Outcome]
    samples: list[Sample]
    kills: list[Kill] = field(default_factory=list[Kill])


@contextmanager
def database(server_url: str, name: str, *, migrated: bool = True) -> Generator[str]:
    """A fresh database of this name beside the block."""
    with psycopg.connect(server_url, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            url = make_conninfo(server_url, dbname=name)
            if migrated:
                with psycopg.connect(url) as conn:
                    migrate_database(conn)
            yield url
        finally:
            drop = sql.SQL("drop database {} with (force)")
            admin.execute(drop.format(sql.Identifier(name)))


class Run:
    """A fleet at work on a database; `perform` sees it through."""

    def __init__(self, url: str, folder: Path, work: Work) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._work = work
        self._server = EmbeddingServer(DIMENSIONS, latency_seconds=work.latency_seconds)
        self._fleet = Fleet(url, folder, self._server, settings=_settings(work))
        self._slots: list[Process] = []
        self._slot_of_pid: dict[int, int] = {}
        self._killed_at_units: dict[int, int] = {}
        self._samples: list[Sample] = []
        self._over = threading.Event()
        self._started_at = 0.0

    def perform(self, kills: int, number: signal.Signals, seed: int) -> Result:
        """Take the documents in, work on them under so many kills, and measure."""
        with self._server, self._fleet:
            self._fleet.take_in(*self._work.documents)
            for slot in range(self._work.workers):
                self._start(slot)
            await_true(self._anyone_at_work, "no worker began", PATIENCE_SECONDS)
            self._started_at = time.monotonic()
            sampler = threading.Thread(target=self._sample, daemon=True)
            sampler.start()
            done = list(self._kill_at(_shares(kills, seed), number, seed))
            await_true(self._fleet.is_over, "the work did not end", PATIENCE_SECONDS)
            seconds = time.monotonic() - self._started_at
            self._over.set()
            sampler.join()
            for process in self._slots:
                process.send(signal.SIGTERM)
                process.wait()
            self._attribute(done)
            return Result(
                seconds,
                self._server.embedded,
                self._fleet.pages_read().total(),
                self._fleet.outcomes(),
                self._samples,
                done,
            )

    # -- workers ---------------------------------------------------------------------------------

    def _start(self, slot: int) -> Process:
        settings: dict[str, Any] = {}
        if self._work.apart:
            settings["home"] = self._home_of_its_own(slot)
        process = self._fleet.worker(until_idle=False, **settings)
        self._slot_of_pid[process.pid] = slot
        self._slots[slot : slot + 1] = [process]
        return process

    def _home_of_its_own(self, slot: int) -> Path:
        """A home with the shared blobs in it, as on another machine with the same disk mounted."""
        home = self._folder / f"home-{slot}-{len(self._fleet.processes)}"
        home.mkdir()
        (home / "blobs").symlink_to(self._folder / "home" / "blobs")
        return home

    def _anyone_at_work(self) -> bool:
        return self._fleet.is_at_work(self._slots)

    # -- samples ---------------------------------------------------------------------------------

    def _sample(self) -> None:
        with self._fleet.connect() as conn:
            while not self._over.wait(SAMPLE_SECONDS):
                self._samples.extend(self._look(conn))
            self._samples.extend(self._look(conn))

    def _look(self, conn: psycopg.Connection[Any]) -> list[Sample]:
        rows = conn.execute(_PROGRESS).fetchall()
        at = time.monotonic() - self._started_at
        return [
            Sample(at, document, self._slot_of_owner(owner), _pid(owner), pages, units, total)
            for document, owner, pages, units, total in rows
        ]

    def _slot_of_owner(self, owner: str | None) -> int | None:
        pid = _pid(owner)
        return None if pid is None else self._slot_of_pid[pid]

    # -- kills -----------------------------------------------------------------------------------

    def _kill_at(
        self, shares: Sequence[float], number: signal.Signals, seed: int
    ) -> Generator[Kill]:
        """Kill at each of these shares of the work, until it is over."""
        for share in shares:
            kill = self._kill(share, number, seed)
            if kill is None:
                return
            yield kill

    def _kill(self, share: float, number: signal.Signals, seed: int) -> Kill | None:
        """Wait for that share of the work, hit a worker at work, and replace it.

        None when the work ends without a worker to hit any more.
        """
        rng = random.Random(f"{seed} {share}")
        await_true(
            lambda: self._share_done() >= share or self._fleet.is_over(),
            "no progress",
            PATIENCE_SECONDS,
        )
        threading.Event().wait(rng.uniform(0.0, 1.5 * self._work.latency_seconds))
        with self._fleet.connect() as conn:
            await_true(
                lambda: bool(self._victims(conn)) or self._fleet.is_over(),
                "nobody works",
                PATIENCE_SECONDS,
            )
            victims = self._victims(conn)
            if not victims:
                return None
            document, owner, pages, units, token = rng.choice(victims)
            self._killed_at_units[document] = units
            slot = cast(int, self._slot_of_owner(owner))
            at = time.monotonic() - self._started_at
            self._hit(slot, number)
            kill = self._take_stock(conn, at, slot, document, pages, units)
            self._start(slot)
            await_true(
                lambda: _is_reclaimed(conn, document, token), "nobody took over", PATIENCE_SECONDS
            )
        kill.reclaim_seconds = time.monotonic() - self._started_at - at
        # What the victim had asked for is still embedded, and counted, until the latency is over.
        answered_at = self._started_at + at + self._work.latency_seconds + ANSWER_SECONDS
        threading.Event().wait(max(0.0, answered_at - time.monotonic()))
        kill.embedded = Counter(self._server.counts)
        return kill

    def _victims(self, conn: psycopg.Connection[Any]) -> list[tuple[int, str, int, int, int]]:
        """Workers at work on a document that has got on since it was last killed.

        Three kills without any progress between them would seal it `failed`, and rightly (L9).
        """
        held = conn.execute(_HELD).fetchall()
        return [
            (document, owner, pages, units, token)
            for document, owner, pages, units, token in held
            if self._is_alive(owner) and units > self._killed_at_units.get(document, -1)
        ]

    def _is_alive(self, owner: str) -> bool:
        slot = self._slot_of_owner(owner)
        return (
            slot is not None and self._slots[slot].is_alive and _pid(owner) == self._slots[slot].pid
        )

    def _hit(self, slot: int, number: signal.Signals) -> None:
        self._slots[slot].send(number)
        if number is not signal.SIGSTOP:
            self._slots[slot].wait()

    def _take_stock(
        self,
        conn: psycopg.Connection[Any],
        at: float,
        slot: int,
        document: int,
        pages: int,
        units: int,
    ) -> Kill:
        worked, blob = cast(tuple[float, str], conn.execute(_WORKED, {"id": document}).fetchone())
        return Kill(
            at=at,
            slot=slot,
            document=document,
            pages_committed=pages,
            units_committed=units,
            worked_seconds=float(worked),
            blob=blob,
            committed=self._fleet.committed_texts(),
            embedded=Counter(),
            pages=self._fleet.pages_read(),
        )

    def _share_done(self) -> float:
        with self._fleet.connect() as conn:
            done, planned, reading = cast(tuple[int, int, bool], conn.execute(_SHARE).fetchone())
        return done / planned if planned and not reading else 0.0

    def _attribute(self, kills: Sequence[Kill]) -> None:
        """What each kill cost: texts and pages of its document that were done once more after it.

        Those that were not committed then, and whose count has grown by the next kill of the same
        document, or the end.
        """
        final, pages = Counter(self._server.counts), self._fleet.pages_read()
        with self._fleet.connect() as conn:
            texts = _texts_by_document(conn)
        for place, kill in enumerate(kills):
            same = [later for later in kills[place + 1 :] if later.document == kill.document]
            counts, read = (same[0].embedded, same[0].pages) if same else (final, pages)
            lost = texts[kill.document] - kill.committed
            kill.units_again = _grown(kill.embedded, counts, lost)
            kill.pages_again = _grown(
                kill.pages, read, {p for p in read if p.startswith(kill.blob)}
            )


def _pid(owner: str | None) -> int | None:
    """The process in a worker's name."""
    return None if owner is None else int(owner.split(":")[1])


def _grown(before: Counter[str], after: Counter[str], keys: set[str]) -> int:
    """How many of the keys were there before and are more now."""
    return sum(0 < before[key] < after[key] for key in keys)


def _settings(work: Work) -> dict[str, Any]:
    return {
        "batch_units": work.batch_units,
        "page_group": 8,
        "chunk_tokens": 256,
        "chunk_overlap": 32,
        "lease_seconds": work.lease_seconds,
        "poll_seconds": 2.0,
    }


def _shares(kills: int, seed: int) -> list[float]:
    """At which shares of the work the kills fall due: spread over it, with jitter.

    None falls due at its very end: while one worker is replaced the others get on.
    """
    rng = random.Random(seed)
    return [(number + rng.uniform(0.2, 0.8)) / (kills + 1) for number in range(kills)]


_PROGRESS = """
    select job.id, job.lease_owner, job.processed_pages, job.processed_units, job.total_units
      from file_ingestions as job
     order by job.id
"""
_HELD = """
    select id, lease_owner, processed_pages, processed_units, lease_token
      from file_ingestions
     where status = 'running'
"""
_SHARE = """
    select sum(processed_units), sum(planned_units), bool_or(total_units is null)
      from file_ingestions
"""
_WORKED = """
    select sum(extract(epoch from coalesce(ended_at, clock_timestamp()) - attempt.started_at)),
           encode(sha256, 'hex')
      from ingestion_attempts as attempt
      join file_ingestions as job on job.id = attempt.ingestion_id
     where job.id = %(id)s
     group by job.id
"""
_TEXTS = "select ingestion_id, text from chunks"
_RECLAIMED = """
    select 1
      from file_ingestions
     where id = %(id)s
       and (status in ('ready', 'failed', 'cancelled')
            or (status = 'running' and lease_token <> %(token)s))
"""


def _is_reclaimed(conn: psycopg.Connection[Any], document: int, token: int) -> bool:
    return conn.execute(_RECLAIMED, {"id": document, "token": token}).fetchone() is not None


def _texts_by_document(conn: psycopg.Connection[Any]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for document, text in conn.execute(_TEXTS):
        found[document].add(text_key(text))
    return found
