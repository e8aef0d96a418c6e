"""Presence: what tells the workers of one machine at once that one of them has died.

Each worker holds a lock on a file of its own under `home/workers` for as long as it lives. The
kernel drops the lock with the process, however that ends, so a file that can be locked belongs to
a dead worker, and its lease need not be waited for. A worker that is stopped, or merely slow, still
holds its lock. Where there is no such file (another machine, another home) the lease decides alone.

This only ever shortens a wait: a lease that is expired here in error is fenced like any other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self


class Presence:
    """The lock of one worker; a context manager around its life."""

    def __init__(self, home: Path, worker: str) -> None:
        self._path = _folder(home) / _file_name(worker)
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Locked before it has its name, so that nobody finds it unlocked.
        unnamed = self._path.with_name(f".{self._path.name}")
        self._descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        unnamed.rename(self._path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._path.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def find_dead(home: Path) -> list[str]:
    """The workers of this machine that died without leaving; usually none, and then no I/O but one
    look into a folder that is empty or small."""
    folder = _folder(home)
    if not folder.is_dir():
        return []
    dead = [path for path in sorted(folder.iterdir()) if _is_abandoned(path)]
    return [path.name.replace("=", ":") for path in dead if not path.name.startswith(".")]


def forget(home: Path, workers: Iterable[str]) -> None:
    """Remove the files of workers that were dealt with."""
    for worker in workers:
        (_folder(home) / _file_name(worker)).unlink(missing_ok=True)


def _folder(home: Path) -> Path:
    return home / "workers"


def _file_name(worker: str) -> str:
    return worker.replace("/", "_").replace(":", "=")


def _is_abandoned(path: Path) -> bool:
    """Whether nobody holds the file's lock."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True
    return False
