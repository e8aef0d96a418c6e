"""The worker: one process, one job at a time, one loop (rules L10, L15 and L17).

`while running: poll(); wait`. More throughput is more processes. SIGTERM or SIGINT ends the job
in hand with `ShuttingDown`, gives its lease back at once and leaves; the next worker starts on it
within one poll. A second signal, or whatever has not ended within the grace, ends the process then
and there; the lease is given back first if the database answers within a second. A third signal
does not wait for that.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

import psycopg

from leasequeue import lease as leases
from leasequeue import workers
from leasequeue.abort import AbortSignal
from leasequeue.backoff import reconnect_delay
from leasequeue.errors import Partial, ShuttingDown
from leasequeue.keeper import Keeper
from leasequeue.lease import Lease
from leasequeue.outage import is_outage
from leasequeue.poll import Polled, Stage, poll
from leasequeue.settle import LOST, Done, Ending, Settled, settle

Connection = psycopg.Connection[Any]
Work = Callable[[AbortSignal], "Done | Settled | Partial | None"]

log = logging.getLogger("leasequeue")

POLL_SECONDS = 2.0
GRACE_SECONDS = 8.0
LAST_WORDS_SECONDS = 1.0
LOG_SECONDS = 1.0


class Worker:
    """Polls its stages until it is told to stop.

    `connect` opens a connection in autocommit mode for the keeper; `connection` lends one from
    the worker's pool. `stages` is set afterwards: a stage that works on jobs calls `perform`.
    `forced_exit_code` is the process's when the grace is over and it leaves by force.
    `after_outage` is called after a poll that failed, before the next. `clock` is for tests alone:
    while it answers None the database's own now() counts (rule L3).
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        connection: Callable[[], AbstractContextManager[Connection]],
        *,
        name: str | None = None,
        version: str = "",
        poll_seconds: float = POLL_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        forced_exit_code: int = 0,
        after_outage: Callable[[], None] = lambda: None,
        clock: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        self.name = name or workers.worker_id()
        self.stages: Sequence[Stage] = ()
        self._connect = connect
        self._connection = connection
        self._poll_seconds = poll_seconds
        self._grace_seconds = grace_seconds
        self._forced_exit_code = forced_exit_code
        self._after_outage = after_outage
        self.clock = clock
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._left = threading.Event()
        self._left.set()
        self._job: tuple[Lease, AbortSignal] | None = None
        self._logged_at = -LOG_SECONDS
        self._unlogged = 0
        self.keeper = Keeper(
            connect,
            self.name,
            version=version,
            wake=self._wake.set,
            on_error=lambda error: self.report("keeper", error),
        )

    @property
    def stopping(self) -> bool:
        """Whether this worker has been told to stop."""
        return self._stopping.is_set()

    # The loop

    def run(self, *, once: bool = False, idle: Callable[[], bool] | None = None) -> None:
        """Poll until stopped; `once`: one poll; `idle`: until it answers True after a poll.

        Stages that fail are logged, about a line a second, and tried again.
        """
        self._left.clear()
        try:
            with self.keeper:
                self._loop(once, idle)
        finally:
            self._left.set()

    def _loop(self, once: bool, idle: Callable[[], bool] | None) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._wake.clear()
            polled = self.poll()
            failures = failures + 1 if polled.errors else 0
            if once or (not polled.errors and not polled.done and self._is_idle(idle)):
                return
            if failures:
                self._after_outage()
                self._stopping.wait(reconnect_delay(failures))
            elif not polled.done:
                self._wake.wait(self._poll_seconds)

    def poll(self) -> Polled:
        """One walk through the stages; what failed is logged."""
        polled = poll(self.stages, self._stopping.is_set)
        for name, error in polled.errors.items():
            self.report(name, error)
        return polled

    def _is_idle(self, idle: Callable[[], bool] | None) -> bool:
        if idle is None:
            return False
        try:
            return idle()
        except psycopg.Error as error:
            self.report("idle", error)
            return False

    def report(self, where: str, error: Exception) -> None:
        """Log an error, at most about once a second while they keep coming."""
        now = time.monotonic()
        if now - self._logged_at < LOG_SECONDS:
            self._unlogged += 1
            return
        more, self._unlogged, self._logged_at = self._unlogged, 0, now
        suffix = f" (and {more} more like it)" if more else ""
        if is_outage(error):
            first_line = str(error).strip().partition("\n")[0]
            log.warning("%s: the database is away: %s%s", where, first_line, suffix)
        else:
            log.error("%s failed: %r%s", where, error, suffix, exc_info=error)

    # A job

    def perform(self, lease: Lease, work: Work) -> str:
        """Run `work` under `lease`, inline, and settle what comes of it.

        Returns the row's status afterwards, or `settle.LOST`. While the database is away the
        ending is kept and written when it is back, for as long as the lease lasts.
        """
        abort = AbortSignal(
            lease_seconds=lease.claimed_at + lease.seconds - time.monotonic(),
            timeout_seconds=lease.row.get("timeout_seconds"),
        )
        self._job = (lease, abort)
        if self._stopping.is_set():
            abort.set(ShuttingDown("the worker is stopping"))
        try:
            with self.keeper.keep(lease, abort):
                ending: Ending = self._attempt(work, abort)
                status = self._settle(lease, abort, ending)
        except (KeyboardInterrupt, SystemExit):
            # Whoever runs a worker without `signals` may still interrupt it.
            self._settle(lease, abort, ShuttingDown("the worker was interrupted"))
            raise
        finally:
            self._job = None
        log.info("%s %s attempt %s: %s", lease.table.table, lease.id, lease.attempt, status)
        return status

    def _attempt(self, work: Work, abort: AbortSignal) -> Ending:
        try:
            abort.check()
            return work(abort) or Done()
        except Exception as error:  # noqa: BLE001 - whatever a job raises is its ending
            # An outage is often how a lost lease or a shutdown shows first.
            return abort.reason or error

    def _settle(self, lease: Lease, abort: AbortSignal, ending: Ending) -> str:
        if isinstance(ending, Exception):
            log.debug("attempt ended", exc_info=ending)
        tries = 0
        while True:
            try:
                with self._connection() as conn:
                    return settle(conn, lease, ending, now=self.clock())
            except Exception as error:
                # Lending a connection may fail in the lender's own way, and say so.
                if not is_outage(error) and not is_outage(error.__cause__):
                    raise
                self.report("settle", error)
                tries += 1
                self._after_outage()
                if abort.lease_is_over() or self._stopping.is_set():
                    return LOST
                self._stopping.wait(reconnect_delay(tries))

    # Stopping

    def stop(self) -> None:
        """Stop after the stage in hand; the job in hand ends with `ShuttingDown`."""
        first = not self._stopping.is_set()
        self._stopping.set()
        self._wake.set()
        job = self._job
        if job is not None:
            job[1].set(ShuttingDown("the worker is stopping"))
        if first:
            threading.Thread(target=self._watch_the_leaving, name="grace", daemon=True).start()

    def _watch_the_leaving(self) -> None:
        """End the process when the loop has not ended by itself, whatever it is stuck in."""
        if not self._left.wait(self._grace_seconds):
            log.warning("not done within %s s: leaving", self._grace_seconds)
            self._leave(self._forced_exit_code)

    def _leave(self, code: int) -> None:
        """End the process, with the lease given back if the database answers in time."""
        words = threading.Thread(target=self._give_back, name="give back", daemon=True)
        words.start()
        words.join(LAST_WORDS_SECONDS)
        os._exit(code)

    def _give_back(self) -> None:
        job = self._job
        try:
            with self._connect() as conn:
                if job is not None:
                    leases.release(conn, job[0], error_code="shutting_down")
                workers.deregister(conn, self.name)
        except Exception as error:  # noqa: BLE001 - the process ends in any case
            log.warning("the lease was not given back: %s", error)

    @contextmanager
    def signals(self) -> Generator[None]:
        """Stop on SIGTERM and SIGINT while the block runs; a second one ends the process.

        Only in the main thread. The signals are read by a thread of their own, so they are heard
        even while the job is deep in a library's C code, where Python would not look at them.
        """
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = {number: signal.signal(number, _heard) for number in _STOPPING_SIGNALS}
        fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=[reader], name="signals", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()

    def _hear(self, reader: socket.socket) -> None:
        """First signal: stop. Second: leave, with a word to the database. Third: just leave."""
        heard = 0
        with reader:
            while number := reader.recv(1):
                if number[0] not in _STOPPING_SIGNALS:
                    continue
                heard += 1
                if heard == 1:
                    self.stop()
                elif heard == 2:
                    code = 128 + number[0]
                    threading.Thread(target=self._leave, args=[code], daemon=True).start()
                else:
                    os._exit(128 + number[0])


_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _heard(number: int, frame: FrameType | None) -> None:
    """Nothing: the number has been written to the thread that listens."""
