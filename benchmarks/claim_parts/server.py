"""The one server of a run, and the databases on it."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from planroom import embedded


class Server:
    """A server on which databases may be created; they are dropped at the end."""

    def __init__(self, url: str, *, is_embedded: bool) -> None:
        self.url = url
        self.is_embedded = is_embedded
        self._names: list[str] = []

    def database(self, name: str) -> str:
        """The URL of a new, empty database."""
        name = f"bench_{name}_{uuid.uuid4().hex[:8]}"
        with psycopg.connect(self.url, autocommit=True) as admin:
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        self._names.append(name)
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def drop(self, url: str) -> None:
        """Drop a database of this run, and whoever is still connected to it."""
        name = urlsplit(url).path.lstrip("/")
        with psycopg.connect(self.url, autocommit=True) as admin:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
        self._names.remove(name)

    def drop_all(self) -> None:
        """Drop every database of this run."""
        for name in list(self._names):
            self.drop(f"//server/{name}")

    def facts(self) -> dict[str, str]:
        """The version, and the settings that decide what a commit costs."""
        with psycopg.connect(self.url) as conn:
            rows = conn.execute("""
                select name, setting from pg_settings
                 where name in ('server_version', 'fsync', 'synchronous_commit',
                                'shared_buffers', 'max_connections')
            """).fetchall()
        return {"kind": "embedded" if self.is_embedded else "given", **dict(rows)}


@contextmanager
def open_server(url: str | None) -> Generator[Server]:
    """The user's server, or the embedded one in a folder of its own, removed afterwards."""
    if url is not None:
        server = Server(url, is_embedded=False)
        try:
            yield server
        finally:
            server.drop_all()
        return
    home = Path(tempfile.mkdtemp(prefix="planroom-bench-", dir="/tmp"))
    if os.geteuid() == 0:
        # The server's own user has to pass this folder to reach its data.
        home.chmod(0o711)
    try:
        yield Server(embedded.start(home), is_embedded=True)
    finally:
        embedded.stop(home)
        shutil.rmtree(home)
