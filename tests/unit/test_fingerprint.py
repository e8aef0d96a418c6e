"""A fingerprint decides from where an ingestion is done again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planroom.fingerprint import (
    Restart,
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
