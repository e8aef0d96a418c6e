"""The tables that a person reads; the JSON has everything that is in them, and more."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from claim_parts.plan import Result

_VERDICTS = {
    True: "[green]met[/]       ",
    False: "[red]missed[/]    ",
    None: "[dim]too few[/]   ",
}


def show(console: Console, result: Result) -> None:
    """Print a table for each part that was measured, and a line for each budget."""
    for part, table in (
        ("claims", _claims),
        ("latency", _latency),
        ("idle", _idle),
        ("peers", _peers),
        ("peers", _guarantees),
    ):
        if part in result:
            console.print(table(result[part]))
    for budget in result["budgets"]:
        verdict = _VERDICTS[budget["met"]]
        console.print(f"{verdict}{budget['what']}: {budget['measured']} (≤ {budget['limit']})")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_lines=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _claims(claims: Result) -> Table:
    table = _table(
        "Claims: claim and seal of empty jobs",
        "queue",
        "processes",
        "finished rows",
        "jobs/s",
        "claim p50 ms",
        "claim p99 ms",
        "seal p50 ms",
        "p99 ratio",
    )
    ratios = {(row["queue"], row["workers"]): row["ratio"] for row in claims["p99_ratio"]}
    for row in claims["conditions"]:
        ratio = ratios[row["queue"], row["workers"]] if row["finished_rows"] else None
        table.add_row(
            row["what"],
            str(row["workers"]),
            f"{row['finished_rows']:,}",
            f"{row['jobs_per_second']:,.0f}",
            f"{row['claim']['p50_ms']:.2f}",
            f"{row['claim']['p99_ms']:.2f}",
            f"{row['seal']['p50_ms']:.2f}",
            "" if ratio is None else f"{ratio:.2f}",
            end_section=bool(row["finished_rows"]),
        )
    return table


def _latency(latency: Result) -> Table:
    table = _table(
        "Latency: enqueue to the handler's first line, idle worker",
        "wake",
        "jobs",
        "p50 ms",
        "p99 ms",
        "max ms",
    )
    for mode, row in latency["enqueue_to_start"].items():
        name = mode if mode == "notify" else f"poll, every {latency['poll_seconds']:.0f} s"
        table.add_row(name, str(row["sent"]), *_milliseconds(row))
    return table


def _milliseconds(row: dict[str, Any]) -> list[str]:
    return [f"{row[key]:,.1f}" for key in ("p50_ms", "p99_ms", "max_ms")]


def _idle(idle: Result) -> Table:
    table = _table(
        "Idle worker",
        "worker",
        "polls",
        "queries/poll",
        "pool checks/poll",
        "keeper queries/min",
        "server transactions/poll",
        "CPU % of a core",
    )
    for name, row in idle["workers"].items():
        table.add_row(
            name,
            str(row["polls"]),
            f"{row['queries_a_poll']:.2f}",
            f"{row['pool_checks_a_poll']:.2f}",
            f"{row['keeper_queries_a_minute']:.1f}",
            f"{row['server_transactions_a_poll']:.2f}",
            f"{row['cpu_percent']:.2f}",
        )
    return table


def _peers(peers: list[Result]) -> Table:
    counts = sorted({count for peer in peers for count in peer.get("jobs_per_second", ())})
    table = _table(
        "Peers: empty jobs through their own workers, same server, same run",
        "queue",
        "at once",
        *(f"jobs/s, {count} process(es)" for count in counts),
        "start p50 ms",
        "start p99 ms",
    )
    for peer in peers:
        name = f"{peer['name']} {peer.get('version', '')}".strip()
        if not peer["installed"] or "error" in peer:
            why = peer.get("error") or f"not installed: {peer['install']}"
            table.add_row(name, why)
            continue
        latency = peer["enqueue_to_start"]
        table.add_row(
            name,
            peer["jobs_at_once"],
            *(f"{rate:,.0f}" for rate in peer["jobs_per_second"].values()),
            f"{latency['p50_ms']:,.1f}",
            f"{latency['p99_ms']:,.1f}",
        )
    return table


def _guarantees(peers: list[Result]) -> Table:
    table = Table(
        title="How each was set up, and what it guarantees", title_justify="left", show_lines=True
    )
    columns = {
        "name": "queue",
        "settings": "settings",
        "fence": "fencing token",
        "renewal": "renewal",
        "tenant_limits": "limits per tenant",
        "transactional_enqueue": "transactional enqueue",
        "crash_recovery": "recovery from a crash",
    }
    for heading in columns.values():
        table.add_column(heading, overflow="fold")
    for peer in peers:
        table.add_row(*(peer[column] for column in columns))
    return table
