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

# The classes and codes of SQLSTATE that say: not now. 08 connection, 40 rolled back, 53 short of
# something, 57 told to stop; a lock not had in time; a standby that cannot write (case Q17); a
# session ended for being idle; a failing disk.
_AWAY_CLASSES = frozenset({"08", "40", "53", "57"})
_AWAY_CODES = frozenset({"55P03", "55006", "25006", "25P03", "25P04", "58000", "58030"})
_NOT_AWAY = frozenset({"57P04", "57014"})  # The database was dropped; a statement was cancelled.


def is_outage(error: BaseException | None) -> bool:
    """Whether the same statement may succeed later, though nothing about the job changes.

    An OperationalError without a code is a broken or refused connection, or a pool's timeout; so
    is the InterfaceError of a connection found closed.
    """
    if not isinstance(error, psycopg.Error):
        return False
    code = error.sqlstate
    if code is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return code not in _NOT_AWAY and (code[:2] in _AWAY_CLASSES or code in _AWAY_CODES)


def outage_delay(error: BaseException) -> timedelta:
    """How long a job given back for `error` is not due: longer when a disk has to be freed."""
    return DISK_FULL_DELAY if isinstance(error, errors.DiskFull) else OUTAGE_DELAY
