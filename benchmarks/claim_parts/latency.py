"""From the call that enqueues to the first line of the handler, while a worker is idle.

One job at a time, at random moments, so that no phase of a poll is favoured. Both ends are the
machine's monotonic clock, which all of its processes share. The enqueue's own commit is part of
the figure.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from claim_peers import Peer, leasequeue_peer, load

from claim_parts.plan import Plan, Result, milliseconds
from claim_parts.server import Server

SPAWN = multiprocessing.get_context("spawn")
ANSWER_SECONDS = 60.0
PAUSE_SECONDS = 0.1

Reports = Any
"""A queue of (number, when its handler began by the monotonic clock)."""


def measure_latency(server: Server, plan: Plan, say: Callable[[str], None]) -> Result:
    """leasequeue's own worker, with notifications and without."""
    url = server.database("latency")
    leasequeue_peer.prepare(url)
    results: Result = {}
    for mode, function, sent, phase in (
        ("notify", "work", plan.sent_notified, PAUSE_SECONDS),
        ("poll", "work_polling", plan.sent_polled, leasequeue_peer.POLL_SECONDS),
    ):
        say(f"latency: {mode}, {sent} jobs")
        with working(url, "leasequeue_peer", 1, function=function) as reports:
            seconds = send_one_by_one(leasequeue_peer, url, reports, sent, phase)
        results[mode] = {"sent": sent, **milliseconds(seconds)}
    server.drop(url)
    return {"poll_seconds": leasequeue_peer.POLL_SECONDS, "enqueue_to_start": results}


@contextmanager
def working(url: str, peer: str, processes: int, *, function: str = "work") -> Generator[Reports]:
    """So many worker processes of a peer, started together, killed at the end of the block."""
    reports = SPAWN.Queue()
    ready = SPAWN.Barrier(processes)
    started = [
        SPAWN.Process(target=_be_a_worker, args=(peer, function, url, reports, ready), daemon=True)
        for _ in range(processes)
    ]
    for process in started:
        process.start()
    try:
        yield reports
    finally:
        for process in started:
            _end(process)


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _be_a_worker(peer: str, function: str, url: str, reports: Reports, ready: Any) -> None:
    module = load(peer)

    def started(number: int) -> None:
        reports.put((number, time.monotonic()))

    ready.wait()
    getattr(module, function)(url, started)


def send_one_by_one(
    peer: Peer, url: str, reports: Reports, count: int, phase_seconds: float
) -> list[float]:
    """Enqueue one job at a time and wait for its handler to begin: seconds of each.

    The first is not counted: it waits for the worker to come up.
    """
    chance = random.Random(7)
    seconds: list[float] = []
    with peer.sender(url) as send:
        for number in range(count + 1):
            sent_at = time.monotonic()
            send(number)
            began_at = _await(reports, number)
            if number > 0:
                seconds.append(began_at - sent_at)
            time.sleep(PAUSE_SECONDS + chance.uniform(0.0, phase_seconds))
    return seconds


def _await(reports: Reports, number: int) -> float:
    until = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            reported, began_at = reports.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(
                f"job {number} did not start within {ANSWER_SECONDS:.0f} s"
            ) from None
        if reported == number:
            return began_at
