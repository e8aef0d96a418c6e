"""Leased background jobs in Postgres: claim, renew, fence, release, requeue, seal.

Knows nothing of documents; planroom is one of its users. Start with README.md beside this file.
"""

from leasequeue.abort import AbortSignal
from leasequeue.backoff import reconnect_delay, retry_delay
from leasequeue.connections import add_connection, list_connections, mark_purged
from leasequeue.crashpoint import crash_point
from leasequeue.errors import (
    Cancelled,
    JobFailed,
    LeaseLost,
    LeaseQueueError,
    MigrationError,
    Partial,
    Retryable,
    ShuttingDown,
    TimedOut,
)
from leasequeue.evict import evict
from leasequeue.keeper import Keeper
from leasequeue.lease import (
    Ended,
    Lease,
    LeaseTable,
    check_control,
    checkpoint,
    claim,
    expire,
    release,
    renew,
    request_cancel,
    requeue,
    seal,
)
from leasequeue.maintenance import Pause, pause, paused, resume
from leasequeue.migrate import (
    Migration,
    apply_migrations,
    engine_migrations,
    pending_migrations,
    read_migrations,
)
from leasequeue.outage import is_outage
from leasequeue.poll import Polled, Stage, poll
from leasequeue.runs import (
    RUNS,
    disconnect,
    enqueue,
    list_runs,
    promote,
    record_result,
    request_purge,
    run_history,
)
from leasequeue.serve import connect, migrate_engine, serve
from leasequeue.settle import LOST, Done, Settled, sentence, settle
from leasequeue.stages import Run, engine_stages, evict_stage, seldom
from leasequeue.throttle import due
from leasequeue.timed_connection import TimedConnection, read_timeout
from leasequeue.worker import Worker
from leasequeue.workers import deregister, heartbeat, list_workers, register, worker_id
from leasequeue.workspaces import ensure_workspace, lock_workspace

__all__ = [
    "LOST",
    "RUNS",
    "AbortSignal",
    "Cancelled",
    "Done",
    "Ended",
    "JobFailed",
    "Keeper",
    "Lease",
    "LeaseLost",
    "LeaseQueueError",
    "LeaseTable",
    "Migration",
    "MigrationError",
    "Partial",
    "Pause",
    "Polled",
    "Retryable",
    "Run",
    "Settled",
    "ShuttingDown",
    "Stage",
    "TimedConnection",
    "TimedOut",
    "Worker",
    "add_connection",
    "apply_migrations",
    "check_control",
    "checkpoint",
    "claim",
    "connect",
    "crash_point",
    "deregister",
    "disconnect",
    "due",
    "engine_migrations",
    "engine_stages",
    "enqueue",
    "ensure_workspace",
    "evict",
    "evict_stage",
    "expire",
    "heartbeat",
    "is_outage",
    "list_connections",
    "list_runs",
    "list_workers",
    "lock_workspace",
    "mark_purged",
    "migrate_engine",
    "pause",
    "paused",
    "pending_migrations",
    "poll",
    "promote",
    "read_migrations",
    "read_timeout",
    "reconnect_delay",
    "record_result",
    "register",
    "release",
    "renew",
    "request_cancel",
    "request_purge",
    "requeue",
    "resume",
    "retry_delay",
    "run_history",
    "seal",
    "seldom",
    "sentence",
    "serve",
    "settle",
    "worker_id",
]
