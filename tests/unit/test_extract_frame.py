"""Messages between the reader and its child."""

from __future__ import annotations

import os
import struct

import pytest

from planroom.extract.frame import FrameBuffer, FrameError, send


def test_a_message_arrives_whole_however_it_is_cut() -> None:
    read, write = os.pipe()
    message = {"page": {"text": 'Ø 3/4" – \U0001f600', "index": 7}}
    send(write, message)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    buffer = FrameBuffer()

    for i in range(len(data) - 1):
        buffer.feed(data[i : i + 1])
        assert buffer.take() is None
    buffer.feed(data[-1:])

    assert buffer.take() == message
    assert buffer.take() is None


@pytest.mark.parametrize(
    "data",
    [struct.pack(">I", 0xFFFFFFFF), struct.pack(">I", 2) + b"[]", struct.pack(">I", 3) + b"\xff{}"],
    ids=["endless", "no object", "no json"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    buffer = FrameBuffer()
    buffer.feed(data)

    with pytest.raises(FrameError):
        buffer.take()
