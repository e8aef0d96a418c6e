"""The commands, on a real database: what they do, what they say to people and to machines.

Where signals, pipes or start-up matter they are real processes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from planroom.config import Settings
from support.command import ESCAPE, Commands, Inline
from support.pdf import ARCH_D, PdfPage, drawing, encrypt, image_page, text, write_pdf


@pytest.fixture
def processes(settings: Settings, tmp_path: Path) -> Commands:
    return Commands.on(settings, tmp_path)


@pytest.fixture
def planroom(
    processes: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Inline:
    return Inline(processes, monkeypatch, capsys)


def sheet(number: str, title: str, note: str = "") -> PdfPage:
    """A sheet with its number and title in the title block, and a note on the drawing."""
    return PdfPage(drawing(number, title) + text(note, 300, 800), ARCH_D)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Two sheets with text, and between them a scan."""
    return write_pdf(
        tmp_path / "plan.pdf",
        [
            sheet("A-101", "FIRST FLOOR PLAN"),
            image_page(),
            sheet("A-201", "ELEVATIONS", "CURTAIN WALL [TYPE 2]"),
        ],
    )


# -- index ---------------------------------------------------------------------------------------


def test_a_set_is_indexed_and_a_sheet_of_it_is_found(processes: Commands, plan: Path) -> None:
    indexed = processes("index", plan)
    found = processes("search", "curtain wall")

    assert "indexed plan.pdf: 3 pages" in indexed.out
    assert found.out.startswith(" 1  A-201  ELEVATIONS  plan.pdf, page 3 of 3\n")
    assert "*CURTAIN WALL* [TYPE" in found.out


def test_pages_without_text_are_named_where_they_cannot_be_overlooked(
    planroom: Inline, plan: Path
) -> None:
    said = planroom("index", plan)

    assert "plan.pdf: 1 of 3 pages is not searchable\n  page 2: no text" in said.out


def test_the_same_bytes_again_are_already_indexed(planroom: Inline, plan: Path) -> None:
    planroom("index", plan)
    again = planroom("index", plan)

    assert "plan.pdf: already indexed" in again.out
    assert "page 2: no text" in again.out
    assert planroom("status", plan.name, "--json").document["files"][0]["version"] == 1


def test_every_event_of_index_is_a_line_of_json(planroom: Inline, plan: Path) -> None:
    said = planroom("index", plan, "nothing.pdf", "--json", code=1)

    kinds = [event["event"] for event in said.events if event["event"] != "progress"]
    assert kinds == ["taken", "refused", "ended", "summary"]
    (refused,) = said.of("refused")
    assert refused["error"]["code"] == "no_such_file"
    (ended,) = said.of("ended")
    assert (ended["file"], ended["status"]) == ("plan.pdf", "ready")
    assert (ended["pages"], ended["pages_with_text"], ended["image_only_pages"]) == (3, 2, 1)
    assert [(gap["page"], gap["status"]) for gap in ended["gaps"]] == [(2, "image_only")]
    (summary,) = said.of("summary")
    assert (summary["files"], summary["ready"], summary["refused"]) == (1, 1, 1)
    assert said.err == ""


def test_what_is_no_pdf_is_refused_in_a_line_each_and_the_others_go_on(
    planroom: Inline, plan: Path, tmp_path: Path, connection: psycopg.Connection
) -> None:
    (tmp_path / "empty.pdf").touch()
    (tmp_path / "page.pdf").write_text("<html>not found</html>")
    (tmp_path / "folder").mkdir()

    said = planroom("index", "gone.pdf", "empty.pdf", "page.pdf", "folder", plan, code=1)

    assert len(said.err.splitlines()) == 4
    assert all(line.startswith("refused: ") for line in said.err.splitlines())
    assert "1 of 5 files searchable, 4 refused" in said.out
    assert connection.execute("select name from files").fetchall() == [("plan.pdf",)]


def test_a_document_that_fails_is_told_with_its_code_and_ends_with_1(
    planroom: Inline, plan: Path
) -> None:
    encrypt(plan, user="secret", owner="secret")

    said = planroom("index", plan, code=1)

    assert said.out.startswith("failed plan.pdf: ")
    assert "[password_required]" in said.out
    assert "[password_required]" in planroom("status").out


def test_files_of_one_name_are_told_apart_by_their_folders(
    planroom: Inline, plan: Path, tmp_path: Path
) -> None:
    for folder in ("east", "west"):
        (tmp_path / folder).mkdir()
        write_pdf(tmp_path / folder / "plan.pdf", [sheet("A-1", folder.upper())])

    first = planroom("index", "east/plan.pdf", "west/plan.pdf", "--json")
    again = planroom("index", "east/plan.pdf", "west/plan.pdf", "--json")

    assert [taken["file"] for taken in first.of("taken")] == ["east/plan.pdf", "west/plan.pdf"]
    assert {taken["outcome"] for taken in again.of("taken")} == {"already_indexed"}


def test_one_file_named_twice_is_taken_in_once(
    planroom: Inline, plan: Path, tmp_path: Path
) -> None:
    said = planroom("index", plan, tmp_path, plan.name, "--json")

    assert [taken["file"] for taken in said.of("taken")] == ["plan.pdf"]


def test_a_name_of_one_s_own_is_for_one_file(planroom: Inline, plan: Path, tmp_path: Path) -> None:
    write_pdf(tmp_path / "other.pdf", [sheet("A-1", "OTHER")])

    named = planroom("index", plan, "--name", "Riverside", "--json")
    refused = planroom("index", plan, "other.pdf", "--name", "Riverside", "--json", code=2)

    assert named.of("ended")[0]["file"] == "Riverside"
    assert refused.error["code"] == "usage"


def test_projects_keep_to_themselves(planroom: Inline, plan: Path) -> None:
    planroom("index", plan, "--project", "riverside")

    there = planroom("search", "curtain wall", "--project", "riverside", "--json")
    everywhere = planroom("search", "curtain wall", "--all-projects", "--json")
    by_file = planroom("search", "curtain wall", "--file", "plan.pdf", "--json")
    elsewhere = planroom("search", "curtain wall", "--json", code=1)

    for found in (there, everywhere, by_file):
        assert found.document["hits"][0]["project"] == "riverside"
    assert elsewhere.error["code"] == "not_found"


# -- search --------------------------------------------------------------------------------------


def test_a_hit_for_a_machine_says_where_its_words_are_marked(planroom: Inline, plan: Path) -> None:
    planroom("index", plan)

    (hit, *_) = planroom("search", "curtain wall", "--json").document["hits"]

    words = [hit["snippet"][start:stop] for start, stop in hit["marks"]]
    assert words == ["CURTAIN", "WALL"]
    assert (hit["sheet_number"], hit["page"], hit["page_count"]) == ("A-201", 3, 3)


def test_a_sheet_number_comes_first_and_k_and_sheet_narrow(planroom: Inline, plan: Path) -> None:
    planroom("index", plan)

    (first,) = planroom("search", "a101", "-k", "1", "--json").document["hits"]
    on_sheet = planroom("search", "dimensions", "--sheet", "A-201", "--json").document["hits"]

    assert (first["sheet_number"], first["exact_sheet"]) == ("A-101", True)
    assert [hit["sheet_number"] for hit in on_sheet] == ["A-201"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("search", "", "--json"), "query_empty"),
        (("search", "x", "--file", "gone.pdf", "--json"), "not_found"),
        (("status", "gone.pdf", "--json"), "not_found"),
        (("verify", "gone.pdf", "--json"), "not_found"),
        (("remove", "gone.pdf", "--json"), "not_found"),
        (("run", "4711", "--json"), "not_found"),
    ],
)
def test_what_is_not_there_is_an_error_with_a_code(
    planroom: Inline, plan: Path, arguments: tuple[str, ...], code: str
) -> None:
    planroom("add", plan)

    said = planroom(*arguments, code=1)

    assert (said.out, said.error["code"]) == ("", code)
    assert set(said.error) == {"code", "message", "hint"}


# -- what is done to files -----------------------------------------------------------------------


def test_a_file_is_cancelled_retried_removed(planroom: Inline, plan: Path) -> None:
    planroom("add", plan)

    assert "cancelled" in planroom("cancel", "plan.pdf").out
    assert "nothing is queued or running" in planroom("cancel", "plan.pdf").out
    assert planroom("retry", "plan.pdf", "--json").document["ingestion_id"]
    assert "being worked on already" in planroom("retry", "plan.pdf").out
    assert planroom("remove", "plan.pdf", "--json").document["removed"] is True
    assert planroom("status", "--json").document["files"] == []
    assert "No files yet" in planroom("status").out


def test_status_of_a_file_has_its_gaps_and_every_attempt(planroom: Inline, plan: Path) -> None:
    planroom("index", plan)

    document = planroom("status", "plan.pdf", "--json").document
    shown = planroom("status", "plan.pdf").out

    (attempt,) = document["attempts"]
    assert (attempt["outcome"], attempt["pages_read"]) == ("ready", 3)
    assert (attempt["pages_read_again"], attempt["units_embedded_again"]) == (0, 0)
    assert [gap["page"] for gap in document["coverage"]["gaps"]] == [2]
    assert "page 2: no text" in shown
    assert attempt["worker"] in shown


def test_verify_passes_and_after_tampering_it_does_not(
    planroom: Inline, plan: Path, connection: psycopg.Connection
) -> None:
    planroom("index", plan)
    good = planroom("verify", "plan.pdf", "--json").document
    connection.execute("update chunks set text = 'FORGED' where chunk_index = 0")

    bad = planroom("verify", "plan.pdf", "--json", code=1).document

    assert (good["ok"], good["pages"], good["problems"]) == (True, 3, [])
    assert bad["ok"] is False
    assert any("Chunk 0" in problem for problem in bad["problems"])


# -- the fleet -----------------------------------------------------------------------------------


def test_workers_do_what_was_added(planroom: Inline, plan: Path) -> None:
    assert "plan.pdf: queued" in planroom("add", plan).out

    planroom("worker", "--until-idle")

    assert planroom("status", "--json").document["files"][0]["status"] == "ready"
    assert "No worker is running" in planroom("workers").out


def test_a_pause_is_seen_by_workers_and_said_by_status(planroom: Inline, plan: Path) -> None:
    planroom("add", plan)
    planroom("pause", "--reason", "moving house")
    planroom("worker", "--once")

    assert "moving house" in planroom("status").out
    assert planroom("workers", "--json").document["paused"]["reason"] == "moving house"
    assert planroom("status", "--json").document["files"][0]["status"] == "queued"
    assert planroom("resume", "--json").document == {"resumed": True}
    assert planroom("resume", "--json").document == {"resumed": False}
    planroom("worker", "--once")
    assert planroom("status", "--json").document["files"][0]["status"] == "ready"


def test_there_are_no_runs_without_connections(planroom: Inline) -> None:
    assert planroom("runs").out == "No runs.\n"
    assert planroom("runs", "--json").document == {"runs": []}


# -- upkeep --------------------------------------------------------------------------------------


def test_a_new_database_is_migrated_on_request(
    planroom: Inline, empty_database_url: str, plan: Path
) -> None:
    fresh = planroom.with_settings(database_url=empty_database_url)

    behind = fresh("index", plan, "--json", code=1)
    applied = fresh("migrate", "--json")
    again = fresh("migrate")

    assert behind.error["code"] == "schema_behind"
    assert "planroom migrate" in behind.error["hint"]
    assert applied.document["applied"][0] == "0001_engine.sql"
    assert again.out == "The schema is up to date.\n"
    fresh("index", plan)


def test_doctor_finds_all_well(planroom: Inline, plan: Path) -> None:
    planroom("index", plan)

    said = planroom("doctor", "--json").document

    assert said["ok"] is True
    assert {check["name"] for check in said["checks"] if check["status"] == "ok"} == {
        *("python", "home", "disk", "embedder", "database", "schema", "connections"),
        *("blobs", "fleet"),
    }


def test_doctor_names_what_is_broken_and_what_to_do(
    planroom: Inline, plan: Path, settings: Settings
) -> None:
    planroom("index", plan)
    for blob in (settings.home / "blobs").rglob("*"):
        if len(blob.name) == 64:
            blob.unlink()
    nowhere = planroom.with_settings(database_url="postgresql://nobody:s3cret@127.0.0.1:1/none")

    lost = planroom("doctor", "--json").document
    away = nowhere("doctor", code=1)

    (blobs,) = [check for check in lost["checks"] if check["name"] == "blobs"]
    assert blobs["status"] == "warning"
    assert "shared disk" in blobs["hint"]
    assert "broken  database" in away.out
    assert "s3cret" not in away.out + away.err


# -- errors --------------------------------------------------------------------------------------


def test_a_database_that_is_away_is_one_sentence_without_the_password(
    planroom: Inline, plan: Path
) -> None:
    nowhere = planroom.with_settings(database_url="postgresql://nobody:s3cret@127.0.0.1:1/none")

    said = nowhere("index", plan, code=1)

    assert said.err.startswith("The database cannot be reached")
    assert "s3cret" not in said.out + said.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("index",),
        ("nonsense",),
        ("search", "x", "--mode", "psychic"),
        ("worker", "--processes", "0"),
        ("worker", "--once", "--until-idle"),
        ("run", "seventeen"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_where_help_is(
    planroom: Inline, arguments: tuple[str, ...]
) -> None:
    for_people = planroom(*arguments, code=2)
    for_machines = planroom(*arguments, "--json", code=2)

    assert "--help" in for_people.err
    assert for_machines.error["code"] == "usage"


def test_a_wrong_setting_is_named_and_its_value_is_not(planroom: Inline) -> None:
    wrong = planroom.with_settings(chunk_tokens="s3cret")

    said = wrong("status", code=2)

    assert said.err.startswith("PLANROOM_CHUNK_TOKENS: ")
    assert "s3cret" not in said.err


def test_debug_shows_where_an_error_came_from(planroom: Inline) -> None:
    quiet = planroom("status", "gone.pdf", code=1)
    asked = planroom.with_settings(debug="1")("status", "gone.pdf", code=1)

    assert "Traceback" not in quiet.err
    assert "Traceback" in asked.err


# -- terminals and pipes -------------------------------------------------------------------------


def test_nothing_in_a_name_or_a_drawing_steers_the_terminal(
    planroom: Inline, tmp_path: Path
) -> None:
    nasty = "a\x1b[31m[bold]\x07\u202e.pdf"
    write_pdf(tmp_path / nasty, [sheet("A-1", "PLAN", "[red]ROOF[/red]")])

    said = [
        planroom("index", nasty, f"gone\x1b[2J{nasty}", code=1),
        planroom("search", "roof"),
        planroom("status"),
        planroom("status", "1"),
        planroom("status", "gone\x1b[2J", code=1),
    ]

    for text_said in (part for each in said for part in (each.out, each.err)):
        assert ESCAPE not in text_said
        assert "\x07" not in text_said
        assert "\u202e" not in text_said
    assert "[bold]" in said[0].out
    assert "[red]*ROOF*" in said[1].out


def test_a_reader_who_goes_away_is_no_error(processes: Commands, plan: Path) -> None:
    processes("index", plan)

    run = subprocess.run(
        f"{sys.executable} -m planroom search floor | true",
        env=processes.env(),
        cwd=processes.folder,
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_help_has_an_example_for_every_command(planroom: Inline) -> None:
    listed = planroom("--help").out
    commands = [
        *("index", "add", "search", "status", "worker", "cancel", "retry", "remove", "migrate"),
        *("doctor", "verify", "runs", "run", "workers", "pause", "resume"),
    ]

    for command in commands:
        assert f"│ {command} " in listed
        shown = planroom(command, "--help").out
        assert "Example" in shown
        assert f"planroom {command}" in shown.partition("Example")[2]
        assert "--json" in shown


def test_help_waits_for_nothing_heavy() -> None:
    code = (
        "import sys; from planroom.cli import main; main(['--help']);"
        "heavy = {'numpy', 'psycopg', 'pydantic_settings', 'tiktoken', 'pypdfium2', 'httpx'};"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (run.returncode, run.stderr) == (0, "")


def test_the_version_is_said(planroom: Inline) -> None:
    assert planroom("--version").out.startswith("planroom 0.")
