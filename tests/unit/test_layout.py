"""The layout's one trap, and what follows from it: source roots that are not packages."""

from __future__ import annotations

import queue
import subprocess
import sys
import sysconfig
from pathlib import Path

from planroom.migrate import migration_files

ROOT = Path(__file__).parents[2]


def test_source_roots_are_not_packages() -> None:
    """With queue/__init__.py the standard library's queue would be shadowed."""
    assert not (ROOT / "queue" / "__init__.py").exists()
    assert not (ROOT / "indexer" / "__init__.py").exists()


def test_the_standard_library_s_queue_is_not_shadowed() -> None:
    assert Path(queue.__file__) == Path(sysconfig.get_path("stdlib")) / "queue.py"


def test_the_libraries_that_import_queue_still_import_from_the_root() -> None:
    modules = "concurrent.futures.thread, multiprocessing.queues, psycopg_pool, tiktoken, urllib3"

    subprocess.run([sys.executable, "-c", f"import {modules}"], cwd=ROOT, check=True)


def test_every_migration_is_found() -> None:
    on_disk = sorted(path.name for path in (ROOT / "migrations").iterdir())

    assert [file.name for file in migration_files()] == on_disk != []
    assert {Path(name).suffix for name in on_disk} == {".sql"}


def test_each_package_says_that_it_is_typed() -> None:
    assert (ROOT / "indexer" / "planroom" / "py.typed").exists()
    assert (ROOT / "queue" / "leasequeue" / "py.typed").exists()
