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
from leasequeue.migrate import (
    Migration,
    apply_migrations,
    engine_migrations,
    pending_migrations,
    read_migrations,
)

__all__ = [
    "AbortSignal",
    "Cancelled",
    "JobFailed",
    "LeaseLost",
    "LeaseQueueError",
    "Migration",
    "MigrationError",
    "Retryable",
    "ShuttingDown",
    "TimedOut",
    "apply_migrations",
    "engine_migrations",
    "pending_migrations",
    "read_migrations",
    "reconnect_delay",
    "retry_delay",
]
