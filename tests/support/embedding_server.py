"""A real HTTP server that embeds like OpenAI's endpoint, and misbehaves on command.

It counts every text that it embeds, so a test can tell whether anything was embedded twice, even
by workers in other processes. Run it alone for a benchmark:

    python -m support.embedding_server --port 0 --latency-ms 50
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import socket
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np

Kind = Literal[
    "status",  # `status`, with an error of OpenAI's form, `code` and `headers`
    "count",  # the last embedding is left out
    "extra",  # one embedding too many, for a text that was not sent
    "duplicate",  # the index of the last embedding is that of the first
    "unnumbered",  # no embedding has an index
    "shuffle",  # correct, but in reverse order
    "dimension",  # the embedding at `position` is one number short
    "nan",  # the embedding at `position` holds NaN
    "infinity",  # the embedding at `position` holds a number too large for a double
    "null",  # the embedding at `position` holds null
    "null_entry",  # the embedding at `position` is null
    "zero",  # the embedding at `position` is all zero
    "html",  # a page of HTML with `status`
    "truncated",  # JSON cut short, with a matching length
    "huge",  # JSON that goes on for ever
    "redirect",  # 307 to `location`
    "drop",  # the connection ends in the middle of the body, after the texts were embedded
    "refuse",  # the connection ends before any answer
    "echo_key",  # `status`, repeating the key in the message and the headers
    "hang",  # no answer until `release()`; then a proper one
]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request; see `Kind` for what each does with the other fields."""

    kind: Kind
    status: int = 200
    code: str = ""
    message: str = "this is a test"
    position: int = 0
    location: str = ""
    headers: tuple[tuple[str, str], ...] = ()


def rate_limited(retry_after: int | str | None = None, *, date: str | None = None) -> Fault:
    """A 429; `retry_after` in seconds or an HTTP date, `date` for the answer's own Date."""
    headers: list[tuple[str, str]] = []
    if retry_after is not None:
        headers.append(("Retry-After", str(retry_after)))
    if date is not None:
        headers.append(("Date", date))
    return Fault("status", 429, "rate_limit_exceeded", "slow down", headers=tuple(headers))


def failing(status: int, message: str = "this is a test", code: str = "") -> Fault:
    """An error answer of OpenAI's form."""
    return Fault("status", status, code, message)


def text_key(text: str) -> str:
    """The key of a text in `EmbeddingServer.counts`."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


@functools.lru_cache(maxsize=10_000)
def vector_of(text: str, dimensions: int) -> tuple[float, ...]:
    """The unit vector that the server gives to `text`: the same in every process."""
    seed = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    numbers = np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(dimensions)
    return tuple((numbers / np.linalg.norm(numbers)).tolist())


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came: what a test may want to look at."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        """The texts that were sent."""
        return list(self.body["input"])


class EmbeddingServer:
    """The server and its counters. Use it in a `with` block; `url` is the base URL to configure.

    `fail_next` queues what happens to the requests to come, one entry a request, first in first
    out; None in the queue is a proper answer. With an empty queue every answer is proper.
    """

    def __init__(
        self,
        dimensions: int = 64,
        *,
        latency_seconds: float = 0.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.dimensions = dimensions
        self.latency_seconds = latency_seconds
        self.embedded = 0
        self.counts: Counter[str] = Counter()
        self.received: list[Request] = []
        self._faults: deque[Fault | None] = deque()
        self._changed = threading.Condition()
        self._released = threading.Event()
        self._closing = threading.Event()
        self._server = _Server((host, port), self)
        self.url = f"http://{host}:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every request and stop listening."""
        self._closing.set()
        self._released.set()
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()
        self._thread.join()

    @property
    def requests(self) -> int:
        """How many requests have come, well answered or not."""
        return len(self.received)

    def fail_next(self, *faults: Fault | None, times: int = 1) -> None:
        """Queue `faults`, `times` over, for the requests to come."""
        with self._changed:
            self._faults.extend(faults * times)

    def release(self) -> None:
        """Let every request that hangs go on, now and later."""
        self._released.set()

    def wait_for_requests(self, count: int, timeout: float = 30.0) -> None:
        """Return once `count` requests have come in all; TimeoutError where they do not."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.received) >= count, timeout):
                raise TimeoutError(f"{len(self.received)} of {count} requests came")

    def wait_for_embedded(self, count: int, timeout: float = 30.0) -> None:
        """Return once `count` texts have been embedded in all; TimeoutError where they are not."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.embedded >= count, timeout):
                raise TimeoutError(f"{self.embedded} of {count} texts were embedded")

    def arrived(self, request: Request) -> Fault | None:
        """Record a request; what is to go wrong with it."""
        with self._changed:
            self.received.append(request)
            fault = self._faults.popleft() if self._faults else None
            self._changed.notify_all()
            return fault

    def embed(self, texts: Sequence[str], dimensions: int) -> list[dict[str, Any]]:
        """Embed and count `texts`, after the latency."""
        if self.latency_seconds:
            self._closing.wait(self.latency_seconds)
        with self._changed:
            self.embedded += len(texts)
            self.counts.update(map(text_key, texts))
            self._changed.notify_all()
        return [
            {"object": "embedding", "index": at, "embedding": list(vector_of(text, dimensions))}
            for at, text in enumerate(texts)
        ]

    def hang(self) -> None:
        """Wait until released or closed."""
        self._released.wait()


# What socketserver calls the socket of a connection that it accepted.
_Accepted = socket.socket | tuple[bytes, socket.socket]


class _Server(ThreadingHTTPServer):
    # Threads are joined when it closes, so none outlives its test.
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: EmbeddingServer) -> None:
        self.owner = owner
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: _Accepted, client_address: Any) -> None:
        with self._connections_lock:
            self._connections.add(cast("socket.socket", request))
        super().process_request(request, client_address)

    def close_request(self, request: _Accepted) -> None:
        with self._connections_lock:
            self._connections.discard(cast("socket.socket", request))
        super().close_request(request)

    def close_connections(self) -> None:
        with self._connections_lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Header and body are two writes; held back, each would wait for the client's receipt.
    disable_nagle_algorithm = True
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: tests own the terminal."""

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        body = cast("dict[str, Any]", json.loads(raw))
        owner = self.server.owner
        headers = {name.lower(): value for name, value in self.headers.items()}
        fault = owner.arrived(Request(self.path, headers, body))
        if not self.path.partition("?")[0].endswith("/embeddings"):
            fault = failing(404, "no such path")
        if fault is None:
            data = owner.embed(body["input"], body.get("dimensions", owner.dimensions))
            self._send_json(200, _envelope(data))
        else:
            self._misbehave(fault, body)

    def _misbehave(self, fault: Fault, body: dict[str, Any]) -> None:
        match fault.kind:
            case "status":
                error = {"message": fault.message, "type": "test", "code": fault.code}
                self._send_json(fault.status, {"error": error}, fault.headers)
            case "echo_key":
                sent = self.headers.get("Authorization", "")
                said = f"{'x' * 280} wrong key {sent.removeprefix('Bearer ')}, sent as {sent}"
                error = {"message": said, "type": sent, "code": sent}
                self._send_json(fault.status, {"error": error}, (("X-Echo", sent),))
            case "html":
                sent = self.headers.get("Authorization", "")
                page = f"<html><body>Bad gateway {sent}</body></html>".encode()
                self._send(fault.status, page, (("Content-Type", f"text/html; key={sent}"),))
            case "redirect":
                self._send(307, b"", (("Location", fault.location),))
            case "refuse":
                self.close_connection = True
            case "truncated":
                self._send(200, b'{"object": "list", "data": [{"index": 0, "embed', ())
            case "huge":
                self._send_without_end()
            case _:
                self._embed_badly(fault, body)

    def _embed_badly(self, fault: Fault, body: dict[str, Any]) -> None:
        """The faults of an answer for which the texts were embedded all the same."""
        owner = self.server.owner
        if fault.kind == "hang":
            owner.hang()
        data = owner.embed(body["input"], body.get("dimensions", owner.dimensions))
        if fault.kind == "drop":
            self._drop(json.dumps(_envelope(data)).encode())
        else:
            self._send_json(200, _envelope(_spoilt(data, fault)))

    def _drop(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.close_connection = True

    def _send_without_end(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        block = b'{"object": "list", "data": [' + b" " * 1_000_000
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(block)

    def _send_json(
        self, status: int, body: object, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._send(
            status, json.dumps(body).encode(), (("Content-Type", "application/json"), *headers)
        )

    def _send(self, status: int, body: bytes, headers: Sequence[tuple[str, str]]) -> None:
        self.send_response_only(status)
        if not any(name == "Date" for name, _ in headers):
            self.send_header("Date", self.date_time_string())
        for name, value in headers:
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(OSError):
            self.end_headers()
            self.wfile.write(body)


def _envelope(data: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": data, "model": "test", "usage": {"total_tokens": len(data)}}


def _spoilt(data: list[dict[str, Any]], fault: Fault) -> list[dict[str, Any]]:
    """A correct answer with one thing wrong."""
    numbers: list[Any] = data[fault.position]["embedding"]
    match fault.kind:
        case "count":
            data.pop()
        case "extra":
            data.append({**data[-1], "index": len(data)})
        case "duplicate":
            data[-1]["index"] = data[0]["index"]
        case "unnumbered":
            for entry in data:
                del entry["index"]
        case "shuffle":
            data.reverse()
        case "dimension":
            numbers.pop()
        case "nan" | "null":
            numbers[len(numbers) // 2] = float("nan") if fault.kind == "nan" else None
        case "infinity":
            numbers[len(numbers) // 2] = 10**400
        case "null_entry":
            data[fault.position]["embedding"] = None
        case "zero":
            data[fault.position]["embedding"] = [0.0] * len(numbers)
        case _:
            pass
    return data


def main() -> None:
    """Serve until interrupted, printing the base URL first."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--dimensions", type=int, default=256)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    options = parser.parse_args()
    with (
        EmbeddingServer(
            options.dimensions, latency_seconds=options.latency_ms / 1000, port=options.port
        ) as server,
        contextlib.suppress(KeyboardInterrupt),
    ):
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
