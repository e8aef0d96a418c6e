"""The index of vectors: built once it pays, repaired, used, and never at the cost of a scope."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import planroom.search as search_module
from planroom.config import Settings
from planroom.search import Mode
from planroom.vector_index import build_vector_indexes
from support.engine import await_true, in_background, scalar
from support.room import Bench, notes_pdf

SMALL = {"chunk_tokens": 16, "chunk_overlap": 0}


@pytest.fixture
def bench(settings: Settings, tmp_path: Path) -> Iterator[Bench]:
    """160 chunks, and 4,000 more of the same embedder in other files."""
    with Bench.open(settings.model_copy(update=SMALL)) as bench:
        row = bench.index(notes_pdf(tmp_path / "notes.pdf", 2))
        bench.conn.execute(
            """
            with copied as (
                insert into files (workspace_id, project_id, name, sha256, size_bytes)
                select workspace_id, project_id, 'copy ' || n, sha256, size_bytes
                  from files, generate_series(1, 25) as n
                returning id
            ), made as (
                insert into file_ingestions (
                    workspace_id, project_id, file_id, version, sha256, size_bytes, status,
                    finished_at, extractor, chunker, embedder, page_count, processed_pages,
                    planned_units, total_units, processed_units
                )
                select workspace_id, project_id, copied.id, 1, sha256, size_bytes, status,
                       finished_at, extractor, chunker, embedder, page_count, processed_pages,
                       planned_units, total_units, processed_units
                  from file_ingestions, copied
                returning id
            )
            select count(*) from made
            """
        )
        bench.conn.execute(
            """
            insert into pages
                (ingestion_id, page_index, workspace_id, status, parser, text, width, height,
                 rotation, chunk_count)
            select job.id, page_index, pages.workspace_id, pages.status, parser, text, width,
                   height, rotation, chunk_count
              from pages, file_ingestions as job where job.id <> pages.ingestion_id
            """
        )
        bench.conn.execute(
            """
            insert into chunks
                (ingestion_id, chunk_index, workspace_id, page_index, embedder_id, tokens,
                 text_hash, text, embedding)
            select job.id, chunk_index, chunks.workspace_id, page_index, embedder_id, tokens,
                   sha256(convert_to(text || job.id, 'UTF8')), text || ' ' || job.id, embedding
              from chunks, file_ingestions as job where job.id <> chunks.ingestion_id
            """
        )
        bench.conn.execute(
            """
            update files set published_ingestion_id = job.id
              from file_ingestions as job where job.file_id = files.id
            """
        )
        bench.conn.execute("vacuum analyze")
        assert row["total_units"] == 160
        yield bench


def index_of(bench: Bench) -> str | None:
    """`valid`, `invalid`, or None when there is none."""
    found = bench.rows(
        "select indisvalid from pg_index where indexrelid = to_regclass('chunks_hnsw_' ||"
        " (select id from embedders))"
    )
    return None if not found else "valid" if found[0]["indisvalid"] else "invalid"


def scans(bench: Bench) -> int:
    """How often the index was used by transactions that are over."""
    bench.conn.execute("select pg_stat_force_next_flush()")
    bench.conn.execute("select 1")
    return scalar(
        bench.conn,
        "select coalesce(sum(idx_scan), 0) from pg_stat_user_indexes"
        " where indexrelname like 'chunks_hnsw_%%'",
    )


def test_an_index_is_built_once_there_are_chunks_enough_and_once_only(bench: Bench) -> None:
    assert build_vector_indexes(bench.conn, 5000) == 0
    assert index_of(bench) is None
    assert build_vector_indexes(bench.conn, 4000) == 1
    assert index_of(bench) == "valid"
    assert build_vector_indexes(bench.conn, 4000) == 0


def test_what_an_interrupted_build_left_is_dropped_and_built_again(bench: Bench) -> None:
    build_vector_indexes(bench.conn, 4000)
    bench.conn.execute(
        "update pg_index set indisvalid = false where indexrelid = to_regclass('chunks_hnsw_1')"
    )
    assert index_of(bench) == "invalid"
    oid = scalar(bench.conn, "select to_regclass('chunks_hnsw_1')::oid")
    assert build_vector_indexes(bench.conn, 4000) == 1
    assert index_of(bench) == "valid"
    assert scalar(bench.conn, "select to_regclass('chunks_hnsw_1')::oid") != oid


def test_an_index_that_another_worker_is_building_is_left_alone(bench: Bench) -> None:
    with (
        bench.database.connect() as blocker,
        bench.database.connect() as builder,
        ExitStack() as stack,
        blocker.transaction(),
    ):
        # A build waits for transactions that may still write to the table.
        blocker.execute("lock table chunks in row exclusive mode")
        stack.enter_context(in_background(lambda: build_vector_indexes(builder, 4000)))
        await_true(lambda: index_of(bench) == "invalid", "the build never began")
        assert build_vector_indexes(bench.conn, 4000) == 0
        assert index_of(bench) == "invalid"
    assert index_of(bench) == "valid"


def test_a_build_is_given_up_when_the_worker_has_to_stop(bench: Bench) -> None:
    stopping = threading.Event()
    built: list[int] = []
    with (
        bench.database.connect() as blocker,
        bench.database.connect() as builder,
        blocker.transaction(),
    ):
        blocker.execute("lock table chunks in row exclusive mode")
        with in_background(
            lambda: built.append(build_vector_indexes(builder, 4000, stopping=stopping.is_set))
        ) as build:
            await_true(lambda: index_of(bench) == "invalid", "the build never began")
            stopping.set()
            build.join(10)
            assert built == [0]
    # The next one repairs what that left.
    assert build_vector_indexes(bench.conn, 4000) == 1
    assert index_of(bench) == "valid"


@pytest.fixture
def any_scope_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "EXACT_CHUNKS_MAX", 1000)


@pytest.mark.usefixtures("any_scope_is_large")
def test_a_search_of_a_large_scope_uses_the_index_and_finds_the_same_pages(bench: Bench) -> None:
    exact = bench.search("ANCHOR 107A", mode=Mode.VECTOR, k=26)
    build_vector_indexes(bench.conn, 4000)
    before = scans(bench)
    through_index = bench.search("ANCHOR 107A", mode=Mode.VECTOR, k=26)
    assert scans(bench) == before + 1
    assert {(hit.file_id, hit.page) for hit in through_index[:20]} <= {
        (hit.file_id, hit.page) for hit in exact
    }
    assert through_index[0].page == exact[0].page == 1


@pytest.mark.usefixtures("any_scope_is_large")
def test_a_small_scope_among_many_neighbours_loses_nothing_to_the_index(
    bench: Bench, tmp_path: Path
) -> None:
    build_vector_indexes(bench.conn, 4000)
    other = bench.elsewhere("small")
    other.index(notes_pdf(tmp_path / "other.pdf", 1, lines=3, first=50))
    other.index(notes_pdf(tmp_path / "more.pdf", 1, lines=3, first=60))
    before = scans(bench)
    # What is asked for stands in the other workspace, 26 times, and not in this one.
    hits = other.search("ANCHOR 107A", mode=Mode.VECTOR)
    assert {hit.file for hit in hits} == {"other.pdf", "more.pdf"}
    assert scans(bench) == before


@pytest.mark.usefixtures("any_scope_is_large")
def test_a_scope_that_the_index_gives_up_on_is_searched_exactly(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_vector_indexes(bench.conn, 4000)
    expected = bench.search("ANCHOR 107A", mode=Mode.VECTOR, k=26)
    monkeypatch.setattr(search_module, "EXACT_CHUNKS_MAX", 0)
    bench.conn.execute("set hnsw.max_scan_tuples = 1")
    bench.conn.execute("set hnsw.ef_search = 1")
    file_id = scalar(bench.conn, "select max(id) from files")
    hits = bench.search("ANCHOR 107A", mode=Mode.VECTOR, file_id=file_id)
    assert [hit.page for hit in hits] == [1, 2]
    assert {hit.file_id for hit in hits} == {file_id}
    assert expected[0].page == 1
