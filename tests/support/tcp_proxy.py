"""A TCP proxy before the tests' server that can fall silent, as a cut cable does.

`freeze` stops forwarding on the connections there are and closes none of them: to both ends they
look alive for ever. New connections are forwarded.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from urllib.parse import unquote

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class Proxy:
    """Forwards bytes between a port of its own and the server."""

    def __init__(self, database_url: str) -> None:
        given = conninfo_to_dict(database_url)
        self._host = unquote(str(given["host"]))
        self._port = int(given.get("port") or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket, threading.Event]] = []
        port = self._listener.getsockname()[1]
        self.url = make_conninfo(database_url, host="127.0.0.1", port=port)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = self._connect()
                frozen = threading.Event()
                self._pairs.append((client, server, frozen))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=_forward, args=[*ends, frozen], daemon=True).start()

    def _connect(self) -> socket.socket:
        if not self._host.startswith("/"):
            return socket.create_connection((self._host, self._port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(os.path.join(self._host, f".s.PGSQL.{self._port}"))  # noqa: PTH118
        return server

    def freeze(self) -> int:
        """Forward nothing more on what is connected now; how many connections that is."""
        for _, _, frozen in self._pairs:
            frozen.set()
        return len(self._pairs)

    def refuse(self) -> None:
        """Take no new connection. Closing alone would leave the one that `accept` waits for."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def connections(self) -> int:
        """How many connections there have been."""
        return len(self._pairs)

    def close(self) -> None:
        self.refuse()
        for client, server, _ in self._pairs:
            client.close()
            server.close()


def _forward(source: socket.socket, target: socket.socket, frozen: threading.Event) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            if frozen.is_set():
                return
            target.sendall(data)
        if not frozen.is_set():
            target.shutdown(socket.SHUT_WR)


@contextmanager
def proxied(database_url: str) -> Generator[Proxy]:
    """A proxy beside the block."""
    proxy = Proxy(database_url)
    try:
        yield proxy
    finally:
        proxy.close()
