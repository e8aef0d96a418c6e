"""The drawing-set generator of `fixtures/`, for tests: make a set and know what is on each page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

FIXTURES = Path(__file__).parents[2] / "fixtures"

if TYPE_CHECKING:
    from fixtures.drawings.surface import collisions
    from fixtures.make_drawing_set import PROJECT, QUESTIONS, SetInfo, SheetTruth, main, make_set
else:
    # The generator is a script with its parts beside it; this is what running it does too.
    sys.path.append(str(FIXTURES))
    from drawings.surface import collisions
    from make_drawing_set import PROJECT, QUESTIONS, SetInfo, SheetTruth, main, make_set

__all__ = [
    "FIXTURES",
    "PROJECT",
    "QUESTIONS",
    "SetInfo",
    "SheetTruth",
    "collisions",
    "main",
    "make_set",
]
