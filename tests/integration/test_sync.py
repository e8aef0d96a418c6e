"""A connection's two runs on real files: sync brings a folder up to date, purge leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import leasequeue
from leasequeue import Worker
from planroom import ingestions
from planroom.config import Settings
from planroom.room import PlanRoom
from support.pdf import PdfPage, drawing, write_pdf


@pytest.fixture
def room(settings: Settings) -> Iterator[PlanRoom]:
    with PlanRoom(settings) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "sets"
    (root / "east").mkdir(parents=True)
    sheet(root / "west.pdf", "WEST WING FLOOR PLAN")
    sheet(root / "east" / "east.pdf", "EAST WING FLOOR PLAN")
    return root


def sheet(path: Path, words: str) -> None:
    write_pdf(path, [PdfPage(drawing("A-101", words))])


def connect(room: PlanRoom, folder: Path) -> int:
    with room.database.connection() as conn:
        added = leasequeue.add_connection(
            conn, room.workspace_id, "sets", "folder", {"path": str(folder), "project": "default"}
        )
    assert added is not None
    return added


def run(room: PlanRoom, kind: str, connection_id: int) -> dict[str, Any]:
    """Ask for a run, poll until it is over, and return it with its results."""
    ask = leasequeue.request_purge if kind == "purge" else leasequeue.enqueue
    with room.database.connection() as conn:
        run_id = ask(conn, room.workspace_id, connection_id)
    assert run_id is not None
    return finished(room, run_id)


def finished(room: PlanRoom, run_id: int) -> dict[str, Any]:
    worker = room.worker()
    assert worker.poll().errors == {}
    with room.database.connection() as conn:
        history = leasequeue.run_history(conn, room.workspace_id, run_id)
    assert history is not None
    return history


def counts(history: dict[str, Any]) -> tuple[int, int, int, int]:
    (result,) = history["results"]
    return result["upserted"], result["unchanged"], result["deleted"], result["failed"]


def names(room: PlanRoom) -> list[str]:
    return [row["name"] for row in room.status()]


def test_a_sync_takes_in_what_is_new_and_the_next_one_reads_nothing_again(
    room: PlanRoom, folder: Path
) -> None:
    connection_id = connect(room, folder)

    first = run(room, "sync", connection_id)
    again = run(room, "sync", connection_id)

    assert (first["status"], counts(first)) == ("succeeded", (2, 0, 0, 0))
    assert names(room) == ["sets/east/east.pdf", "sets/west.pdf"]
    assert (again["status"], counts(again)) == ("succeeded", (0, 2, 0, 0))


def test_a_changed_file_is_a_new_version_and_a_missing_one_is_removed(
    room: PlanRoom, folder: Path
) -> None:
    connection_id = connect(room, folder)
    run(room, "sync", connection_id)
    sheet(folder / "west.pdf", "WEST WING REFLECTED CEILING PLAN")
    (folder / "east" / "east.pdf").unlink()

    history = run(room, "sync", connection_id)

    assert counts(history) == (1, 0, 1, 0)
    assert [(row["name"], row["version"]) for row in room.status()] == [("sets/west.pdf", 2)]


def test_a_refused_file_makes_the_sync_partial_and_keeps_no_other_out(
    room: PlanRoom, folder: Path
) -> None:
    (folder / "notes.pdf").write_text("<html>not a drawing</html>")

    history = run(room, "sync", connect(room, folder))

    assert (history["status"], counts(history)) == ("partial", (2, 0, 0, 1))
    assert "notes.pdf" in history["error"]


@pytest.mark.parametrize("vanish", ["gone", "empty"])
def test_a_folder_that_is_not_mounted_removes_nothing(
    room: PlanRoom, folder: Path, vanish: str
) -> None:
    connection_id = connect(room, folder)
    run(room, "sync", connection_id)
    folder.rename(folder.with_name("elsewhere"))
    if vanish == "empty":
        folder.mkdir()

    history = run(room, "sync", connection_id)

    assert history["status"] == "queued"
    assert history["error_code"] == ("source_empty" if vanish == "empty" else "source_unavailable")
    assert names(room) == ["sets/east/east.pdf", "sets/west.pdf"]


TABLES = ("chunks", "pages", "file_ingestions", "ingestion_attempts", "files")


def rows_left(conn: psycopg.Connection[Any]) -> dict[str, int]:
    left: dict[str, int] = {}
    for table in TABLES:
        statement = sql.SQL("select count(*) from {}").format(sql.Identifier(table))
        row = conn.execute(statement).fetchone()
        assert row is not None
        left[table] = row[0]
    return left


def test_a_purge_leaves_no_row_and_no_hit(room: PlanRoom, folder: Path) -> None:
    connection_id = connect(room, folder)
    run(room, "sync", connection_id)
    room.worker().run(idle=lambda: True)
    assert next(hit.file for hit in room.search("east wing")) == "sets/east/east.pdf"

    history = run(room, "purge", connection_id)

    assert (history["status"], counts(history)) == ("succeeded", (0, 0, 2, 0))
    assert room.search("east wing") == []
    with room.database.connection() as conn:
        assert rows_left(conn) == dict.fromkeys(TABLES, 0)
        (connection,) = leasequeue.list_connections(conn, room.workspace_id)
    assert connection["status"] == "disconnected"


def test_q15_a_purge_asked_for_during_an_ingestion_waits_for_it_and_then_nothing_is_left(
    room: PlanRoom, folder: Path
) -> None:
    connection_id = connect(room, folder)
    run(room, "sync", connection_id)
    with room.database.connection() as conn:
        held = ingestions.claim(conn, "another worker", 120.0)
        assert isinstance(held, leasequeue.Lease)
        purge_id = leasequeue.request_purge(conn, room.workspace_id, connection_id)
        assert purge_id is not None

    def let_go() -> None:
        """What the other worker does when its control query says that it is cancelled."""
        with room.database.connect() as conn:
            while not leasequeue.check_control(conn, held):
                pass
            assert not finished_already(conn, purge_id)
            assert leasequeue.seal(conn, held, "ready") == "cancelled"

    history = with_background(let_go, lambda: finished(room, purge_id))

    assert history["status"] == "succeeded"
    with room.database.connection() as conn:
        assert rows_left(conn) == dict.fromkeys(TABLES, 0)


def finished_already(conn: psycopg.Connection[Any], run_id: int) -> bool:
    row = conn.execute(
        "select finished_at is not null from connection_runs where id = %(id)s", {"id": run_id}
    ).fetchone()
    assert row is not None
    return row[0]


def with_background(work: Any, main: Any) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        result = main()
        future.result(timeout=30)
    return result


def test_a_purge_ends_what_a_dead_worker_left_running(room: PlanRoom, folder: Path) -> None:
    connection_id = connect(room, folder)
    run(room, "sync", connection_id)
    with room.database.connection() as conn:
        long_ago = datetime.now(UTC) - timedelta(hours=1)
        conn.execute("update file_ingestions set queued_at = now() - interval '2 hours'")
        assert isinstance(ingestions.claim(conn, "dead", 1.0, now=long_ago), leasequeue.Lease)

    assert run(room, "purge", connection_id)["status"] == "succeeded"

    with room.database.connection() as conn:
        assert rows_left(conn) == dict.fromkeys(TABLES, 0)


def test_a_worker_without_these_stages_leaves_syncs_alone(room: PlanRoom, folder: Path) -> None:
    connection_id = connect(room, folder)
    with room.database.connection() as conn:
        leasequeue.enqueue(conn, room.workspace_id, connection_id)
    worker: Worker = room.worker(file_ids=[])

    worker.poll()

    with room.database.connection() as conn:
        (only,) = leasequeue.list_runs(conn, room.workspace_id)
    assert only["status"] == "queued"
