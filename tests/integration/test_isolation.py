"""Workspaces: a tenant sees, uses and changes its own, though another has the very same."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from leasequeue import request_cancel
from planroom import files, ingestions, intake, status
from planroom.chunks import ensure_embedder, find_embedded
from planroom.config import Settings
from planroom.errors import NotFound, PlanroomError
from planroom.intake import Outcome
from planroom.model import PageStatus
from planroom.projects import (
    ensure_project,
    find_project,
    project_settings,
    set_project_settings,
)
from planroom.search import Mode
from planroom.verify import verify
from support.engine import snapshot
from support.room import Bench, Row, notes_pdf

TABLES = ("projects", "files", "file_ingestions", "pages", "chunks", "ingestion_attempts")


@dataclass
class Tenants:
    """Two workspaces with the same documents: one indexed, one waiting, one half done."""

    ours: Bench
    theirs: Bench
    our_ready: Row
    their_ready: Row
    their_queued: intake.Taken

    def others(self) -> list[list[tuple[Any, ...]]]:
        """All that the other workspace has, to compare before and after."""
        workspace = self.theirs.workspace
        return [
            [
                row
                for row in snapshot(self.theirs.conn, table)
                if table == "ingestion_attempts"
                or workspace_of(self.theirs, table, row) == workspace
            ]
            for table in TABLES
        ]


def workspace_of(bench: Bench, table: str, row: tuple[Any, ...]) -> int:
    columns = bench.rows(
        "select attname from pg_attribute where attrelid = to_regclass(%s) and attnum > 0"
        " order by attnum",
        table,
    )
    return cast(int, row[[column["attname"] for column in columns].index("workspace_id")])


@pytest.fixture
def tenants(settings: Settings, tmp_path: Path) -> Iterator[Tenants]:
    document = notes_pdf(tmp_path / "set.pdf", 2, lines=10)
    waiting = notes_pdf(tmp_path / "waiting.pdf", 1, lines=5, first=8)
    with Bench.open(settings) as ours:
        theirs = ours.elsewhere("theirs")
        our_ready, their_ready = ours.index(document), theirs.index(document)
        yield Tenants(ours, theirs, our_ready, their_ready, theirs.take(waiting))


def test_each_workspace_embeds_for_itself(tenants: Tenants) -> None:
    assert tenants.ours.embedder.embedded == tenants.theirs.embedder.embedded > 0
    assert tenants.our_ready["file_id"] != tenants.their_ready["file_id"]
    hashes = [c["text_hash"] for c in tenants.ours.chunks(tenants.our_ready["id"])]
    nobody = tenants.ours.elsewhere("nobody").workspace
    embedder_id = ensure_embedder(tenants.ours.conn, tenants.ours.embedder.identity, 256)
    assert find_embedded(tenants.ours.conn, nobody, embedder_id, hashes) == {}


def test_the_same_bytes_are_new_to_a_workspace_that_has_not_seen_them(tenants: Tenants) -> None:
    path = tenants.theirs.blobs.path(tenants.theirs.file(tenants.their_queued.file_id)["sha256"])
    assert tenants.ours.take(path, "waiting.pdf").outcome is Outcome.NEW


@pytest.mark.parametrize("mode", Mode)
def test_search_finds_its_own_alone(tenants: Tenants, mode: Mode) -> None:
    hits = tenants.ours.search("ANCHOR BOLT 101A", mode=mode, k=50, project_id=None)
    assert {hit.file_id for hit in hits} == {tenants.our_ready["file_id"]}
    # Naming the other's project or file by number opens nothing.
    assert tenants.ours.search("ANCHOR", mode=mode, project_id=tenants.theirs.project) == []
    file_id = tenants.their_ready["file_id"]
    assert tenants.ours.search("ANCHOR", mode=mode, project_id=None, file_id=file_id) == []


def test_status_gaps_and_attempts_show_its_own_alone(tenants: Tenants) -> None:
    conn, workspace = tenants.ours.conn, tenants.ours.workspace
    their_file, their_job = tenants.their_ready["file_id"], tenants.their_ready["id"]
    rows = status.list_files(conn, workspace)
    assert [row["id"] for row in rows] == [tenants.our_ready["file_id"]]
    assert status.list_files(conn, workspace, files=[their_file]) == []
    conn.execute(
        "update pages set status = %s, text = '', chunk_count = 0", (PageStatus.IMAGE_ONLY,)
    )
    assert status.list_gaps(conn, workspace, their_job) == []
    assert len(status.list_gaps(conn, workspace, tenants.our_ready["id"])) == 2
    assert status.list_attempts(conn, workspace, their_file) == []


def test_files_and_projects_are_found_by_name_in_their_own_workspace(tenants: Tenants) -> None:
    conn, workspace = tenants.ours.conn, tenants.ours.workspace
    assert files.find_file(conn, workspace, "set.pdf") == tenants.our_ready["file_id"]
    for name in ("waiting.pdf", str(tenants.their_ready["file_id"])):
        with pytest.raises(NotFound):
            files.find_file(conn, workspace, name)
    secret = ensure_project(conn, tenants.theirs.workspace, "secret")
    with pytest.raises(NotFound):
        find_project(conn, workspace, "secret")
    with pytest.raises(NotFound):
        project_settings(conn, workspace, secret, tenants.ours.settings)
    assert ensure_project(conn, workspace, "secret") != secret


def test_nothing_of_another_workspace_can_be_changed(tenants: Tenants) -> None:
    ours, conn, workspace = tenants.ours, tenants.ours.conn, tenants.ours.workspace
    their_file, their_queued = tenants.their_ready["file_id"], tenants.their_queued
    annex = ensure_project(conn, workspace, "annex")
    before = tenants.others()
    attempts: dict[str, Callable[[], object]] = {
        "lock": lambda: files.lock_file(conn, workspace, their_file),
        "find project": lambda: files.find_project_of(conn, workspace, their_file),
        "remove": lambda: files.remove_file(conn, workspace, their_file),
        "cancel": lambda: files.cancel_ingestions(conn, workspace, their_queued.file_id),
        "retry": lambda: intake.retry(conn, workspace, their_file),
        "move away": lambda: files.move_file(conn, workspace, their_file, annex),
        "move in": lambda: files.move_file(
            conn, workspace, tenants.our_ready["file_id"], tenants.theirs.project
        ),
        "settings": lambda: set_project_settings(
            conn, workspace, tenants.theirs.project, {"chunk_tokens": 64}, ours.settings
        ),
        "verify": lambda: verify(conn, ours.blobs, ours.settings, workspace, their_file),
    }
    for name, attempt in attempts.items():
        with pytest.raises(PlanroomError):
            pytest.fail(f"{name} answered {attempt()!r}")
    assert ingestions.enqueue(conn, workspace, their_file) is None
    cancelled = request_cancel(conn, ingestions.INGESTIONS, workspace, [their_queued.ingestion_id])
    assert cancelled == {}
    assert files.end_ingestions(conn, workspace, their_queued.file_id) == {}
    assert tenants.others() == before


def test_a_file_cannot_name_a_project_or_an_ingestion_a_file_of_another_workspace(
    tenants: Tenants, tmp_path: Path
) -> None:
    document = notes_pdf(tmp_path / "new.pdf", 1)
    with pytest.raises(PlanroomError):
        tenants.ours.take(document, project=tenants.theirs.project)
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        tenants.ours.conn.execute(
            "update files set workspace_id = %s where id = %s",
            (tenants.ours.workspace, tenants.their_ready["file_id"]),
        )


# Every statement

# Statements that name no workspace, and why each needs none.
LEASED = "by the id of an ingestion that the caller holds the lease of, under its fence"
LOCKED = "by the id of a file that the caller has locked in its workspace"
FOUND = "by the id of an ingestion that the caller has found in its workspace"
FLEET = "a worker's, who serves every workspace"
WITHOUT_WORKSPACE = {
    "chunks._ANY_FROM": LEASED,
    "chunks._CLEAR": LEASED,
    "chunks._DELETE_TAIL": LEASED,
    "files._LET_GO": LOCKED,
    "files._PUBLISH": LOCKED,
    "files._WAIT_FOR_TURN": LOCKED,
    "ingest._FIRST_FAILURE": LEASED,
    "ingestions.INGESTIONS": FLEET,
    "ingestions._BEGIN": LEASED,
    "ingestions._COUNT_ADOPTED": LOCKED,
    "ingestions._DELETE_PAGES": LEASED,
    "ingestions._FIND_ENDING": LOCKED,
    "ingestions._FORGET_PAGES": LEASED,
    "ingestions._FORGET_UNITS": LEASED,
    "ingestions._MOVE_PAGES": LOCKED,
    "ingestions._MOVE_TO_PROJECT": LEASED,
    "ingestions._NOTE": LEASED,
    "ingestions._PENDING": FLEET,
    "ingestions._RELOAD": LEASED,
    "ingestions._REPLAN": LEASED,
    "ingestions._RETIRE": LOCKED,
    "ingestions._SWEEPABLE": FLEET,
    "ingestions._SWEEP_CHUNKS": FLEET,
    "ingestions._SWEEP_PAGES": FLEET,
    "ingestions._SWEPT": FLEET,
    "intake._LATEST": LOCKED,
    "orphans._UNWANTED": FLEET,
    "pages._LOCATE": LEASED,
    "pages._SET_CHUNK_COUNT": LEASED,
    "pages._TEXTS": LEASED,
    "search._ON_SHEET": "a condition within statements that name it",
    "vector_index._OUTGROWN": FLEET,
    "verify._CHUNKS": FOUND,
    "verify._PAGES": FOUND,
}
TENANT_TABLES = re.compile(
    r"\b(?:from|join|into|update|copy)\s+(?:files|file_ingestions|pages|chunks|projects"
    r"|ingestion_attempts|connections|connection_runs|file_overview|ingestion_ledger)\b"
)
SOURCES = Path(__file__).parents[2] / "indexer" / "planroom"
# What a person who looks after the whole installation runs.
NO_TENANTS_CODE = {"doctor"}


def statements() -> dict[str, str]:
    """Every module's constants that read or write tenants' tables, as `module.NAME`: its SQL."""
    found: dict[str, str] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        names: dict[str, str] = {}
        for node in ast.parse(path.read_text("utf-8")).body:
            match node:
                case ast.Assign(targets=[ast.Name(name)], value=value):
                    pass
                case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                    pass
                case _:
                    continue
            names[name] = " ".join(parts_of(value, names))
            if path.stem not in NO_TENANTS_CODE and TENANT_TABLES.search(names[name]):
                found[f"{path.stem}.{name}"] = names[name]
    return found


def parts_of(value: ast.expr, names: dict[str, str]) -> Iterator[str]:
    """The strings in an expression; a statement that is put together has what its parts have."""
    for part in ast.walk(value):
        match part:
            case ast.Constant(value=str(said)):
                yield said
            case ast.Name(id=name):
                yield names.get(name, "")
            case _:
                pass


def test_every_statement_names_the_workspace_or_is_known_to_need_none() -> None:
    found = statements()
    assert len(found) > 40
    without = {name for name, said in found.items() if "workspace_id" not in said}
    assert without == WITHOUT_WORKSPACE.keys()


def test_no_statement_on_tenants_tables_hides_inside_a_function() -> None:
    hidden: list[str] = []
    for path in sorted(SOURCES.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            docstring = ast.get_docstring(function, clean=False)
            hidden += [
                f"{path.stem}.{function.name}"
                for part in ast.walk(function)
                if isinstance(part, ast.Constant)
                and isinstance(part.value, str)
                and part.value != docstring
                and TENANT_TABLES.search(part.value)
            ]
    assert hidden == []
