"""A fleet of real worker processes to kill, freeze and replace, and what it left behind.

`Fleet` is one database, one folder of blobs and one embedding server, with any number of processes
that work on them. What a test asks afterwards is read from outside: rows from the database, texts
embedded from the embedding server's own count, pages read from a log that the readers write.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

import psycopg
from psycopg.rows import dict_row

from planroom.config import Settings
from planroom.ingestions import any_pending
from planroom.room import PlanRoom
from support.embedding_server import EmbeddingServer, text_key
from support.pdf import PdfPage, image_page, text, write_pdf

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

ROOT = Path(__file__).parents[2]
ALIVE_SECONDS = 60.0
BATCH_UNITS = 20
PAGE_GROUP = 4
DIMENSIONS = 8
SEED = int(os.environ.get("PLANROOM_TEST_SEED", "0")) or random.randrange(1, 10**6)


def await_true(condition: Callable[[], bool], otherwise: str, seconds: float = 30.0) -> None:
    """Return as soon as the condition holds; AssertionError after `seconds`."""
    pause = threading.Event()
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(otherwise)
        pause.wait(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended; a stopped one is alive."""
    try:
        return _state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _state(pid: int) -> str:
    """The letter that /proc has for it, as `T` for stopped and `Z` for ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Victim(Protocol):
    """A process that can be killed."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""


class Process:
    """One process of a fleet; its output is in `log`."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                command, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=ROOT
            )
        self.pid = self._popen.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is still there."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self.wait()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; a stopped one is alive."""
        return self._popen.poll() is None

    def wait(self, seconds: float = ALIVE_SECONDS) -> int:
        """Its exit status, as of `subprocess`: minus the signal that ended it."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {self.pid} did not end:\n{self.said()}") from None

    def wait_stopped(self, seconds: float = ALIVE_SECONDS) -> None:
        """Return once it was stopped by a signal."""

        def stopped() -> bool:
            state = _state(self.pid)
            assert state != "Z", f"process {self.pid} ended before it stopped:\n{self.said()}"
            return state == "T"

        await_true(stopped, f"process {self.pid} never stopped", seconds)

    def said(self) -> str:
        """The last of what it wrote."""
        return self.log.read_text(errors="replace")[-6000:]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one file came to: the digest of its chunks, and the counts that must agree with it."""

    digest: str
    chunks: int
    pages: int
    status: str
    published: bool


@dataclass(frozen=True, slots=True)
class Calm:
    """What a document comes to when nobody is killed."""

    outcome: Outcome
    embedded: int
    pages: int


@dataclass
class Fleet:
    """A database, a folder and an embedding server, and the processes that share them."""

    database_url: str
    folder: Path
    server: EmbeddingServer
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    processes: list[Process] = field(default_factory=list[Process])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            if process.is_alive:
                process.send(signal.SIGCONT)
                process.kill()

    # -- processes -------------------------------------------------------------------------------

    def chosen(self, **settings: Any) -> dict[str, Any]:
        """The settings of a process of this fleet: small batches, short waits."""
        defaults: dict[str, Any] = {
            "database_url": self.database_url,
            "home": self.folder / "home",
            "embedder": "openai",
            "openai_base_url": self.server.url,
            "openai_dimensions": self.server.dimensions,
            "openai_api_key": "none",
            "batch_units": BATCH_UNITS,
            "page_group": PAGE_GROUP,
            "chunk_tokens": 32,
            "chunk_overlap": 4,
            "poll_seconds": 0.05,
        }
        return {**defaults, **self.settings, **settings}

    def environment(self, **settings: Any) -> dict[str, str]:
        """The environment of a process; `settings` are those of planroom, in lower case."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PLANROOM_")}
        chosen = {"test_pages_log": self.pages_log, **self.chosen(**settings)}
        paths = [str(ROOT / part) for part in ("tests", "indexer", "queue")]
        if "PYTHONPATH" in kept:
            paths.insert(0, kept["PYTHONPATH"])
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(paths),
            **{f"PLANROOM_{name.upper()}": _written(value) for name, value in chosen.items()},
        }

    @property
    def pages_log(self) -> Path:
        """Where the readers write the index of each page that they gave."""
        return self.folder / "pages.log"

    def run(
        self,
        *arguments: str,
        crash_at: str | None = None,
        module: str = "support.worker_process",
        **settings: Any,
    ) -> Process:
        """Start one of the processes of the tests with these arguments."""
        env = self.environment(**settings)
        if crash_at is not None:
            env["LEASEQUEUE_CRASH_AT"] = crash_at
        return self.start([sys.executable, "-m", module, *arguments], env)

    def start(self, command: Sequence[str], env: dict[str, str]) -> Process:
        """Start any process, to be ended with the fleet."""
        log = self.folder / f"process-{len(self.processes)}.log"
        process = Process(command, env, log)
        self.processes.append(process)
        return process

    def worker(
        self, *, crash_at: str | None = None, until_idle: bool = True, **settings: Any
    ) -> Process:
        """Start a worker; unless told otherwise it ends when nothing is left to do."""
        arguments = ["work", "--until-idle"] if until_idle else ["work"]
        return self.run(*arguments, crash_at=crash_at, **settings)

    def add(self, path: Path, *, crash_at: str | None = None, **settings: Any) -> Process:
        """Start a process that takes a file in."""
        return self.run("add", str(path), crash_at=crash_at, **settings)

    def take_in(self, *paths: Path, **settings: Any) -> None:
        """Take files in, from this process, which nobody kills."""
        with self.room(**settings) as room:
            for path in paths:
                room.add(path)

    def room(self, **settings: Any) -> PlanRoom:
        """The plan room of this fleet, in this process."""
        values: dict[str, Any] = {"_env_file": None, **self.chosen(**settings)}
        return PlanRoom(Settings(**values))

    def finish(self, **settings: Any) -> Process:
        """Let one worker do all that is left, and end well."""
        return finish(self.worker(**settings))

    # -- the database ----------------------------------------------------------------------------

    @contextmanager
    def connect(self) -> Generator[Connection]:
        """A connection of the test's own, in autocommit mode."""
        with psycopg.connect(self.database_url, autocommit=True) as conn:
            yield conn

    def expire_leases(self, process: Victim | None = None) -> int:
        """Let the leases of a process, or all, run out now, so that no test waits for it."""
        pid = "" if process is None else f":{process.pid}:"
        with self.connect() as conn:
            return conn.execute(_EXPIRE, {"pid": pid}).rowcount

    def is_at_work(self, team: Sequence[Victim]) -> bool:
        """Whether one of these processes holds a lease."""
        with self.connect() as conn:
            owners = [row[0] for row in conn.execute(_OWNERS)]
        return any(f":{process.pid}:" in owner for process in team for owner in owners)

    def processed_units(self) -> int:
        """How many units are committed, all files together."""
        with self.connect() as conn:
            return cast(tuple[int], conn.execute(_PROCESSED).fetchone())[0]

    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        with self.connect() as conn:
            return not any_pending(conn)

    def waits_for(self, error_code: str) -> bool:
        """Whether a document was given back because of this."""
        with self.connect() as conn:
            return conn.execute(_WAITS, {"code": error_code}).rowcount > 0

    def kill_one(self, team: Sequence[Victim], rng: random.Random) -> bool:
        """Kill one of these at random, sparing whose document may not lose a third worker."""
        with self.connect() as conn, conn.transaction():
            # Held for the moment, so that nobody claims or commits between the look and the kill.
            rows = conn.execute(_LOOK_AND_HOLD).fetchall()
            spared = [owner for owner, crashes in rows if crashes >= 2]
            victims = [p for p in team if not any(f":{p.pid}:" in owner for owner in spared)]
            victim = rng.choice(victims) if victims else None
            if victim is not None:
                victim.kill()
        if victim is not None:
            # On this machine the others know at once; on another they would wait for the lease.
            self.expire_leases(victim)
        return victim is not None

    def count_expired(self) -> int:
        """How many attempts have ended with their worker."""
        with self.connect() as conn:
            return len(conn.execute(_EXPIRED).fetchall())

    def hurry(self) -> int:
        """Let what waits for its time be due now."""
        with self.connect() as conn:
            return conn.execute(_HURRY).rowcount

    def terminate_backends(self) -> None:
        """End every session of this database but the test's own."""
        with self.connect() as conn:
            conn.execute(_TERMINATE)

    def end_idle_transactions(self, idle_seconds: float = 0.0) -> None:
        """End the sessions that hang in a transaction or a COPY, as others do after a while."""
        with self.connect() as conn:
            conn.execute(_END_IDLE_TRANSACTIONS, {"seconds": idle_seconds})

    def count_idle_transactions(self) -> int:
        """How many sessions hang in a transaction without asking for anything."""
        with self.connect() as conn:
            return conn.execute(_IDLE_TRANSACTIONS).rowcount

    def outcomes(self) -> dict[str, Outcome]:
        """What each file came to, by name."""
        with self.connect() as conn:
            return outcomes(conn)

    def committed_texts(self) -> set[str]:
        """The keys (as the embedding server has them) of all texts committed by this moment."""
        with self.connect() as conn:
            return {text_key(row[0]) for row in conn.execute(_COMMITTED)}

    def pages_read(self) -> Counter[str]:
        """How often each page (`BLOB INDEX`) was given by a reader, all processes together."""
        if not self.pages_log.exists():
            return Counter()
        return Counter(self.pages_log.read_text().splitlines())

    def check_invariants(self) -> None:
        """What must hold at any instant, whatever has been killed."""
        with self.connect() as conn:
            for statement in _BROKEN:
                broken = conn.execute(cast(Any, statement)).fetchall()
                assert not broken, f"{broken} by\n{statement}"

    def snapshot(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row that a worker may write for a document, with the transaction that wrote it."""
        with self.connect() as conn:
            return {
                name: conn.execute(
                    cast(Any, f"select xmin::text, * from {name} as t order by t::text")
                ).fetchall()
                for name in SNAPSHOT_TABLES
            }


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


SNAPSHOT_TABLES = ("files", "file_ingestions", "ingestion_attempts", "pages", "chunks")


def finish(process: Process, seconds: float = ALIVE_SECONDS) -> Process:
    """Wait for a process that must end well."""
    status = process.wait(seconds)
    assert status == 0, f"exit {status}:\n{process.said()}"
    return process


_EXPIRE = """
    update file_ingestions
       set lease_expires_at = now() - interval '1 second'
     where status = 'running' and strpos(lease_owner, %(pid)s) > 0
"""
_OWNERS = "select lease_owner from file_ingestions where status = 'running'"
_LOOK_AND_HOLD = """
    select coalesce(lease_owner, ''), crashes
      from file_ingestions
     where status in ('queued', 'running')
       for update
"""
_EXPIRED = "select 1 from ingestion_attempts where outcome = 'expired'"
_HURRY = "update file_ingestions set queued_at = now() where status = 'queued'"
_PROCESSED = "select coalesce(sum(processed_units), 0)::integer from file_ingestions"
_WAITS = "select 1 from file_ingestions where status = 'queued' and error_code = %(code)s"
_TERMINATE = """
    select pg_terminate_backend(pid)
      from pg_stat_activity
     where datname = current_database() and pid <> pg_backend_pid()
       and backend_type = 'client backend'
"""
_END_IDLE_TRANSACTIONS = """
    select pg_terminate_backend(pid, 10000)
      from pg_stat_activity
     where datname = current_database()
       and (state = 'idle in transaction' or (state = 'active' and wait_event = 'ClientRead'))
       and state_change <= clock_timestamp() - make_interval(secs => %(seconds)s)
"""
_IDLE_TRANSACTIONS = """
    select pid
      from pg_stat_activity
     where datname = current_database() and state = 'idle in transaction'
"""
_COMMITTED = """
    select chunks.text
      from chunks
      join file_ingestions as job on job.id = chunks.ingestion_id
     where chunks.chunk_index < job.processed_units
"""

# Each finds what must never be there, killed or not.
_BROKEN = (
    # The checkpoint and its chunks are one: no gap below it.
    """
    select job.id, job.processed_units, count(chunks.chunk_index)
      from file_ingestions as job
      left join chunks on chunks.ingestion_id = job.id
       and chunks.chunk_index < job.processed_units
     where job.swept_at is null
     group by job.id
    having job.processed_units <> count(chunks.chunk_index)
    """,
    # So are the pages and theirs.
    """
    select job.id, job.processed_pages, count(pages.page_index)
      from file_ingestions as job
      left join pages on pages.ingestion_id = job.id and pages.page_index < job.processed_pages
     where job.swept_at is null and job.status <> 'cancelled' and job.status <> 'failed'
     group by job.id
    having job.processed_pages <> count(pages.page_index)
    """,
    # Nothing past the end once it is published.
    """
    select job.id, chunks.chunk_index
      from files
      join file_ingestions as job on job.id = files.published_ingestion_id
      join chunks on chunks.ingestion_id = job.id
     where chunks.chunk_index >= job.total_units or job.status <> 'ready'
    """,
    # A page's chunks are on it, in order.
    """
    select pages.ingestion_id, pages.page_index, pages.chunk_count, count(chunks.chunk_index)
      from pages
      join file_ingestions as job on job.id = pages.ingestion_id and job.status = 'ready'
      left join chunks using (ingestion_id, page_index)
     where job.swept_at is null
     group by pages.ingestion_id, pages.page_index, pages.chunk_count
    having pages.chunk_count <> count(chunks.chunk_index)
    """,
    # What does not run has no open attempt, and what runs has one.
    """
    select job.id, job.status
      from file_ingestions as job
      left join ingestion_attempts as attempt
        on attempt.ingestion_id = job.id and attempt.ended_at is null
     where (job.status = 'running') <> (attempt.ingestion_id is not null)
    """,
)

_LATEST = """
    select files.name, job.id, job.status,
           files.published_ingestion_id = job.id as published
      from files
      join lateral (
          select * from file_ingestions where file_id = files.id order by id desc limit 1
      ) as job on true
"""
_CHUNKS = """
    select chunk_index, page_index, text_hash, halfvec_send(embedding)
      from chunks
     where ingestion_id = %(id)s
     order by chunk_index
"""


def outcomes(conn: Connection) -> dict[str, Outcome]:
    """What each file came to, by name."""
    with conn.cursor(row_factory=dict_row) as cursor:
        files = cursor.execute(_LATEST).fetchall()
    return {row["name"]: _outcome(conn, row) for row in files}


def _outcome(conn: Connection, row: Row) -> Outcome:
    digest = hashlib.sha256()
    chunks = conn.execute(_CHUNKS, {"id": row["id"]}).fetchall()
    for place, (index, page, text_hash, vector) in enumerate(chunks):
        assert index == place, f"{row['name']}: chunk {place} is missing"
        digest.update(b"%d %d " % (index, page) + text_hash + vector)
    count = conn.execute(
        "select count(*) from pages where ingestion_id = %(id)s", {"id": row["id"]}
    ).fetchone()
    assert count is not None
    return Outcome(digest.hexdigest(), len(chunks), count[0], row["status"], bool(row["published"]))


_WORDS = """
    beam column slab footing anchor bolt weld plate grid elevation section detail parapet flashing
    membrane gypsum stud insulation duct diffuser damper valve pump riser drain vent conduit panel
    breaker luminaire switch sprinkler hydrant hose door frame hinge threshold
""".split()  # noqa: SIM905 - a list of words is easier to read as text


def make_document(
    path: Path, *, pages: int = 12, lines: int = 14, seed: int = 1, blank_every: int = 5
) -> Path:
    """Write a document of so many sheets, each with texts that no other document has.

    Some notes are repeated on every sheet, as on real sets; every `blank_every`-th is a scan.
    """
    rng = random.Random(f"{path.name}/{seed}")
    sheets = [
        image_page()
        if blank_every and index % blank_every == blank_every - 1
        else PdfPage(_notes(rng, index, lines, seed))
        for index in range(pages)
    ]
    return write_pdf(path, sheets)


def _notes(rng: random.Random, index: int, lines: int, seed: int) -> bytes:
    said = [f"SHEET A-{100 + index} OF JOB {seed}"]
    said += [f"{n}. " + " ".join(rng.choices(_WORDS, k=9)) for n in range(1, lines)]
    return b"".join(text(line, 40, 760 - 14 * n) for n, line in enumerate(said))
