"""The world changes while a worker is dead, frozen or of another version: what is published fits.

The versions meet as in a rolling deploy: some workers of the fleet are of the old one, some of the
new, on one database.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

import leasequeue
from planroom import files
from planroom.projects import ensure_project
from support.embedding_server import EmbeddingServer
from support.fleet import BATCH_UNITS, DIMENSIONS, Calm, Fleet, Outcome, Process, make_document

COARSE = {"chunk_tokens": 64, "chunk_overlap": 8}
"""Settings of another chunker: about half as many units."""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document of these tests."""
    return make_document(tmp_path_factory.mktemp("document") / "set.pdf")


@pytest.fixture
def undisturbed(
    server_url: str, template: str, admin: psycopg.Connection, tmp_path: Path
) -> Generator[Callable[..., Outcome]]:
    """What a document comes to under given settings, in a database of its own."""
    name = sql.Identifier(f"undisturbed_{tmp_path.stat().st_ino}")
    create = sql.SQL("create database {name} template {template}")
    admin.execute(create.format(name=name, template=sql.Identifier(template)))
    folder = tmp_path / "undisturbed"
    folder.mkdir()

    def run(path: Path, **settings: Any) -> Outcome:
        url = make_conninfo(server_url, dbname=name.as_string().strip('"'))
        with EmbeddingServer(DIMENSIONS) as server, Fleet(url, folder, server) as fleet:
            fleet.take_in(path, **settings)
            fleet.finish(**settings)
            return fleet.outcomes()[path.name]

    yield run
    admin.execute(sql.SQL("drop database {} with (force)").format(name))


def killed(fleet: Fleet, at: str, **settings: Any) -> None:
    """A worker dies at this point."""
    victim = fleet.worker(crash_at=at, **settings)
    assert victim.wait() == -signal.SIGKILL, victim.said()
    fleet.expire_leases(victim)


def test_d19_a_shorter_plan_leaves_nothing_of_the_longer_one_behind(
    fleet: Fleet, document: Path, undisturbed: Callable[..., Outcome]
) -> None:
    """All units of the old plan are committed when its worker dies, twice as many as the new's."""
    expected = undisturbed(document, **COARSE)
    fleet.take_in(document)
    killed(fleet, "finish.before")
    fleet.finish(**COARSE)
    assert fleet.outcomes() == {"set.pdf": expected}
    fleet.check_invariants()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("versions", "again"),
    [({"chunker": 2}, 0), ({"extractor": 2}, 12)],
    ids=["another chunker", "another extractor"],
)
def test_d23_a_worker_of_another_version_starts_from_what_changed(
    fleet: Fleet,
    document: Path,
    calm_run: Callable[[Path], Calm],
    versions: dict[str, int],
    again: int,
) -> None:
    """The result is the same here, since only the names differ, but nothing is carried on."""
    fleet.take_in(document)
    killed(fleet, "batch.committed:3")
    read = sum(fleet.pages_read().values())
    fleet.finish(test_versions=versions)
    calm = calm_run(document)
    assert fleet.outcomes() == {"set.pdf": calm.outcome}
    # Pages are kept by a new chunker and read again by a new extractor; vectors of texts that are
    # the same are used again by both.
    assert sum(fleet.pages_read().values()) - read >= again
    assert fleet.server.embedded <= calm.embedded + BATCH_UNITS
    fleet.check_invariants()


@pytest.mark.slow
def test_d23_two_versions_that_take_turns_still_never_mix(
    fleet: Fleet, document: Path, undisturbed: Callable[..., Outcome]
) -> None:
    """A rolling deploy: old, new, old, new, each dying after some batches."""
    expected = undisturbed(document, **COARSE)
    fleet.take_in(document)
    for settings in ({}, COARSE, {}, COARSE):
        killed(fleet, "batch.committed:2", **settings)
        fleet.check_invariants()
    fleet.finish(**COARSE)
    assert fleet.outcomes() == {"set.pdf": expected}


def test_q26_a_kind_of_a_newer_version_is_left_alone_and_documents_go_on(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm]
) -> None:
    with fleet.connect() as conn:
        workspace = leasequeue.ensure_workspace(conn, "default")
        source = leasequeue.add_connection(conn, workspace, "share", "folder")
        assert source is not None
        run = leasequeue.enqueue(conn, workspace, source, "reindex_in_the_next_version")
    fleet.take_in(document)
    fleet.finish()
    assert fleet.outcomes() == {"set.pdf": calm_run(document).outcome}
    with fleet.connect() as conn:
        left = conn.execute("select id, status, attempts from connection_runs").fetchall()
    assert left == [(run, "queued", 0)]


def frozen_before_the_finish(fleet: Fleet, document: Path) -> Process:
    """A worker that has done everything but publish."""
    fleet.take_in(document)
    worker = fleet.worker(crash_at="finish.before:1:STOP")
    worker.wait_stopped()
    return worker


def wake(worker: Process) -> None:
    """It still holds its lease, and goes on."""
    worker.send(signal.SIGCONT)
    assert worker.wait() == 0, worker.said()


def test_d18_a_file_removed_before_its_finish_is_never_published(
    fleet: Fleet, document: Path
) -> None:
    worker = frozen_before_the_finish(fleet, document)
    with fleet.room() as room:
        assert room.remove("set.pdf")
    wake(worker)
    assert fleet.outcomes()["set.pdf"].status == "cancelled"
    with fleet.connect() as conn:
        rows = conn.execute("select status, published_ingestion_id from files").fetchall()
    assert rows == [("removed", None)]


@pytest.mark.slow
def test_a_file_replaced_before_its_finish_publishes_only_the_new_version(
    fleet: Fleet, document: Path, tmp_path: Path, undisturbed: Callable[..., Outcome]
) -> None:
    worker = frozen_before_the_finish(fleet, document)
    newer = make_document(tmp_path / "set.pdf", seed=2)
    fleet.take_in(newer)
    wake(worker)
    fleet.finish()
    assert fleet.outcomes() == {"set.pdf": undisturbed(newer)}
    with fleet.connect() as conn:
        rows = conn.execute("select version, status from file_ingestions order by id").fetchall()
    assert rows == [(1, "cancelled"), (2, "ready")]


@pytest.mark.slow
@pytest.mark.parametrize("coarse", [False, True], ids=["same settings", "other settings"])
def test_a_file_moved_before_its_finish_is_published_where_it_is_now(
    fleet: Fleet, document: Path, undisturbed: Callable[..., Outcome], coarse: bool
) -> None:
    worker = frozen_before_the_finish(fleet, document)
    settings: dict[str, Any] = COARSE if coarse else {}
    with fleet.connect() as conn:
        workspace = leasequeue.ensure_workspace(conn, "default")
        tower = ensure_project(conn, workspace, "tower")
        conn.execute(
            "update projects set settings = %s where id = %s",
            [Jsonb(settings), tower],
        )
        row = conn.execute("select id from files").fetchone()
        assert row is not None
        files.move_file(conn, workspace, row[0], tower)
    wake(worker)
    assert fleet.outcomes() == {"set.pdf": undisturbed(document, **settings)}
    with fleet.connect() as conn:
        assert conn.execute("select distinct project_id from file_ingestions").fetchall() == [
            (tower,)
        ]
    fleet.check_invariants()
