"""Sources of files: one module a provider, each listing what it has as `Found`."""

from __future__ import annotations

from planroom.connectors.connector import Connector, Found, open_connector

__all__ = ["Connector", "Found", "open_connector"]
