"""The one signal that ends a job early (rule L6).

A lost lease, a cancel, a timeout and a shutdown all set the same `AbortSignal`, each with the
error to raise. The first reason wins, except that a lost lease overrides every other: a worker
that may not write must not try to, whatever else it was asked.

The signal also sets itself: it knows until when, by this process's monotonic clock, the lease is
certainly held, and how long the job may run. So a worker whose keeper hangs on a dead connection
still stops in time (rule L4): nobody has to be alive to tell it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from leasequeue.errors import LeaseLost, LeaseQueueError, TimedOut


class AbortSignal:
    """A thread-safe flag with a reason. The work listens to this and to nothing else."""

    def __init__(
        self,
        *,
        lease_seconds: float = math.inf,
        timeout_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._reason: LeaseQueueError | None = None
        self._lease_until = clock() + lease_seconds
        self._run_until = math.inf if timeout_seconds is None else clock() + timeout_seconds

    def renewed(self, at: float, lease_seconds: float) -> None:
        """A renewal that was sent at `at` by this clock has succeeded."""
        with self._changed:
            self._lease_until = max(self._lease_until, at + lease_seconds)
            self._changed.notify_all()

    def set(self, reason: LeaseQueueError) -> None:
        """End the job for `reason`; later reasons change nothing, but for a lost lease."""
        with self._changed:
            if self._reason is None or isinstance(reason, LeaseLost):
                self._reason = reason
            self._changed.notify_all()

    @property
    def reason(self) -> LeaseQueueError | None:
        """The error that ends the job, or None while it may go on."""
        now = self._clock()
        if now >= self._lease_until and not isinstance(self._reason, LeaseLost):
            self.set(LeaseLost("no renewal has succeeded for a whole lease"))
        elif now >= self._run_until:
            self.set(TimedOut("the job ran longer than its timeout"))
        return self._reason

    def lease_is_over(self) -> bool:
        """Whether the lease is lost, or has run out by this process's clock."""
        return isinstance(self.reason, LeaseLost)

    def is_set(self) -> bool:
        """Whether the job has to end."""
        return self.reason is not None

    def check(self) -> None:
        """Raise the reason if the job has to end."""
        reason = self.reason
        if reason is not None:
            raise reason

    def wait(self, seconds: float) -> bool:
        """Sleep at most `seconds`; return at once, with True, when the job has to end."""
        until = self._clock() + seconds
        with self._changed:
            while self.reason is None:
                left = min(until, self._lease_until, self._run_until) - self._clock()
                if left <= 0 and self._clock() >= until:
                    return False
                self._changed.wait(max(left, 0.0))
        return True
