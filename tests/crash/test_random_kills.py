"""SIGKILL at random instants under a fleet: the documents come out as if nothing had been.

Each round draws documents, batch sizes, a number of workers and the instants from one seed, which
is printed: `PLANROOM_TEST_SEED=… pytest tests/crash/test_random_kills.py` repeats its choices (what
the kernel does with them is its own).
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from support.embedding_server import EmbeddingServer
from support.fleet import (
    ALIVE_SECONDS,
    DIMENSIONS,
    SEED,
    Fleet,
    Outcome,
    Process,
    await_true,
    make_document,
)

SHORT_ROUNDS, SHORT_KILLS = 1, 6
LONG_ROUNDS, LONG_KILLS = 14, 25
PAUSE_SECONDS_MAX = 0.6


@dataclass(frozen=True, slots=True)
class Round:
    """What one round drew."""

    seed: int
    documents: tuple[Path, ...]
    workers: int
    batch_units: int
    page_group: int
    kills: int

    @classmethod
    def draw(cls, seed: int, folder: Path, kills: int) -> Round:
        rng = random.Random(seed)
        documents = tuple(
            make_document(
                folder / f"set-{number}.pdf",
                pages=rng.randint(5, 60),
                lines=rng.randint(2, 40),
                seed=rng.randrange(10**6),
                blank_every=rng.choice([0, 3, 7]),
            )
            for number in range(rng.randint(2, 4))
        )
        workers, batch, group = rng.randint(1, 3), rng.randint(3, 60), rng.randint(1, 9)
        return cls(seed, documents, workers, batch, group, kills)

    @property
    def settings(self) -> dict[str, Any]:
        return {"batch_units": self.batch_units, "page_group": self.page_group}


@pytest.fixture
def another_database_url(
    server_url: str, template: str, admin: psycopg.Connection, tmp_path: Path
) -> Iterator[str]:
    """A second database, for the run without kills."""
    name = f"calm_{tmp_path.name[-8:]}_{random.randrange(10**9)}"
    names = {"name": sql.Identifier(name), "template": sql.Identifier(template)}
    admin.execute(sql.SQL("create database {name} template {template}").format(**names))
    yield make_conninfo(server_url, dbname=name)
    admin.execute(sql.SQL("drop database {name} with (force)").format(**names))


def undisturbed(url: str, folder: Path, drawn: Round) -> tuple[dict[str, Outcome], int]:
    """What the round comes to without kills, and how many texts are embedded for it."""
    folder.mkdir()
    with EmbeddingServer(DIMENSIONS) as server, Fleet(url, folder, server) as fleet:
        fleet.take_in(*drawn.documents)
        fleet.finish(**drawn.settings)
        return fleet.outcomes(), server.embedded


def is_done(fleet: Fleet) -> bool:
    """Whether every document is over."""
    return all(o.status in ("ready", "failed") for o in fleet.outcomes().values())


def await_end(fleet: Fleet) -> None:
    """Return when every document is over; however long that is, they must get on all the time."""
    while not is_done(fleet):
        before = fleet.processed_units()
        await_true(
            lambda b=before: is_done(fleet) or fleet.processed_units() > b,
            "they do not get on",
            ALIVE_SECONDS,
        )


def kill_at_random(fleet: Fleet, drawn: Round) -> None:
    """Kill and replace workers until the kills are spent or the work is done.

    Spared is who holds a document that two workers in a row have died on without getting on: a
    third would end it `failed`, as it should (L9).
    """
    rng = random.Random(f"kills {drawn.seed}")
    pause = threading.Event()
    team = [fleet.worker(until_idle=False, **drawn.settings) for _ in range(drawn.workers)]

    def is_the_time() -> bool:
        assert all(process.is_alive for process in team), said(team)
        return is_done(fleet) or fleet.is_at_work(team)

    for _ in range(drawn.kills):
        await_true(is_the_time, "nobody works", ALIVE_SECONDS)
        pause.wait(rng.uniform(0.0, PAUSE_SECONDS_MAX))
        await_true(lambda: fleet.kill_one(team, rng), "all are to be spared", ALIVE_SECONDS)
        if is_done(fleet):
            break
        fleet.check_invariants()
        for place, process in enumerate(team):
            if not process.is_alive:
                team[place] = fleet.worker(until_idle=False, **drawn.settings)
    fleet.server.latency_seconds = 0.0
    await_end(fleet)
    for process in team:
        process.send(signal.SIGTERM)
        # One that was only just started does not hear signals yet.
        assert process.wait() in (0, -signal.SIGTERM, -signal.SIGKILL), process.said()


def said(team: list[Process]) -> str:
    return "\n".join(process.said() for process in team)


def survive(fleet: Fleet, another_database_url: str, folder: Path, seed: int, kills: int) -> int:
    """One round, and what must hold after it; how many kills hit a worker at work."""
    drawn = Round.draw(seed, folder, kills)
    print(f"\nseed {seed}: {drawn}")
    calm, embedded = undisturbed(another_database_url, folder / f"calm-{seed}", drawn)
    # Slow enough that a kill falls into the middle of something.
    fleet.server.latency_seconds = (
        0.05 if kills == SHORT_KILLS else random.Random(seed).uniform(0.05, 0.4)
    )
    fleet.take_in(*drawn.documents)
    kill_at_random(fleet, drawn)
    hits = fleet.count_expired()
    fleet.check_invariants()
    assert fleet.outcomes() == calm
    assert fleet.server.embedded <= embedded + hits * drawn.batch_units
    again = sum(fleet.pages_read().values()) - sum(o.pages for o in calm.values())
    assert again <= hits * drawn.page_group
    return hits


def test_random_kills_change_nothing(
    fleet: Fleet, another_database_url: str, tmp_path: Path
) -> None:
    hits = survive(fleet, another_database_url, tmp_path, SEED, SHORT_KILLS)
    print(f"{hits} kills hit a worker at work")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(LONG_ROUNDS))
def test_hundreds_of_random_kills_change_nothing(
    fleet: Fleet, another_database_url: str, tmp_path: Path, number: int
) -> None:
    hits = survive(fleet, another_database_url, tmp_path, SEED + 1 + number, LONG_KILLS)
    print(f"{hits} kills hit a worker at work")
