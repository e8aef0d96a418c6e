"""The stream of units: the same list wherever it is taken up, and never much of it in memory."""

from __future__ import annotations

from typing import Any, cast

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planroom import units
from planroom.chunk import ChunkParams, chunk_page
from planroom.model import Chunk
from planroom.units import UnitStream

PARAMS = ChunkParams(16, 0)


class Pages:
    """Stored pages, in place of the two queries that the stream makes."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.committed = len(texts)
        self.reads = 0

    def locate_unit(self, conn: object, ingestion_id: int, unit: int) -> tuple[int, int] | None:
        before = 0
        for page, text in enumerate(self.texts[: self.committed]):
            count = len(chunk_page(text, PARAMS))
            if before + count > unit:
                return page, before
            before += count
        return None

    def read_texts(
        self, conn: object, ingestion_id: int, first: int, limit: int
    ) -> list[tuple[int, str]]:
        self.reads += 1
        stop = min(first + limit, self.committed)
        return list(enumerate(self.texts[first:stop], first))

    def all_units(self) -> list[tuple[int, Chunk]]:
        return [
            (i, chunk) for i, text in enumerate(self.texts) for chunk in chunk_page(text, PARAMS)
        ]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Pages:
    pages = Pages([])
    monkeypatch.setattr(units, "locate_unit", pages.locate_unit)
    monkeypatch.setattr(units, "read_texts", pages.read_texts)
    return pages


def page_of(words: int, seed: int) -> str:
    return " ".join(f"word{seed}x{i}" for i in range(words))


NO_CONNECTION = cast("psycopg.Connection[Any]", None)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=12),
    start_share=st.floats(0, 1),
    held_max=st.integers(0, 40),
    batch=st.integers(1, 30),
    group=st.integers(1, 5),
)
def test_from_any_start_the_rest_of_the_list_comes_once_and_in_order(
    sizes: list[int], start_share: float, held_max: int, batch: int, group: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pages = Pages([page_of(size, seed) for seed, size in enumerate(sizes)])
        patch.setattr(units, "locate_unit", pages.locate_unit)
        patch.setattr(units, "read_texts", pages.read_texts)
        expected = pages.all_units()
        start = int(start_share * len(expected))
        stream = UnitStream(1, PARAMS, start, held_max)
        taken: list[tuple[int, Chunk]] = []
        pages.committed = 0
        # As a job does: some pages are committed, and what is whole by then is taken.
        while pages.committed < len(sizes):
            first = pages.committed
            pages.committed = min(first + group, len(sizes))
            stream.locate(NO_CONNECTION)
            for page in range(first, pages.committed):
                stream.offer(page, chunk_page(pages.texts[page], PARAMS))
            planned = sum(len(chunk_page(t, PARAMS)) for t in pages.texts[: pages.committed])
            while planned - start - len(taken) >= batch:
                some = stream.take(NO_CONNECTION, batch, pages.committed)
                assert len(some) == batch
                taken += some
        while rest := stream.take(NO_CONNECTION, batch, len(sizes)):
            taken += rest
        assert taken == expected[start:]


def test_pages_that_were_just_read_are_not_read_back_while_there_is_room(stored: Pages) -> None:
    stored.texts = [page_of(30, seed) for seed in range(4)]
    stored.committed = 4
    stream = UnitStream(1, PARAMS, 0, 10_000)
    stream.locate(NO_CONNECTION)
    for page, text in enumerate(stored.texts):
        stream.offer(page, chunk_page(text, PARAMS))
    taken = stream.take(NO_CONNECTION, 10_000, 4)
    assert taken == stored.all_units()
    assert stored.reads == 0


def test_rows_that_are_missing_end_the_stream_and_do_not_hang_it(stored: Pages) -> None:
    stored.texts = [page_of(30, 1)]
    stored.committed = 1
    stream = UnitStream(1, PARAMS, 0, 100)
    stream.locate(NO_CONNECTION)
    stored.committed = 0
    assert stream.take(NO_CONNECTION, 10, 5) == []
