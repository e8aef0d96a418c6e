"""A holder frozen in the middle of a COPY keeps its row locked: it is put out, and no other is."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from leasequeue import Lease, checkpoint, evict
from planroom import ingestions
from planroom.config import Settings
from planroom.ingestions import INGESTIONS
from planroom.room import PlanRoom
from support.engine import await_true
from support.pdf import PdfPage, drawing, write_pdf

NO_PATIENCE = timedelta(0)
EXPIRE = "update file_ingestions set lease_expires_at = now() - interval '1 minute'"


@pytest.fixture
def room(settings: Settings, tmp_path: Path) -> Generator[PlanRoom]:
    """A plan room with one queued document."""
    path = write_pdf(tmp_path / "set.pdf", [PdfPage(drawing("A-101", "FLOOR PLAN"))])
    with PlanRoom(settings) as opened:
        opened.add(path)
        yield opened


@contextmanager
def frozen_in_copy(room: PlanRoom) -> Generator[psycopg.Connection]:
    """A holder's session that stands still inside a COPY, under the fence of a lease long over."""
    conn = room.database.connect()
    try:
        held = ingestions.claim(conn, "frozen", 120.0)
        assert isinstance(held, Lease)
        conn.execute(EXPIRE)
        conn.execute("begin")
        # The renewal is not seen by the others before the commit that never comes.
        checkpoint(conn, held, {"page_count": 1})
        conn.pgconn.exec_(b"copy pages (ingestion_id) from stdin")
        yield conn
    finally:
        conn.close()


def lives(conn: psycopg.Connection, other: psycopg.Connection) -> bool:
    """Whether the server still has this session."""
    found = conn.execute("select 1 from pg_stat_activity where pid = %s", [other.info.backend_pid])
    return found.rowcount == 1


def test_l1_a_row_that_a_frozen_copy_locks_is_claimed_once_its_session_is_ended(
    room: PlanRoom,
) -> None:
    with frozen_in_copy(room) as frozen, room.database.connect() as conn:
        assert ingestions.claim(conn, "other", 120.0) is None

        assert evict(conn, INGESTIONS) == 1

        await_true(lambda: not lives(conn, frozen), "the session goes on")
        claimed = ingestions.claim(conn, "other", 120.0)
    assert isinstance(claimed, Lease)
    assert claimed.attempt == 2


def test_a_holder_whose_lease_lasts_is_left_alone(room: PlanRoom) -> None:
    with room.database.connect() as holder, room.database.connect() as conn:
        held = ingestions.claim(holder, "busy", 120.0)
        assert isinstance(held, Lease)
        with holder.transaction():
            checkpoint(holder, held, {"page_count": 1})

            assert evict(conn, INGESTIONS, patience=NO_PATIENCE) == 0

            checkpoint(holder, held, {"page_count": 1})


def test_sessions_that_lock_nothing_of_an_expired_row_are_left_alone(room: PlanRoom) -> None:
    with room.database.connect() as other, room.database.connect() as conn:
        assert isinstance(ingestions.claim(conn, "gone", 120.0), Lease)
        conn.execute(EXPIRE)
        with other.transaction():
            other.execute("insert into embedders (identity, dimensions) values ('x', 1)")

            assert evict(conn, INGESTIONS, patience=NO_PATIENCE) == 0

            other.execute("select 1")


def test_a_poll_puts_a_frozen_holder_out_and_the_document_is_finished(room: PlanRoom) -> None:
    with frozen_in_copy(room):
        worker = room.worker()

        def is_ready() -> bool:
            worker.poll()
            return room.status("set.pdf")[0]["state"] == "ready"

        await_true(is_ready, "nobody took it over")
