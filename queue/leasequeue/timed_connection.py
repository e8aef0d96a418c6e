"""A connection that gives up on a server that says nothing, as JDBC's socketTimeout does.

The kernel notices a dead machine and a cut cable. It does not notice a balancer that has lost its
server and keeps its clients, or a pooler that hangs: what we send is acknowledged and never
answered (case Q18). A job that waits there would be renewed by its keeper, whose connection is
another one, for ever.

A statement that takes long is silent, too. So before the connection breaks, the server is asked,
over another one, whether the session is at work. One that waits for a lock is not: the lock may be
that of a session which lost its client, and whoever waits for it has to get on. Behind a pooler
nobody can tell, since the session's number is not the client's: there silence alone decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, LiteralString, NoReturn, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.rows import TupleRow

T = TypeVar("T")

READ_TIMEOUT_MIN = 5.0


def read_timeout(lease_seconds: float) -> float:
    """How long a worker with such a lease waits for a word, in seconds: half of it, at least 5."""
    return max(READ_TIMEOUT_MIN, lease_seconds / 2)


class TimedConnection(psycopg.Connection[TupleRow]):
    """Breaks, with OperationalError, when the server has said nothing for `read_timeout` seconds.

    Every wait of psycopg for the server goes through `wait`: statements, COPY, commits. `ask` opens
    the connection over which the server may say that it is at work; without it, it never is. Not
    for a connection that only listens: to be silent is its work.
    """

    read_timeout: float = math.inf
    ask: Callable[[], psycopg.Connection[Any]] | None = None

    @contextmanager
    def waiting(self, seconds: float) -> Generator[None]:
        """Wait this long for a word while the block runs."""
        before, self.read_timeout = self.read_timeout, seconds
        try:
            yield
        finally:
            self.read_timeout = before

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Do what psycopg does, and stop waiting when the server is silent."""
        return super().wait(self._unless_silent(gen), *args, **kwargs)

    def _unless_silent(self, gen: PQGen[T]) -> PQGen[T]:
        """`gen`, which is told ten times a second when nothing is ready, until it is too long."""
        heard_at = time.monotonic()
        try:
            asked = next(gen)
            while True:
                ready = yield asked
                if ready:
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at >= self.read_timeout:
                    if not self._server_is_at_work():
                        # Its answer may have come while it was asked.
                        ready = yield asked
                        if not ready:
                            self._break()
                    heard_at = time.monotonic()
                asked = gen.send(ready)
        except StopIteration as done:
            return done.value

    def _break(self) -> NoReturn:
        """Whatever becomes of the session there, nobody here may go on with it."""
        self.pgconn.finish()
        raise psycopg.OperationalError(f"the server has said nothing for {self.read_timeout:g} s")

    def _server_is_at_work(self) -> bool:
        """What the server says; where it cannot be asked, silence decides."""
        if self.ask is None:
            return False
        try:
            with self.ask() as conn:
                return conn.execute(_AT_WORK, {"pid": self.pgconn.backend_pid}).rowcount > 0
        except Exception:  # noqa: BLE001 - it is whoever opens the connection who raises
            return False
        except BaseException:
            self.pgconn.finish()
            raise


_AT_WORK: LiteralString = """
    select 1
      from pg_stat_activity
     where pid = %(pid)s
       and datname = current_database()
       and usename = session_user
       and state = 'active'
       and coalesce(wait_event_type, '') not in ('Client', 'Lock')
"""
