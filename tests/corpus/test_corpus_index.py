"""The whole corpus through one worker: every file ends, says why, and the worker outlives them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planroom.config import Settings
from support.room import Bench

CORPUS = Path(__file__).parents[3] / "shared" / "corpus"
MIB = 1024 * 1024

pytestmark = pytest.mark.skipif(not CORPUS.is_dir(), reason="needs the corpus beside the checkout")

# What the README of the corpus says of each, as the end of its ingestion.
REFUSED = {"empty.pdf": "empty_file", "html.pdf": "not_a_pdf"}
FAILED = {
    "encrypted-r2-user-password.pdf": "password_required",
    "encrypted-r4-aes-user-password.pdf": "password_required",
    "encrypted-r6-both-passwords.pdf": "password_required",
    "encrypted-r6-user-password.pdf": "password_required",
    "password-example.pdf": "password_required",
    "layered-plan.pdf": "no_text",
    "scanned-plan.pdf": "no_text",
    "poppler-85140-0.pdf": "no_text",
    "bomb2g.pdf": "unreadable",
}
GAPS = {"poppler-90-0-fuzzed.pdf": (13, 1)}
"""Pages without text, and pages that failed, of those that are ready with gaps."""

# One process takes everything in, works until nothing is left, asks, and says what it took.
WORK = """
import json, resource, sys
from pathlib import Path
from planroom.config import Settings
from planroom.errors import InputRefused
from planroom.room import PlanRoom

given = json.loads(sys.argv[1])
settings = Settings(_env_file=None, home=given["home"], database_url=given["url"])
refused = {}
with PlanRoom(settings) as room:
    for path in sorted(Path(given["corpus"]).glob("*.pdf")):
        try:
            room.add(path)
        except InputRefused as error:
            refused[path.name] = [error.code, str(error)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker = room.worker()
    worker.run(idle=room.is_idle)
    answers = {
        query: [[hit.file, hit.page] for hit in room.search(query)]
        for query in given["queries"]
    }
print(json.dumps({
    "refused": refused,
    "answers": answers,
    "before_kib": before,
    "worker_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "child_kib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
}))
"""
QUERIES = ("field finish vents grilles access panels", "AF101")


@dataclass(frozen=True)
class Ran:
    """What one worker made of the corpus."""

    said: dict[str, Any]
    rows: dict[str, dict[str, Any]]


@pytest.fixture
def ran(settings: Settings) -> Iterator[tuple[Ran, Bench]]:
    assert settings.database_url is not None
    given = {
        "home": str(settings.home),
        "url": settings.database_url.get_secret_value(),
        "corpus": str(CORPUS),
        "queries": QUERIES,
    }
    done = subprocess.run(
        [sys.executable, "-c", WORK, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with Bench.open(settings) as bench:
        rows = bench.rows(
            "select files.name, job.* from file_ingestions as job"
            " join files on files.id = job.file_id"
        )
        yield Ran(json.loads(done.stdout), {row["name"]: row for row in rows}), bench


def test_every_file_of_the_corpus_ends_with_a_code_and_a_sentence_in_one_run(
    ran: tuple[Ran, Bench],
) -> None:
    result, bench = ran
    names = {path.name for path in CORPUS.glob("*.pdf")}

    # At the door.
    assert {name: code for name, (code, _) in result.said["refused"].items()} == REFUSED
    assert all(len(said) > 20 for _, said in result.said["refused"].values())
    assert result.rows.keys() == names - REFUSED.keys()

    # Each ends, at the first attempt, for good.
    assert {row["status"] for row in result.rows.values()} == {"ready", "failed"}
    assert {row["attempts"] for row in result.rows.values()} == {1}
    failed = {n: row["error_code"] for n, row in result.rows.items() if row["status"] == "failed"}
    assert failed == FAILED
    for name in failed:
        assert len(result.rows[name]["error"]) > 20, name

    # What was ready is whole, and says what it lacks.
    for name in names - REFUSED.keys() - FAILED.keys():
        row = result.rows[name]
        assert row["processed_pages"] == row["page_count"]
        assert row["processed_units"] == row["total_units"] == len(bench.chunks(row["id"]))
        assert (row["image_only_pages"], row["failed_pages"]) == GAPS.get(name, (0, 0)), name

    # The worker outlived them all, the bomb included, within its bound and its child's.
    assert result.said["worker_kib"] - result.said["before_kib"] < 400 * 1024
    assert result.said["child_kib"] < 1536 * 1024

    # And the sheet is found.
    assert result.said["answers"][QUERIES[0]][0] == ["sample-finish-plan.pdf", 1]
    assert result.said["answers"][QUERIES[1]][0] == ["sample-finish-plan.pdf", 1]
