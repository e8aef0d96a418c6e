"""A worker that dies is taken over: at once on its own machine, after its lease elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from planroom.config import Settings
from planroom.room import PlanRoom
from support.pdf import PdfPage, drawing, write_pdf

ROOT = Path(__file__).parents[2]


def die_at(settings: Settings, point: str) -> int:
    """Run a worker that kills itself at a crash point; returns how it ended."""
    assert settings.database_url is not None
    environment = os.environ | {
        "PLANROOM_HOME": str(settings.home),
        "PLANROOM_DATABASE_URL": settings.database_url.get_secret_value(),
        "PLANROOM_EMBEDDER": settings.embedder,
        "LEASEQUEUE_CRASH_AT": point,
        "PYTHONPATH": str(ROOT / "tests"),
    }
    command = [sys.executable, "-m", "support.worker_process", "work", "--once"]
    return subprocess.run(command, env=environment, timeout=60, check=False).returncode


def test_a_death_on_this_machine_is_taken_over_without_waiting_for_the_lease(
    settings: Settings, tmp_path: Path
) -> None:
    assert settings.lease_seconds == 120.0
    path = write_pdf(tmp_path / "set.pdf", [PdfPage(drawing("A-101", "FLOOR PLAN"))])
    with PlanRoom(settings) as room:
        taken = room.add(path)
        assert die_at(settings, "pages.committed") == -signal.SIGKILL

        polled = room.worker([taken.file_id]).poll()

        assert polled.errors == {}
        (row,) = room.status("set.pdf")
        outcomes = [attempt["outcome"] for attempt in room.attempts("set.pdf")]
    assert (row["state"], outcomes) == ("ready", ["expired", "ready"])


def test_a_death_in_another_home_waits_for_its_lease(settings: Settings, tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "set.pdf", [PdfPage(drawing("A-101", "FLOOR PLAN"))])
    with PlanRoom(settings) as room:
        taken = room.add(path)
        assert die_at(settings, "pages.committed") == -signal.SIGKILL
        away = settings.model_copy(update={"home": tmp_path / "other home"})

        with PlanRoom(away) as other:
            other.worker([taken.file_id]).poll()
            (row,) = other.status("set.pdf")

    assert row["status"] == "running"
