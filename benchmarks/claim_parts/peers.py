"""Other queues on the same server: empty jobs a second through their own workers, and latency.

None of the peers offers a claim alone in its public API that could be timed fairly, so what is
measured is the round trip that all of them have: jobs are enqueued first, then worker processes are
started together, and the time runs from the first handler's first line until nothing is queued or
running any more. Every worker process is one that a user would start, in recommended settings; how
many jobs it runs at once differs and stands beside the figure, as does what each guarantees.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata

from claim_peers import NAMES, Count, Peer, installed, load

from claim_parts.latency import Reports, send_one_by_one, working
from claim_parts.plan import Plan, Result, milliseconds
from claim_parts.server import Server

LOOK_SECONDS = 0.02
START_SECONDS = 60.0
DRAIN_SECONDS = 600.0


def measure_peers(
    server: Server, plan: Plan, say: Callable[[str], None], names: Sequence[str] = NAMES
) -> list[Result]:
    """Every peer that is installed; one that fails is reported with its error."""
    return [_measure_peer(server, plan, say, name) for name in names]


def _measure_peer(server: Server, plan: Plan, say: Callable[[str], None], name: str) -> Result:
    peer = load(name)
    result: Result = {**asdict(peer.ABOUT), "installed": installed(peer)}
    if not result["installed"]:
        result["install"] = f"pip install '{peer.ABOUT.requirement}'"
        return result
    result["version"] = _version(peer)
    try:
        drained = {
            str(workers): _drain(server, plan, say, name, workers) for workers in plan.peer_workers
        }
        result["jobs_per_second"] = {workers: rates[0] for workers, rates in drained.items()}
        result["starts_per_second"] = {workers: rates[1] for workers, rates in drained.items()}
        say(f"peers: {peer.ABOUT.name}, latency of {plan.peer_sent} jobs")
        result["enqueue_to_start"] = _latency(server, plan, name)
    except Exception as error:  # noqa: BLE001 - one peer's trouble must not hide the others
        result["error"] = f"{type(error).__name__}: {error}"
    return result


def _version(peer: Peer) -> str:
    distribution = peer.ABOUT.requirement.partition(">")[0].partition("[")[0]
    return metadata.version(distribution)


def _drain(
    server: Server, plan: Plan, say: Callable[[str], None], name: str, workers: int
) -> tuple[float, float]:
    """Jobs a second of so many worker processes over a backlog: settled, and merely started."""
    peer = load(name)
    say(f"peers: {peer.ABOUT.name}, {workers} process(es), {plan.peer_jobs} jobs")
    url = server.database(name)
    peer.prepare(url)
    peer.fill(url, plan.peer_jobs)
    with peer.counter(url) as count, working(url, name, workers) as reports:
        _, first_at = reports.get(timeout=START_SECONDS)
        last_at, ended_at = _await_drained(count, reports, plan.peer_jobs)
    server.drop(url)
    started = (plan.peer_jobs - 1) / (last_at - first_at)
    return round(plan.peer_jobs / (ended_at - first_at), 1), round(started, 1)


def _await_drained(count: Count, reports: Reports, jobs: int) -> tuple[float, float]:
    """When the last job began, and when nothing was queued or running any more."""
    until = time.monotonic() + DRAIN_SECONDS
    last_at = 0.0
    begun = 1
    while begun < jobs:
        try:
            _, at = reports.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            message = f"{begun} of {jobs} jobs began within {DRAIN_SECONDS:.0f} s"
            raise TimeoutError(message) from None
        last_at = max(last_at, at)
        begun += 1
    while count() > 0:
        if time.monotonic() > until:
            raise TimeoutError(f"jobs are still running after {DRAIN_SECONDS:.0f} s")
        time.sleep(LOOK_SECONDS)
    return last_at, time.monotonic()


def _latency(server: Server, plan: Plan, name: str) -> Result:
    peer = load(name)
    url = server.database(name)
    peer.prepare(url)
    with working(url, name, 1) as reports:
        seconds = send_one_by_one(
            peer, url, reports, plan.peer_sent, peer.ABOUT.latency_phase_seconds
        )
    server.drop(url)
    return {"sent": plan.peer_sent, **milliseconds(seconds)}
