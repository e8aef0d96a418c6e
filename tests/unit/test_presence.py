"""A worker's death is seen at once on its machine, and nothing else is taken for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from planroom.presence import Presence, find_dead, forget

HOLD = """
import sys
from pathlib import Path
from planroom.presence import Presence
with Presence(Path(sys.argv[1]), sys.argv[2]):
    print("here", flush=True)
    sys.stdin.read()
"""


@contextmanager
def worker_process(home: Path, name: str) -> Generator[subprocess.Popen[str]]:
    """A process that is present until its input ends, or until it is killed."""
    arguments = [sys.executable, "-c", HOLD, str(home), name]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


def test_a_living_worker_is_not_dead(tmp_path: Path) -> None:
    with worker_process(tmp_path, "host:1:aa"):
        assert find_dead(tmp_path) == []


def test_a_killed_worker_is_dead_until_it_is_forgotten(tmp_path: Path) -> None:
    with worker_process(tmp_path, "host:1:aa") as process:
        process.kill()
        process.wait()

        assert find_dead(tmp_path) == ["host:1:aa"]
        forget(tmp_path, ["host:1:aa"])
        assert find_dead(tmp_path) == []


def test_a_stopped_worker_is_not_dead(tmp_path: Path) -> None:
    with worker_process(tmp_path, "host:1:aa") as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)

        assert find_dead(tmp_path) == []


def test_a_worker_that_leaves_leaves_no_file(tmp_path: Path) -> None:
    with Presence(tmp_path, "host:1:aa"):
        pass

    assert list((tmp_path / "workers").iterdir()) == []


def test_a_home_without_workers_has_no_dead(tmp_path: Path) -> None:
    assert find_dead(tmp_path / "nowhere") == []
