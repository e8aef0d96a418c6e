"""What reading a document may cost."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ExtractLimits:
    """Bounds on the child that reads.

    Seconds are processor seconds of the child, so that a busy machine does not change what is
    read; four times as many by the clock end a child that hangs without computing.
    """

    memory_bytes: int = 1536 * MIB
    """Address space of the child."""
    page_seconds: float = 60.0
    open_seconds: float = 120.0
    reopen_pages: int = 25
    """Pages after which PDFium's document is opened again."""
    pages_max: int = 20_000
