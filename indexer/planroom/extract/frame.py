"""Messages between the reader and its child: a length of four bytes, then JSON.

Not pickle: the child parses files from anywhere, and a parser that a file has taken over must not
be able to run code in the worker.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
EXIT_MEMORY = 77
"""The child's status when Python was refused memory; a parser in C that is refused it aborts."""

FRAME_BYTES_MAX = 256 * 1024 * 1024


class FrameError(Exception):
    """What was received is not a message."""


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write one message whole; BrokenPipeError when nobody reads any more."""
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    view = memoryview(_LENGTH.pack(len(body)) + body)
    while view:
        view = view[os.write(descriptor, view) :]


class FrameBuffer:
    """Bytes as they arrive, given out as messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what was received."""
        self._bytes += data

    def take(self) -> dict[str, Any] | None:
        """The next whole message, or None while it is not there; FrameError if it is none."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > FRAME_BYTES_MAX:
            raise FrameError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        try:
            message: object = json.loads(self._bytes[_LENGTH.size : end])
        except ValueError as error:
            raise FrameError("a message that is not JSON") from error
        del self._bytes[:end]
        if not isinstance(message, dict):
            raise FrameError("a message that is not an object")
        return message  # pyright: ignore[reportUnknownVariableType]
