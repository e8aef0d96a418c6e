"""The ingestion path with a real embedding service that is busy, broken or lying."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from leasequeue import Ended, Lease
from planroom.chunk import count_tokens
from planroom.config import Settings
from planroom.embed.openai import OpenAIEmbedder
from planroom.errors import PlanroomError
from support.embedding_server import EmbeddingServer, Fault, failing, rate_limited, vector_of
from support.engine import in_background
from support.pdf import PdfPage, annotation, write_pdf
from support.room import Bench, Vectors, notes_pdf

SMALL = {"chunk_tokens": 16, "chunk_overlap": 0, "batch_units": 40}
LATER = datetime.now(UTC) + timedelta(days=1)


class Patience:
    """Waits for no time and says how long it would have been."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, seconds: float) -> None:
        self.seconds += seconds


@contextmanager
def service(
    settings: Settings, *, patience_seconds: float = 60.0
) -> Generator[tuple[Bench, EmbeddingServer]]:
    patience = Patience()
    with (
        EmbeddingServer() as server,
        Bench.open(settings.model_copy(update=SMALL)) as bench,
    ):
        embedder = OpenAIEmbedder(
            base_url=server.url,
            model="test",
            dimensions=64,
            wait=patience,
            patience_seconds=patience_seconds,
        )
        bench.opens = lambda settings: embedder
        with closing(embedder):
            yield bench, server


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """Two pages, 160 chunks: four batches of 40."""
    return notes_pdf(tmp_path / "notes.pdf", 2)


def test_every_text_is_sent_once_and_filed_under_its_own_chunk(
    settings: Settings, document: Path
) -> None:
    with service(settings) as (bench, server):
        row = bench.index(document)
        assert row["status"] == "ready"
        assert server.embedded == row["total_units"]
        assert set(server.counts.values()) == {1}
        assert_vectors_are_their_texts(bench, row["id"])


def assert_vectors_are_their_texts(bench: Bench, ingestion_id: int) -> None:
    for chunk in bench.chunks(ingestion_id):
        stored = [float(number) for number in chunk["embedding"].strip("[]").split(",")]
        expected = vector_of(chunk["text"], 64)
        assert stored == pytest.approx(expected, abs=1e-3)


def test_d13_a_429_in_mid_document_waits_as_asked_and_goes_on_with_the_same_batch(
    settings: Settings, document: Path
) -> None:
    with service(settings) as (bench, server):
        server.fail_next(None, rate_limited(7), rate_limited(7))
        row = bench.index(document)
        assert (row["status"], row["attempts"]) == ("ready", 1)
        sizes = [len(request.texts) for request in server.received]
        assert sizes == [40] * 6
        assert server.received[1].texts == server.received[2].texts == server.received[3].texts
        assert set(server.counts.values()) == {1}


def test_d13_a_long_retry_after_requeues_and_keeps_the_earlier_batches(
    settings: Settings, document: Path
) -> None:
    with service(settings) as (bench, server):
        server.fail_next(None, None, rate_limited(600))
        taken = bench.take(document)
        before = datetime.now(UTC)
        assert bench.finish() == "queued"
        row = bench.row(taken.ingestion_id)
        assert (row["processed_units"], row["error_code"]) == (80, "embedder_busy")
        assert row["queued_at"] >= before + timedelta(seconds=600)
        assert len(bench.chunks(row["id"])) == 80
        assert bench.claim() is None
        sent = server.requests

        assert bench.work(bench.held("bob", now=LATER)) == "ready"
        assert server.received[sent].texts == server.received[sent - 1].texts
        assert set(server.counts.values()) == {1}
        first, second = bench.attempts(row["id"])
        assert (first["outcome"], first["retry_at"]) == ("retried", row["queued_at"])
        assert second["first_unit"] == 80


def test_a_service_that_stays_away_ends_the_ingestion_after_three_attempts(
    settings: Settings, document: Path
) -> None:
    with service(settings, patience_seconds=1.0) as (bench, server):
        server.fail_next(None, *[failing(503)] * 50)
        taken = bench.take(document)
        assert bench.finish() == "queued"
        assert bench.work(bench.held(now=LATER)) == "queued"
        assert bench.work(bench.held(now=LATER + timedelta(days=1))) == "failed"
        row = bench.row(taken.ingestion_id)
        assert row["error_code"] == "embedder_busy"
        assert "503" in row["error"]
        # What was committed is kept for a retry.
        assert (row["processed_units"], len(bench.chunks(row["id"]))) == (40, 40)
        assert [a["outcome"] for a in bench.attempts(row["id"])] == ["retried", "retried", "failed"]


def test_progress_between_failures_starts_the_count_of_attempts_again(
    settings: Settings, document: Path
) -> None:
    with service(settings, patience_seconds=1.0) as (bench, server):
        taken = bench.take(document)
        statuses: list[str] = []
        now = LATER
        while len(statuses) < 4:
            server.fail_next(None, failing(503))
            now += timedelta(days=1)
            statuses.append(bench.work(bench.held(now=now)))
        assert statuses == ["queued", "queued", "queued", "ready"]
        assert bench.row(taken.ingestion_id)["attempts"] == 4


def test_d15_shuffled_answers_are_filed_by_their_index(settings: Settings, document: Path) -> None:
    with service(settings) as (bench, server):
        server.fail_next(Fault("shuffle"), times=4)
        row = bench.index(document)
        assert row["status"] == "ready"
        assert_vectors_are_their_texts(bench, row["id"])


@pytest.mark.parametrize(
    "fault",
    [
        Fault("count"),
        Fault("duplicate"),
        Fault("extra"),
        Fault("dimension", position=3),
        Fault("nan", position=3),
        Fault("null", position=3),
        Fault("infinity", position=3),
        Fault("zero", position=3),
    ],
    ids=lambda fault: fault.kind,
)
def test_d15_d16_a_wrong_answer_fails_the_document_and_misfiles_nothing(
    settings: Settings, document: Path, fault: Fault
) -> None:
    with service(settings) as (bench, server):
        server.fail_next(None, fault)
        taken = bench.take(document)
        assert bench.finish() == "failed"
        row = bench.row(taken.ingestion_id)
        assert row["error_code"] == "embedding_invalid"
        if fault.position:
            assert "(for chunk 43, on page 1)" in row["error"]
        else:
            assert "chunk" in row["error"]
        assert (row["processed_units"], len(bench.chunks(row["id"]))) == (40, 40)
        assert_vectors_are_their_texts(bench, row["id"])
        assert bench.file(taken.file_id)["published_ingestion_id"] is None
        # The bad vectors were not kept anywhere: a retry asks for them again.
        sent = server.requests
        bench.index(document)
        assert server.received[sent].texts == server.received[sent - 1].texts


def test_d16_an_embedder_of_any_kind_that_returns_nan_is_refused_with_the_chunk(
    settings: Settings, document: Path
) -> None:
    with Bench.open(settings.model_copy(update=SMALL)) as bench:

        def spoil(vectors: Vectors) -> Vectors:
            if len(bench.embedder.batches) == 2:
                vectors[5, 7] = float("nan")
            return vectors

        bench.embedder.spoil = spoil
        row = bench.index(document)
        assert (row["status"], row["error_code"]) == ("failed", "embedding_invalid")
        assert "(for chunk 45, on page 1)" in row["error"]
        assert len(bench.chunks(row["id"])) == 40


def test_d16_the_chunk_is_named_when_part_of_the_batch_is_known_already(
    settings: Settings, tmp_path: Path
) -> None:
    with service(settings) as (bench, server):
        bench.index(notes_pdf(tmp_path / "known.pdf", 1))
        server.fail_next(Fault("nan", position=2))
        # The first page is known; the third text sent is the third of the second page.
        row = bench.index(notes_pdf(tmp_path / "both.pdf", 2))
        assert row["status"] == "failed"
        assert "(for chunk 82, on page 2)" in row["error"]


def test_d14_200_chunks_of_2000_tokens_are_sent_in_requests_below_the_limit(
    settings: Settings, tmp_path: Path
) -> None:
    pages = [
        PdfPage(annotations=tuple(cyrillic(20 * page + i) for i in range(20))) for page in range(11)
    ]
    document = write_pdf(tmp_path / "dense.pdf", pages)
    with service(settings) as (bench, server):
        bench = bench.with_settings(chunk_tokens=2000, batch_units=200)
        row = bench.index(document)
        assert row["status"] == "ready"
        assert row["total_units"] > 200
        tokens = [sum(map(count_tokens, request.texts)) for request in server.received]
        quarters = [
            sum(len(sent.encode()) // 4 for sent in request.texts) for request in server.received
        ]
        assert max(tokens) <= 300_000
        assert max(quarters) <= 300_000
        assert sum(tokens[:2]) > 300_000, "the first batch would have fitted in one request"
        assert set(server.counts.values()) == {1}


def cyrillic(seed: int) -> str:
    """An annotation of about 2,000 tokens that are not Latin."""
    said = " ".join(f"щит{1000 * seed + i:06d}вентиляция" for i in range(180))
    return annotation(
        "Square", "", 10, 10, extra=f"/Contents <FEFF{said.encode('utf-16-be').hex()}>"
    )


def test_d17_an_answer_that_comes_after_the_lease_was_taken_over_is_refused(
    settings: Settings, document: Path
) -> None:
    with service(settings) as (bench, server):
        taken = bench.take(document)
        stale = bench.held("alice")
        server.fail_next(None, Fault("hang"))

        def take_over() -> None:
            server.wait_for_requests(2)
            with bench.database.connect() as conn:
                rival = replace(bench, conn=conn)
                lease = rival.held("bob", now=LATER)
                assert lease.row["processed_units"] == 40
                assert rival.work(lease) == "ready"
            server.release()

        with in_background(take_over):
            assert bench.work(stale) == "lost"
        row = bench.row(taken.ingestion_id)
        assert (row["status"], row["lease_owner"]) == ("ready", None)
        assert len(bench.chunks(row["id"])) == row["total_units"]
        assert [a["outcome"] for a in bench.attempts(row["id"])] == ["expired", "ready"]


def test_an_embedder_that_cannot_be_used_here_is_retried_under_its_own_code(
    settings: Settings, document: Path
) -> None:
    with Bench.open(settings.model_copy(update=SMALL)) as bench:
        taken = bench.take(document)

        def refuse(settings: Settings) -> OpenAIEmbedder:
            raise PlanroomError("no model here", code="embedder_refused", hint="install it")

        bench.opens = refuse
        assert bench.finish() == "queued"
        row = bench.row(taken.ingestion_id)
        assert row["error_code"] == "embedder_refused"
        assert "install it" in row["error"]


def test_a_wrong_key_fails_at_once_and_is_not_repeated_in_the_error(
    settings: Settings, document: Path
) -> None:
    with service(settings) as (bench, server):
        server.fail_next(failing(401, "no such key"), times=9)
        taken = bench.take(document)
        assert bench.finish() == "failed"
        assert server.requests == 1
        assert bench.row(taken.ingestion_id)["error_code"] == "embedder_refused"
        claimed: Lease | Ended | None = bench.claim(now=LATER)
        assert claimed is None
