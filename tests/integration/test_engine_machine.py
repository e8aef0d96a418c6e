"""The engine against a model: hypothesis drives workers, clocks, crashes and users on Postgres.

The model is the rules L1 to L18 written a second time, in plain Python over plain objects. After
each step every row, every attempt and the limiter are compared with it. Leases are never forgotten:
any step may be a late write of a worker that lost its row long ago. Time is injected, so a crash is
nothing but a clock that goes on.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

import leasequeue
from leasequeue import (
    Ended,
    JobFailed,
    Lease,
    LeaseLost,
    Partial,
    Retryable,
    Run,
    ShuttingDown,
    Worker,
    runs,
)
from leasequeue import lease as leases
from support.engine import LEASE_SECONDS, NOON

Connection = psycopg.Connection[Any]

LIVE = ("waiting", "queued", "running")
DAYS_KEPT = 2
KINDS = ["sync", "purge"]
# Workspace, provider and interval of each connection: enough for every pair of the limiter's.
SOURCES: tuple[tuple[str, str, int | None], ...] = (
    ("ACME", "s3", None),
    ("ACME", "s3", 900),
    ("ACME", "gcs", None),
    ("Other", "s3", 900),
)


@dataclass
class Source:
    """A connection as the model sees it."""

    workspace: int
    provider: str
    interval: int | None
    status: str = "active"
    next_at: datetime | None = None


@dataclass
class Job:
    """A run as the model sees it; `outcomes` has None for the attempt that is open."""

    source: int
    kind: str
    status: str
    queued_at: datetime
    failures: int = 0
    crashes: int = 0
    cancel: bool = False
    token: int | None = None
    expires_at: datetime | None = None
    finished_at: datetime | None = None
    outcomes: list[str | None] = field(default_factory=list[str | None])


connection_indexes = st.integers(0, len(SOURCES) - 1)
any_lease = st.integers(0, 10**6)
workers = st.sampled_from(["alice", "bob"])
holder_writes = st.sampled_from(["renew", "checkpoint", "control", "result"])
endings = st.sampled_from(["succeeded", "partial", "failed", "requeue", "release"])


class EngineMachine(RuleBasedStateMachine):
    """One fleet over one database; each rule is one thing that a worker or a user does."""

    conn: Connection

    @initialize(enqueued=st.lists(connection_indexes, max_size=4, unique=True))
    def begin(self, enqueued: list[int]) -> None:
        self.conn.execute(
            "truncate workspaces, connections, connection_runs, run_attempts, run_results,"
            " workers, stage_markers restart identity cascade"
        )
        leasequeue.resume(self.conn)
        self.now = NOON
        self.paused = False
        self.jobs: dict[int, Job] = {}
        self.leases: list[Lease] = []
        self.sources: dict[int, Source] = {}
        self.ended_rows: dict[int, dict[str, Any]] = {}
        for number, (workspace, provider, interval) in enumerate(SOURCES):
            workspace_id = leasequeue.ensure_workspace(self.conn, workspace)
            connection = leasequeue.add_connection(
                self.conn,
                workspace_id,
                f"c{number}",
                provider,
                interval_seconds=interval,
                now=self.now,
            )
            assert connection is not None
            due = None if interval is None else self.now
            self.sources[connection] = Source(workspace_id, provider, interval, next_at=due)
        for index in enqueued:
            self._enqueue(index)

    # The model's questions

    def _source(self, index: int) -> tuple[int, Source]:
        return list(self.sources.items())[index]

    def _active(self, source: int) -> int | None:
        """L11: the queued or running run of a connection."""
        found = [
            number
            for number, job in self.jobs.items()
            if job.source == source and job.status in ("queued", "running")
        ]
        assert len(found) <= 1
        return found[0] if found else None

    def _pending_purge(self, source: int) -> int | None:
        for number, job in self.jobs.items():
            if job.source == source and job.kind == "purge" and job.status in LIVE:
                return number
        return None

    def _wanted(self, job: Job) -> bool:
        """Whether the world still wants it: an active connection, or one being deleted."""
        status = self.sources[job.source].status
        return status == ("deleting" if job.kind == "purge" else "active")

    def _is_due(self, job: Job) -> bool:
        if job.status == "queued":
            return job.queued_at <= self.now
        return job.status == "running" and job.expires_at is not None and job.expires_at < self.now

    def _is_admitted(self, number: int) -> bool:
        """L12, and that a purge is not starved."""
        job = self.jobs[number]
        mine = self.sources[job.source]
        for other_number, other in self.jobs.items():
            theirs = self.sources[other.source]
            if other_number == number or theirs.workspace != mine.workspace:
                continue
            if other.status == "running" and (
                "purge" in (job.kind, other.kind) or theirs.provider == mine.provider
            ):
                return False
            if (
                other.kind == "purge"
                and other.status == "queued"
                and job.kind != "purge"
                and job.status == "queued"
                and (other.queued_at, other_number) < (job.queued_at, number)
            ):
                return False
        return True

    def _next(self) -> int | None:
        """L1: what a claim must take."""
        if self.paused:
            return None
        found = [
            (job.queued_at, number)
            for number, job in self.jobs.items()
            if self._is_due(job) and self._is_admitted(number)
        ]
        return min(found)[1] if found else None

    # The model's moves

    def _finish(self, job: Job, status: str) -> None:
        job.status, job.finished_at = status, self.now
        job.token = job.expires_at = None

    def _claimed(self, number: int, token: int | None) -> str:
        """L1, L7, L8 and L9: what becomes of the row that a claim takes."""
        job = self.jobs[number]
        expired = job.status == "running"
        if expired:
            job.outcomes[-1] = "expired"
            job.crashes += 1
        if job.cancel or not self._wanted(job):
            self._finish(job, "cancelled")
        elif expired and job.crashes >= 3:
            self._finish(job, "failed")
        else:
            job.status, job.token = "running", token
            job.expires_at = self.now + timedelta(seconds=LEASE_SECONDS)
            job.outcomes.append(None)
        return job.status

    def _enqueued(self, source: int, number: int, kind: str = "sync") -> None:
        self.jobs[number] = Job(source, kind, "queued", self.now)

    def _promotable(self) -> list[Job]:
        waiting = [job for job in self.jobs.values() if job.status == "waiting"]
        return [job for job in waiting if self._active(job.source) is None]

    def _let_go(self, number: int, outcome: str, status: str) -> str:
        job = self.jobs[number]
        if job.cancel:
            status = "cancelled"
        job.outcomes[-1] = outcome if status == "queued" else status
        if status == "queued":
            job.status = "queued"
            job.token = job.expires_at = None
        else:
            self._finish(job, status)
        return status

    def _requeued(self, number: int, exhausted: str) -> str:
        """L8."""
        job = self.jobs[number]
        job.failures += 1
        status = "queued" if job.failures < 3 else exhausted
        if not self._wanted(job):
            status = "cancelled"
        return self._let_go(number, "retried", status)

    def _is_current(self, lease: Lease) -> bool:
        job = self.jobs.get(lease.id)
        return job is not None and job.token == lease.token

    def _some_lease(self, pick: int) -> Lease:
        """Mostly one that is held, and now and then one that was lost long ago."""
        current = [lease for lease in self.leases if self._is_current(lease)]
        among = current if current and pick % 4 else self.leases
        return among[pick // 4 % len(among)]

    # Time and people

    @rule(seconds=st.sampled_from([1, 5, 40, 121, 121, 3600, 3 * 86_400]))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(index=connection_indexes)
    def somebody_enqueues(self, index: int) -> None:
        self._enqueue(index)

    def _enqueue(self, index: int) -> None:
        number, source = self._source(index)
        got = leasequeue.enqueue(self.conn, source.workspace, number, now=self.now)
        live = self._active(number)
        if source.status != "active":
            assert got is None
        elif live is not None:
            assert got == live
        else:
            assert got is not None
            assert got not in self.jobs
            self._enqueued(number, got)

    @rule(index=connection_indexes)
    def somebody_asks_for_a_purge(self, index: int) -> None:
        number, source = self._source(index)
        got = leasequeue.request_purge(self.conn, source.workspace, number, now=self.now)
        assert got is not None
        source.status, source.next_at = "deleting", None
        pending = self._pending_purge(number)
        if pending is not None:
            assert got == pending
            return
        live = self._active(number)
        if live is not None and self.jobs[live].status == "queued":
            self._finish(self.jobs[live], "cancelled")
        self._enqueued(number, got, "purge")
        if live is not None and self.jobs[live].status == "running":
            self.jobs[got].status = "waiting"

    @rule(index=connection_indexes)
    def somebody_disconnects(self, index: int) -> None:
        number, source = self._source(index)
        got = leasequeue.disconnect(self.conn, source.workspace, number, now=self.now)
        assert got == (source.status == "active")
        if got:
            source.status, source.next_at = "disconnected", None
            live = self._active(number)
            if live is not None and self.jobs[live].status == "queued":
                self._finish(self.jobs[live], "cancelled")

    @rule(index=connection_indexes)
    def somebody_reconnects(self, index: int) -> None:
        number, source = self._source(index)
        got = leasequeue.add_connection(
            self.conn,
            source.workspace,
            f"c{index}",
            source.provider,
            interval_seconds=source.interval,
            now=self.now,
        )
        if source.status == "deleting" and self._pending_purge(number) is not None:
            assert got is None
            return
        assert got == number
        source.status = "active"
        source.next_at = None if source.interval is None else self.now

    @precondition(lambda self: self.jobs)
    @rule(pick=any_lease)
    def somebody_cancels(self, pick: int) -> None:
        number = sorted(self.jobs)[pick % len(self.jobs)]
        job = self.jobs[number]
        workspace = self.sources[job.source].workspace
        got = leasequeue.request_cancel(
            self.conn, leasequeue.RUNS, workspace, [number], now=self.now
        )
        if job.status not in LIVE:
            assert got == {}
            return
        job.cancel = True
        if job.status != "running":
            self._finish(job, "cancelled")
        assert got == {number: job.status}

    @rule()
    def somebody_pauses_or_resumes(self) -> None:
        if self.paused:
            assert leasequeue.resume(self.conn)
        else:
            leasequeue.pause(self.conn, "Ada", now=self.now)
        self.paused = not self.paused

    # Workers

    @rule(owner=workers, times=st.integers(1, 3))
    def a_worker_claims(self, owner: str, times: int) -> None:
        for _ in range(times):
            self._claim(owner)

    def _claim(self, owner: str) -> None:
        expected = self._next()
        got = runs.claim(self.conn, owner, LEASE_SECONDS, KINDS, now=self.now)
        if expected is None:
            assert got is None
            return
        assert got is not None
        assert got.id == expected
        status = self._claimed(expected, got.token if isinstance(got, Lease) else None)
        if isinstance(got, Lease):
            assert status == "running"
            assert got.token not in {lease.token for lease in self.leases}
            self.leases.append(got)
        else:
            assert isinstance(got, Ended)
            assert got.status == status

    @rule(times=st.integers(1, 4))
    def workers_fail_at_what_they_claim(self, times: int) -> None:
        for _ in range(times):
            before = len(self.leases)
            self._claim("clumsy")
            if len(self.leases) > before:
                self._let_go_of(self.leases[-1], "requeue", 0)

    @rule(times=st.integers(1, 4))
    def workers_die_of_what_they_claim(self, times: int) -> None:
        for _ in range(times):
            self._claim("doomed")
            self.now += timedelta(seconds=LEASE_SECONDS + 1)

    @precondition(lambda self: self.leases)
    @rule(pick=any_lease, write=holder_writes)
    def a_holder_goes_on(self, pick: int, write: str) -> None:
        self._go_on(self._some_lease(pick), write)

    def _go_on(self, lease: Lease, write: str) -> None:
        current = self._is_current(lease)
        try:
            heard: bool | None = None
            match write:
                case "renew":
                    heard = leasequeue.renew(self.conn, lease, now=self.now)
                case "checkpoint":
                    progress = {"payload": Jsonb({"token": lease.token})}
                    heard = leasequeue.checkpoint(self.conn, lease, progress, now=self.now)
                case "control":
                    heard = leasequeue.check_control(self.conn, lease, now=self.now)
                case _:
                    leasequeue.record_result(self.conn, lease, "files", upserted=1, now=self.now)
        except LeaseLost:
            assert not current
            return
        assert current
        job = self.jobs[lease.id]
        assert heard in (None, job.cancel)
        if write != "control":
            job.expires_at = self.now + timedelta(seconds=LEASE_SECONDS)
        if write == "checkpoint":
            job.failures = job.crashes = 0

    @precondition(lambda self: self.leases)
    @rule(pick=any_lease, ending=endings, delay=st.sampled_from([0, 5, 300]))
    def a_holder_lets_go(self, pick: int, ending: str, delay: int) -> None:
        self._let_go_of(self._some_lease(pick), ending, delay)

    def _let_go_of(self, lease: Lease, ending: str, delay: int) -> None:
        current = self._is_current(lease)
        try:
            got = self._write_the_end(lease, ending, delay)
        except LeaseLost:
            assert not current
            return
        assert current
        match ending:
            case "requeue":
                status = self._requeued(lease.id, "failed")
            case "release":
                status = self._let_go(lease.id, "released", "queued")
            case _:
                status = self._let_go(lease.id, ending, ending)
        assert got == status
        if status == "queued" and (ending == "requeue" or delay):
            self.jobs[lease.id].queued_at = self.now + timedelta(seconds=delay)

    def _write_the_end(self, lease: Lease, ending: str, delay: int) -> str:
        wait = timedelta(seconds=delay)
        match ending:
            case "requeue":
                return leasequeue.requeue(
                    self.conn, lease, wait, error_code="busy", error="busy", now=self.now
                )
            case "release":
                return leasequeue.release(self.conn, lease, delay=wait, now=self.now)
            case "failed":
                return leasequeue.seal(
                    self.conn, lease, "failed", error_code="x", error="x", now=self.now
                )
            case "partial":
                return leasequeue.seal(self.conn, lease, "partial", now=self.now)
            case _:
                return leasequeue.seal(self.conn, lease, "succeeded", now=self.now)

    @rule(ending=st.sampled_from(["done", "retryable", "partial", "failed", "shutdown", "dies"]))
    def a_worker_polls(self, ending: str) -> None:
        """A whole poll: schedules, promotions, one run with this ending, and retention."""
        handled: list[Lease] = []

        def handler(run: Run) -> Partial | None:
            handled.append(run.lease)
            match ending:
                case "retryable":
                    raise Retryable("busy")
                case "partial":
                    return Partial("2 of 9", retryable=True)
                case "failed":
                    raise JobFailed("no")
                case "shutdown":
                    raise ShuttingDown("stop")
                case "dies":
                    raise LeaseLost("as good as dead: nothing more is written")
                case _:
                    return None

        worker = Worker(lambda: self.conn, self._lend, name="poller", clock=lambda: self.now)
        worker.stages = leasequeue.engine_stages(
            worker, self._lend, dict.fromkeys(KINDS, handler), lease_seconds=LEASE_SECONDS
        )
        worker.stages = worker.stages[:3]  # Retention has a rule of its own.
        self._model_schedule()
        for job in self._promotable():
            job.status, job.queued_at = "queued", self.now
        self._adopt_scheduled(worker)
        expected = self._next()
        polled = worker.stages[2].run()
        assert polled == (0 if expected is None else 1)
        if expected is None:
            assert handled == []
            return
        status = self._claimed(expected, handled[0].token if handled else None)
        assert (status == "running") == bool(handled)
        if handled:
            self.leases.append(handled[0])
            self._end_of_poll(expected, ending)

    def _end_of_poll(self, number: int, ending: str) -> None:
        job = self.jobs[number]
        match ending:
            case "dies":
                return
            case "retryable" | "partial":
                status = self._requeued(number, "failed" if ending == "retryable" else "partial")
                if status == "queued":
                    job.queued_at = self._queued_at(number)
                    step = (5, 30)[job.failures - 1]
                    wait = (job.queued_at - self.now).total_seconds()
                    assert 0.8 * step <= wait <= 1.2 * step
            case "failed":
                self._let_go(number, "failed", "failed")
            case "shutdown":
                self._let_go(number, "released", "queued")
            case _:
                self._let_go(number, "succeeded", "succeeded")
                if job.kind == "purge":
                    source = self.sources[job.source]
                    source.status = "disconnected"

    def _queued_at(self, number: int) -> datetime:
        row = self.conn.execute(
            "select queued_at from connection_runs where id = %s", [number]
        ).fetchone()
        assert row is not None
        return row[0]

    @contextmanager
    def _lend(self) -> Generator[Connection]:
        yield self.conn

    def _model_schedule(self) -> None:
        """L14: what is due, to be enqueued once each; ids are adopted from the database."""
        self.scheduled: list[int] = []
        for number, source in self.sources.items():
            if source.next_at is not None and source.next_at <= self.now:
                assert source.interval is not None
                source.next_at = self.now + timedelta(seconds=source.interval)
                if self._active(number) is None:
                    self.scheduled.append(number)

    def _adopt_scheduled(self, worker: Worker) -> None:
        for stage in worker.stages[:2]:
            stage.run()
        rows = self.conn.execute(
            "select connection_id, id from connection_runs where id <> all (%s)"
            " order by connection_id",
            [list(self.jobs)],
        ).fetchall()
        assert [row[0] for row in rows] == self.scheduled
        for source, number in rows:
            self._enqueued(source, number)

    # What single steps seldom come to by chance

    @rule(first=connection_indexes, purged=connection_indexes)
    def a_purge_comes_between(self, first: int, purged: int) -> None:
        """Into a fleet with one run at work, and more queued behind it (L12)."""
        for lease in self.leases:
            if self._is_current(lease):
                self._let_go_of(lease, "succeeded", 0)
        for index in range(len(SOURCES)):
            self.somebody_reconnects(index)
        self._enqueue(first)
        self._claim("early")
        self.somebody_asks_for_a_purge(purged)
        for index in range(len(SOURCES)):
            self._enqueue(index)
        self._claim("late")

    @precondition(lambda self: self.leases)
    @rule(pick=any_lease, ending=endings)
    def a_cancel_meets_the_end(self, pick: int, ending: str) -> None:
        """Asked for while the holder is about to let go (L7), and once more after it (L16)."""
        lease = self._some_lease(pick)
        if lease.id in self.jobs:
            place = sorted(self.jobs).index(lease.id)
            self.somebody_cancels(place)
            self._let_go_of(lease, ending, 0)
            self.somebody_cancels(place)

    @rule(write=holder_writes)
    def a_worker_is_late_for_its_own_successor(self, write: str) -> None:
        """One of the same name holds the row by then: the token alone tells them apart (L2)."""
        before = len(self.leases)
        self._claim("doomed")
        self.now += timedelta(seconds=LEASE_SECONDS + 1)
        self._claim("doomed")
        for lease in self.leases[before:]:
            self._go_on(lease, write)

    @rule(write=holder_writes)
    def a_second_try_gets_on(self, write: str) -> None:
        """What failed or died before is forgiven by progress, and by nothing else (L9)."""
        self.workers_fail_at_what_they_claim(1)
        self.workers_die_of_what_they_claim(1)
        before = len(self.leases)
        self._claim("lucky")
        for lease in self.leases[before:]:
            self._go_on(lease, write)

    @rule()
    def old_history_goes(self) -> None:
        removed = runs.remove_old_runs(self.conn, DAYS_KEPT, now=self.now)
        before = self.now - timedelta(days=DAYS_KEPT)
        old = [n for n, job in self.jobs.items() if job.finished_at and job.finished_at < before]
        assert removed == len(old)
        for number in old:
            del self.jobs[number]
            self.ended_rows.pop(number, None)

    # After each step

    @invariant()
    def every_row_is_as_the_model_says(self) -> None:
        """Nothing is lost, nothing is invented, and terminal rows never change."""
        rows = self._rows("select * from connection_runs order by id")
        assert [row["id"] for row in rows] == sorted(self.jobs)
        for row in rows:
            job = self.jobs[row["id"]]
            assert _seen(row) == _modelled(job)
            if job.status not in LIVE:
                assert self.ended_rows.setdefault(row["id"], row) == row

    @invariant()
    def every_connection_is_as_the_model_says(self) -> None:
        """Its status, and when it is due next."""
        for row in self._rows("select id, status, next_run_at from connections"):
            source = self.sources[row["id"]]
            assert (row["status"], row["next_run_at"]) == (source.status, source.next_at)

    @invariant()
    def attempts_and_history_agree(self) -> None:
        """As many rows as attempts, numbered from 1; one is open if and only if the run runs."""
        rows = self._rows("select * from run_attempts order by run_id, attempt")
        for number, job in self.jobs.items():
            mine = [row for row in rows if row["run_id"] == number]
            assert [row["attempt"] for row in mine] == list(range(1, len(job.outcomes) + 1))
            assert [row["outcome"] for row in mine] == job.outcomes
            still_open = [row["lease_token"] for row in mine if row["ended_at"] is None]
            assert still_open == ([job.token] if job.status == "running" else [])

    @invariant()
    def the_limiter_is_never_exceeded(self) -> None:
        """L12, asked of the database alone."""
        assert self._rows(_TOO_MANY) == []

    @invariant()
    def at_most_one_lease_of_a_row_is_live(self) -> None:
        """Of all the leases ever taken, the fence matches those that the model calls current."""
        live = self._rows("select lease_token from connection_runs where lease_token is not null")
        matching = [lease.id for lease in self.leases if self._is_current(lease)]
        assert len(matching) == len(set(matching)) == len(live)

    def _rows(self, query: LiteralString) -> list[dict[str, Any]]:
        with self.conn.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query).fetchall()


_TOO_MANY: LiteralString = """
    select one.id, other.id as beside
      from connection_runs as one
      join connection_runs as other
        on other.workspace_id = one.workspace_id and other.id > one.id
     where one.status = 'running'
       and other.status = 'running'
       and ('purge' in (one.kind, other.kind) or one.provider = other.provider)
"""


def _seen(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": row["status"],
        "queued_at": row["queued_at"],
        "attempts": row["attempts"],
        "failures": row["failures"],
        "crashes": row["crashes"],
        "cancel": row["cancel_requested_at"] is not None,
        "token": row["lease_token"],
        "expires_at": row["lease_expires_at"],
        "finished_at": row["finished_at"],
    }


def _modelled(job: Job) -> dict[str, Any]:
    return {
        "status": job.status,
        "queued_at": job.queued_at,
        "attempts": len(job.outcomes),
        "failures": job.failures,
        "crashes": job.crashes,
        "cancel": job.cancel,
        "token": job.token,
        "expires_at": job.expires_at,
        "finished_at": job.finished_at,
    }


def _drive(conn: Connection, examples: int, steps: int, *, shrink: bool = True) -> None:
    class Machine(EngineMachine):
        pass

    Machine.conn = conn
    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            print_blob=shrink,
            # So that whether a mistake is found is no matter of luck.
            derandomize=not shrink,
        ),
    )


def test_the_engine_does_what_the_model_says(connection: Connection) -> None:
    _drive(connection, examples=40, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_engine_does_what_the_model_says_for_long(connection: Connection) -> None:
    _drive(connection, examples=400, steps=80)


# One mistake each, as somebody may make it; the machine has to find every one.
_MISTAKES: list[tuple[str, str, str]] = [
    ("l1 a live lease is stolen", "or job.lease_expires_at <", "or now() <"),
    ("l1 the youngest first", "order by job.queued_at", "order by -job.id"),
    ("l1 a dead attempt stays open", "claimed.old_status = 'running'", "false"),
    ("l2 no token in the fence", "job.lease_token = %(token)s", "true"),
    (
        "l7 the finish beats the cancel",
        "then 'cancelled'\n                   else %(status)s end",
        "then %(status)s else %(status)s end",
    ),
    (
        "l7 a cancelled run is claimed",
        "job.cancel_requested_at is not null",
        "false",
    ),
    ("l8 a fourth attempt", "failures + 1 >=", "failures >="),
    ("l8 a world not looked at", "not ({world})", "false"),
    ("l9 no crash budget", "job.crashes + 1 >=", "job.crashes - 9 >="),
    (
        "l9 progress forgives nothing",
        "failures = 0, crashes = 0",
        "crashes = 0",
    ),
    (
        "l10 a hand-over is a failure",
        "queued_at = case when cancel",
        "failures = 1, queued_at = case when cancel",
    ),
    (
        "l12 providers run twice",
        "other.provider = job.provider",
        "false",
    ),
    ("l12 a purge is not alone", "job.kind = 'purge' or", ""),
    ("l12 a purge is starved", "purge.status = 'queued'", "false"),
    ("l13 a purge fights the sync", "'waiting' else", "'cancelled' else"),
    (
        "l14 a schedule catches up",
        "set next_run_at = coalesce(%(now)s, now())",
        "set next_run_at = next_run_at",
    ),
    (
        "l16 a cancel of what has ended",
        "not in ('succeeded', 'partial', 'ready', ",
        "not in (",
    ),
    ("l18 no pause", "where paused_at is not null", "where false"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [mistake[1:] for mistake in _MISTAKES],
    ids=[mistake[0] for mistake in _MISTAKES],
)
def test_the_machine_finds_each_of_these_mistakes(
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    right: str,
    wrong: str,
) -> None:
    found = [
        (module, name, value.replace(right, wrong))
        for module in (leases, runs)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and right in value
    ]
    assert found
    for module, name, mistaken in found:
        monkeypatch.setattr(module, name, mistaken)
    leases.compose.cache_clear()
    leases._compose_checkpoint.cache_clear()  # pyright: ignore[reportPrivateUsage]
    try:
        with pytest.raises((AssertionError, psycopg.Error, ExceptionGroup)):
            _drive(connection, examples=500, steps=50, shrink=False)
    finally:
        leases.compose.cache_clear()
        leases._compose_checkpoint.cache_clear()  # pyright: ignore[reportPrivateUsage]
