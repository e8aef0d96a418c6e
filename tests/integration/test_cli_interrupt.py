"""Ctrl-C, SIGTERM and SIGKILL in the middle of `index`; and `index` beside a fleet.

The embedding server stops a command at a known place: its second batch gets no answer until the
test says so.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from planroom.config import Settings
from support.command import Commands, end
from support.embedding_server import EmbeddingServer, Fault
from support.fleet import await_true, make_document


@pytest.fixture
def server() -> Generator[EmbeddingServer]:
    with EmbeddingServer(8) as running:
        yield running


@pytest.fixture
def planroom(settings: Settings, tmp_path: Path, server: EmbeddingServer) -> Commands:
    return Commands.on(
        settings,
        tmp_path,
        embedder="openai",
        openai_base_url=server.url,
        openai_dimensions=server.dimensions,
        openai_api_key="none",
        chunk_tokens=32,
        chunk_overlap=4,
        batch_units=10,
        page_group=4,
    )


@pytest.fixture
def document(tmp_path: Path) -> Path:
    return make_document(tmp_path / "set.pdf", pages=8, blank_every=0)


@contextmanager
def stopped_in_second_batch(
    planroom: Commands, server: EmbeddingServer, *arguments: str | Path
) -> Generator[subprocess.Popen[str]]:
    """A command that has committed its pages and its first batch, and waits for the second."""
    server.fail_next(None, Fault("hang"))
    process = planroom.start(*arguments)
    try:
        server.wait_for_requests(2)
        await_true(
            lambda: planroom("status", "set.pdf", "--json").document["files"][0]["total_units"],
            "the pages were not all committed",
        )
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            end(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_l10_an_interrupted_index_gives_its_lease_back_and_the_same_command_goes_on(
    planroom: Commands, server: EmbeddingServer, document: Path, number: signal.Signals
) -> None:
    with stopped_in_second_batch(planroom, server, "index", document) as process:
        process.send_signal(number)
        said = end(process)
    server.release()
    (row,) = planroom("status", "--json").document["files"]
    again = planroom("index", document)

    assert (said.code, said.err) == (130, "")
    assert "set.pdf: stopped at all 8 pages read, chunk 10 of" in said.out
    assert "The same command again goes on from there." in said.out
    assert (row["state"], row["processed_units"]) == ("queued to resume", 10)
    assert "set.pdf: resuming at chunk 11 of" in again.out
    assert "all 8 pages are read" in again.out
    attempts = planroom("status", "set.pdf", "--json").document["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["released", "ready"]
    assert attempts[1]["pages_read"] == 0


@pytest.mark.slow
def test_l10_an_interrupted_index_that_is_stuck_in_the_database_is_left_with_130(
    planroom: Commands,
    server: EmbeddingServer,
    document: Path,
    connection: psycopg.Connection,
) -> None:
    """The batch cannot be committed, for its row is locked; nothing that is committed is lost."""
    with stopped_in_second_batch(planroom, server, "index", document) as process:
        with connection.transaction():
            connection.execute("select 1 from file_ingestions for update")
            server.release()
            server.wait_for_embedded(20)
            process.send_signal(signal.SIGINT)
            said = end(process)
        again = planroom("index", document)

    assert said.code == 130
    assert "not done within 8.0 s: leaving" in said.err
    assert again.code == 0
    assert "set.pdf: resuming at chunk 11 of" in again.out


def test_an_interrupt_is_an_event_for_machines(
    planroom: Commands, server: EmbeddingServer, document: Path
) -> None:
    with stopped_in_second_batch(planroom, server, "index", document, "--json") as process:
        process.send_signal(signal.SIGINT)
        said = end(process)

    assert said.code == 130
    (interrupted,) = said.of("interrupted")
    assert [left["file"] for left in interrupted["left"]] == ["set.pdf"]
    assert said.of("summary") == []


def test_after_a_sigkill_the_same_command_resumes(
    planroom: Commands, server: EmbeddingServer, document: Path
) -> None:
    with stopped_in_second_batch(planroom, server, "index", document) as process:
        process.kill()
        end(process)
    server.release()
    first_batch = {text for request in server.received[:1] for text in request.texts}

    again = planroom("index", document)

    assert "set.pdf: resuming at chunk 11 of" in again.out
    assert "indexed set.pdf: 8 pages" in again.out
    later = {text for request in server.received[2:] for text in request.texts}
    assert not first_batch & later
    planroom("verify", "set.pdf")


def test_index_follows_a_file_that_another_worker_holds(
    planroom: Commands, server: EmbeddingServer, document: Path
) -> None:
    planroom("add", document)
    with stopped_in_second_batch(planroom, server, "worker", "--until-idle") as worker:
        index = planroom.start("index", document, "--json")
        assert index.stdout is not None
        taken = index.stdout.readline()
        server.release()
        said = end(index)
        done = end(worker)

    assert '"outcome": "resumed"' in taken
    assert (said.code, done.code) == (0, 0)
    assert said.of("ended")[0]["status"] == "ready"
    attempts = planroom("status", "set.pdf", "--json").document["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["ready"]
    assert f":{worker.pid}:" in attempts[0]["worker"]


def test_a_worker_that_is_told_to_stop_ends_with_0_and_hands_over(
    planroom: Commands, server: EmbeddingServer, document: Path
) -> None:
    planroom("add", document)
    with stopped_in_second_batch(planroom, server, "worker") as worker:
        worker.send_signal(signal.SIGTERM)
        said = end(worker)

    assert said.code == 0
    assert planroom("status", "--json").document["files"][0]["state"] == "queued to resume"
    assert planroom("workers", "--json").document["workers"] == []
    assert '"message": "worker stopped"' in said.err
