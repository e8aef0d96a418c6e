"""procrastinate, with its defaults and the periodic task that its guide gives for stalled jobs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, LiteralString

from claim_peers import About, Count, Send, Started, counting

ABOUT = About(
    name="procrastinate",
    module="procrastinate",
    requirement="procrastinate>=3.10",
    settings="PsycopgConnector, concurrency 1, listen_notify, poll 5 s (all defaults)",
    jobs_at_once="1",
    latency_phase_seconds=0.1,
    fence="no: a job is finished by its id while it is todo or doing",
    renewal="no lease; a heartbeat a worker, every 10 s",
    tenant_limits="one at a time per lock (and one queued per queueing_lock)",
    transactional_enqueue="yes: connection=",
    crash_recovery="by a periodic task of the user's own: guide: every 10 min, silent for 30 s",
)
_PENDING: LiteralString = (
    "select count(*) from procrastinate_jobs where status in ('todo', 'doing')"
)

_TASK = "bench"


def _open_app(url: str) -> Any:
    library: Any = import_module("procrastinate")
    return library.App(connector=library.PsycopgConnector(conninfo=url))


def _add_retry_of_stalled(app: Any) -> None:
    async def retry_stalled(context: Any, timestamp: int) -> None:
        for job in await app.job_manager.get_stalled_jobs():
            await app.job_manager.retry_job(job)

    task = app.task(retry_stalled, queueing_lock="retry_stalled", pass_context=True)
    app.periodic(cron="*/10 * * * *")(task)


def prepare(url: str) -> None:
    with _open_app(url).open() as app:
        app.schema_manager.apply_schema()


def fill(url: str, jobs: int) -> None:
    with _open_app(url).open() as app:
        app.configure_task(_TASK).batch_defer(*({"n": n} for n in range(jobs)))


@contextmanager
def sender(url: str) -> Generator[Send]:
    with _open_app(url).open() as app:
        deferrer = app.configure_task(_TASK)
        yield lambda n: deferrer.defer(n=n)


def counter(url: str) -> AbstractContextManager[Count]:
    return counting(url, _PENDING)


def work(url: str, started: Started) -> None:
    app = _open_app(url)

    async def handle(n: int) -> None:
        started(n)

    app.task(handle, name=_TASK)
    _add_retry_of_stalled(app)
    app.run_worker()
