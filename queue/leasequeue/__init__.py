"""Leased background jobs in Postgres: claim, renew, fence, release, requeue, seal."""

from leasequeue.abort import AbortSignal
from leasequeue.backoff import reconnect_delay, retry_delay
from leasequeue.errors import (
    Cancelled,
    JobFailed,
    LeaseLost,
    LeaseQueueError,
    MigrationError,
    Retryable,
    ShuttingDown,
    TimedOut,
)

__all__ = [
    "AbortSignal",
    "Cancelled",
    "JobFailed",
    "LeaseLost",
    "LeaseQueueError",
    "MigrationError",
    "Retryable",
    "ShuttingDown",
    "TimedOut",
    "reconnect_delay",
    "retry_delay",
]
