"""Which errors mean that the database is away, or refuses for now, and not that a job is wrong.

A job that meets one is given back without a mark against it; the worker backs off, reconnects and
goes on in the same process (case Q16).
"""

from __future__ import annotations

from datetime import timedelta

import psycopg
from psycopg import errors

DISK_FULL_DELAY = timedelta(seconds=30)
OUTAGE_DELAY = timedelta(seconds=1)

# A standby after a fail-over answers every write with the first (case Q17).
_REFUSALS = (
    errors.ReadOnlySqlTransaction,
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.TooManyConnections,
    errors.IdleInTransactionSessionTimeout,
    errors.DiskFull,
    errors.OutOfMemory,
    errors.IoError,
    errors.LockNotAvailable,
    errors.DeadlockDetected,
    errors.SerializationFailure,
)


def is_outage(error: BaseException | None) -> bool:
    """Whether the same statement may succeed later, though nothing about the job changes.

    Connection failures have no SQLSTATE of their own, or class 08. A PoolTimeout of psycopg_pool
    is an OperationalError without one, too.
    """
    if isinstance(error, _REFUSALS):
        return True
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(("08", "57P"))


def outage_delay(error: BaseException) -> timedelta:
    """How long a job given back for `error` is not due: longer when a disk has to be freed."""
    return DISK_FULL_DELAY if isinstance(error, errors.DiskFull) else OUTAGE_DELAY
