"""A worker is frozen past its lease, another takes over and finishes, and then the first one wakes.

Frozen is SIGSTOP: the process keeps its memory, its connections and its belief that the job is its
own. What it does after SIGCONT must come to nothing: not one row is written, deleted or even
rewritten (the snapshots hold each row with the transaction that wrote it), and it leaves the job by
itself.

Frozen inside a transaction it also keeps its locks, and nobody can take the job over before the
server ends its session for being idle (`idle_in_transaction_session_timeout`). The tests end the
session themselves so as not to wait for it; one slow test waits.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from support.embedding_server import Fault
from support.fleet import (
    ALIVE_SECONDS,
    BATCH_UNITS,
    PAGE_GROUP,
    Calm,
    Fleet,
    Process,
    await_true,
    make_document,
)

OUTSIDE = (
    "ingest.begun",
    "pages.before",
    "batch.begun",
    "batch.embedded",
    "batch.before",
    "batch.committed",
    "finish.before",
)
INSIDE = (
    "pages.written",
    "batch.fenced",
    "batch.written",
    "finish.fenced",
    "finish.tail_deleted",
    "finish.published",
    "finish.sealed",
)
QUICK = ("batch.embedded", "batch.written", "finish.before", "finish.published")


def some_slow(names: tuple[str, ...]) -> list[ParameterSet]:
    """The points, most of them for the slow suite only."""
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document of these tests."""
    return make_document(tmp_path_factory.mktemp("document") / "set.pdf")


def freeze(
    fleet: Fleet, document: Path, at: str, *, lease_seconds: float = 120.0, helped: bool = True
) -> Process:
    """A worker that has stopped itself at a crash point of this document.

    `helped` ends its session if it hangs in a transaction: in a thread of its own or, where the
    point is in the embedder's, in the thread that writes pages meanwhile.
    """
    fleet.take_in(document)
    zombie = fleet.worker(crash_at=f"{at}:STOP", lease_seconds=lease_seconds)
    zombie.wait_stopped()
    if helped:
        fleet.end_idle_transactions()
    return zombie


def finish_without(fleet: Fleet, zombie: Process) -> dict[str, list[tuple[object, ...]]]:
    """Another worker does the rest; every row as it is then."""
    another = fleet.worker()
    # Again and again, because one that is awake may renew until the other has come.
    await_true(lambda: fleet.expire_leases(zombie) == 0, "nobody took it over", ALIVE_SECONDS)
    assert another.wait() == 0, another.said()
    assert fleet.count_expired() == 1
    return fleet.snapshot()


def wake(zombie: Process) -> None:
    """Let it go on; it has to end by itself, and well: there is nothing left for it to do."""
    zombie.send(signal.SIGCONT)
    assert zombie.wait() == 0, zombie.said()


def check(fleet: Fleet, calm: Calm, before: dict[str, list[tuple[object, ...]]]) -> None:
    """Nothing changed since, and what there is is what an undisturbed run makes."""
    assert fleet.snapshot() == before
    fleet.check_invariants()
    assert fleet.outcomes() == {"set.pdf": calm.outcome}
    assert fleet.server.embedded <= calm.embedded + BATCH_UNITS
    assert sum(fleet.pages_read().values()) <= calm.pages + PAGE_GROUP


@pytest.mark.parametrize("name", some_slow(OUTSIDE))
def test_l2_a_worker_that_wakes_after_another_finished_writes_nothing(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm], name: str
) -> None:
    calm = calm_run(document)
    zombie = freeze(fleet, document, f"{name}:{1 if name.split('.')[0] in 'finish ingest' else 2}")
    before = finish_without(fleet, zombie)
    wake(zombie)
    check(fleet, calm, before)
    assert ": lost" in zombie.said()


@pytest.mark.parametrize("name", some_slow(INSIDE))
def test_l2_a_worker_that_wakes_inside_its_transaction_commits_nothing(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm], name: str
) -> None:
    calm = calm_run(document)
    zombie = freeze(fleet, document, f"{name}:{1 if name.startswith('finish') else 2}")
    before = finish_without(fleet, zombie)
    wake(zombie)
    check(fleet, calm, before)


@pytest.mark.slow
def test_a_worker_frozen_inside_its_transaction_is_put_out_of_it_by_the_server(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm]
) -> None:
    """Nobody helps: the server's own timeout frees the row, half a lease later at most."""
    calm = calm_run(document)
    zombie = freeze(fleet, document, "batch.written:2", helped=False)
    another = fleet.worker()
    await_true(
        lambda: fleet.count_idle_transactions() == 0,
        "the frozen session was never ended",
        2 * ALIVE_SECONDS,
    )
    fleet.expire_leases(zombie)
    assert another.wait() == 0, another.said()
    before = fleet.snapshot()
    wake(zombie)
    check(fleet, calm, before)


def test_d17_a_worker_whose_embedder_answers_after_the_lease_is_gone_writes_nothing(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm]
) -> None:
    """It is awake all the time, and its own keeper tells it."""
    calm = calm_run(document)
    fleet.take_in(document)
    fleet.server.fail_next(None, Fault("hang"))
    slow = fleet.worker()
    fleet.server.wait_for_requests(2)
    before = finish_without(fleet, slow)
    fleet.server.release()
    assert slow.wait() == 0, slow.said()
    check(fleet, calm, before)
    assert ": lost" in slow.said()


def test_l4_a_worker_frozen_past_its_lease_is_replaced_without_any_help(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm]
) -> None:
    """Two seconds of lease, really waited for, and a zombie that still holds its presence."""
    calm = calm_run(document)
    zombie = freeze(fleet, document, "batch.before:2", lease_seconds=2.0)
    fleet.finish()
    assert fleet.count_expired() == 1
    before = fleet.snapshot()
    wake(zombie)
    check(fleet, calm, before)


def test_q1_a_worker_of_the_same_name_is_still_another_holder(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm]
) -> None:
    """Two containers may call themselves the same: the owner is no fence, the token is."""
    calm = calm_run(document)
    fleet.take_in(document)
    zombie = fleet.worker(crash_at="batch.before:2:STOP", test_worker_name="pod:1:abc")
    zombie.wait_stopped()
    fleet.expire_leases()
    fleet.finish(test_worker_name="pod:1:abc")
    before = fleet.snapshot()
    wake(zombie)
    check(fleet, calm, before)


@pytest.mark.slow
def test_q1_a_worker_of_the_same_name_is_not_written_over_while_it_works(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm]
) -> None:
    """The row is running under the very name that the zombie had: only the token tells."""
    calm = calm_run(document)
    fleet.take_in(document)
    zombie = fleet.worker(crash_at="batch.before:2:STOP", test_worker_name="pod:1:abc")
    zombie.wait_stopped()
    fleet.expire_leases()
    another = fleet.worker(crash_at="batch.before:2:STOP", test_worker_name="pod:1:abc")
    another.wait_stopped()
    before = fleet.snapshot()
    zombie.send(signal.SIGCONT)
    await_true(lambda: ": lost" in zombie.said(), "the zombie did not notice", ALIVE_SECONDS)
    assert fleet.snapshot() == before
    another.send(signal.SIGCONT)
    assert another.wait() == 0, another.said()
    assert zombie.wait() == 0, zombie.said()
    check(fleet, calm, fleet.snapshot())
