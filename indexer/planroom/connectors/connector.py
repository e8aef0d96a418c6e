"""What every provider promises, and how one is opened from a connection's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from planroom.errors import PlanroomError


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


def open_connector(provider: str, config: Mapping[str, Any]) -> Connector:
    """The connector of a provider. Raises PlanroomError for one this version does not know."""
    if provider == "folder":
        from planroom.connectors.folder import FolderConnector

        return FolderConnector.open(config)
    raise PlanroomError(
        f"There is no provider {provider!r}.",
        code="provider_unknown",
        hint="This version knows: folder.",
    )
