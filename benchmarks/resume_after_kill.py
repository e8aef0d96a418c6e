"""What does a kill cost? The same work uninterrupted and under kills, measured and drawn.

    python benchmarks/resume_after_kill.py [FILE…] [--workers 2] [--kills 5]
        [--signal KILL|TERM|STOP] [--database URL] [--embed-latency MS] [--apart]
        [--json OUT.json] [--plot OUT]

Real worker processes, a real server (the embedded one, or that of `--database`, a URL whose role
may create databases), and an HTTP embedding server that counts what it embeds. Stubbed is only
what an embedding means: vectors come from a hash of the text, after `--embed-latency` a request.
For each kill: the seconds until another worker had the document, and the units and pages that were
done again. Then the totals beside the uninterrupted run, and beside beginning anew at each kill,
which is reckoned from what was committed. The run fails unless both made the same chunks, byte for
byte. Without FILE it works on a generated set; it takes about two minutes.

A killed worker's lease is taken over at once by workers of the same machine, who see that it is
dead. `--apart` hides that from them, as on machines of their own: then the lease has to run out.
Needs the extras `dev` and, for `--plot`, `plot`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "fixtures")]

from resume_parts.report import Comparison, as_json, show  # noqa: E402
from resume_parts.run import Result, Run, Work, database  # noqa: E402

from planroom import embedded  # noqa: E402

SHEETS = 300


def main() -> int:
    """The command line."""
    given = _arguments()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="planroom-resume-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o711)
        documents = tuple(given.files) or _generate(folder, given.workers, console)
        work = Work(
            documents,
            given.workers,
            given.embed_latency / 1000,
            given.lease_seconds,
            given.batch_units,
            given.apart,
        )
        with _server(given.database, folder) as url:
            calm = _run(url, folder, work, 0, given, console)
            killed = _run(url, folder, work, given.kills, given, console)
    compared = Comparison(work, given.signal, calm, killed)
    show(console, compared)
    assert calm.outcomes == killed.outcomes, "the kills changed the result"
    console.print("The chunks of both runs are the same, byte for byte.")
    if given.json:
        given.json.write_text(json.dumps(as_json(compared, given.seed)) + "\n")
    if given.plot:
        from resume_parts.plot import draw

        console.print("Drawn: " + ", ".join(map(str, draw(compared, given.plot))))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What does a kill cost?")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--signal", choices=["KILL", "TERM", "STOP"], default="KILL")
    parser.add_argument("--database", metavar="URL", help="a server to work on")
    parser.add_argument(
        "--embed-latency", type=float, default=1500.0, metavar="MS", help="of one request (1500)"
    )
    parser.add_argument("--lease-seconds", type=float, default=120.0)
    parser.add_argument("--batch-units", type=int, default=200)
    parser.add_argument("--apart", action="store_true", help="each worker on a machine of its own")
    parser.add_argument("--seed", type=int, default=7, help="of the moments of the kills (7)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="written as OUT.png and OUT.svg")
    given = parser.parse_args()
    if given.signal == "STOP" and given.lease_seconds > 30:
        parser.error("a stopped worker keeps its lease to the end: give --lease-seconds 10, say")
    return given


def _generate(folder: Path, workers: int, console: Console) -> tuple[Path, ...]:
    """One set a worker, none like another."""
    make_set: Any = import_module("make_drawing_set").make_set
    made: list[Path] = []
    for number in range(1, workers + 1):
        path = folder / f"set {number}.pdf"
        with console.status(f"drawing {path.name}: {SHEETS} sheets"):
            make_set(path, sheets=SHEETS, seed=number, paths=0, project=f"HARBOR POINT {number}")
        made.append(path)
    return tuple(made)


@contextmanager
def _server(given: str | None, folder: Path) -> Generator[str]:
    """The server of `--database`, or the embedded one beside the block."""
    if given is not None:
        yield given
        return
    home = folder / "server"
    home.mkdir(mode=0o711)
    try:
        yield embedded.start(home)
    finally:
        embedded.stop(home)
        shutil.rmtree(home, ignore_errors=True)


def _run(
    url: str, folder: Path, work: Work, kills: int, given: argparse.Namespace, console: Console
) -> Result:
    kind = "killed" if kills else "calm"
    number = signal.Signals[f"SIG{given.signal}"]
    name = f"resume_{kind}_{os.getpid()}_{random.randrange(10**6)}"
    said = f"the work with {kills} kills" if kills else "the work without a kill"
    with console.status(said), database(url, name) as own:
        result = Run(own, folder / kind, work).perform(kills, number, given.seed)
    console.print(f"{said}: {result.seconds:.1f} s")
    if len(result.kills) < kills:
        console.print(
            f"It was over after {len(result.kills)}: give more work, or fewer kills, for them all."
        )
    return result


if __name__ == "__main__":
    raise SystemExit(main())
