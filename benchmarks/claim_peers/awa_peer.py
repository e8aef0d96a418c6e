"""awa-pg: its queue-storage engine and Rust dispatcher, a Python handler, 4 workers a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from claim_peers import About, Count, Send, Started

ABOUT = About(
    name="awa-pg",
    module="awa",
    requirement="awa-pg>=0.6.9",
    settings='start([("bench", 4)]) as its quick start, NOTIFY, poll 0.2 s (defaults)',
    jobs_at_once="4",
    latency_phase_seconds=0.2,
    fence="yes, for its own rows: run_lease; the job's writes are not fenced",
    renewal="heartbeat a job, every 30 s",
    tenant_limits="concurrency and rate a queue, not per tenant",
    transactional_enqueue="yes: awa.bridge",
    crash_recovery="by an elected leader's rescue: heartbeat silent for about 90 s, looked at "
    "every 30 s; a deadline of 5 min an attempt",
)

_QUEUE = "bench"


@dataclass
class Bench:
    """The arguments of a job; its kind is the name of this class."""

    n: int


def _with_host(url: str) -> str:
    """awa's client wants a host before the path, though `?host=` names a socket's folder."""
    return url.replace("@/", "@localhost/")


def _client(url: str) -> Any:
    return import_module("awa").Client(_with_host(url))


def prepare(url: str) -> None:
    with _client(url) as client:
        client.migrate()
        client.install_queue_storage()


def fill(url: str, jobs: int) -> None:
    with _client(url) as client:
        client.enqueue_many_copy([Bench(n) for n in range(jobs)], queue=_QUEUE)


@contextmanager
def sender(url: str) -> Generator[Send]:
    with _client(url) as client:
        yield lambda n: client.insert(Bench(n), queue=_QUEUE)


@contextmanager
def counter(url: str) -> Generator[Count]:
    with _client(url) as client:
        yield lambda: sum(stat.total_queued + stat.running for stat in client.queue_stats())


def work(url: str, started: Started) -> None:
    async def handle(job: Any) -> None:
        started(job.args.n)

    async def serve() -> None:
        client = import_module("awa").AsyncClient(_with_host(url))
        client.task(Bench, queue=_QUEUE)(handle)
        await client.start([(_QUEUE, 4)])
        await asyncio.Event().wait()

    asyncio.run(serve())
