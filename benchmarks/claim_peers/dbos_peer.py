"""DBOS Transact: a durable workflow of no steps on a queue, in its default settings."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, LiteralString

from claim_peers import About, Count, Send, Started, counting

ABOUT = About(
    name="dbos",
    module="dbos",
    requirement="dbos>=3.4",
    settings="register_queue, poll 1 s, no concurrency limit (defaults), no Conductor",
    jobs_at_once="as many as its thread pool",
    latency_phase_seconds=1.0,
    fence="yes, for a workflow's outcome: owner_xid; a step may run twice",
    renewal="no lease; Conductor watches executors",
    tenant_limits="yes: partition_concurrency, partition_limiter per queue_partition_key",
    transactional_enqueue="yes: enqueue_in_transaction, in DBOS's own database",
    crash_recovery="by a restart of the same executor_id, or by Conductor (a service) after 60 s",
)
_PENDING: LiteralString = """
    select count(*) from dbos.workflow_status where status in ('ENQUEUED', 'PENDING', 'DELAYED')
"""

_QUEUE = "bench"
_WORKFLOW = "bench"
_VERSION = "bench"


def _launch(url: str, executor: str) -> Any:
    library: Any = import_module("dbos")
    return library.DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "application_version": _VERSION,
            "executor_id": executor,
            "log_level": "ERROR",
        }
    )


def _client(url: str) -> Any:
    return import_module("dbos").DBOSClient(system_database_url=url, application_name="bench")


def _options() -> dict[str, str]:
    return {"workflow_name": _WORKFLOW, "queue_name": _QUEUE, "app_version": _VERSION}


def prepare(url: str) -> None:
    library: Any = import_module("dbos")
    _launch(url, "prepare")
    library.DBOS.launch()
    library.DBOS.register_queue(_QUEUE)
    library.DBOS.destroy()


def fill(url: str, jobs: int) -> None:
    engine = import_module("sqlalchemy").create_engine(
        url.replace("postgresql://", "postgresql+psycopg://")
    )
    client = _client(url)
    with engine.begin() as conn:
        for n in range(jobs):
            client.enqueue_in_transaction(conn, _options(), n)
    client.destroy()
    engine.dispose()


@contextmanager
def sender(url: str) -> Generator[Send]:
    client = _client(url)
    try:
        yield lambda n: client.enqueue(_options(), n)
    finally:
        client.destroy()


def counter(url: str) -> AbstractContextManager[Count]:
    return counting(url, _PENDING)


def work(url: str, started: Started) -> None:
    library: Any = import_module("dbos")
    _launch(url, f"executor-{threading.get_native_id()}")

    def handle(n: int) -> None:
        started(n)

    library.DBOS.workflow(name=_WORKFLOW)(handle)
    library.DBOS.launch()
    library.DBOS.register_queue(_QUEUE)
    threading.Event().wait()
