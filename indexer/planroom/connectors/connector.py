"""What every provider promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Found:
    """One file at the source. `stamp` changes whenever its bytes do."""

    name: str
    path: Path
    stamp: str


class Connector(Protocol):
    """A configured source."""

    def list(self) -> Iterator[Found]:
        """Every PDF there, in a fixed order.

        Raises `leasequeue.Retryable` when the source cannot be reached: that is not the same as
        a source that is empty, and must never look like one.
        """
        ...
