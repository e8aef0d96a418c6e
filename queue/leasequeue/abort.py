"""The one signal that ends a job early (rule L6).

A lost lease, a cancel, a timeout and a shutdown all set the same `AbortSignal`, each with the
error to raise. The first reason wins, except that a lost lease overrides every other: a worker
that may not write must not try to, whatever else it was asked.
"""

from __future__ import annotations

import threading

from leasequeue.errors import LeaseLost, LeaseQueueError


class AbortSignal:
    """A thread-safe flag with a reason. The work listens to this and to nothing else."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._reason: LeaseQueueError | None = None

    @property
    def reason(self) -> LeaseQueueError | None:
        """The error that ended the job, or None while it may go on."""
        return self._reason

    def is_set(self) -> bool:
        """Whether the job has to end."""
        return self._event.is_set()

    def set(self, reason: LeaseQueueError) -> None:
        """End the job for `reason`; later reasons change nothing, but for a lost lease."""
        with self._lock:
            if self._reason is None or isinstance(reason, LeaseLost):
                self._reason = reason
        self._event.set()

    def check(self) -> None:
        """Raise the reason if the job has to end."""
        if self._reason is not None:
            raise self._reason

    def wait(self, seconds: float) -> bool:
        """Sleep at most `seconds`; return at once, with True, when the job has to end."""
        return self._event.wait(seconds)
