"""What every peer is given, read from its command line. Imports nothing that a peer lacks."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

MODEL = "text-embedding-3-small"
DIMENSIONS = 64
BATCH = 200


@dataclass(frozen=True)
class Case:
    """The chunks (each with `id`, `page`, `text`), and where things are."""

    path: Path
    chunks: list[dict[str, str]]
    database: dict[str, str]
    embeddings: str
    state: Path

    def url(self, scheme: str = "postgresql") -> str:
        """The database as a URL; its server listens on a socket in a folder."""
        where = {"host": self.database["host"], "port": self.database["port"]}
        return f"{scheme}://{self.database['user']}@/{self.database['dbname']}?{urlencode(where)}"


def read_case() -> Case:
    """The case of this process."""
    path, database, embeddings, state = sys.argv[1:]
    texts = Path(path)
    return Case(texts, json.loads(texts.read_text()), json.loads(database), embeddings, Path(state))
