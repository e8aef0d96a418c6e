"""Decide where an ingestion starts again when what would continue it is not what began it.

The one idea: a fingerprint has three parts, in the order of the work, and a change costs only what
comes after it. Two fingerprints never mix in one ingestion (case D23).
"""

from __future__ import annotations

from enum import StrEnum

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
