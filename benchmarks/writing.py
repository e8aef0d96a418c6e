"""How fast are chunks written, next to a bare COPY of the same rows into the same table?

    python benchmarks/writing.py [--batches 200] [--database URL] [--json OUT.json]

A worker's batch is one transaction: the fence with the checkpoint and the lease, 200 rows copied,
the ledger. The bare one is COPY BINARY of 200 such rows and a commit. They take turns, batch by
batch, so the table, its indexes and what else the machine does are the same for both. Texts are
like those of drawings, all different; vectors are random.

The server is the embedded one with its durable settings, in a folder of its own, or that of
`--database`, a database to fill. Nothing is stubbed. The budget is 90 %.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from pgvector import HalfVector
from pydantic import SecretStr

from leasequeue import Lease, ensure_workspace
from planroom import embedded, ingestions
from planroom.blobs import Blob
from planroom.chunk import ChunkParams, chunk_page
from planroom.chunks import copy_chunks, ensure_embedder
from planroom.config import Settings
from planroom.database import Database
from planroom.files import take_file
from planroom.ingest import Batch, commit_batch
from planroom.model import Chunk
from planroom.projects import ensure_project

BATCH = 200
DIMENSIONS = 256
WARM_UP = 10
WORDS = [
    "VERIFY",
    "ALL",
    "DIMENSIONS",
    "IN",
    "THE",
    "FIELD",
    "BEFORE",
    "FABRICATION",
    "OF",
    "STEEL",
    "ANCHOR",
    "BOLTS",
    "PER",
    "DETAIL",
    "AT",
    "GRID",
    "LINE",
    "PROVIDE",
    "FIRE",
    "RATED",
    "GYPSUM",
    "BOARD",
    "PARTITION",
    "TO",
    "UNDERSIDE",
    "OF",
    "DECK",
    "ABOVE",
    "SEAL",
    "ALL",
    "PENETRATIONS",
    "WITH",
    "LISTED",
    "ASSEMBLY",
    "COORDINATE",
    "DUCT",
    "ROUTING",
    "WITH",
    "STRUCTURAL",
    "BEAM",
    "CAMBER",
]


@contextmanager
def database_at(url: str | None) -> Generator[tuple[Database, Path]]:
    """The database to measure on, migrated, and a home folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="planroom-bench-", dir="/var/tmp") as folder:
        home = Path(folder)
        home.chmod(0o711)
        given = None if url is None else SecretStr(url)
        settings = Settings(_env_file=None, home=home, database_url=given)  # pyright: ignore[reportCallIssue]
        try:
            with Database(settings, name="benchmark") as database:
                database.migrate()
                yield database, home
        finally:
            if url is None:
                embedded.stop(home)


def make_chunks(count: int) -> list[Chunk]:
    """So many different chunks of about 256 tokens."""
    chunks: list[Chunk] = []
    params = ChunkParams()
    rng = np.random.default_rng(7)
    while len(chunks) < count:
        picked = rng.integers(0, len(WORDS), 4000)
        page = " ".join(
            f"{WORDS[w]}{' A-' + str(i) if i % 9 == 0 else ''}" for i, w in enumerate(picked)
        )
        chunks += chunk_page(page, params)
    return chunks[:count]


def lease_of(conn: psycopg.Connection[Any], name: str, units: int) -> Lease:
    """A claimed ingestion with a plan of so many units."""
    workspace = ensure_workspace(conn, "benchmark")
    project = ensure_project(conn, workspace, "benchmark")
    with conn.transaction():
        file = take_file(conn, workspace, project, name, Blob(name.encode().ljust(32), 1))
        ingestion_id = ingestions.enqueue(conn, workspace, file.id)
    conn.execute(
        "update file_ingestions set planned_units = %s, page_count = 1 where id = %s",
        (units, ingestion_id),
    )
    lease = ingestions.claim(conn, "benchmark", 3600)
    assert isinstance(lease, Lease)
    return lease


def measure(database: Database, batches: int) -> dict[str, Any]:
    """Write by turns; the seconds of each batch, without the first few."""
    rng = np.random.default_rng(11)
    units = BATCH * (batches + WARM_UP)
    chunks = make_chunks(2 * units)
    seconds: dict[str, list[float]] = {"bare": [], "planroom": []}
    with database.connect() as conn:
        ours, bare = lease_of(conn, "ours", units), lease_of(conn, "bare", units)
        embedder_id = ensure_embedder(conn, "benchmark", DIMENSIONS)
        workspace = ours.row["workspace_id"]
        for start in range(0, units, BATCH):
            vectors = [HalfVector(row) for row in rng.random((BATCH, DIMENSIONS), np.float32)]
            mine = chunks[2 * start : 2 * start + BATCH]
            others = chunks[2 * start + BATCH : 2 * start + 2 * BATCH]
            hashes = [chunk.text_hash for chunk in mine]
            texts = {key: chunk.text for key, chunk in zip(hashes, mine, strict=True)}
            batch = Batch(start, [(0, chunk) for chunk in mine], hashes, {}, texts)
            rows = [
                (bare.id, start + i, workspace, 0, embedder_id, c.tokens, c.text_hash, c.text, v)
                for i, (c, v) in enumerate(zip(others, vectors, strict=True))
            ]
            started = time.perf_counter()
            begun = start + 2 * BATCH
            commit_batch(conn, ours, embedder_id, batch, vectors, begun=begun, replace=False)
            middle = time.perf_counter()
            with conn.transaction():
                copy_chunks(conn, rows)
            seconds["planroom"].append(middle - started)
            seconds["bare"].append(time.perf_counter() - middle)
    return figures({name: values[WARM_UP:] for name, values in seconds.items()})


def figures(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Rows a second in all and of the median batch, and their ratios."""
    rate = {name: BATCH * len(values) / sum(values) for name, values in seconds.items()}
    median = {name: BATCH / statistics.median(values) for name, values in seconds.items()}
    return {
        "batches": len(seconds["bare"]),
        "rows_per_batch": BATCH,
        "bare_rows_per_second": round(rate["bare"]),
        "planroom_rows_per_second": round(rate["planroom"]),
        "ratio": round(rate["planroom"] / rate["bare"], 3),
        "median_ratio": round(median["planroom"] / median["bare"], 3),
        "median_batch_ms": {name: round(1000 * BATCH / r, 2) for name, r in median.items()},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def main() -> int:
    """Measure, print a table, and write the figures where asked."""
    parser = argparse.ArgumentParser(description="Chunks a second, next to a bare COPY BINARY.")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--database", metavar="URL", help="a database to fill")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    with database_at(options.database) as (database, _):
        found = measure(database, options.batches)
    print(f"{found['batches']} batches of {BATCH} rows each, by turns")
    print(f"  bare COPY BINARY   {found['bare_rows_per_second']:8,d} rows/s")
    print(f"  batch transaction  {found['planroom_rows_per_second']:8,d} rows/s")
    print(f"  ratio              {found['ratio']:8.3f}   (budget 0.9)")
    print(f"  ratio of medians   {found['median_ratio']:8.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
