"""The stream of units: the chunk list of an ingestion in order, held a little at a time.

The list is a pure function of the pages' text and the chunker, so it needs no storing: it can be
taken up at any unit by finding its page. Pages that were just read are offered and kept while there
is room; beyond that they are read back from the database when their turn comes. So memory stays
flat when reading is far ahead of embedding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import psycopg

from planroom.chunk import ChunkParams, chunk_page
from planroom.model import Chunk
from planroom.pages import locate_unit, read_texts

Connection = psycopg.Connection[Any]
Unit = tuple[int, Chunk]
"""The page's index, and the chunk."""

PAGES_PER_READ = 8


class UnitStream:
    """The units of one ingestion from number `start` on; each is taken once."""

    def __init__(self, ingestion_id: int, params: ChunkParams, start: int, held_max: int) -> None:
        self._ingestion_id = ingestion_id
        self._params = params
        self._start = start
        self._held_max = held_max
        self._held: deque[Unit] = deque()
        self._next_page: int | None = None
        self._skip = 0

    def locate(self, conn: Connection) -> bool:
        """Find the page of the first unit; False while it has not been read yet."""
        if self._next_page is None:
            found = locate_unit(conn, self._ingestion_id, self._start)
            if found is not None:
                self._next_page, first = found
                self._skip = self._start - first
        return self._next_page is not None

    def offer(self, page: int, chunks: Sequence[Chunk]) -> None:
        """Keep the chunks of a page that was just committed, if it is next and there is room."""
        if page == self._next_page and len(self._held) < self._held_max:
            self._append(page, chunks)

    def take(self, conn: Connection, count: int, pages_committed: int) -> list[Unit]:
        """The next `count` units, fewer only where the committed pages end."""
        if not self.locate(conn):
            return []
        while len(self._held) < count and self._pages_left(pages_committed):
            assert self._next_page is not None
            rows = read_texts(conn, self._ingestion_id, self._next_page, PAGES_PER_READ)
            if not rows:
                break
            for page, text in rows:
                self._append(page, chunk_page(text, self._params))
        return [self._held.popleft() for _ in range(min(count, len(self._held)))]

    def _pages_left(self, pages_committed: int) -> bool:
        return self._next_page is not None and self._next_page < pages_committed

    def _append(self, page: int, chunks: Sequence[Chunk]) -> None:
        skip, self._skip = min(self._skip, len(chunks)), max(0, self._skip - len(chunks))
        self._held.extend((page, chunk) for chunk in chunks[skip:])
        self._next_page = page + 1
