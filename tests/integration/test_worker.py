"""The worker: stages, endings, retries, outages and signals (rules L6, L8, L10, L15, L17)."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest
from psycopg_pool import ConnectionPool

import leasequeue
from leasequeue import (
    LOST,
    Cancelled,
    JobFailed,
    Partial,
    Retryable,
    Run,
    ShuttingDown,
    Stage,
    TimedOut,
    Worker,
)
from support.engine import LEASE_SECONDS, NOON, World, after, await_true, begun, scalar
from support.engine_worker import worker_process

Connection = psycopg.Connection[Any]
Handler = Callable[[Run], Partial | None]

Pool = ConnectionPool[Connection]


class Make(Protocol):
    """Makes a worker with one handler for all its kinds."""

    def __call__(
        self, handler: Handler, name: str = "alice", *kinds: str, retention_days: int = 90
    ) -> Worker: ...


FAST: dict[str, float] = {"poll_seconds": 0.05}


@pytest.fixture
def world(connection: Connection) -> World:
    return World.new(connection)


@pytest.fixture
def pool(database_url: str) -> Generator[Pool]:
    kwargs = {"autocommit": True, "prepare_threshold": None}
    made: Pool = ConnectionPool(database_url, kwargs=kwargs, min_size=1, max_size=4, open=True)
    with made:
        yield made


class Clock:
    """The time that a test says it is."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(database_url: str, pool: Pool, clock: Clock) -> Make:
    """Workers whose keeper does not run, for tests that call `poll`."""

    def make_one(
        handler: Handler, name: str = "alice", *kinds: str, retention_days: int = 90
    ) -> Worker:
        worker = Worker(
            lambda: leasequeue.connect(database_url), pool.connection, name=name, clock=clock
        )
        handlers = dict.fromkeys(kinds or ("sync", "purge"), handler)
        worker.stages = leasequeue.engine_stages(
            worker, pool.connection, handlers, retention_days=retention_days
        )
        return worker

    return make_one


def _raise(error: BaseException) -> Handler:
    def handler(run: Run) -> None:
        raise error

    return handler


# L15: one poll, many stages


def test_l15_a_failing_stage_never_skips_the_next(make: Make) -> None:
    walked: list[str] = []

    def stage(name: str, error: Exception | None = None) -> Stage:
        def run() -> int:
            walked.append(name)
            if error is not None:
                raise error
            return 1

        return Stage(name, run)

    broken = RuntimeError("broken")
    polled = leasequeue.poll([stage("a"), stage("b", broken), stage("c")])
    assert walked == ["a", "b", "c"]
    assert (polled.done, polled.errors) == (2, {"b": broken})


def test_l15_a_poll_walks_schedules_promotions_a_run_and_retention(
    world: World, make: Make
) -> None:
    worker = make(lambda run: None)
    names = [stage.name for stage in worker.stages]
    assert names == ["schedule", "promote", "run", "retain", "evict"]
    world.connection("a", interval_seconds=60)
    assert worker.poll().done == 2
    assert worker.poll().done == 0
    assert world.status(1) == "succeeded"


def test_l17_one_poll_runs_one_job(world: World, make: Make) -> None:
    runs = [world.run(name, name) for name in "abc"]
    worker = make(lambda run: None)
    for done in range(3):
        assert [world.status(run) for run in runs].count("succeeded") == done
        assert worker.poll().done == 1


def test_l15_a_stage_that_runs_seldom_runs_once_for_the_fleet(world: World) -> None:
    every = timedelta(hours=1)
    assert leasequeue.due(world.conn, "sweep", every, now=NOON) is True
    assert leasequeue.due(world.conn, "sweep", every, now=after(3599)) is False
    assert leasequeue.due(world.conn, "other", every, now=after(1)) is True
    assert leasequeue.due(world.conn, "sweep", every, now=after(3600)) is True


def test_an_idle_poll_asks_the_database_at_most_five_times(world: World, make: Make) -> None:
    worker = make(lambda run: None)
    worker.poll()
    before = _queries(world)
    for _ in range(20):
        assert worker.poll().done == 0
    assert _queries(world) - before <= 5 * 20


def _queries(world: World) -> int:
    """Transactions of this database so far; outside a transaction each query is one."""
    world.conn.execute("select pg_stat_clear_snapshot()")
    return scalar(
        world.conn,
        "select xact_commit from pg_stat_database where datname = current_database()",
    )


def test_an_ended_row_is_work_done_so_the_poll_goes_on_at_once(
    world: World, make: Make, clock: Clock
) -> None:
    run = world.run("a", now=clock.now)
    world.held("dead")
    world.cancel(run)
    clock.turn(LEASE_SECONDS + 1)
    worker = make(_raise(AssertionError("a cancelled run was run")))
    assert worker.poll().done == 1
    assert world.status(run) == "cancelled"
    assert worker.poll().done == 0


# L6: endings

_ENDINGS: list[tuple[BaseException, str, str | None, str]] = [
    (JobFailed("no such folder", code="gone"), "failed", "gone", "failed"),
    (TimedOut("too long"), "failed", "timeout", "failed"),
    (Retryable("busy", code="busy"), "queued", "busy", "retried"),
    (RuntimeError("oops"), "queued", "unexpected", "retried"),
    (ShuttingDown("stop"), "queued", None, "released"),
    (Cancelled("stop"), "cancelled", None, "cancelled"),
    (psycopg.OperationalError("server closed"), "queued", "database_unavailable", "released"),
]


@pytest.mark.parametrize(
    ("error", "status", "code", "outcome"), _ENDINGS, ids=[type(e[0]).__name__ for e in _ENDINGS]
)
def test_l6_what_a_job_raises_becomes_its_rows_ending(
    world: World,
    make: Make,
    error: BaseException,
    status: str,
    code: str | None,
    outcome: str,
) -> None:
    run = world.run("a")
    make(_raise(error)).poll()
    row = world.row(run)
    assert (row["status"], row["error_code"]) == (status, code)
    assert world.outcomes(run) == [outcome]


def test_l6_a_job_that_lost_its_lease_leaves_the_row_to_its_new_holder(
    world: World, make: Make, clock: Clock
) -> None:
    run = world.run("a")

    def lose(handed: Run) -> None:
        clock.turn(LEASE_SECONDS + 1)
        world.held("bob", now=clock.now)

    make(lose).poll()
    row = world.row(run)
    assert (row["status"], row["lease_owner"]) == ("running", "bob")


def test_l6_a_timeout_ends_the_job_through_the_same_signal(world: World, make: Make) -> None:
    connection = world.connection("a")
    run = leasequeue.enqueue(
        world.conn, world.workspace, connection, timeout_seconds=0.01, now=NOON
    )
    assert run is not None

    def wait(handed: Run) -> None:
        handed.abort.wait(20)
        handed.abort.check()

    make(wait).poll()
    assert (world.status(run), world.row(run)["error_code"]) == ("failed", "timeout")


def test_l6_an_outage_that_hides_a_shutdown_is_a_shutdown(world: World, make: Make) -> None:
    run = world.run("a")

    def shut_down(handed: Run) -> None:
        handed.abort.set(ShuttingDown("stop"))
        raise psycopg.OperationalError("the connection is closed")

    make(shut_down).poll()
    assert (world.status(run), world.row(run)["error_code"]) == ("queued", None)


def test_an_interrupt_without_signal_handlers_gives_the_lease_back(
    world: World, make: Make
) -> None:
    run = world.run("a")
    with pytest.raises(KeyboardInterrupt):
        make(_raise(KeyboardInterrupt())).poll()
    assert (world.status(run), world.outcomes(run)) == ("queued", ["released"])


def test_the_fence_of_a_runs_transaction_also_hears_a_cancel(world: World, make: Make) -> None:
    run = world.run("a")
    world.conn.execute("create table written (n integer)")

    def write(handed: Run) -> None:
        with handed.transaction({"page": 1}) as conn:
            conn.execute("insert into written values (1)")
        world.cancel(handed.id)
        with handed.transaction({"page": 2}) as conn:
            conn.execute("insert into written values (2)")

    make(write).poll()
    row = world.row(run)
    assert (row["status"], row["payload"]) == ("cancelled", {"page": 1})
    assert world.conn.execute("select n from written").fetchall() == [(1,)]


# L8: retries


def test_l8_a_failing_job_is_tried_three_times_after_5_and_30_seconds(
    world: World, make: Make, clock: Clock
) -> None:
    run = world.run("a")
    worker = make(_raise(Retryable("busy")))
    for least, most in ((4.0, 6.0), (24.0, 36.0)):
        assert worker.poll().done == 1
        wait = (world.row(run)["queued_at"] - clock.now).total_seconds()
        assert least <= wait <= most
        clock.turn(least - 0.1)
        assert worker.poll().done == 0
        clock.turn(most - least + 0.1)
    assert worker.poll().done == 1
    assert (world.status(run), world.outcomes(run)) == ("failed", ["retried", "retried", "failed"])


def test_l8_a_partial_result_is_retried_if_it_says_so_and_sealed_partial_if_not(
    world: World, make: Make, clock: Clock
) -> None:
    final, retried = world.run("a", "a"), world.run("b", "b", now=after(1))
    clock.turn(1)

    def partly(run: Run) -> Partial:
        return Partial("2 of 9 files", retryable=run.id == retried)

    worker = make(partly)
    for _ in range(5):
        worker.poll()
        clock.turn(120)
    assert (world.status(final), world.outcomes(final)) == ("partial", ["partial"])
    assert world.outcomes(retried) == ["retried", "retried", "partial"]
    assert world.row(retried)["error"] == "2 of 9 files"


def test_l8_q23_thirty_workers_with_one_retry_after_return_neither_early_nor_together(
    world: World, make: Make
) -> None:
    """Q23. The provider said 60 seconds to all thirty at once."""
    runs = [world.run(str(n), str(n)) for n in range(30)]
    worker = make(_raise(Retryable("429", retry_after=timedelta(seconds=60))))
    for _ in runs:
        worker.poll()
    waits = sorted((world.row(run)["queued_at"] - NOON).total_seconds() for run in runs)
    assert waits[0] >= 60
    assert waits[-1] <= 72
    assert len({round(wait, 2) for wait in waits}) > 20
    assert waits[-1] - waits[0] > 3


def test_l9_progress_in_a_runs_transaction_forgives_failures(
    world: World, make: Make, clock: Clock
) -> None:
    run = world.run("a")

    def step(handed: Run) -> None:
        page = handed.payload.get("page", 0)
        if page == 6:
            return
        with handed.transaction({"page": page + 1}):
            pass
        raise Retryable("once more")

    worker = make(step)
    for _ in range(7):
        worker.poll()
        clock.turn(600)
    assert (world.status(run), world.row(run)["attempts"]) == ("succeeded", 7)


def test_l13_a_purge_that_succeeds_leaves_its_connection_disconnected(
    world: World, make: Make, clock: Clock
) -> None:
    sync = world.run("a")
    connection = world.row(sync)["connection_id"]
    purge: list[int | None] = []

    def handler(run: Run) -> None:
        if run.kind == "sync":
            purge.append(
                leasequeue.request_purge(world.conn, world.workspace, connection, now=clock.now)
            )

    worker = make(handler)
    worker.poll()
    [pending] = purge
    assert pending is not None
    assert (world.status(sync), world.status(pending)) == ("succeeded", "waiting")
    worker.poll()
    assert world.status(pending) == "succeeded"
    [row] = leasequeue.list_connections(world.conn, world.workspace)
    assert row["status"] == "disconnected"


def test_q26_a_worker_polls_past_a_kind_it_has_no_handler_for(world: World, make: Make) -> None:
    """Q26. During a roll-out old workers see new kinds; the new ones take them."""
    run = world.run("a", kind="reindex")
    assert make(_raise(AssertionError("handled"))).poll().done == 0
    assert world.status(run) == "queued"
    make(lambda handed: None, "new", "sync", "reindex").poll()
    assert world.status(run) == "succeeded"


def test_l18_a_paused_fleet_polls_and_claims_nothing(world: World, make: Make) -> None:
    run = world.run("a")
    leasequeue.pause(world.conn, "Ada")
    worker = make(lambda handed: None)
    assert worker.poll().done == 0
    leasequeue.resume(world.conn)
    assert worker.poll().done == 1
    assert world.status(run) == "succeeded"


# Logs


def test_errors_are_logged_about_once_a_second_and_the_rest_counted(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(lambda run: None)
    with caplog.at_level(logging.WARNING, "leasequeue"):
        for _ in range(50):
            worker.report("claim", psycopg.OperationalError("connection refused\nsecond line"))
    [line] = caplog.messages
    assert line == "claim: the database is away: connection refused"


# The loop


@contextmanager
def _running(worker: Worker) -> Generator[None]:
    """The worker's loop in a thread beside the block; stopped after it."""
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(20)
        assert not thread.is_alive()


def _worker(database_url: str, pool: Pool, handler: Handler, **options: Any) -> Worker:
    worker = Worker(lambda: leasequeue.connect(database_url), pool.connection, **options)
    worker.stages = leasequeue.engine_stages(worker, pool.connection, {"sync": handler})
    return worker


def test_a_notification_wakes_an_idle_worker(world: World, database_url: str, pool: Pool) -> None:
    """It polls once in ten minutes; so it was woken."""
    handled = threading.Event()
    worker = _worker(database_url, pool, lambda run: handled.set(), poll_seconds=600)
    with _running(worker):
        await_true(
            lambda: scalar(world.conn, "select count(*) from workers") == 1, "it did not register"
        )
        world.run("a")
        assert handled.wait(20)


def _shared(conn: Connection) -> bool:
    return False


def test_without_notifications_a_poll_finds_the_run(
    world: World, database_url: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasequeue.keeper._own_session", _shared)
    handled = threading.Event()
    worker = _worker(database_url, pool, lambda run: handled.set(), poll_seconds=0.02)
    with _running(worker):
        world.run("a")
        assert handled.wait(20)
    assert scalar(world.conn, "select count(*) from workers") == 0


def test_run_until_idle_ends_when_nothing_is_left(
    world: World, database_url: str, pool: Pool
) -> None:
    runs = [world.run(name, name) for name in "abc"]
    _worker(database_url, pool, lambda run: None).run(idle=lambda: True)
    assert [world.status(run) for run in runs] == ["succeeded"] * 3


def test_stopping_a_worker_that_is_not_running_ends_no_process(world: World, make: Make) -> None:
    run = world.run("a")
    worker = make(_raise(AssertionError("it was stopped")))
    worker.stop()
    assert worker.stopping
    assert worker.poll().done == 0
    assert world.status(run) == "queued"


def test_l10_a_worker_stopped_between_claim_and_work_gives_the_lease_back(
    world: World, make: Make
) -> None:
    run = world.run("a")
    worker = make(lambda handed: None)
    held = world.held("alice")
    worker.stop()
    assert worker.perform(held, lambda abort: pytest.fail("it ran")) == "queued"
    assert (world.status(run), world.outcomes(run)) == ("queued", ["released"])


def test_l10_a_run_that_ended_while_the_database_was_away_is_sealed_when_it_is_back(
    world: World, database_url: str, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """The ending is kept and written later; the work is not done again."""
    run = world.run("a")
    failures = iter([psycopg.OperationalError("refused")] * 2)

    @contextmanager
    def flaky() -> Generator[Connection]:
        for error in failures:
            raise error
        with pool.connection() as conn:
            yield conn

    worker = Worker(lambda: leasequeue.connect(database_url), flaky, name="alice")
    held = world.held("alice")
    assert worker.perform(held, lambda abort: None) == "succeeded"
    assert world.status(run) == "succeeded"


def test_l4_an_ending_that_cannot_be_written_in_the_leases_time_is_lost(
    world: World, database_url: str
) -> None:
    world.run("a")

    @contextmanager
    def away() -> Generator[Connection]:
        raise psycopg.OperationalError("refused")
        yield

    worker = Worker(lambda: leasequeue.connect(database_url), away, name="alice")
    held = leasequeue.claim(world.conn, leasequeue.RUNS, "alice", 0.3)
    assert isinstance(held, leasequeue.Lease)
    assert worker.perform(held, lambda abort: None) == LOST


# L10 and Q8: signals, with real processes


def _start(world: World, do: str) -> int:
    connection = world.connection(do, do)
    run = leasequeue.enqueue(world.conn, world.workspace, connection, payload={"do": do})
    assert run is not None
    return run


def _await_running(world: World, run: int) -> None:
    await_true(lambda: world.status(run) == "running", "the worker did not start on it")


def _await_worker(world: World) -> None:
    await_true(
        lambda: scalar(world.conn, "select count(*) from workers") == 1, "it did not register"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_l10_q8_a_signal_in_a_job_gives_the_lease_back_and_leaves_nothing(
    world: World, database_url: str, tmp_path: Path, number: int
) -> None:
    """Q8. Queued, no budget spent, deregistered, exit 0; the limiter's place is free."""
    run = _start(world, "wait")
    with worker_process(database_url, tmp_path / "log", **FAST) as process:
        _await_running(world, run)
        process.send_signal(number)
        assert process.wait(10) == 0
    row = world.row(run)
    assert (row["status"], row["attempts"], row["failures"], row["crashes"]) == ("queued", 1, 0, 0)
    assert world.outcomes(run) == ["released"]
    assert scalar(world.conn, "select count(*) from workers") == 0
    assert world.held("next", now=after(10**9)).id == run


def test_l10_a_signal_to_an_idle_worker_ends_it(
    world: World, database_url: str, tmp_path: Path
) -> None:
    with worker_process(database_url, tmp_path / "log", poll_seconds=600) as process:
        _await_worker(world)
        process.terminate()
        assert process.wait(10) == 0
    assert scalar(world.conn, "select count(*) from workers") == 0


@pytest.mark.parametrize("do", ["ignore", "compute"])
def test_l10_a_job_that_does_not_listen_is_left_and_its_lease_given_back(
    world: World, database_url: str, tmp_path: Path, do: str
) -> None:
    """Even one deep in C code, where Python runs no signal handler."""
    run = _start(world, do)
    with worker_process(database_url, tmp_path / "log", grace_seconds=0.2) as process:
        _await_running(world, run)
        process.terminate()
        assert process.wait(10) == 0
    assert (world.status(run), world.outcomes(run)) == ("queued", ["released"])
    assert scalar(world.conn, "select count(*) from workers") == 0


def test_l10_a_second_signal_does_not_wait_for_the_grace(
    world: World, database_url: str, tmp_path: Path
) -> None:
    run = _start(world, "ignore")
    with worker_process(database_url, tmp_path / "log", grace_seconds=600) as process:
        _await_running(world, run)
        process.terminate()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert (world.status(run), world.outcomes(run)) == ("queued", ["released"])


def test_l10_a_worker_stuck_in_the_database_leaves_within_the_grace(
    world: World, database_url: str, tmp_path: Path
) -> None:
    """Between jobs: its claim waits for a table that somebody has locked."""
    with worker_process(
        database_url, tmp_path / "log", grace_seconds=0.2, poll_seconds=0.02
    ) as process:
        _await_worker(world)
        with begun(database_url) as other:
            other.execute("lock table connection_runs in access exclusive mode")
            await_true(
                lambda: scalar(world.conn, "select count(*) > 0 from pg_locks where not granted"),
                "it never waited",
            )
            process.terminate()
            assert process.wait(10) == 0


def test_l10_a_job_stuck_in_a_transaction_of_its_own_keeps_its_lease_until_that_expires(
    world: World, database_url: str, tmp_path: Path
) -> None:
    """It holds its row, so nobody can give the lease back; the process ends all the same."""
    run = _start(world, "lock")
    world.conn.execute("select pg_advisory_lock(1)")
    with worker_process(database_url, tmp_path / "log", grace_seconds=0.2) as process:
        _await_running(world, run)
        await_true(
            lambda: scalar(world.conn, "select count(*) > 0 from pg_locks where not granted"),
            "it never waited",
        )
        process.terminate()
        assert process.wait(10) == 0
    assert world.status(run) in ("running", "queued")


def test_l1_a_killed_workers_run_is_taken_over_after_its_lease(
    world: World, database_url: str, tmp_path: Path
) -> None:
    run = _start(world, "ignore")
    with worker_process(database_url, tmp_path / "log", lease_seconds=1.0) as process:
        _await_running(world, run)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with worker_process(database_url, tmp_path / "log", **FAST) as process:
        await_true(lambda: world.row(run)["attempts"] == 2, "nobody took it over")
    assert world.outcomes(run)[0] == "expired"
