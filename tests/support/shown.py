"""Rows as `PlanRoom.status` gives them, and what a terminal shows of them."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, RenderableType


def file_row(**changed: Any) -> dict[str, Any]:
    """A file of which 120 of 320 pages are read, by this process, with these changes."""
    return {
        "id": 7,
        "name": "set.pdf",
        "project": "default",
        "version": 1,
        "published_version": None,
        "size_bytes": 236_000_000,
        "status": "running",
        "state": "reading",
        "attempts": 1,
        "error_code": None,
        "error": None,
        "lease_owner": f"{socket.gethostname()}:{os.getpid()}:ab",
        "lease_expires_at": datetime(2126, 12, 1, tzinfo=UTC),
        "started_at": None,
        "finished_at": None,
        "waits_seconds": 0,
        "page_count": 320,
        "processed_pages": 120,
        "image_only_pages": 0,
        "failed_pages": 0,
        "planned_units": 2000,
        "total_units": None,
        "processed_units": 1400,
        **changed,
    }


def shown(*parts: RenderableType, width: int = 80) -> list[str]:
    """The lines that these make on a terminal so wide, without colours."""
    console = Console(width=width, markup=False, highlight=False, force_terminal=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return [line.rstrip() for line in captured.get().splitlines()]
