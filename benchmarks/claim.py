"""How fast is a claim, does history slow it, what does an idle worker cost, and beside its peers?

    python benchmarks/claim.py [--quick] [--database URL] [--json OUT.json] [--only claims,idle]

All parts run on one server: the embedded one, started in a folder of its own with its default,
durable settings, or that of `--database`, a URL whose role may create databases. Nothing is
stubbed but the jobs' own work, which is none. Without the extra `bench` the peers are listed as
not installed. What each part measures is said at the head of its module in `claim_parts/`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from claim_parts.claims import measure_claims
from claim_parts.idle import measure_idle
from claim_parts.latency import measure_latency
from claim_parts.peers import measure_peers
from claim_parts.plan import FULL, JUDGED_CLAIMS_MIN, QUICK, Plan, Result
from claim_parts.report import show
from claim_parts.server import Server, open_server
from rich.console import Console

Part = Callable[[Server, Plan, Callable[[str], None]], object]

PARTS: Mapping[str, Part] = {
    "claims": measure_claims,
    "latency": measure_latency,
    "idle": measure_idle,
    "peers": measure_peers,
}


def main() -> None:
    """Measure what was asked for, print it, and write it."""
    arguments = _arguments()
    plan = QUICK if arguments.quick else FULL
    console, progress = Console(), Console(stderr=True)
    began_at = time.monotonic()
    with open_server(arguments.database) as server:
        result: Result = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": arguments.quick,
            "machine": _machine(),
            "server": server.facts(),
        }
        for name in arguments.only:
            result[name] = PARTS[name](server, plan, lambda text: progress.print(f"[dim]{text}"))
    result["budgets"] = _budgets(result)
    result["seconds"] = round(time.monotonic() - began_at, 1)
    show(console, result)
    console.print(f"{result['seconds']:.0f} s on {result['machine']}, {result['server']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="about a minute, for a look")
    parser.add_argument("--database", metavar="URL", help="a server of your own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument(
        "--only", type=_parts, default=list(PARTS), metavar="PARTS", help=",".join(PARTS)
    )
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}")
    return names


def _machine() -> Result:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _budgets(result: Result) -> list[Result]:
    """Each budget of the design, with what was measured and whether it is met."""
    budgets: list[Result] = []

    def add(what: str, measured: float, limit: float, *, judged: bool = True) -> None:
        met = measured <= limit if judged else None
        budgets.append({"what": what, "measured": measured, "limit": limit, "met": met})

    if "claims" in result:
        claims = result["claims"]
        for row in claims["p99_ratio"]:
            what = f"claim p99 with {claims['finished_rows']:,} finished rows over none"
            what = f"{what}, {row['queue']}, {row['workers']} process(es)"
            enough = row["claims"] >= JUDGED_CLAIMS_MIN
            add(what, row["ratio"], claims["p99_ratio_max"], judged=enough)
    if "idle" in result:
        idle = result["idle"]
        for name, row in idle["workers"].items():
            add(f"queries a poll, {name}", row["queries_a_poll"], idle["queries_a_poll_max"])
            add(f"idle CPU %, {name}", row["cpu_percent"], idle["cpu_percent_max"])
    return budgets


if __name__ == "__main__":
    main()
