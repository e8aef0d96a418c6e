"""How much of everything one run of the benchmark does, and the budgets that it is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]

QUERIES_A_POLL_MAX = 5.0
IDLE_CPU_PERCENT_MAX = 1.0
FINISHED_P99_RATIO_MAX = 1.2

# A p99 of fewer is little more than a maximum, and is not held against a budget.
JUDGED_CLAIMS_MIN = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """Seconds are of one round of one condition; jobs and sends are of one condition."""

    finished_rows: int
    claim_workers: tuple[int, ...]
    claim_rounds: int
    claim_seconds: float
    backlog: int
    sent_notified: int
    sent_polled: int
    idle_seconds: float
    peer_jobs: int
    peer_workers: tuple[int, ...]
    peer_sent: int


FULL = Plan(
    finished_rows=1_000_000,
    claim_workers=(1, 2, 4, 8),
    claim_rounds=5,
    claim_seconds=2.0,
    backlog=6_000,
    sent_notified=200,
    sent_polled=60,
    idle_seconds=20.0,
    peer_jobs=2_000,
    peer_workers=(1, 2),
    peer_sent=100,
)
QUICK = Plan(
    finished_rows=100_000,
    claim_workers=(1, 4),
    claim_rounds=1,
    claim_seconds=0.7,
    backlog=3_000,
    sent_notified=20,
    sent_polled=4,
    idle_seconds=5.0,
    peer_jobs=200,
    peer_workers=(1,),
    peer_sent=5,
)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all are not above; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100.0))]


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the maximum, in ms."""
    return {
        "p50_ms": round(1000 * percentile(seconds, 50), 3),
        "p99_ms": round(1000 * percentile(seconds, 99), 3),
        "max_ms": round(1000 * percentile(seconds, 100), 3),
    }
