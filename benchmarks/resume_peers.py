"""What is done again after a kill: planroom and its peers, same chunks, same embedder, same server.

    python benchmarks/resume_peers.py --peers /tmp/peers/bin/python [--sheets 160] [--kills 1]
        [--embed-latency MS] [--only planroom,dbos] [--json OUT.json]

Each system indexes the chunks of one generated set in a process of its own, as its documentation
recommends (see `resume_peer/`), once undisturbed and once killed by SIGKILL in the middle of an
embedding request, at the same shares of the distinct texts; after a kill the same command is run
again. Counted are texts at the embedding server, which embeds by a hash after a latency, and
seconds until the last process has ended. planroom also reads the PDF itself; the others are given
its chunks ready made, so their seconds hold no reading.

The peers live in an environment of their own, for which resume_peers.txt is the list; `--peers`
is its Python. What is not installed there is reported as such.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "fixtures")]

from resume_parts.run import DIMENSIONS, database  # noqa: E402

from planroom import embedded  # noqa: E402
from planroom.chunk import ChunkParams, chunk_page  # noqa: E402
from planroom.extract import PageReader  # noqa: E402
from support.embedding_server import EmbeddingServer  # noqa: E402
from support.fleet import Fleet, Process, await_true  # noqa: E402

PEERS = ("planroom", "dbos", "langchain", "cocoindex", "llama_index")
PATIENCE_SECONDS = 600.0

Start = Callable[[], Process]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one system came to."""

    name: str
    chunks: int
    seconds: float
    embedded: int
    killed_seconds: float
    killed_embedded: int
    seconds_after_kill: float
    problem: str | None = None

    @property
    def again(self) -> int:
        """Texts embedded a second time because of the kills."""
        return self.killed_embedded - self.embedded

    @property
    def seconds_more(self) -> float:
        """How much longer it took."""
        return self.killed_seconds - self.seconds


def main() -> int:
    """The command line."""
    given = _arguments()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="planroom-peers-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o711)
        pdf, texts = _generate(folder, given.sheets)
        home = folder / "server"
        home.mkdir(mode=0o711)
        try:
            url = embedded.start(home)
            measured = [
                _measure(peer, url, folder, pdf, texts, given, console) for peer in given.only
            ]
        finally:
            embedded.stop(home)
    console.print(_table(measured, given))
    if given.json:
        machine = {"system": platform.platform(), "cores": os.cpu_count()}
        results = [asdict(m) | {"again": m.again} for m in measured]
        settings = {"kills": given.kills, "sheets": given.sheets, "latency": given.embed_latency}
        given.json.write_text(json.dumps({"machine": machine, **settings, "results": results}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What is done again after a kill?")
    parser.add_argument("--peers", type=Path, help="the Python of the peers' environment")
    parser.add_argument("--sheets", type=int, default=160)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--embed-latency", type=float, default=1500.0, metavar="MS")
    parser.add_argument("--only", type=lambda v: v.split(","), default=list(PEERS))
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser.parse_args()


def _generate(folder: Path, sheets: int) -> tuple[Path, Path]:
    """The set, and its chunks as a JSON file alone in a folder."""
    pdf, texts = folder / "set.pdf", folder / "texts" / "set.json"
    import_module("make_drawing_set").make_set(pdf, sheets=sheets, seed=1, paths=0)
    chunks: list[dict[str, str]] = []
    with PageReader(pdf) as reader:
        for page in reader:
            for chunk in chunk_page(page.text, ChunkParams()):
                key = f"{len(chunks):06}"
                chunks.append({"id": key, "page": str(page.index), "text": chunk.text})
            reader.committed(page.index + 1)
    texts.parent.mkdir()
    texts.write_text(json.dumps(chunks))
    return pdf, texts


def _measure(
    peer: str,
    url: str,
    folder: Path,
    pdf: Path,
    texts: Path,
    given: argparse.Namespace,
    console: Console,
) -> Measured:
    chunks = len(json.loads(texts.read_text()))
    try:
        with console.status(f"{peer}, undisturbed"):
            seconds, count, distinct, _ = _run(peer, url, folder, pdf, texts, given, [])
        shares = [(n + 0.5) / given.kills * distinct for n in range(given.kills)]
        with console.status(f"{peer}, killed"):
            killed, again, _, after = _run(peer, url, folder, pdf, texts, given, shares)
    except AssertionError as error:
        console.print(f"{peer}: {error}")
        return Measured(peer, chunks, 0, 0, 0, 0, 0, str(error).strip().splitlines()[-1])
    console.print(f"{peer}: {seconds:.1f} s undisturbed, {again - count} texts again")
    return Measured(peer, chunks, seconds, count, killed, again, after)


def _run(
    peer: str,
    url: str,
    folder: Path,
    pdf: Path,
    texts: Path,
    given: argparse.Namespace,
    kill_at: list[float],
) -> tuple[float, int, int, float]:
    """Seconds, texts embedded, distinct ones, and seconds after the last kill."""
    name = f"peer_{peer}_{random.randrange(10**9)}"
    own = folder / name
    own.mkdir()
    latency = given.embed_latency / 1000
    with (
        EmbeddingServer(DIMENSIONS, latency_seconds=latency) as server,
        _database(url, name, peer) as address,
        Fleet(address, own, server, settings=_SETTINGS) as fleet,
    ):
        start = _starter(peer, fleet, pdf, texts, given.peers)
        began_at = killed_at = time.monotonic()
        process = start()
        for distinct in kill_at:
            _await_in_request(server, process, distinct)
            process.send(signal.SIGKILL)
            process.wait()
            killed_at = time.monotonic()
            process = start()
        status = process.wait(PATIENCE_SECONDS)
        assert status == 0, f"exit {status}: {process.said()}"
        ended_at = time.monotonic()
        return ended_at - began_at, server.embedded, len(server.counts), ended_at - killed_at


_SETTINGS = {"batch_units": 200, "page_group": 8, "chunk_tokens": 256, "chunk_overlap": 32}


def _database(url: str, name: str, peer: str) -> Any:
    """planroom's is migrated; a peer's holds only what it makes itself."""
    return database(url, name, migrated=peer == "planroom")


def _starter(peer: str, fleet: Fleet, pdf: Path, texts: Path, python: Path | None) -> Start:
    if peer == "planroom":
        fleet.take_in(pdf)
        return fleet.worker
    assert python is not None, "not installed: give --peers"
    script = ROOT / "benchmarks" / "resume_peer" / f"{peer}_peer.py"
    address = conninfo_to_dict(fleet.database_url)
    parts = json.dumps({key: str(address[key]) for key in ("user", "dbname", "host", "port")})
    command = [str(python), str(script), str(texts), parts, fleet.server.url, str(fleet.folder)]
    imported = subprocess.run(
        [str(python), "-c", f"import {peer.replace('langchain', 'langchain_classic')}"],
        capture_output=True,
        text=True,
        check=False,
    )
    said = imported.stderr.strip().splitlines()
    assert imported.returncode == 0, f"not installed: {said[-1] if said else ''}"
    with psycopg.connect(fleet.database_url) as conn:
        conn.execute("create extension if not exists vector")
    return lambda: fleet.start(command, _environment())


def _environment() -> dict[str, str]:
    """The peers' own: no settings of ours, nothing sent home."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
    return {**kept, "OPENAI_API_KEY": "none", "COCOINDEX_DISABLE_USAGE_TRACKING": "1"}


def _await_in_request(server: EmbeddingServer, process: Process, distinct: float) -> None:
    """Return in the middle of the next request after so many distinct texts."""

    def is_the_time() -> bool:
        assert process.is_alive, f"it ended before the kill: {process.said()}"
        return len(server.counts) >= distinct

    await_true(is_the_time, "it never came so far", PATIENCE_SECONDS)
    seen = server.requests
    await_true(lambda: server.requests > seen, "no further request came", PATIENCE_SECONDS)


def _table(measured: list[Measured], given: argparse.Namespace) -> Table:
    table = Table(
        title=f"{given.kills} × SIGKILL in {measured[0].chunks:,} chunks",
        title_justify="left",
    )
    table.add_column("")
    for name in ("embedded again", "undisturbed", "killed", "more", "from the kill to the end"):
        table.add_column(name, justify="right")
    for m in measured:
        if m.problem is not None:
            table.add_row(m.name, "did not run")
            continue
        table.add_row(
            m.name,
            f"{m.again:,}",
            f"{m.seconds:.1f} s",
            f"{m.killed_seconds:.1f} s",
            f"{m.seconds_more:+.1f} s",
            f"{m.seconds_after_kill:.1f} s",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
