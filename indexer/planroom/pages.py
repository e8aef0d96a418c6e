"""Rows of pages: written in groups with their outcome, read back to be cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import psycopg

from planroom.extract.sheet import normalise_sheet_number
from planroom.model import Page

Connection = psycopg.Connection[Any]


_COPY = """
    copy pages (
        ingestion_id, page_index, workspace_id, status, reason, detail, parser, text, label,
        bookmark, sheet_number, sheet_key, sheet_title, sheet_source, width, height, rotation,
        chunk_count
    ) from stdin
"""


def insert_pages(
    conn: Connection,
    ingestion_id: int,
    workspace_id: int,
    pages: Sequence[Page],
    chunk_counts: Sequence[int],
) -> None:
    """Add a group of pages, each with the number of its chunks."""
    with conn.cursor() as cursor, cursor.copy(_COPY) as copy:
        for page, chunk_count in zip(pages, chunk_counts, strict=True):
            number = page.sheet_number
            copy.write_row(
                (
                    ingestion_id,
                    page.index,
                    workspace_id,
                    page.status,
                    page.reason,
                    page.detail,
                    page.parser,
                    page.text,
                    page.label,
                    page.bookmark,
                    number,
                    None if number is None else normalise_sheet_number(number),
                    page.sheet_title,
                    page.sheet_source,
                    page.width,
                    page.height,
                    page.rotation,
                    chunk_count,
                )
            )


_TEXTS = """
    select page_index, text
      from pages
     where ingestion_id = %(ingestion_id)s and page_index >= %(first)s
     order by page_index
     limit %(limit)s
"""


def read_texts(
    conn: Connection, ingestion_id: int, first: int, limit: int
) -> list[tuple[int, str]]:
    """At most `limit` pages from `first` on, as (index, text)."""
    parameters = {"ingestion_id": ingestion_id, "first": first, "limit": limit}
    return cast(list[tuple[int, str]], conn.execute(_TEXTS, parameters).fetchall())


def iterate_texts(
    conn: Connection, ingestion_id: int, *, group: int = 32
) -> Iterator[tuple[int, str]]:
    """All pages in order, read a group at a time."""
    first = 0
    while rows := read_texts(conn, ingestion_id, first, group):
        yield from rows
        first = rows[-1][0] + 1


# The page that holds unit number `unit`, and the number of the first unit on it.
_LOCATE = """
    select page_index, before
      from (
          select page_index, chunk_count,
                 sum(chunk_count) over (order by page_index) - chunk_count as before
            from pages
           where ingestion_id = %(ingestion_id)s
      ) as counted
     where before + chunk_count > %(unit)s
     order by page_index
     limit 1
"""


def locate_unit(conn: Connection, ingestion_id: int, unit: int) -> tuple[int, int] | None:
    """Where a unit is: (its page, the first unit of that page); None when it is on no page yet."""
    row = conn.execute(_LOCATE, {"ingestion_id": ingestion_id, "unit": unit}).fetchone()
    return None if row is None else (int(row[0]), int(row[1]))


_SET_CHUNK_COUNT = """
    update pages
       set chunk_count = %(chunk_count)s
     where ingestion_id = %(ingestion_id)s and page_index = %(page_index)s
"""


def set_chunk_counts(conn: Connection, ingestion_id: int, counts: Mapping[int, int]) -> None:
    """Replace the pages' chunk counts, after the chunker has changed."""
    with conn.cursor() as cursor:
        cursor.executemany(
            _SET_CHUNK_COUNT,
            [
                {"ingestion_id": ingestion_id, "page_index": index, "chunk_count": count}
                for index, count in counts.items()
            ],
        )
