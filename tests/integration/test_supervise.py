"""`planroom worker --processes N`: real workers, killed and ended from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planroom.config import Settings
from planroom.supervise import Patience
from support.command import Commands
from support.fleet import await_true, is_alive, make_document


@pytest.fixture
def planroom(settings: Settings, tmp_path: Path) -> Commands:
    return Commands.on(settings, tmp_path)


class Supervised:
    """A supervisor in a process of its own, and what it has logged so far."""

    def __init__(self, planroom: Commands, log: Path, *options: str) -> None:
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                planroom.line("worker", "--processes", "2", "--json", *options),
                env=planroom.env(),
                cwd=planroom.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def lines(self, message: str) -> list[dict[str, Any]]:
        """The log's lines with this message."""
        said: list[dict[str, Any]] = []
        for line in self._log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):
                said.append(json.loads(line))
        return [line for line in said if line.get("message") == message]

    def started(self) -> list[int]:
        """The processes of the workers, in the order in which the supervisor started them."""
        return [line["pid"] for line in self.lines("process started")]

    def working(self) -> int:
        """How many workers have said that they are up."""
        return len(self.lines("worker started"))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds."""
        await_true(condition, self._log.read_text()[-3000:], 60)


@contextmanager
def supervised(planroom: Commands, *options: str) -> Generator[Supervised]:
    running = Supervised(planroom, planroom.folder / "log", *options)
    try:
        yield running
    finally:
        for pid in [running.process.pid, *running.started()]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        running.process.wait()


def test_a_killed_worker_is_replaced_and_sigterm_ends_all_in_order(planroom: Commands) -> None:
    with supervised(planroom) as running:
        running.wait_for(lambda: running.working() == 2)
        first, second = running.started()
        os.kill(first, signal.SIGKILL)
        running.wait_for(lambda: running.working() == 3)
        third = running.started()[2]

        running.process.send_signal(signal.SIGTERM)
        code = running.process.wait(60)

        (death,) = running.lines("process died")
        assert (death["pid"], death["signal"]) == (first, "SIGKILL")
        stopped = running.lines("process stopped")
        assert {line["pid"] for line in stopped} == {second, third}
        assert all(line["exit_code"] == 0 for line in stopped)
    assert code == 0
    left = [row["pid"] for row in planroom("workers", "--json").document["workers"]]
    assert left in ([], [first])


def test_until_idle_ends_when_all_workers_have(planroom: Commands, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        planroom("add", make_document(tmp_path / f"{seed}.pdf", pages=2, seed=seed))

    with supervised(planroom, "--until-idle") as running:
        assert running.process.wait(60) == 0
        assert len(running.lines("process ended")) == 2

    states = {row["status"] for row in planroom("status", "--json").document["files"]}
    assert states == {"ready"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_workers_stop_in_order_when_their_supervisor_is_killed(planroom: Commands) -> None:
    with supervised(planroom) as running:
        running.wait_for(lambda: running.working() == 2)
        workers = running.started()
        running.process.kill()
        running.process.wait()

        running.wait_for(lambda: not any(map(is_alive, workers)))

        assert len(running.lines("worker stopped")) == 2
    assert planroom("workers", "--json").document["workers"] == []


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""
SUPERVISE = """
import sys
from planroom.supervise import Supervisor
sys.exit(Supervisor([sys.executable, "-c", sys.argv[1]], 1, grace_seconds=float(sys.argv[2])).run())
"""


@pytest.mark.parametrize(("grace", "signals"), [("0.1", 1), ("600", 2)])
def test_a_worker_that_does_not_leave_is_killed_after_the_grace_or_a_second_signal(
    grace: str, signals: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, STUBBORN, grace], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []

    def read_until(wanted: str) -> None:
        while wanted not in (line := process.stdout.readline() if process.stdout else ""):
            assert line, lines
            lines.append(line)

    with process.stdout:
        read_until("up")
        process.send_signal(signal.SIGTERM)
        read_until("stopping")
        if signals == 2:
            process.send_signal(signal.SIGINT)
        read_until("process killed")

    assert process.wait(30) == 1


def test_deaths_in_a_row_are_answered_ever_more_slowly_and_a_minute_of_life_forgives_them() -> None:
    patience = Patience()

    in_a_row = [patience.after_death(0.5) for _ in range(7)]
    after_a_minute = [patience.after_death(60.0), patience.after_death(59.9)]

    assert in_a_row == [1, 2, 4, 8, 16, 30, 30]
    assert after_a_minute == [1, 2]
