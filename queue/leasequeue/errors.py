"""What can go wrong with a leased job: one class for each thing a caller does differently.

A handler raises `Retryable`, `JobFailed` or lets any other exception escape; the engine raises
the rest. Every error has a stable `code` for machines, a sentence for people and, where there is
something to do, a `hint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


class LeaseQueueError(Exception):
    """The base of every error of this package."""

    code = "error"

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code if code is not None else type(self).code
        self.hint = hint


class LeaseLost(LeaseQueueError):
    """The fence matched no row: another worker holds the job, or it has ended (rule L2).

    The holder rolls back and stops. It writes nothing more.
    """

    code = "lease_lost"


class Cancelled(LeaseQueueError):
    """The user asked for the job to end; what it has gathered is kept (rule L7)."""

    code = "cancelled"


class ShuttingDown(LeaseQueueError):
    """This worker was told to stop; the job goes back to the queue untouched (rule L10)."""

    code = "shutting_down"


class TimedOut(LeaseQueueError):
    """The job ran longer than its own timeout."""

    code = "timeout"


class JobFailed(LeaseQueueError):
    """The job cannot succeed however often it is tried: seal it `failed`."""

    code = "failed"


class Retryable(LeaseQueueError):
    """The job may succeed later: requeue the same row (rule L8).

    `retry_after` is the least time to wait, as the other side asked for; jitter only adds to it.
    """

    code = "retryable"

    def __init__(
        self,
        message: str,
        *,
        retry_after: timedelta | None = None,
        code: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Partial:
    """What a handler returns that did some of its work: sealed `partial`, not raised.

    With `retryable` the same row is tried again while its attempts last (rule L8), and is sealed
    `partial` after the last.
    """

    error: str
    code: str = "partial"
    retryable: bool = False
    retry_after: timedelta | None = None


class MigrationError(LeaseQueueError):
    """The schema cannot be brought to what the code needs."""

    code = "migration_failed"
