"""Verify: derive the chunk list again from the bytes, and compare it with what is stored.

Trusts nothing that ingestion has written but the page outcomes that depend on the day: a page that
failed because its parser was killed or took too long may well be readable now, so it is counted
and not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

import psycopg
from psycopg.rows import dict_row

from planroom.blobs import BlobStore
from planroom.chunk import ChunkParams, chunk_page
from planroom.config import Settings
from planroom.errors import NotFound, PlanroomError
from planroom.extract import ExtractLimits, PageReader, extractor_identity
from planroom.model import PageReason, PageStatus

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

PROBLEMS_MAX = 20
CHUNKS_PER_READ = 500
_OF_THE_DAY = {PageReason.TIMEOUT, PageReason.MEMORY, PageReason.CRASHED}


@dataclass(slots=True)
class Verification:
    """What was compared and what was wrong; `problems` is empty when all is well.

    `reread` says whether the pages were read from the bytes again; they are not when another
    version of the extractor or chunker made them. Then only the stored rows are checked.
    """

    file_id: int
    ingestion_id: int
    pages: int = 0
    units: int = 0
    pages_not_compared: int = 0
    reread: bool = True
    problems: list[str] = field(default_factory=list[str])

    @property
    def ok(self) -> bool:
        """Whether everything stored is as it should be."""
        return not self.problems

    def found(self, problem: str) -> None:
        """Note a problem; the first few are enough."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)


_PUBLISHED = """
    select job.id, job.sha256, job.page_count, job.total_units, job.extractor, job.chunker,
           embedders.id as embedder_id, embedders.dimensions
      from files
      join file_ingestions as job on job.id = files.published_ingestion_id
      join embedders on embedders.identity = job.embedder
     where files.id = %(file_id)s and files.workspace_id = %(workspace_id)s
"""


def verify(
    conn: Connection,
    blobs: BlobStore,
    settings: Settings,
    workspace_id: int,
    file_id: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Check the published version of a file: its bytes, pages, rows, gaps, hashes and tail.

    `settings` are those of the file's project. Raises NotFound when nothing is published, and
    PlanroomError (`superseded`) when something else is by the end.
    """
    with conn.cursor(row_factory=dict_row) as cursor:
        parameters = {"file_id": file_id, "workspace_id": workspace_id}
        job = cursor.execute(_PUBLISHED, parameters).fetchone()
    if job is None:
        raise NotFound("Nothing of this file is searchable, so there is nothing to verify.")
    params = ChunkParams(tokens_max=settings.chunk_tokens, overlap_tokens=settings.chunk_overlap)
    result = Verification(file_id, job["id"])
    if job["chunker"] != params.identity or job["extractor"] != extractor_identity():
        result.reread = False
    elif not blobs.verify(job["sha256"]):
        result.found("The bytes in the blob store are not those that were indexed.")
        result.reread = False
    with closing(_expected(conn, blobs, settings, job, params, result, progress)) as expected:
        _compare_chunks(conn, job, expected, result)
    with conn.cursor(row_factory=dict_row) as cursor:
        published = cursor.execute(_PUBLISHED, parameters).fetchone()
    if published is None or published["id"] != job["id"]:
        raise PlanroomError(
            "Another version was published, or the file removed, while this one was verified.",
            code="superseded",
            hint="Verify it again.",
        )
    return result


_PAGES = """
    select page_index, status, reason, text, chunk_count
      from pages
     where ingestion_id = %(id)s and page_index >= %(first)s
     order by page_index
     limit 64
"""


def _stored_pages(conn: Connection, ingestion_id: int) -> Iterator[Row]:
    first = 0
    while True:
        with conn.cursor(row_factory=dict_row) as cursor:
            rows = cursor.execute(_PAGES, {"id": ingestion_id, "first": first}).fetchall()
        if not rows:
            return
        yield from rows
        first = rows[-1]["page_index"] + 1


def _expected(
    conn: Connection,
    blobs: BlobStore,
    settings: Settings,
    job: Row,
    params: ChunkParams,
    result: Verification,
    progress: Callable[[int, int], None],
) -> Generator[tuple[int, bytes]]:
    """The chunk list as it should be, as (page index, text hash); pages are compared on the way."""
    stored = _stored_pages(conn, job["id"])
    texts = _read_again(blobs, settings, job, progress) if result.reread else _nothing()
    with closing(texts):
        for index in range(job["page_count"]):
            page = next(stored, None)
            if page is None or page["page_index"] != index:
                result.found(f"Page {index + 1} has no row.")
                return
            result.pages += 1
            if result.reread:
                _compare_page(page, next(texts, None), result)
                yield from _chunks_of(page, params, result)
            else:
                # Chunks of another version are taken as its pages count them.
                yield from [(index, b"")] * page["chunk_count"]
        if next(texts, None) is not None:
            result.found(f"The document has more than its {job['page_count']} pages.")
    if next(stored, None) is not None:
        result.found("Pages stand past the last one.")


def _nothing() -> Generator[tuple[PageStatus, str]]:
    yield from ()


def _chunks_of(
    page: Row, params: ChunkParams, result: Verification
) -> Generator[tuple[int, bytes]]:
    """The chunks that a stored page's text gives."""
    index = page["page_index"]
    chunks = chunk_page(page["text"], params)
    if len(chunks) != page["chunk_count"]:
        result.found(f"Page {index + 1} counts {page['chunk_count']} chunks and has {len(chunks)}.")
    for chunk in chunks:
        yield index, chunk.text_hash


def _read_again(
    blobs: BlobStore, settings: Settings, job: Row, progress: Callable[[int, int], None]
) -> Generator[tuple[PageStatus, str]]:
    """Status and text of each page, as the bytes give them now."""
    limits = ExtractLimits(
        memory_bytes=settings.extract_memory_bytes,
        page_seconds=settings.page_seconds,
        pages_max=settings.pages_max,
    )
    with PageReader(blobs.find(job["sha256"]), limits=limits) as reader:
        for page in reader:
            reader.committed(page.index + 1)
            progress(page.index + 1, reader.page_count)
            yield page.status, page.text


def _compare_page(page: Row, now: tuple[PageStatus, str] | None, result: Verification) -> None:
    if now is None:
        result.found(f"Page {page['page_index'] + 1} is not in the document.")
        return
    status, text = now
    if page["reason"] in _OF_THE_DAY:
        result.pages_not_compared += 1
    elif page["status"] != status:
        result.found(f"Page {page['page_index'] + 1} is stored as {page['status']}, not {status}.")
    elif page["text"] != text:
        result.found(f"Page {page['page_index'] + 1} has another text than its bytes give.")


_CHUNKS = """
    select chunk_index, page_index, text_hash, sha256(convert_to(text, 'UTF8')) as hash,
           embedder_id, vector_dims(embedding) as dimensions, l2_norm(embedding) as norm
      from chunks
     where ingestion_id = %(id)s and chunk_index >= %(first)s
     order by chunk_index
     limit %(limit)s
"""


def _stored_chunks(conn: Connection, ingestion_id: int) -> Iterator[Row]:
    first = 0
    while True:
        with conn.cursor(row_factory=dict_row) as cursor:
            parameters = {"id": ingestion_id, "first": first, "limit": CHUNKS_PER_READ}
            rows = cursor.execute(_CHUNKS, parameters).fetchall()
        if not rows:
            return
        yield from rows
        first = rows[-1]["chunk_index"] + 1


def _compare_chunks(
    conn: Connection, job: Row, expected: Iterator[tuple[int, bytes]], result: Verification
) -> None:
    stored = _stored_chunks(conn, job["id"])
    total = 0
    for index, (page_index, text_hash) in enumerate(expected):
        total += 1
        chunk = next(stored, None)
        if chunk is None or chunk["chunk_index"] != index:
            result.found(f"Chunk {index} is missing.")
            return
        result.units += 1
        _compare_chunk(job, chunk, page_index, text_hash, result)
    tail = sum(1 for _ in stored)
    if tail:
        result.found(f"{tail} chunks stand past the last one.")
    if total != job["total_units"]:
        result.found(f"The plan counts {job['total_units']} chunks and the pages give {total}.")


def _compare_chunk(
    job: Row, chunk: Row, page_index: int, text_hash: bytes, result: Verification
) -> None:
    index = chunk["chunk_index"]
    if chunk["page_index"] != page_index:
        result.found(f"Chunk {index} is filed under page {chunk['page_index'] + 1}.")
    if chunk["hash"] != chunk["text_hash"]:
        result.found(f"Chunk {index} does not have the text that its hash names.")
    if text_hash and chunk["text_hash"] != text_hash:
        result.found(f"Chunk {index} has another text than its page gives.")
    if chunk["embedder_id"] != job["embedder_id"] or chunk["dimensions"] != job["dimensions"]:
        result.found(f"Chunk {index} was embedded by another embedder.")
    if not 0.9 < cast(float, chunk["norm"]) < 1.1:
        result.found(f"Chunk {index} has a vector of length {chunk['norm']:.3f}.")
