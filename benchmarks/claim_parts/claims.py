"""Claims a second and what one takes, with and without history, with and without the limiter.

Processes claim an empty job and seal it, in a loop, each on one connection in planroom's settings.
A job so costs two transactions for the bare lease, and one more look-up and the workspace's lock
for a run under the limiter. Each condition is measured in several short rounds, in turns with the
others, every other round in reverse.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, LiteralString

import psycopg
from claim_peers import leasequeue_peer
from psycopg import sql

import leasequeue
from claim_parts.plan import FINISHED_P99_RATIO_MAX, Plan, Result, milliseconds, percentile
from claim_parts.server import Server
from leasequeue import Lease, LeaseTable, runs

Connection = psycopg.Connection[Any]

# The ends of a multiprocessing pipe have no public type that is the same everywhere.
Pipe = Any

LEASE_SECONDS = 120.0
HEAD_START_SECONDS = 0.4

# The columns that a table of leased jobs needs, with the checks and indexes of planroom's own.
_CREATE_BARE = """
    create table bare_jobs (
        id bigint generated always as identity primary key,
        workspace_id bigint not null references workspaces,
        file_id bigint not null,
        status text not null default 'queued'
            check (status in ('queued', 'running', 'ready', 'failed', 'cancelled')),
        attempts integer not null default 0 check (attempts >= 0),
        failures integer not null default 0 check (failures >= 0),
        crashes integer not null default 0 check (crashes >= 0),
        timeout_seconds double precision check (timeout_seconds > 0),
        queued_at timestamptz not null default now(),
        started_at timestamptz,
        finished_at timestamptz,
        lease_owner text,
        lease_token bigint,
        lease_expires_at timestamptz,
        cancel_requested_at timestamptz,
        error_code text,
        error text,
        check ((status = 'running') = (lease_owner is not null)),
        check ((status = 'running') = (lease_token is not null)),
        check ((status = 'running') = (lease_expires_at is not null)),
        check ((status in ('ready', 'failed', 'cancelled')) = (finished_at is not null))
    ) with (fillfactor = 80);
    create unique index bare_jobs_one_active
        on bare_jobs (file_id) where status in ('queued', 'running');
    create index bare_jobs_history on bare_jobs (file_id, id);
    create index bare_jobs_claim on bare_jobs (queued_at, id) where finished_at is null;
    create index bare_jobs_finished on bare_jobs (finished_at) where finished_at is not null;
    create table bare_attempts (
        job_id bigint not null references bare_jobs on delete cascade,
        attempt integer not null check (attempt > 0),
        lease_token bigint not null unique,
        worker text not null,
        started_at timestamptz not null,
        seen_at timestamptz not null,
        ended_at timestamptz,
        outcome text,
        error_code text,
        error text,
        retry_at timestamptz,
        primary key (job_id, attempt),
        check ((ended_at is null) = (outcome is null))
    );
    create unique index bare_attempts_one_open on bare_attempts (job_id) where ended_at is null
"""
_ADD_CONNECTIONS = """
    with workspace as (
        insert into workspaces (name)
        select 'workspace ' || n from generate_series(1, %(workspaces)s::integer) as n
        returning id
    )
    insert into connections (workspace_id, name, provider)
    select id, 'connection ' || n, 'provider ' || n
      from generate_series(1, %(providers)s::integer) as n, workspace
     order by n, id
"""
_FINISH_BARE = """
    with job as (
        insert into bare_jobs (
            workspace_id, file_id, status, attempts, queued_at, started_at, finished_at
        )
        select (select min(id) from workspaces), n %% 6000, 'ready', 1,
               at, at + interval '1 second', at + interval '1 minute'
          from generate_series(1, %(rows)s::integer) as n,
               lateral (select now() - interval '1 day' - n * interval '1 second' as at) as time
        returning id, started_at, finished_at
    )
    insert into bare_attempts (
        job_id, attempt, lease_token, worker, started_at, seen_at, ended_at, outcome
    )
    select id, 1, nextval('lease_tokens'), 'past', started_at, finished_at, finished_at, 'ready'
      from job
"""
_FINISH_RUNS = """
    with source as (
        select id, workspace_id, provider, row_number() over (order by id) - 1 as place
          from connections
    ), run as (
        insert into connection_runs (
            workspace_id, connection_id, provider, kind, status, attempts,
            created_at, queued_at, started_at, finished_at
        )
        select workspace_id, id, provider, 'sync', 'succeeded', 1,
               at, at, at + interval '1 second', at + interval '1 minute'
          from generate_series(1, %(rows)s::integer) as n
          join source on place = n %% (select count(*) from connections),
               lateral (select now() - interval '1 day' - n * interval '1 second' as at) as time
        returning id, started_at, finished_at
    )
    insert into run_attempts (
        run_id, attempt, lease_token, worker, started_at, seen_at, ended_at, outcome
    )
    select id, 1, nextval('lease_tokens'), 'past', started_at, finished_at, finished_at,
           'succeeded'
      from run
"""
_QUEUE_BARE = """
    insert into bare_jobs (workspace_id, file_id, queued_at)
    select (select min(id) from workspaces), n, now() - interval '1 hour' + n * interval '1 ms'
      from generate_series(1, %(jobs)s::integer) as n
"""
# One queued run a connection, as the unique index demands. Neighbours in the queue belong to
# different workspaces, as where the syncs of many tenants fall due together.
_QUEUE_RUNS = """
    insert into connection_runs (workspace_id, connection_id, provider, kind, queued_at)
    select workspace_id, id, provider, 'sync', now() - interval '1 hour' + id * interval '1 ms'
      from connections
     order by id
     limit %(jobs)s
"""
_FORGET_ATTEMPTS: LiteralString = "delete from {attempts} where worker <> 'past'"
_FORGET_JOBS: LiteralString = "delete from {table} where queued_at > now() - interval '12 hours'"
_TIDY: LiteralString = "vacuum analyze {table}, {attempts}"

BARE = LeaseTable(table="bare_jobs", attempts="bare_attempts", key="job_id")


def _claim_bare(conn: Connection, owner: str) -> object:
    return leasequeue.claim(conn, BARE, owner, LEASE_SECONDS)


def _claim_run(conn: Connection, owner: str) -> object:
    return runs.claim(conn, owner, LEASE_SECONDS, ["sync"])


@dataclass(frozen=True, slots=True)
class Queue:
    """One of the two queues that are claimed from: how it is set up, claimed and sealed."""

    what: str
    claim: Callable[[Connection, str], object]
    success: LiteralString
    finish: LiteralString
    fill: LiteralString
    table: LiteralString
    attempts: LiteralString


QUEUES = {
    "lease": Queue(
        what="the lease alone",
        claim=_claim_bare,
        success="ready",
        finish=_FINISH_BARE,
        fill=_QUEUE_BARE,
        table="bare_jobs",
        attempts="bare_attempts",
    ),
    "runs": Queue(
        what="runs: lease and limiter",
        claim=_claim_run,
        success="succeeded",
        finish=_FINISH_RUNS,
        fill=_QUEUE_RUNS,
        table="connection_runs",
        attempts="run_attempts",
    ),
}


@dataclass(slots=True)
class _Measured:
    claim_seconds: list[float] = field(default_factory=list[float])
    seal_seconds: list[float] = field(default_factory=list[float])
    round_p99_seconds: list[float] = field(default_factory=list[float])
    rates: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class _Order:
    """What a claiming process is told to do; `start_at` is the machine's monotonic clock."""

    url: str
    queue: str
    start_at: float
    seconds: float


def measure_claims(server: Server, plan: Plan, say: Callable[[str], None]) -> Result:
    """Every combination of queue, history and number of processes."""
    urls: dict[int, str] = {}
    for finished in (0, plan.finished_rows):
        say(f"claims: a database with {finished:,} finished rows in each queue")
        urls[finished] = _make_database(server, plan, finished)
    measured = {
        (queue, workers, finished): _Measured()
        for queue in QUEUES
        for workers in plan.claim_workers
        for finished in urls
    }
    conditions = list(measured)
    with _processes(max(plan.claim_workers)) as pipes:
        for turn in range(plan.claim_rounds):
            say(f"claims: round {turn + 1} of {plan.claim_rounds}")
            for condition in conditions if turn % 2 == 0 else reversed(conditions):
                queue, workers, finished = condition
                _refill(urls[finished], QUEUES[queue], plan.backlog)
                _measure_round(
                    urls[finished], queue, pipes[:workers], plan.claim_seconds, measured[condition]
                )
    for url in urls.values():
        server.drop(url)
    return {
        "finished_rows": plan.finished_rows,
        "backlog": plan.backlog,
        "rounds": plan.claim_rounds,
        "conditions": [_condition(*key, value) for key, value in measured.items()],
        "p99_ratio": _ratios(plan, measured),
        "p99_ratio_max": FINISHED_P99_RATIO_MAX,
    }


def _condition(queue: str, workers: int, finished: int, measured: _Measured) -> Result:
    return {
        "queue": queue,
        "what": QUEUES[queue].what,
        "workers": workers,
        "finished_rows": finished,
        "claims": len(measured.claim_seconds),
        "jobs_per_second": round(median(measured.rates), 1),
        "jobs_per_second_rounds": [round(rate, 1) for rate in measured.rates],
        "claim": milliseconds(measured.claim_seconds),
        "seal": milliseconds(measured.seal_seconds),
    }


def _ratios(plan: Plan, measured: dict[tuple[str, int, int], _Measured]) -> list[Result]:
    """Claim p99 with history over claim p99 without, for each queue and number of processes.

    Of each the median of its rounds' p99, so that one stall of the machine decides nothing.
    """
    ratios: list[Result] = []
    for queue in QUEUES:
        for workers in plan.claim_workers:
            without = measured[queue, workers, 0]
            with_history = measured[queue, workers, plan.finished_rows]
            ratio = median(with_history.round_p99_seconds) / median(without.round_p99_seconds)
            claims = min(len(without.claim_seconds), len(with_history.claim_seconds))
            ratios.append(
                {"queue": queue, "workers": workers, "ratio": round(ratio, 3), "claims": claims}
            )
    return ratios


def _make_database(server: Server, plan: Plan, finished: int) -> str:
    """Both queues, nothing queued, and so many finished rows and attempts in each."""
    url = server.database(f"claims_{finished}")
    providers = leasequeue_peer.PROVIDERS
    workspaces = -(-plan.backlog // providers)
    with leasequeue_peer.connect(url) as conn:
        leasequeue.apply_migrations(conn, leasequeue.engine_migrations())
        conn.execute(_CREATE_BARE)
        conn.execute(_ADD_CONNECTIONS, {"workspaces": workspaces, "providers": providers})
        for queue in QUEUES.values():
            conn.execute(queue.finish, {"rows": finished})
        conn.execute("vacuum analyze")
    return url


def _refill(url: str, queue: Queue, backlog: int) -> None:
    """Forget what an earlier round queued or finished, and queue anew."""
    names = {"table": sql.Identifier(queue.table), "attempts": sql.Identifier(queue.attempts)}
    with leasequeue_peer.connect(url) as conn:
        conn.execute(sql.SQL(_FORGET_ATTEMPTS).format(**names))
        conn.execute(sql.SQL(_FORGET_JOBS).format(**names))
        conn.execute(queue.fill, {"jobs": backlog})
        conn.execute(sql.SQL(_TIDY).format(**names))


def _measure_round(
    url: str, queue: str, pipes: list[Pipe], seconds: float, measured: _Measured
) -> None:
    start_at = time.monotonic() + HEAD_START_SECONDS
    for pipe in pipes:
        pipe.send(_Order(url, queue, start_at, seconds))
    all_seconds: list[float] = []
    ended_at = start_at
    for pipe in pipes:
        claim_seconds, seal_seconds, process_ended_at = pipe.recv()
        all_seconds += claim_seconds
        measured.seal_seconds += seal_seconds
        ended_at = max(ended_at, process_ended_at)
    if not all_seconds:
        raise RuntimeError(f"nothing was claimed from {queue} within {seconds} s")
    measured.claim_seconds += all_seconds
    measured.round_p99_seconds.append(percentile(all_seconds, 99))
    measured.rates.append(len(all_seconds) / (ended_at - start_at))


@contextmanager
def _processes(count: int) -> Generator[list[Pipe]]:
    """Processes that claim on demand, for as long as the block runs."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(count)]
    started = [
        context.Process(target=_be_a_claimer, args=(theirs,), daemon=True) for _, theirs in pairs
    ]
    for process in started:
        process.start()
    for ours, _ in pairs:
        # Its imports are over: an order that is sent now is begun in time.
        ours.recv()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for ours, _ in pairs:
            ours.send(None)
        for process in started:
            process.join()


def _be_a_claimer(pipe: Pipe) -> None:
    pipe.send("ready")
    while True:
        order: _Order | None = pipe.recv()
        if order is None:
            return
        pipe.send(_claim_and_seal(order))


def _claim_and_seal(order: _Order) -> tuple[list[float], list[float], float]:
    """Claim and seal until the time is up or nothing is left: seconds of each, and the end."""
    queue = QUEUES[order.queue]
    owner = leasequeue.worker_id()
    claims: list[float] = []
    seals: list[float] = []
    clock = time.monotonic
    until = order.start_at + order.seconds
    with leasequeue_peer.connect(order.url) as conn:
        time.sleep(max(0.0, order.start_at - clock()))
        while clock() < until:
            began = clock()
            held = queue.claim(conn, owner)
            claimed = clock()
            if not isinstance(held, Lease):
                break
            leasequeue.seal(conn, held, queue.success)
            claims.append(claimed - began)
            seals.append(clock() - claimed)
    return claims, seals, clock()
