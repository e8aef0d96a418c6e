"""Folders for embedded servers: short paths that, for root, the server's own user can pass."""

from __future__ import annotations

import tempfile
from pathlib import Path


def reachable_folder() -> Path:
    """A new folder, private but for being passed; whoever asks removes it."""
    folder = Path(tempfile.mkdtemp(prefix="planroom-test-", dir="/tmp"))
    folder.chmod(0o711)
    return folder
