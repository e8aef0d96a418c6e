"""How long does a document take, next to its slowest stage alone? And does memory stay flat?

    python benchmarks/end_to_end.py FILE [--rounds 3] [--embedder static] [--json OUT.json]

Three stages: reading (the child process and its pages), embedding (cutting pages into chunks, and
a vector for each new text), writing (every transaction of pages and chunks). Each is run alone over
the whole document, and the ingestion as a worker runs it, in turns; the best round of each counts,
and the budget is 1.15 times the slowest stage. Each round is a workspace of its own, so no vector
is there to be used again but those of texts that stand on several sheets.

Memory is this process's, looked at after every commit: its growth from the tenth page to the last,
and its peak beyond what it held before the first document. The server is the embedded one with its
durable settings, in a folder of its own, or that of `--database`. Nothing is stubbed.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import psycopg
from numpy.typing import NDArray
from pgvector import HalfVector
from writing import database_at

import planroom.ingest
from leasequeue import AbortSignal, Lease, checkpoint, ensure_workspace
from planroom import ingestions, intake
from planroom.blobs import BlobStore
from planroom.chunk import chunk_page
from planroom.chunks import ensure_embedder
from planroom.config import Settings
from planroom.database import Database
from planroom.embed import Embedder, open_embedder
from planroom.extract import PageReader
from planroom.ingest import Batch, chunk_params, commit_batch, current_fingerprint, ingest
from planroom.model import Chunk, Page
from planroom.pages import insert_pages
from planroom.projects import ensure_project

MIB = 1024 * 1024
STAGES = ("read", "embed", "write", "whole")


@dataclass
class Bench:
    """One document and what its stages hand to each other."""

    path: Path
    database: Database
    blobs: BlobStore
    settings: Settings
    embedder: Embedder
    rounds: int = 0
    pages: list[Page] = field(default_factory=list[Page])
    units: list[tuple[int, Chunk]] = field(default_factory=list[tuple[int, Chunk]])
    vectors: dict[bytes, NDArray[np.float32]] = field(
        default_factory=dict[bytes, NDArray[np.float32]]
    )
    resident: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def claim(self, conn: psycopg.Connection[Any]) -> Lease:
        """Take the document into a workspace of its own and claim it."""
        self.rounds += 1
        workspace = ensure_workspace(conn, f"round {self.rounds}")
        intake.take(
            conn,
            self.blobs,
            self.path,
            workspace_id=workspace,
            project_id=ensure_project(conn, workspace, "benchmark"),
            name=self.path.name,
            bytes_max=self.settings.file_bytes_max,
            fingerprint=current_fingerprint(self.settings, self.embedder),
        )
        lease = ingestions.claim(conn, "benchmark", 3600)
        assert isinstance(lease, Lease)
        return lease

    def read(self) -> float:
        """Read every page, as the worker's reader does."""
        started = time.perf_counter()
        pages: list[Page] = []
        with PageReader(self.path, ahead=self.settings.page_group) as reader:
            for page in reader:
                pages.append(page)
                reader.committed(page.index + 1)
        self.pages = pages
        return time.perf_counter() - started

    def embed(self) -> float:
        """Cut the pages and embed what is new of every batch."""
        started = time.perf_counter()
        params = chunk_params(self.settings)
        self.units = [(p.index, chunk) for p in self.pages for chunk in chunk_page(p.text, params)]
        self.vectors = {}
        for start in range(0, len(self.units), self.settings.batch_units):
            batch = self.units[start : start + self.settings.batch_units]
            texts = {chunk.text_hash: chunk.text for _, chunk in batch}
            new = {key: text for key, text in texts.items() if key not in self.vectors}
            self.vectors |= zip(new, self.embedder.embed(list(new.values())), strict=True)
        return time.perf_counter() - started

    def write(self) -> float:
        """Commit the pages in groups and the chunks in batches; what they hold is there already."""
        with self.database.connect() as conn:
            lease = self.claim(conn)
            embedder_id = ensure_embedder(conn, self.embedder.identity, self.embedder.dimensions)
            batches = list(self._batches())
            started = time.perf_counter()
            self._write_pages(conn, lease)
            for batch, vectors in batches:
                begun = batch.stop + self.settings.batch_units
                commit_batch(conn, lease, embedder_id, batch, vectors, begun=begun, replace=False)
            seconds = time.perf_counter() - started
            conn.execute("update file_ingestions set cancel_requested_at = now()")
            planroom.ingest.seal(conn, lease, "cancelled")
        return seconds

    def _batches(self) -> list[tuple[Batch, list[HalfVector]]]:
        size = self.settings.batch_units
        made: list[tuple[Batch, list[HalfVector]]] = []
        for start in range(0, len(self.units), size):
            units = self.units[start : start + size]
            hashes = [chunk.text_hash for _, chunk in units]
            made.append(
                (
                    Batch(start, units, hashes, {}, {}),
                    [HalfVector(self.vectors[key]) for key in hashes],
                )
            )
        return made

    def _write_pages(self, conn: psycopg.Connection[Any], lease: Lease) -> None:
        counts = [0] * len(self.pages)
        for page_index, _ in self.units:
            counts[page_index] += 1
        conn.execute(
            "update file_ingestions set extractor = '', chunker = '', embedder = '' where id = %s",
            (lease.id,),
        )
        step = max(1, self.settings.page_group // 2)
        for first in range(0, len(self.pages), step):
            group = self.pages[first : first + step]
            with conn.transaction():
                progress = {
                    "page_count": len(self.pages),
                    "processed_pages": first + len(group),
                    "planned_units": sum(counts[: first + len(group)]),
                }
                checkpoint(conn, lease, progress)
                insert_pages(
                    conn,
                    lease.id,
                    lease.row["workspace_id"],
                    group,
                    counts[first : first + len(group)],
                )
                ingestions.note_progress(conn, lease, pages_read=len(group))

    def whole(self) -> float:
        """The ingestion as a worker runs it, with a look at memory after every commit."""
        with self.database.connect() as conn:
            lease = self.claim(conn)
            self.resident = []
            with looking_at(planroom.ingest, "checkpoint", self._look):
                started = time.perf_counter()
                settled = ingest(
                    conn, self.blobs, self.settings, lambda s: self.embedder, lease, AbortSignal()
                )
                seconds = time.perf_counter() - started
            assert settled.status == "ready", settled
        return seconds

    def _look(self, *given: Any) -> None:
        pages = given[2].get("processed_pages")
        last = self.resident[-1][0] if self.resident else 0
        self.resident.append((last if pages is None else pages, psutil.Process().memory_info().rss))


class looking_at:  # noqa: N801 - a context manager
    """Call `look` whenever the function of that name in the module is called."""

    def __init__(self, module: Any, name: str, look: Callable[..., None]) -> None:
        self._module, self._name, self._look = module, name, look
        self._function: Callable[..., Any] = getattr(module, name)

    def __enter__(self) -> None:
        def both(*given: Any, **named: Any) -> Any:
            self._look(*given)
            return self._function(*given, **named)

        setattr(self._module, self._name, both)

    def __exit__(self, *_: object) -> None:
        setattr(self._module, self._name, self._function)


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Run the stages and the whole in turns."""
    before = psutil.Process().memory_info().rss
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    # First of all, so that the memory seen is the worker's and not that of the stages alone.
    seconds["whole"].append(bench.whole())
    resident = bench.resident
    for round_ in range(rounds):
        for stage in STAGES:
            if stage != "whole" or round_ > 0:
                seconds[stage].append(getattr(bench, stage)())
    best = {stage: min(values) for stage, values in seconds.items()}
    slowest = max(("read", "embed", "write"), key=best.__getitem__)
    tenth = next((rss for pages, rss in resident if pages >= 10), resident[0][1])
    return {
        "file": bench.path.name,
        "file_mib": round(bench.path.stat().st_size / MIB, 1),
        "pages": len(bench.pages),
        "units": len(bench.units),
        "texts": len(bench.vectors),
        "embedder": bench.embedder.identity,
        "seconds": {stage: [round(s, 3) for s in values] for stage, values in seconds.items()},
        "best": {stage: round(value, 3) for stage, value in best.items()},
        "slowest_stage": slowest,
        "ratio": round(best["whole"] / best[slowest], 3),
        "worker_before_mib": before // MIB,
        "worker_peak_beyond_mib": (max(rss for _, rss in resident) - before) // MIB,
        "worker_growth_from_page_10_mib": (max(rss for _, rss in resident) - tenth) // MIB,
        "child_peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def main() -> int:
    """Measure, print a table, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="A document, next to its slowest stage alone.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--embedder", choices=("static", "hashing", "minilm"), default="static")
    parser.add_argument("--database", metavar="URL", help="a database to fill")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    with database_at(options.database) as (database, home):
        settings = Settings(_env_file=None, home=home, embedder=options.embedder)  # pyright: ignore[reportCallIssue]
        embedder = open_embedder(settings)
        embedder.embed(["warm"])
        blobs = BlobStore(home / "blobs")
        found = measure(Bench(options.file, database, blobs, settings, embedder), options.rounds)
    print(
        f"{found['file']}: {found['pages']} pages, {found['units']} chunks, {found['texts']} texts"
    )
    for stage in STAGES:
        print(f"  {stage:6s} {found['best'][stage]:9.3f} s")
    print(f"  ratio  {found['ratio']:9.3f}   to {found['slowest_stage']} alone (budget 1.15)")
    print(
        f"  memory: {found['worker_peak_beyond_mib']} MiB beyond the model's process at its peak,"
        f" {found['worker_growth_from_page_10_mib']} MiB more than at page 10;"
        f" the child's peak {found['child_peak_mib']} MiB"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
