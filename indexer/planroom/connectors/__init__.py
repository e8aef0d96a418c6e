"""Sources of files: one module a provider, each listing what it has as `Found`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planroom.connectors.connector import Connector, Found

__all__ = ["Connector", "Found", "open_connector"]


def open_connector(provider: str, config: Mapping[str, Any]) -> Connector:
    """The connector of a provider. Raises PlanroomError for one this version does not know."""
    match provider:
        case "folder":
            from planroom.connectors.folder import FolderConnector

            return FolderConnector.open(config)
        case unknown:
            from planroom.errors import PlanroomError

            raise PlanroomError(
                f"There is no provider {unknown!r}.",
                code="provider_unknown",
                hint="This version knows: folder.",
            )
