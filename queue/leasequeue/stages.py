"""The stages that serve `connection_runs`: hand this list to a `Worker`, with a handler a kind.

A handler gets a `Run` and does the work, inline. It checks `run.abort` often, writes in
`run.transaction()` or through `record_result`, which are fenced, and returns None, or a `Partial`;
or raises `Retryable` or `JobFailed`. Kinds without a handler are left alone, so old workers and
new kinds may meet (case Q26).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from leasequeue import lease as leases
from leasequeue import runs
from leasequeue.abort import AbortSignal
from leasequeue.connections import mark_purged
from leasequeue.errors import Cancelled, Partial
from leasequeue.evict import evict
from leasequeue.lease import Lease, LeaseTable
from leasequeue.poll import Stage
from leasequeue.settle import Done, Settled
from leasequeue.throttle import due
from leasequeue.worker import Worker

Connection = psycopg.Connection[Any]
Lend = Callable[[], AbstractContextManager[Connection]]

EVICT_EVERY = timedelta(seconds=15)
RETENTION_EVERY = timedelta(hours=1)
SCHEDULED_PER_POLL = 100
PROMOTED_PER_POLL = 10
REMOVED_PER_POLL = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a connection, as its handler sees it."""

    lease: Lease
    abort: AbortSignal
    id: int
    workspace_id: int
    connection_id: int
    provider: str
    kind: str
    payload: Mapping[str, Any]
    lend: Lend

    @contextmanager
    def transaction(self, payload: Mapping[str, Any] | None = None) -> Generator[Connection]:
        """A transaction that only the holder of the lease can commit (rule L2).

        A `payload` replaces the run's, with the block's own rows or not at all: this is a
        checkpoint, which the next attempt finds in `run.payload`, and it forgives earlier
        failures (L9). Raises LeaseLost, or Cancelled, before the block begins.
        """
        with self.lend() as conn, conn.transaction():
            if payload is None:
                cancelled = leases.renew(conn, self.lease)
            else:
                cancelled = leases.checkpoint(conn, self.lease, {"payload": Jsonb(dict(payload))})
            if cancelled:
                raise Cancelled("the user cancelled the job")
            yield conn


Handler = Callable[[Run], "Partial | None"]


def engine_stages(
    worker: Worker,
    lend: Lend,
    handlers: Mapping[str, Handler],
    *,
    lease_seconds: float = 120.0,
    retention_days: int = 90,
) -> list[Stage]:
    """Schedules, promotions, one run a poll, and upkeep: old history, frozen holders."""
    kinds = sorted(handlers)

    def schedule() -> int:
        with lend() as conn:
            return runs.enqueue_due(conn, SCHEDULED_PER_POLL, now=worker.clock())

    def promote() -> int:
        with lend() as conn:
            return runs.promote(conn, PROMOTED_PER_POLL, now=worker.clock())

    def run_one() -> int:
        with lend() as conn:
            claimed = runs.claim(conn, worker.name, lease_seconds, kinds, now=worker.clock())
        if isinstance(claimed, Lease):
            worker.perform(claimed, lambda abort: _handle(worker, claimed, abort, handlers, lend))
        return 0 if claimed is None else 1

    return [
        Stage("schedule", schedule),
        Stage("promote", promote),
        Stage("run", run_one),
        Stage("retain", _retain(worker, lend, retention_days)),
        evict_stage(worker, lend, runs.RUNS),
    ]


def evict_stage(worker: Worker, lend: Lend, table: LeaseTable) -> Stage:
    """Put out the holders that froze with a row of `table` locked, a look every 15 s."""

    def evict_frozen() -> int:
        with lend() as conn:
            return evict(conn, table, now=worker.clock())

    return Stage("evict", seldom(evict_frozen, EVICT_EVERY))


def _retain(worker: Worker, lend: Lend, days: int) -> Callable[[], int]:
    """One batch a poll while batches are full, else a look an hour: jobs come in between."""
    more = False

    def retain() -> int:
        nonlocal more
        with lend() as conn:
            now = worker.clock()
            if not more and not due(conn, "remove_old_runs", RETENTION_EVERY, now=now):
                return 0
            removed = runs.remove_old_runs(conn, days, REMOVED_PER_POLL, now=now)
            more = removed == REMOVED_PER_POLL
            return removed

    spared = seldom(retain, timedelta(minutes=10))
    return lambda: retain() if more else spared()


def seldom(run: Callable[[], int], every: timedelta) -> Callable[[], int]:
    """`run`, at most once in `every` in this process: the marker in the database decides for the
    fleet, and this spares an idle worker from asking it at each poll."""
    next_at = 0.0

    def gated() -> int:
        nonlocal next_at
        if time.monotonic() < next_at:
            return 0
        done = run()
        next_at = time.monotonic() + every.total_seconds()
        return done

    return gated


def _handle(
    worker: Worker, claimed: Lease, abort: AbortSignal, handlers: Mapping[str, Handler], lend: Lend
) -> Done | Settled | Partial:
    row = claimed.row
    partial = handlers[row["kind"]](
        Run(
            lease=claimed,
            abort=abort,
            id=claimed.id,
            workspace_id=row["workspace_id"],
            connection_id=row["connection_id"],
            provider=row["provider"],
            kind=row["kind"],
            payload=row["payload"],
            lend=lend,
        )
    )
    if partial is not None:
        return partial
    return _finish_purge(worker, claimed, lend) if row["kind"] == runs.PURGE else Done()


def _finish_purge(worker: Worker, claimed: Lease, lend: Lend) -> Settled:
    """The purge and the state of its connection end together; connection first, then the run."""
    with lend() as conn, conn.transaction():
        mark_purged(conn, claimed.row["workspace_id"], claimed.row["connection_id"])
        return Settled(leases.seal(conn, claimed, "succeeded", now=worker.clock()))
