"""pgqueuer: asyncpg, one connection for the worker, uvloop, its autovacuum settings applied."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, LiteralString

from claim_peers import About, Count, Send, Started, counting

ABOUT = About(
    name="pgqueuer",
    module="pgqueuer",
    requirement="pgqueuer[asyncpg]>=1.6",
    settings="AsyncpgDriver, batch_size 10, NOTIFY, poll 30 s (defaults), durable, pgq autovac",
    jobs_at_once="10 a batch, next batch at once",
    latency_phase_seconds=0.1,
    fence="no: a job is finished by its id",
    renewal="heartbeat a job, every 15 s",
    tenant_limits="per entrypoint across the fleet, not per tenant",
    transactional_enqueue="yes: on the caller's connection",
    crash_recovery="by the dequeue: heartbeat silent for 30 s, seen within the poll of 30 s",
)
_PENDING: LiteralString = "select count(*) from pgqueuer"

_ENTRYPOINT = "bench"


def _run(work: Coroutine[Any, Any, None]) -> None:
    import_module("uvloop").run(work)


async def _queries(url: str) -> Any:
    driver = import_module("pgqueuer.db").AsyncpgDriver(await _connect(url))
    return import_module("pgqueuer.queries").Queries(driver)


async def _connect(url: str) -> Any:
    return await import_module("asyncpg").connect(url)


def prepare(url: str) -> None:
    async def install() -> None:
        queries = await _queries(url)
        await queries.install()
        await queries.optimize_autovacuum()

    _run(install())


def fill(url: str, jobs: int) -> None:
    async def enqueue() -> None:
        queries = await _queries(url)
        payloads = [str(n).encode() for n in range(jobs)]
        await queries.enqueue([_ENTRYPOINT] * jobs, payloads, [0] * jobs)

    _run(enqueue())


@contextmanager
def sender(url: str) -> Generator[Send]:
    with asyncio.Runner(loop_factory=import_module("uvloop").new_event_loop) as runner:
        queries = runner.run(_queries(url))
        yield lambda n: runner.run(queries.enqueue(_ENTRYPOINT, str(n).encode()))


def counter(url: str) -> AbstractContextManager[Count]:
    return counting(url, _PENDING)


def work(url: str, started: Started) -> None:
    async def handle(job: Any) -> None:
        started(int(job.payload))

    async def serve() -> None:
        library: Any = import_module("pgqueuer")
        queue = library.PgQueuer.from_asyncpg_connection(await _connect(url))
        queue.entrypoint(_ENTRYPOINT)(handle)
        await queue.run()

    _run(serve())
