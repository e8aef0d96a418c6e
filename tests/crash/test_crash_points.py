"""SIGKILL at every named point, one by one: another worker resumes, and the result is the same.

The names are collected from the sources, so a new point is under test from its first day.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from support.fleet import BATCH_UNITS, PAGE_GROUP, ROOT, Calm, Fleet, make_document

_CALL = re.compile(r'crash_point\("([a-z_.]+)"\)')
SOURCES = [ROOT / "indexer" / "planroom", ROOT / "queue" / "leasequeue"]
NAMES = sorted(
    name
    for source in SOURCES
    for module in source.rglob("*.py")
    for name in _CALL.findall(module.read_text())
)
INTAKE = [name for name in NAMES if name.startswith("intake.")]
INGESTION = [name for name in NAMES if name.split(".")[0] in ("ingest", "pages", "batch", "finish")]
# Those that the default suite goes through; the slow one takes them all, and each twice.
IMPORTANT = [
    "ingest.begun",
    "pages.written",
    "pages.committed",
    "batch.embedded",
    "batch.fenced",
    "batch.written",
    "batch.committed",
    "finish.tail_deleted",
    "finish.sealed",
    "finish.committed",
]
ONCE = ("ingest", "finish")
"""Points that a document passes once, unless its worker is killed."""


@pytest.fixture(scope="session")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document of these tests: 12 sheets, two of them scans, about 100 units."""
    return make_document(tmp_path_factory.mktemp("document") / "set.pdf")


def check(fleet: Fleet, calm: Calm, kills: int) -> None:
    """The promise of the ingestion path, as seen from outside."""
    fleet.check_invariants()
    assert fleet.outcomes() == {"set.pdf": calm.outcome}
    assert fleet.server.embedded <= calm.embedded + kills * BATCH_UNITS
    again = sum(fleet.pages_read().values()) - calm.pages
    assert 0 <= again <= kills * PAGE_GROUP


def committed_counts(fleet: Fleet) -> dict[str, int]:
    """How often each text that is committed by now has been embedded by now."""
    return {key: fleet.server.counts[key] for key in fleet.committed_texts()}


def cases() -> list[ParameterSet]:
    """Every point, on its first and second visit, and on the first visits of two workers."""
    return [
        pytest.param(
            name, visits, marks=() if name in IMPORTANT and visits == "first" else pytest.mark.slow
        )
        for name in INGESTION
        for visits in ("first", "second", "twice")
    ]


@pytest.mark.parametrize(("name", "visits"), cases())
def test_a_worker_killed_at_any_point_is_resumed_by_another(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm], name: str, visits: str
) -> None:
    calm = calm_run(document)
    fleet.take_in(document)
    kills = 0
    for crash_at in {"first": [1], "second": [2], "twice": [1, 1]}[visits]:
        victim = fleet.worker(crash_at=f"{name}:{crash_at}")
        status = victim.wait()
        if status == 0:
            assert name.split(".")[0] in ONCE, f"{name} was never passed"
            assert crash_at == 2 or kills == 1, victim.said()
            continue
        assert status == -signal.SIGKILL, victim.said()
        kills += 1
        fleet.check_invariants()
        fleet.expire_leases(victim)
    committed = committed_counts(fleet)
    fleet.finish()
    check(fleet, calm, kills)
    assert committed == {key: fleet.server.counts[key] for key in committed}
