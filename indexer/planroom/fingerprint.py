"""Decide where an ingestion starts again when what would continue it is not what began it.

The one idea: a fingerprint has three parts, in the order of the work, and a change costs only what
comes after it. Two fingerprints never mix in one ingestion (case D23).
"""

from __future__ import annotations

from enum import StrEnum
from typing import cast

from planroom.model import Fingerprint


class Restart(StrEnum):
    """The least of the work that has to be done again, cheapest first."""

    NOTHING = "nothing"
    """Same fingerprint: continue from the checkpoint."""
    REEMBED = "reembed"
    """From unit 0: the pages and their chunk counts stand, every vector is made again."""
    RECHUNK = "rechunk"
    """From unit 0, after the chunk counts are recomputed from the stored text of the pages."""
    PAGES = "pages"
    """From page 0: the file is read again."""


def restart_point(stored: Fingerprint | None, current: Fingerprint) -> Restart:
    """Where work begun under `stored` goes on under `current`; None is work not yet begun."""
    if stored is None or stored.extractor != current.extractor:
        return Restart.PAGES
    if stored.chunker != current.chunker:
        return Restart.RECHUNK
    if stored.embedder != current.embedder:
        return Restart.REEMBED
    return Restart.NOTHING


def fingerprint_to_json(fingerprint: Fingerprint) -> dict[str, str]:
    """The value to store in a JSON column; `fingerprint_from_json` reads it back."""
    return {
        "extractor": fingerprint.extractor,
        "chunker": fingerprint.chunker,
        "embedder": fingerprint.embedder,
    }


def fingerprint_from_json(value: object) -> Fingerprint | None:
    """Read a stored fingerprint; None when it is absent or not of the form this version writes.

    An unreadable one is none at all: it cannot be shown to equal the current one, so the only
    safe place to start is page 0.
    """
    if not isinstance(value, dict):
        return None
    parts = cast("dict[object, object]", value)
    if set(parts) != {"extractor", "chunker", "embedder"}:
        return None
    extractor, chunker, embedder = parts["extractor"], parts["chunker"], parts["embedder"]
    if not (isinstance(extractor, str) and isinstance(chunker, str) and isinstance(embedder, str)):
        return None
    return Fingerprint(extractor, chunker, embedder)
