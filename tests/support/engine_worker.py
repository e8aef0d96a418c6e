"""A worker process for tests that signal or outlast it: `serve` with handlers that misbehave.

What a run's handler does is in its payload, as `{"do": "wait"}`; the log goes to stderr.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import leasequeue
from leasequeue import Run


def handle(run: Run) -> None:
    """Do what the payload says."""
    match run.payload.get("do"):
        case "wait":  # A job that listens, as it should.
            run.abort.wait(600)
            run.abort.check()
        case "ignore":  # One that does not.
            threading.Event().wait(600)
        case "compute":  # One that is deep in C, without the interpreter lock, and never returns.
            hashlib.pbkdf2_hmac("sha256", b"sheet", b"A-101", 2_000_000_000)
        case "hold":  # One in the middle of its transaction, with its row locked.
            with run.transaction() as conn:
                conn.execute("select pg_sleep(1)")
        case "lock":  # One that waits in the database for what it will not get.
            with run.transaction() as conn:
                conn.execute("select pg_advisory_xact_lock(1)")
        case _:
            leasequeue_result(run)


def leasequeue_result(run: Run) -> None:
    """What a well-behaved job does: write under its fence."""
    with run.lend() as conn:
        leasequeue.record_result(conn, run.lease, "files", upserted=1)


@contextmanager
def worker_process(
    database_url: str, log: Path, **options: float
) -> Generator[subprocess.Popen[bytes]]:
    """A worker that runs beside the block, and is gone after it."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.engine_worker", database_url, json.dumps(options)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            stderr=out,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main(database_url: str, options: Mapping[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    leasequeue.serve(database_url, {"sync": handle, "purge": handle}, **options)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
