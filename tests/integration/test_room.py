"""The plan room as a library: in any thread, with signals left as they were."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import planroom
from planroom import room as room_module
from planroom.config import Settings
from planroom.errors import InputRefused, NotFound, PlanroomError
from planroom.room import PlanRoom
from support.command import Commands, end
from support.embedding_server import EmbeddingServer, Fault
from support.fleet import make_document


@pytest.fixture
def document(tmp_path: Path) -> Path:
    return make_document(tmp_path / "set.pdf", pages=5, blank_every=5)


def test_a_file_is_indexed_from_any_thread_and_its_progress_is_told(
    settings: Settings, document: Path
) -> None:
    told: list[int] = []
    ended: list[dict[str, Any]] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def index() -> None:
        with PlanRoom(settings) as room:
            row = room.index(document, on_progress=lambda row: told.append(row["processed_pages"]))
            ended.append(row)

    thread = threading.Thread(target=index)
    thread.start()
    thread.join(60)

    (row,) = ended
    assert (row["status"], row["page_count"], row["image_only_pages"]) == ("ready", 5, 1)
    assert told[-1] == 5
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_file_is_known_by_its_name_its_number_and_the_end_of_its_path(
    settings: Settings, document: Path
) -> None:
    with PlanRoom(settings) as room:
        taken = room.add(document, name="plans/2026/set.pdf")

        for file in (taken.file_id, str(taken.file_id), "plans/2026/set.pdf", "2026/set.pdf"):
            assert [row["id"] for row in room.status(file)] == [taken.file_id]
        with pytest.raises(NotFound):
            room.status("et.pdf")
        assert room.remove(taken.file_id) is True
        assert room.remove(taken.file_id) is False


def test_documents_of_different_embedders_are_all_found_by_meaning(
    settings: Settings, tmp_path: Path
) -> None:
    for embedder in ("static", "hashing"):
        own = settings.model_copy(update={"embedder": embedder, "project": embedder})
        with PlanRoom(own) as room:
            room.index(make_document(tmp_path / f"{embedder}.pdf", pages=3, blank_every=0))

    with PlanRoom(settings) as room:
        hits = room.search("beam column slab", mode="vector", all_projects=True)
        assert {hit.file for hit in hits} == {"static.pdf", "hashing.pdf"}
        for embedder in ("static", "hashing"):
            hits = room.search("beam column slab", mode="vector", project=embedder)
            assert {hit.file for hit in hits} == {f"{embedder}.pdf"}


def test_what_an_embedder_of_another_version_indexed_is_found_by_its_words_and_that_is_said(
    settings: Settings, document: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with PlanRoom(settings) as room:
        room.index(document)
        with room.database.connection() as conn:
            conn.execute("update file_ingestions set embedder = 'hashing/0 of old'")

        assert room.search("sheet of job")
        assert "searched by words alone: It was indexed with hashing/0 of old" in caplog.text
        with pytest.raises(PlanroomError) as caught:
            room.search("sheet of job", mode="vector")
        assert caught.value.code == "embedder_changed"
        assert room.search("sheet of job", mode="text")


@pytest.fixture
def remote(settings: Settings) -> Generator[tuple[Settings, EmbeddingServer]]:
    """Settings for an embedding service, and the service."""
    with EmbeddingServer(8) as server:
        chosen = {
            "embedder": "openai",
            "openai_base_url": server.url,
            "openai_dimensions": server.dimensions,
            "openai_api_key": SecretStr("none"),
        }
        yield settings.model_copy(update=chosen), server


def test_a_query_whose_service_is_away_is_answered_by_words_and_that_is_said(
    remote: tuple[Settings, EmbeddingServer],
    document: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_module, "QUERY_SECONDS", 0.3)
    settings, server = remote
    with PlanRoom(settings) as room:
        room.index(document)
        server.fail_next(*[Fault("hang")] * 3)

        assert room.search("sheet of job")
        assert "searched by words alone: The embedding service did not answer" in caplog.text
        with pytest.raises(PlanroomError, match="did not answer within"):
            room.search("sheet of job", mode="vector")


def test_no_query_is_sent_to_a_service_that_nothing_here_is_set_to_use(
    remote: tuple[Settings, EmbeddingServer], document: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, server = remote
    with PlanRoom(settings) as room:
        room.index(document)
    asked = len(server.received)

    with PlanRoom(settings.model_copy(update={"embedder": "hashing"})) as room:
        assert room.search("sheet of job", all_projects=True)
        assert "which is not set here" in caplog.text
    assert len(server.received) == asked


def test_what_is_refused_leaves_nothing(settings: Settings, tmp_path: Path) -> None:
    with PlanRoom(settings) as room:
        with pytest.raises(InputRefused):
            room.index(tmp_path / "nothing.pdf")
        assert room.status(all_projects=True) == []


def test_open_takes_settings_and_the_class_is_there_by_name(settings: Settings) -> None:
    assert settings.database_url is not None
    url = settings.database_url.get_secret_value()

    with planroom.open(database_url=url, home=settings.home, project="north") as room:
        assert isinstance(room, planroom.PlanRoom)
        assert room.settings.project == "north"


INDEX = """
import signal, sys
import planroom

if sys.argv[2] == "handled":
    signal.signal(signal.SIGTERM, lambda number, frame: print("my own handler"))
try:
    with planroom.open() as room:
        room.index(sys.argv[1])
    print("returned")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("number", "handled", "said", "code"),
    [
        (signal.SIGINT, "default", "interrupted\n", 0),
        (signal.SIGTERM, "default", "", -signal.SIGTERM),
        (signal.SIGTERM, "handled", "my own handler\nreturned\n", 0),
    ],
)
def test_a_signal_gives_the_lease_back_and_then_does_what_it_did_before(
    settings: Settings,
    tmp_path: Path,
    document: Path,
    number: signal.Signals,
    handled: str,
    said: str,
    code: int,
) -> None:
    with EmbeddingServer(8) as server:
        commands = Commands.on(
            settings,
            tmp_path,
            embedder="openai",
            openai_base_url=server.url,
            openai_dimensions=8,
            openai_api_key="none",
        )
        server.fail_next(Fault("hang"))
        process = subprocess.Popen(
            [sys.executable, "-c", INDEX, document, handled],
            env=commands.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        server.wait_for_requests(1)
        process.send_signal(number)
        ended = end(process)

    assert (ended.out, ended.code, ended.err) == (said, code, "")
    (row,) = commands("status", "--json").document["files"]
    assert row["state"] == "queued to resume"
