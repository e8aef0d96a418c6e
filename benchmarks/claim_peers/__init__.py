"""The queues that `benchmarks/claim.py` measures side by side: one small module each.

A module here is a `Peer`: it knows how its library is set up, fed and served, through that
library's public API and in the settings its own documentation recommends. The driver knows only
this contract. A library is imported when a function of its module is called, never before, so the
benchmark runs with any of them missing.

Every handler does the same nothing: it calls `started(n)` with the number that it was enqueued
with. What is measured therefore is the library, its client, its worker and the server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, LiteralString, Protocol, cast

import psycopg

NAMES = (
    "leasequeue_peer",
    "procrastinate_peer",
    "pgqueuer_peer",
    "awa_peer",
    "dbos_peer",
)

Started = Callable[[int], None]
"""Called by a handler, first thing, with the number of its job."""

Send = Callable[[int], None]
"""Enqueue the job of this number and return once it is committed."""

Count = Callable[[], int]
"""How many jobs are queued or running now."""


@dataclass(frozen=True, slots=True)
class About:
    """What a reader has to know beside the figures.

    `jobs_at_once` is how many jobs one process runs at once in these settings. Latency is measured
    at random moments within `latency_phase_seconds`: the poll's interval, where nothing wakes the
    worker. The last five fields are what the queue guarantees, each in a few words.
    """

    name: str
    module: str
    requirement: str
    settings: str
    jobs_at_once: str
    latency_phase_seconds: float
    fence: str
    renewal: str
    tenant_limits: str
    transactional_enqueue: str
    crash_recovery: str


class Peer(Protocol):
    """A module of this package."""

    ABOUT: About

    def prepare(self, url: str) -> None:
        """Create the schema in an empty database."""
        ...

    def fill(self, url: str, jobs: int) -> None:
        """Enqueue so many jobs, numbered from 0, before any worker is there."""
        ...

    def sender(self, url: str) -> AbstractContextManager[Send]:
        """A producer that is connected and enqueues one job a call."""
        ...

    def counter(self, url: str) -> AbstractContextManager[Count]:
        """An observer of how many jobs are queued or running."""
        ...

    def work(self, url: str, started: Started) -> None:
        """Be one worker process; the driver ends it with a signal."""
        ...


@contextmanager
def counting(url: str, query: LiteralString) -> Generator[Count]:
    """A counter that asks the library's own table."""
    with psycopg.connect(url, autocommit=True) as conn:

        def count() -> int:
            row = cast(tuple[Any, ...], conn.execute(query).fetchone())
            return int(row[0])

        yield count


def load(name: str) -> Peer:
    """The peer's module; its library need not be installed for that."""
    return cast(Peer, import_module(f"claim_peers.{name}"))


def installed(peer: Peer) -> bool:
    """Whether the peer's library can be imported here."""
    return find_spec(peer.ABOUT.module) is not None
