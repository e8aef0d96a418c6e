"""A folder on a disk that every worker can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leasequeue import Retryable
from planroom.connectors.connector import Found
from planroom.errors import InputRefused, PlanroomError
from planroom.intake import find_pdfs


@dataclass(frozen=True, slots=True)
class FolderConnector:
    """Every PDF below `root`, hidden ones and links out of it left aside."""

    root: Path

    @classmethod
    def open(cls, config: Mapping[str, Any]) -> FolderConnector:
        """From a connection's config: `{"path": "/absolute/folder"}`."""
        path = config.get("path")
        if not isinstance(path, str) or not Path(path).is_absolute():
            raise PlanroomError(
                "A folder connection needs an absolute path.", code="config_invalid"
            )
        return cls(Path(path))

    def list(self) -> Iterator[Found]:
        """The PDFs there, named by the folder's name and the path below it."""
        if not self.root.is_dir():
            raise Retryable(
                f"The folder {self.root} is not there.",
                code="source_unavailable",
                hint="Is its disk mounted on this worker's machine?",
            )
        try:
            for path, name in find_pdfs(self.root):
                stat = path.stat()
                yield Found(name, path, f"{stat.st_size}:{stat.st_mtime_ns}")
        except InputRefused as error:
            raise Retryable(
                str(error),
                code="source_empty",
                hint="An empty folder is taken for a disk that is not mounted. "
                "To remove its files, use planroom disconnect --purge.",
            ) from error
