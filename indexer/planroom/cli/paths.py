"""Which files a command line names, and under which name each is entered."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planroom.errors import InputRefused
from planroom.intake import find_pdfs


@dataclass(frozen=True, slots=True)
class Named:
    """A file to take in, and its name in the project."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class RefusedPath:
    """A path that names nothing to take in."""

    path: Path
    error: InputRefused


def find_named(paths: Sequence[Path]) -> tuple[list[Named], list[RefusedPath]]:
    """The PDF files that the paths name, each once, in order; and the paths that name none.

    Files of one name must not become versions of each other by accident: where two would, each
    gets as much of its path before its name as tells them apart.
    """
    found: dict[Path, Named] = {}
    refused: list[RefusedPath] = []
    for path in paths:
        try:
            for file, name in find_pdfs(path):
                found.setdefault(file.resolve(), Named(file, name))
        except InputRefused as error:
            refused.append(RefusedPath(path, error))
    return _told_apart(list(found.values())), refused


def _told_apart(files: Sequence[Named]) -> list[Named]:
    parts = [Path(os.path.abspath(file.path)).parts[1:] for file in files]  # noqa: PTH100
    taken = [len(Path(file.name).parts) for file in files]
    names = [file.name for file in files]
    while True:
        uses = Counter(names)
        longer = [i for i, name in enumerate(names) if uses[name] > 1 and taken[i] < len(parts[i])]
        if not longer:
            break
        for i in longer:
            taken[i] += 1
            names[i] = "/".join(parts[i][-taken[i] :])
    return [Named(file.path, name) for file, name in zip(files, names, strict=True)]
