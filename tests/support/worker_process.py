"""One real process of the product for tests to kill: `work`, or `add PATH`.

It is what the command line does, with two things more. `PLANROOM_TEST_PAGES_LOG` names a file to
which it adds a line for each page that the reader gave it, so that a test can tell whether a page
was read twice, whatever became of it. And `PLANROOM_TEST_VERSIONS` and
`PLANROOM_TEST_WORKER_NAME` alter what this process takes itself for, so that workers of different
versions, or of one name, can meet in one database.

    python -m support.worker_process work [--once | --until-idle]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

import planroom
from leasequeue import workers
from planroom import chunk, extract, ingest, ingestions
from planroom.extract import PageReader
from planroom.model import Page
from planroom.room import PlanRoom

PAGES_LOG = "PLANROOM_TEST_PAGES_LOG"
VERSIONS = "PLANROOM_TEST_VERSIONS"
WORKER_NAME = "PLANROOM_TEST_WORKER_NAME"


class LoggingReader(PageReader):
    """Writes down each page as it comes: the blob's name and the index.

    One write to a file opened for appending is atomic.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._blob = path.name

    def __next__(self) -> Page:
        page = super().__next__()
        log = os.open(os.environ[PAGES_LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(log, f"{self._blob} {page.index}\n".encode())
        finally:
            os.close(log)
        return page


def pretend(versions: dict[str, int]) -> None:
    """Take this process for one of other versions: of the `chunker` or the `extractor`."""
    if "chunker" in versions:
        chunk.CHUNKER_VERSION = versions["chunker"]
    if "extractor" in versions:
        identity = f"{extract.extractor_identity()} test/{versions['extractor']}"
        ingest.extractor_identity = lambda: identity


def work(room: PlanRoom, *, once: bool, until_idle: bool) -> None:
    """Work as `planroom worker` does."""

    def idle() -> bool:
        with room.database.connection() as conn:
            return not ingestions.any_pending(conn)

    worker = room.worker()
    with worker.signals():
        worker.run(once=once, idle=idle if until_idle else None)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    working = commands.add_parser("work")
    working.add_argument("--once", action="store_true")
    working.add_argument("--until-idle", action="store_true")
    adding = commands.add_parser("add")
    adding.add_argument("path", type=Path)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if PAGES_LOG in os.environ:
        ingest.PageReader = LoggingReader
    pretend(json.loads(os.environ.get(VERSIONS, "{}")))
    if WORKER_NAME in os.environ:
        workers.worker_id = lambda: os.environ[WORKER_NAME]
    with planroom.open() as room:
        if given.command == "add":
            room.add(given.path)
        else:
            work(room, once=given.once, until_idle=given.until_idle)


if __name__ == "__main__":
    main()
