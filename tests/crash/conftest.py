"""What the crash tests share: an embedding server that counts, a fleet, and a run without kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from support.embedding_server import EmbeddingServer
from support.fleet import DIMENSIONS, Calm, Fleet


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    """An embedding server of the test's own."""
    with EmbeddingServer(DIMENSIONS) as server:
        yield server


@pytest.fixture
def fleet(database_url: str, tmp_path: Path, server: EmbeddingServer) -> Iterator[Fleet]:
    """A fleet without any process yet, on a migrated database without rows."""
    with Fleet(database_url, tmp_path, server) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def calm_run(
    server_url: str,
    template: str,
    admin: psycopg.Connection,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Path], Calm]:
    """Work on a document undisturbed, once for all tests with that document."""
    done: dict[Path, Calm] = {}

    def run(path: Path) -> Calm:
        if path not in done:
            folder = tmp_path_factory.mktemp("calm")
            names = {"name": sql.Identifier(folder.name), "template": sql.Identifier(template)}
            admin.execute(sql.SQL("create database {name} template {template}").format(**names))
            url = make_conninfo(server_url, dbname=folder.name)
            with EmbeddingServer(DIMENSIONS) as server, Fleet(url, folder, server) as fleet:
                done[path] = _work_on(fleet, path)
            admin.execute(sql.SQL("drop database {name} with (force)").format(**names))
        return done[path]

    return run


def _work_on(fleet: Fleet, path: Path) -> Calm:
    fleet.take_in(path)
    fleet.finish()
    fleet.check_invariants()
    pages = fleet.pages_read()
    assert set(pages.values()) == {1}
    assert set(fleet.server.counts.values()) == {1}
    return Calm(fleet.outcomes()[path.name], fleet.server.embedded, len(pages))
