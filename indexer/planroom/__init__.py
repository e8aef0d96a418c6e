"""Index construction drawing sets into Postgres, resumably, and find the sheet.

`planroom.open()` gives a `PlanRoom`: add files, work on them, search them. Importing this is
cheap; the database and the models are loaded when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planroom.room import PlanRoom

__all__ = ["PlanRoom", "open"]


def open(**settings: Any) -> PlanRoom:  # noqa: A001 - planroom.open() reads as what it does
    """Open a plan room; `settings` are those of `planroom.config.Settings`, over PLANROOM_*.

    Starts the embedded database unless one of the user's is set. Use it as a context manager.
    """
    from planroom.config import Settings
    from planroom.room import PlanRoom

    return PlanRoom(Settings(**settings))


def __getattr__(name: str) -> Any:
    if name == "PlanRoom":
        from planroom.room import PlanRoom

        return PlanRoom
    raise AttributeError(f"module 'planroom' has no attribute {name!r}")
