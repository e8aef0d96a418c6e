"""`planroom worker --processes N` as a user starts it, its workers and itself killed at random.

The supervisor is the product's own, and replaces the dead; the promise is the same as for workers
that the tests start by themselves.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.fleet import (
    ALIVE_SECONDS,
    BATCH_UNITS,
    SEED,
    Calm,
    Fleet,
    Process,
    await_true,
    is_alive,
    make_document,
)

WORKERS = 3
KILLS = 8
SUPERVISOR_AFTER = 2
LATENCY_SECONDS = 0.4
PAUSE_SECONDS_MAX = 0.6


@dataclass(frozen=True, slots=True)
class Child:
    """A worker of a supervisor, who alone can wait for it."""

    pid: int

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        await_true(lambda: not is_alive(self.pid), f"{self.pid} did not die")


def supervise(fleet: Fleet) -> Process:
    """Start a supervisor whose workers end when nothing is left to do."""
    options = ["--processes", str(WORKERS), "--until-idle", "--json"]
    return fleet.start([sys.executable, "-m", "planroom", "worker", *options], fleet.environment())


def children(supervisor: Process) -> list[Child]:
    """Its workers at this moment."""
    pids = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
    return [child for child in map(Child, map(int, pids)) if is_alive(child.pid)]


def await_work(fleet: Fleet, supervisor: Process) -> None:
    """Return when one of its workers holds a document, or nothing is left to do."""

    def is_the_time() -> bool:
        assert supervisor.is_alive or fleet.is_over(), supervisor.said()
        return fleet.is_over() or fleet.is_at_work(children(supervisor))

    await_true(is_the_time, "nobody works", ALIVE_SECONDS)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
def test_a_supervisor_and_its_workers_are_killed_and_nothing_changes(
    fleet: Fleet, tmp_path: Path, calm_run: Callable[[Path], Calm]
) -> None:
    print(f"\nseed {SEED}")
    rng = random.Random(SEED)
    documents = [
        make_document(tmp_path / f"set-{number}.pdf", pages=20, lines=25, seed=number)
        for number in range(WORKERS)
    ]
    calm = [calm_run(document) for document in documents]
    fleet.take_in(*documents)
    fleet.server.latency_seconds = LATENCY_SECONDS
    supervisor, supervisors = supervise(fleet), 1
    for number in range(KILLS):
        await_work(fleet, supervisor)
        threading.Event().wait(rng.uniform(0.0, PAUSE_SECONDS_MAX))
        if fleet.is_over():
            break
        fleet.kill_one(children(supervisor), rng)
        fleet.check_invariants()
        if number == SUPERVISOR_AFTER:
            orphans = children(supervisor)
            supervisor.kill()
            await_true(
                lambda: not any(is_alive(orphan.pid) for orphan in orphans),  # noqa: B023 - not kept
                "they outlived their supervisor",
                ALIVE_SECONDS,
            )
            assert not fleet.is_over()
            supervisor = supervise(fleet)
            supervisors += 1
    fleet.server.latency_seconds = 0.0
    assert supervisor.wait() == 0, supervisor.said()

    assert supervisors == 2, "the work was over before the supervisor was killed"
    fleet.check_invariants()
    assert fleet.outcomes() == {
        document.name: one.outcome for document, one in zip(documents, calm, strict=True)
    }
    # A worker that stops in order leaves the batch in its hands undone, too.
    stops = fleet.count_expired() + WORKERS
    assert fleet.server.embedded <= sum(one.embedded for one in calm) + stops * BATCH_UNITS
    print(f"{fleet.count_expired()} kills hit a worker at work")
