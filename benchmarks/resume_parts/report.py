"""The figures of a killed run beside those of an uninterrupted one: a table, and JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from resume_parts.run import Kill, Result, Work


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same work three times: uninterrupted, killed, and (reckoned) begun anew at each kill."""

    work: Work
    signal: str
    calm: Result
    killed: Result

    @property
    def units_again(self) -> int:
        """Texts embedded again because of a kill, by the embedding server's own count.

        Not the difference of the two runs: documents share texts, and which worker comes first to
        one differs from run to run, kills or none.
        """
        return sum(kill.units_again for kill in self.killed.kills)

    @property
    def pages_again(self) -> int:
        """Pages read again because of a kill, by the readers' own log."""
        return sum(kill.pages_again for kill in self.killed.kills)

    @property
    def seconds_more(self) -> float:
        """How much longer it took."""
        return self.killed.seconds - self.calm.seconds

    @property
    def from_zero(self) -> dict[str, float]:
        """What would have been done again if each killed document had begun anew."""
        kills = self.killed.kills
        return {
            "units_again": sum(kill.units_committed for kill in kills) + self.units_again,
            "pages_again": sum(kill.pages_committed for kill in kills) + self.pages_again,
            "seconds_more": sum(kill.worked_seconds for kill in kills),
        }


def as_json(compared: Comparison, seed: int) -> dict[str, Any]:
    """Everything, for machines: the figures and the progress they were drawn from."""
    work, calm, killed = compared.work, compared.calm, compared.killed
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "seed": seed,
        "signal": compared.signal,
        "documents": [path.name for path in work.documents],
        "workers": work.workers,
        "apart": work.apart,
        "lease_seconds": work.lease_seconds,
        "batch_units": work.batch_units,
        "embed_latency_ms": 1000 * work.latency_seconds,
        "digests_equal": calm.outcomes == killed.outcomes,
        "uninterrupted": _figures(calm),
        "killed": _figures(killed),
        "units_again": compared.units_again,
        "pages_again": compared.pages_again,
        "seconds_more": round(compared.seconds_more, 2),
        "from_zero": {name: round(value, 2) for name, value in compared.from_zero.items()},
        "kills": [_kill(kill) for kill in killed.kills],
    }


def _figures(result: Result) -> dict[str, Any]:
    return {
        "seconds": round(result.seconds, 2),
        "embedded": result.embedded,
        "pages_read": result.pages_read,
        "chunks": sum(outcome.chunks for outcome in result.outcomes.values()),
        "progress": [
            [round(s.at, 2), s.document, s.slot, s.pages, s.units] for s in result.samples
        ],
    }


def _kill(kill: Kill) -> dict[str, Any]:
    return {
        "at_seconds": round(kill.at, 2),
        "worker": kill.slot,
        "document": kill.document,
        "units_committed": kill.units_committed,
        "pages_committed": kill.pages_committed,
        "reclaim_seconds": round(kill.reclaim_seconds, 3),
        "units_again": kill.units_again,
        "pages_again": kill.pages_again,
    }


def show(console: Console, compared: Comparison) -> None:
    """Print the kills and the totals."""
    console.print(_kills_table(compared))
    console.print(_totals_table(compared))


def _kills_table(compared: Comparison) -> Table:
    table = Table(title=f"What each SIG{compared.signal} cost", title_justify="left")
    for name in ("kill", "at", "worker", "document", "committed", "taken over"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("units again", justify="right", style="bold")
    table.add_column("pages again", justify="right", style="bold")
    for number, kill in enumerate(compared.killed.kills, 1):
        table.add_row(
            str(number),
            f"{kill.at:.1f} s",
            str(kill.slot + 1),
            str(kill.document),
            f"{kill.units_committed:,}",
            f"+{kill.reclaim_seconds:.2f} s",
            str(kill.units_again),
            str(kill.pages_again),
        )
    return table


def _totals_table(compared: Comparison) -> Table:
    calm, killed, zero = compared.calm, compared.killed, compared.from_zero
    table = Table(title="In all", title_justify="left")
    table.add_column("")
    for name in ("seconds", "texts embedded", "pages read"):
        table.add_column(name, justify="right")
    table.add_row("uninterrupted", *_row(calm.seconds, calm.embedded, calm.pages_read))
    table.add_row(
        f"killed {len(killed.kills)} times",
        *_row(killed.seconds, killed.embedded, killed.pages_read),
        style="bold",
    )
    table.add_row(
        "begun anew at each kill (reckoned)",
        *_row(
            calm.seconds + zero["seconds_more"],
            calm.embedded + zero["units_again"],
            calm.pages_read + zero["pages_again"],
        ),
    )
    return table


def _row(seconds: float, embedded: float, pages: float) -> Sequence[str]:
    return f"{seconds:.1f}", f"{embedded:,.0f}", f"{pages:,.0f}"
