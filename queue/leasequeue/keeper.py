"""The keeper: the thread that keeps a worker's lease alive while its job does the work.

It has one connection of its own, which neither the job's work nor an exhausted pool can take
(rule L4), and does three things with it. It renews the lease at a third of its length. Every two
seconds it asks whether the lease is still held and whether the user cancelled (L5). Every fifteen
seconds it sends the worker's heartbeat. Between these it sleeps in LISTEN, so the worker hears of
new jobs at once where the connection carries notifications; behind a pooler in transaction mode it
merely never hears any.

What it learns goes into the job's one abort signal (L6). When the database is away it tries again,
every second at most; that the lease has run out meanwhile the signal itself knows. A connection
that is silent for a third of a lease is cut and made anew, so that a half-open one is noticed
while there is still time to renew (case Q18).

A job that has been told to end and has not, for a whole lease, is renewed no longer: whatever it
hangs in, its row goes to another worker or to its end.

The keeper is a Python thread: a handler that holds the interpreter lock for a whole lease (a long
call into a C library that never lets go of it) keeps the keeper from renewing. Do such work in a
child process, as planroom does with PDF pages.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import psycopg

from leasequeue import lease as leases
from leasequeue import workers
from leasequeue.abort import AbortSignal
from leasequeue.backoff import reconnect_delay
from leasequeue.errors import Cancelled, LeaseLost
from leasequeue.lease import Lease

Connection = psycopg.Connection[Any]

CHANNEL = "leasequeue"
CONTROL_SECONDS = 2.0
RENEWALS_PER_LEASE = 3
# Short, so that a lease taken while the thread listens is kept from its start.
LISTEN_SECONDS = 0.5
SILENCE_SECONDS = 20.0
LEAVE_SECONDS = 1.0


class Keeper:
    """Keeps one worker known and its lease renewed; a context manager around the worker's life.

    `connect` opens a connection in autocommit mode; it is called again whenever the connection
    breaks. `wake` is called when a notification arrives.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        worker: str,
        *,
        version: str = "",
        wake: Callable[[], None] = lambda: None,
        on_error: Callable[[Exception], None] = lambda error: None,
        control_seconds: float = CONTROL_SECONDS,
        heartbeat_seconds: float = workers.HEARTBEAT_SECONDS,
    ) -> None:
        self._connect = connect
        self._worker = worker
        self._version = version
        self._wake = wake
        self._on_error = on_error
        self._control_seconds = control_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._turn = threading.Condition()
        self._conn: Connection | None = None
        self._held: tuple[Lease, AbortSignal] | None = None
        self._told_to_end_at: float | None = None
        self._stopping = False
        self._listens = False
        self._errors = 0
        self._renew_at = self._control_at = self._heartbeat_at = 0.0
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._turn:
            self._stopping = True
            self._turn.notify_all()
        self._thread.join(timeout=LEAVE_SECONDS)

    @contextmanager
    def keep(self, lease: Lease, abort: AbortSignal) -> Generator[None]:
        """Renew `lease` and watch it for as long as the block runs."""
        now = time.monotonic()
        with self._turn:
            self._renew_at = now + lease.seconds / RENEWALS_PER_LEASE
            self._control_at = now + self._control_seconds
            self._heartbeat_at = now
            self._told_to_end_at = None
            self._held = (lease, abort)
            self._turn.notify_all()
        try:
            yield
        finally:
            with self._turn:
                self._held = None
                self._heartbeat_at = time.monotonic()
                self._turn.notify_all()

    def _run(self) -> None:
        while not self._stopping:
            try:
                conn = self._conn or self._open()
                self._do_what_is_due(conn)
                self._errors = 0
                self._sleep(conn)
            except Exception as error:  # noqa: BLE001 - a keeper that dies loses a lease
                self._errors += 1
                self._close()
                self._on_error(error)
                with self._turn:
                    if not self._stopping:
                        self._turn.wait(reconnect_delay(self._errors))
        self._leave()

    def _open(self) -> Connection:
        conn = self._conn = self._connect()
        with _answered_within(conn, self._patience()):
            workers.register(conn, self._worker, self._version)
            self._listens = _own_session(conn)
            if self._listens:
                conn.execute("listen leasequeue")
        # Whatever was announced while nobody listened is found by a poll.
        self._wake()
        return conn

    def _do_what_is_due(self, conn: Connection) -> None:
        now = time.monotonic()
        with self._turn:
            held = self._held
            control, renewal = now >= self._control_at, now >= self._renew_at
            beat = now >= self._heartbeat_at
        if held is not None and (control or renewal):
            lease, abort = held
            with _answered_within(conn, self._patience()):
                self._keep_lease(conn, lease, abort, renewal=renewal)
        if beat:
            working_on = None if held is None else f"{held[0].table.table} {held[0].id}"
            with _answered_within(conn, self._patience()):
                if not workers.heartbeat(conn, self._worker, working_on):
                    workers.register(conn, self._worker, self._version)
            with self._turn:
                # Unless the job has changed meanwhile, which is told at once.
                if self._held is held:
                    self._heartbeat_at = now + self._heartbeat_seconds

    def _patience(self) -> float:
        """Seconds to wait for an answer: while a lease is held, as long as between renewals."""
        with self._turn:
            held = self._held
        return SILENCE_SECONDS if held is None else held[0].seconds / RENEWALS_PER_LEASE

    def _keep_lease(
        self, conn: Connection, lease: Lease, abort: AbortSignal, *, renewal: bool
    ) -> None:
        sent_at = time.monotonic()
        try:
            if renewal and not self._given_up(lease, abort, sent_at):
                cancel = leases.renew(conn, lease)
                abort.renewed(sent_at, lease.seconds)
            else:
                cancel = leases.check_control(conn, lease)
        except LeaseLost as lost:
            # The job may have let go of its lease by itself while this query was under way.
            with self._turn:
                if self._held is not None and self._held[0] is lease:
                    abort.set(lost)
                    self._held = None
            return
        with self._turn:
            self._control_at = sent_at + self._control_seconds
            if renewal:
                self._renew_at = sent_at + lease.seconds / RENEWALS_PER_LEASE
        if cancel:
            abort.set(Cancelled("the user cancelled the job"))

    def _given_up(self, lease: Lease, abort: AbortSignal, now: float) -> bool:
        """Whether the job was told to end a whole lease ago, by what the keeper has seen."""
        if not abort.is_set():
            return False
        if self._told_to_end_at is None:
            self._told_to_end_at = now
        return now - self._told_to_end_at >= lease.seconds

    def _sleep(self, conn: Connection) -> None:
        """Wait for a notification, or until something is due."""
        with self._turn:
            if self._stopping:
                return
            if self._held is not None:
                due = min(self._heartbeat_at, self._renew_at, self._control_at)
                self._turn.wait(max(0.0, due - time.monotonic()))
                return
            seconds = min(max(0.0, self._heartbeat_at - time.monotonic()), LISTEN_SECONDS)
            if not self._listens:
                self._turn.wait(seconds)
                return
        for _ in conn.notifies(timeout=seconds, stop_after=1):
            self._wake()

    def _leave(self) -> None:
        try:
            if self._conn is not None:
                with _answered_within(self._conn, LEAVE_SECONDS):
                    workers.deregister(self._conn, self._worker)
        except psycopg.Error as error:
            self._on_error(error)
        self._close()

    def _close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


def _own_session(conn: Connection) -> bool:
    """Whether the server's session is ours; a pooler's is shared, and LISTEN would stay on it."""
    row = conn.execute("select pg_backend_pid()").fetchone()
    return row is not None and row[0] == conn.info.backend_pid


@contextmanager
def _answered_within(conn: Connection, seconds: float) -> Generator[None]:
    """Cut the connection if the block takes longer, so that whoever waits for it gets an error."""
    timer = threading.Timer(seconds, _cut, [conn])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _cut(conn: Connection) -> None:
    """End both directions of the connection's socket; the descriptor stays psycopg's to close."""
    try:
        with socket.socket(fileno=os.dup(conn.fileno())) as its_socket:
            its_socket.shutdown(socket.SHUT_RDWR)
    except (OSError, psycopg.Error):
        return
