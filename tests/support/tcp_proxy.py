"""A TCP proxy before the tests' server that misbehaves as networks do.

`freeze` stops forwarding on the connections there are, in one direction or both, and closes none
of them: to both ends they look alive for ever. `cut` resets them. `refuse` takes no new ones until
`accept` does; without it, new connections are forwarded.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import unquote

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A connection: its two sockets, and whether what each of them sends is swallowed."""

    client: socket.socket
    server: socket.socket
    asks_in_vain: threading.Event = field(default_factory=threading.Event)
    answers_in_vain: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        for end in (self.client, self.server):
            # A thread may wait in `recv`, which a close alone would not end.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Forwards bytes between a port of its own and the server."""

    def __init__(self, database_url: str, host: str = "127.0.0.1") -> None:
        given = conninfo_to_dict(database_url)
        self._host = unquote(str(given["host"]))
        self._port = int(given.get("port") or 5432)
        self._pairs: list[_Pair] = []
        self._address = (host, 0)
        self.accept()
        self.url = make_conninfo(database_url, host=self._address[0], port=self._address[1])

    def accept(self) -> None:
        """Take new connections, at the address of before."""
        self._listener = socket.create_server(self._address)
        self._address = self._listener.getsockname()
        threading.Thread(target=self._serve, args=[self._listener], daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                try:
                    server = self._connect()
                except OSError:
                    client.close()
                    continue
                pair = _Pair(client, server)
                self._pairs.append(pair)
                for source, target, in_vain in (
                    (client, server, pair.asks_in_vain),
                    (server, client, pair.answers_in_vain),
                ):
                    threading.Thread(
                        target=_forward, args=[source, target, in_vain], daemon=True
                    ).start()

    def _connect(self) -> socket.socket:
        if not self._host.startswith("/"):
            return socket.create_connection((self._host, self._port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(os.path.join(self._host, f".s.PGSQL.{self._port}"))  # noqa: PTH118
        return server

    def freeze(self, *, asking: bool = True, answering: bool = True) -> int:
        """Swallow what clients ask, or the server answers, on what is connected now; how many."""
        for pair in self._pairs:
            if asking:
                pair.asks_in_vain.set()
            if answering:
                pair.answers_in_vain.set()
        return len(self._pairs)

    def cut(self) -> None:
        """Reset every connection, towards both ends."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in (pair.client, pair.server):
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            pair.close()

    def refuse(self) -> None:
        """Take no new connection. Closing alone would leave the one that `accept` waits for."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def connections(self) -> int:
        """How many connections there have been, and were not cut."""
        return len(self._pairs)

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self.refuse()
        for pair in self._pairs:
            pair.close()


def _forward(source: socket.socket, target: socket.socket, in_vain: threading.Event) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            if not in_vain.is_set():
                target.sendall(data)
        if not in_vain.is_set():
            target.shutdown(socket.SHUT_WR)


@contextmanager
def proxied(database_url: str, host: str = "127.0.0.1") -> Generator[Proxy]:
    """A proxy beside the block."""
    proxy = Proxy(database_url, host)
    try:
        yield proxy
    finally:
        proxy.close()
