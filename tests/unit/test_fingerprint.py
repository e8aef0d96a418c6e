"""A fingerprint decides from where an ingestion is done again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planroom.fingerprint import (
    Restart,
    fingerprint_from_json,
    fingerprint_to_json,
    restart_point,
)
from planroom.model import Fingerprint

CURRENT = Fingerprint(extractor="pdf/1", chunker="chunk/1 max=256", embedder="static/1")


def test_the_same_fingerprint_continues_from_the_checkpoint() -> None:
    stored = Fingerprint(extractor="pdf/1", chunker="chunk/1 max=256", embedder="static/1")
    assert restart_point(stored, CURRENT) is Restart.NOTHING


def test_work_not_yet_begun_starts_at_page_zero() -> None:
    assert restart_point(None, CURRENT) is Restart.PAGES


@pytest.mark.parametrize(
    ("change", "restart"),
    [
        ({"extractor": "pdf/2"}, Restart.PAGES),
        ({"chunker": "chunk/2 max=256"}, Restart.RECHUNK),
        ({"embedder": "static/2"}, Restart.REEMBED),
        ({"extractor": "pdf/2", "embedder": "static/2"}, Restart.PAGES),
        ({"chunker": "chunk/2 max=256", "embedder": "static/2"}, Restart.RECHUNK),
        (
            {"extractor": "pdf/2", "chunker": "chunk/2 max=256", "embedder": "static/2"},
            Restart.PAGES,
        ),
    ],
)
def test_d23_a_changed_part_restarts_from_the_part_that_changed(
    change: dict[str, str], restart: Restart
) -> None:
    assert restart_point(CURRENT, replace(CURRENT, **change)) is restart


def test_d23_going_back_to_an_older_version_restarts_as_well() -> None:
    newer = replace(CURRENT, chunker="chunk/2 max=256")
    assert restart_point(newer, CURRENT) is Restart.RECHUNK


def test_a_stored_fingerprint_is_read_back_equal() -> None:
    stored: object = json.loads(json.dumps(fingerprint_to_json(CURRENT)))
    assert fingerprint_from_json(stored) == CURRENT


@pytest.mark.parametrize(
    "stored",
    [
        None,
        "pdf/1",
        [],
        {},
        {"extractor": "pdf/1", "chunker": "chunk/1"},
        {"extractor": "pdf/1", "chunker": "chunk/1", "embedder": None},
        {"extractor": "pdf/1", "chunker": "chunk/1", "embedder": "static/1", "ocr": "rapid/1"},
    ],
)
def test_d23_a_fingerprint_of_another_form_starts_at_page_zero(stored: object) -> None:
    assert restart_point(fingerprint_from_json(stored), CURRENT) is Restart.PAGES
