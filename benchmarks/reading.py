"""How fast are pages read, next to a bare PDFium loop over the same file?

    python benchmarks/reading.py FILE [--rounds 3] [--json OUT.json]

The bare loop opens the file by its path in this process, takes the text of every page and opens the
file again every 25 pages. The reader does all that a worker has done to it: a child process started
and confined, labels, outline, annotations, title blocks, normalising, and pages handed over as
values. Both run in turns, so that what else the machine does falls on both alike; the best round of
each counts. Processor seconds are given beside the time by the clock: on a machine that does
other things they are the better witness. The budget is 90 % of the bare loop. Nothing is stubbed.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pypdfium2

from planroom.extract import PageReader, extractor_identity

REOPEN_PAGES = 25
MIB = 1024 * 1024


def bare_loop(path: Path) -> int:
    """Take the text of every page with PDFium alone; the number of characters."""
    characters = 0
    index = 0
    count = 1
    while index < count:
        document: Any = pypdfium2.PdfDocument(path)
        count = len(document)
        for index in range(index, min(index + REOPEN_PAGES, count)):  # noqa: B020
            page = document[index]
            text_page = page.get_textpage()
            characters += len(text_page.get_text_range())
            text_page.close()
            page.close()
        index += 1
        document.close()
    return characters


def page_reader(path: Path) -> int:
    """Read every page as a worker does, committing each at once; the number of characters."""
    characters = 0
    with PageReader(path) as reader:
        for page in reader:
            characters += len(page.text)
            reader.committed(page.index + 1)
    return characters


def processor_seconds() -> float:
    """Processor seconds of this process and of the children it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Run both in turns; pages a second of the best round of each, and the child's peak memory."""
    with PageReader(path) as reader:
        pages = reader.page_count
    wall: dict[str, list[float]] = {"bare": [], "reader": []}
    processor: dict[str, list[float]] = {"bare": [], "reader": []}
    characters: dict[str, int] = {}
    for _ in range(rounds):
        for name, run in (("bare", bare_loop), ("reader", page_reader)):
            started, used = time.perf_counter(), processor_seconds()
            characters[name] = run(path)
            wall[name].append(time.perf_counter() - started)
            processor[name].append(processor_seconds() - used)
    return {
        "file": path.name,
        "file_mib": round(path.stat().st_size / MIB, 1),
        "pages": pages,
        "characters": characters,
        "wall_seconds": wall,
        "processor_seconds": processor,
        "bare_pages_per_second": round(pages / min(wall["bare"]), 1),
        "reader_pages_per_second": round(pages / min(wall["reader"]), 1),
        "ratio": round(min(wall["bare"]) / min(wall["reader"]), 3),
        "processor_ratio": round(min(processor["bare"]) / min(processor["reader"]), 3),
        # Every child this process has waited for is a reader's.
        "child_peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "extractor": extractor_identity(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def main() -> int:
    """Measure, print a table, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="Pages a second, next to a bare PDFium loop.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    figures = measure(options.file, options.rounds)
    print(f"{figures['file']}: {figures['pages']} pages, {figures['file_mib']} MiB")
    print(f"  bare PDFium loop  {figures['bare_pages_per_second']:8.1f} pages/s")
    print(f"  PageReader        {figures['reader_pages_per_second']:8.1f} pages/s")
    print(f"  ratio             {figures['ratio']:8.3f}   (budget 0.9)")
    print(f"  of processor time {figures['processor_ratio']:8.3f}")
    print(f"  child's peak      {figures['child_peak_mib']:8d} MiB resident")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
