"""Open what a command works on, with the settings that its options change."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planroom.config import Settings
    from planroom.room import PlanRoom


def read_settings(**changes: Any) -> Settings:
    """The settings of the environment, changed where a change is not None."""
    from planroom.config import Settings

    return Settings(**{name: value for name, value in changes.items() if value is not None})


@contextmanager
def open_room(settings: Settings | None = None, **changes: Any) -> Generator[PlanRoom]:
    """The plan room, for as long as the block lasts. A command's log is its warnings alone."""
    from planroom.log import set_up_log
    from planroom.room import PlanRoom

    settings = settings or read_settings(**changes)
    set_up_log(settings, at_least="warning")
    with contextlib.closing(PlanRoom(settings)) as room:
        yield room
