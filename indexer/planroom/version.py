"""The version of the installed distribution."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def version() -> str:
    """As `planroom --version` prints it."""
    return metadata.version("planroom")
