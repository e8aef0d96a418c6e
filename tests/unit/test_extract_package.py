"""What `planroom.extract` offers, and what its child does not carry."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import planroom.extract
from planroom.extract import EXTRACTOR_VERSION, extractor_identity
from planroom.extract.child import PAGE_CHARACTERS_MAX, page_fields
from planroom.extract.pdfium import Reading
from planroom.extract.sheet import Heading
from planroom.model import PageReason, PageStatus


def test_the_exported_names_are_sorted_and_exist() -> None:
    names = planroom.extract.__all__

    assert names == sorted(names)
    assert all(hasattr(planroom.extract, name) for name in names)


def test_the_identity_names_our_version_and_both_parsers() -> None:
    ours, pdfium, pypdf = extractor_identity().split()

    assert ours == f"planroom-extract/{EXTRACTOR_VERSION}"
    assert pdfium.startswith("pdfium/")
    assert all(part.isdigit() for part in pdfium.removeprefix("pdfium/").split("."))
    assert pypdf == f"pypdf/{importlib.metadata.version('pypdf')}"


def test_a_page_with_more_text_than_a_receiver_should_hold_fails() -> None:
    fields = page_fields("pdfium", Reading("x" * (PAGE_CHARACTERS_MAX + 1)), Heading())

    assert (fields["status"], fields["reason"]) == (PageStatus.FAILED, PageReason.MEMORY)
    assert "text" not in fields


def test_the_child_imports_no_database_no_numbers_and_no_command_line() -> None:
    script = "import sys, planroom.extract.child; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()

    heavy = {"psycopg", "numpy", "typer", "pydantic", "leasequeue", "pypdf", "planroom.errors"}
    assert heavy & set(loaded) == set()
