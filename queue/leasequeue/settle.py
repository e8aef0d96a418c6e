"""How a job's ending becomes a transition: one table, used by every kind of job.

=====================  =============================================================
the work                the row
=====================  =============================================================
returned               sealed with the status of success
returned `Partial`     requeued if retryable and attempts are left, else `partial`
raised `LeaseLost`     untouched: it is somebody else's
raised `ShuttingDown`  released: queued, in its old place, no budget spent
raised `Cancelled`     sealed `cancelled`
raised `Retryable`     requeued while attempts are left, else `failed`
raised `JobFailed`     sealed `failed`, as for `TimedOut`
hit a database outage  released for a moment, no budget spent
raised anything else   requeued like `Retryable`: it may be a passing fault
=====================  =============================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

import psycopg

from leasequeue import lease as leases
from leasequeue.backoff import retry_delay
from leasequeue.errors import (
    Cancelled,
    JobFailed,
    LeaseLost,
    LeaseQueueError,
    Partial,
    Retryable,
    ShuttingDown,
    TimedOut,
)
from leasequeue.lease import Lease
from leasequeue.outage import is_outage, outage_delay

Connection = psycopg.Connection[Any]

LOST = "lost"
"""What `settle` answers when the row was not this holder's any more."""


@dataclass(frozen=True, slots=True)
class Done:
    """The work has ended well, and the row is to be sealed `status`."""

    status: LiteralString = "succeeded"


@dataclass(frozen=True, slots=True)
class Settled:
    """The work has sealed its row itself, in the transaction of its last writes."""

    status: str


Ending = Done | Settled | Partial | BaseException


def settle(conn: Connection, lease: Lease, ending: Ending, *, now: datetime | None = None) -> str:
    """Write the end of an attempt; returns the row's status then, or `LOST`."""
    try:
        match ending:
            case Settled(status):
                return status
            case Done(status):
                return leases.seal(conn, lease, status, now=now)
            case Partial():
                return _settle_partial(conn, lease, ending, now)
            case LeaseLost():
                return LOST
            case ShuttingDown():
                return leases.release(conn, lease, now=now)
            case Cancelled():
                return leases.seal(conn, lease, "cancelled", now=now)
            case JobFailed() | TimedOut():
                code, text = ending.code, sentence(ending)
                return leases.seal(conn, lease, "failed", error_code=code, error=text, now=now)
            case _:
                return _settle_error(conn, lease, ending, now)
    except LeaseLost:
        return LOST


def _settle_partial(conn: Connection, lease: Lease, partial: Partial, now: datetime | None) -> str:
    if not partial.retryable:
        return leases.seal(
            conn, lease, "partial", error_code=partial.code, error=partial.error, now=now
        )
    delay = retry_delay(failures_now(conn, lease) + 1, partial.retry_after)
    return leases.requeue(
        conn,
        lease,
        delay,
        error_code=partial.code,
        error=partial.error,
        exhausted="partial",
        now=now,
    )


def _settle_error(
    conn: Connection, lease: Lease, error: BaseException, now: datetime | None
) -> str:
    if is_outage(error):
        return leases.release(
            conn,
            lease,
            delay=outage_delay(error),
            error_code="database_unavailable",
            error=sentence(error),
            now=now,
        )
    code = error.code if isinstance(error, LeaseQueueError) else "unexpected"
    asked = error.retry_after if isinstance(error, Retryable) else None
    delay = retry_delay(failures_now(conn, lease) + 1, asked)
    return leases.requeue(conn, lease, delay, error_code=code, error=sentence(error), now=now)


_FAILURES: LiteralString = "select job.failures from {table} as job where {fence}"


def failures_now(conn: Connection, lease: Lease) -> int:
    """Failures in a row so far: a checkpoint since the claim has set them back to 0."""
    row = conn.execute(leases.compose(_FAILURES, lease.table), lease.fence).fetchone()
    return 0 if row is None else int(row[0])


def sentence(error: BaseException | None, characters_max: int = 2000) -> str:
    """The error as one bounded text for people; an error not of ours is named by its type."""
    if error is None:
        return ""
    text = str(error).strip() or type(error).__name__
    if not isinstance(error, LeaseQueueError):
        text = f"{type(error).__name__}: {text}"
    hint = getattr(error, "hint", None)
    if hint:
        text = f"{text} ({hint})"
    return text.replace("\x00", "")[:characters_max]
