"""How long to wait, rule L8: the steps, their scatter, and a Retry-After that is never undercut."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasequeue import reconnect_delay, retry_delay


def seconds(
    failures: int, retry_after: float | None = None, chance: random.Random | None = None
) -> float:
    asked = None if retry_after is None else timedelta(seconds=retry_after)
    return retry_delay(failures, asked, chance).total_seconds()


@pytest.mark.parametrize(("failures", "step"), [(1, 5), (2, 30), (3, 120), (9, 120)])
def test_l8_the_steps_are_5_seconds_30_seconds_and_2_minutes(failures: int, step: int) -> None:
    waits = [seconds(failures, chance=random.Random(seed)) for seed in range(300)]
    assert 0.8 * step <= min(waits) < 0.83 * step
    assert 1.17 * step < max(waits) <= 1.2 * step


@given(st.integers(1, 5), st.floats(0, 7200), st.integers(0))
def test_l8_jitter_never_undercuts_a_retry_after(failures: int, asked: float, seed: int) -> None:
    wait = retry_delay(failures, timedelta(seconds=asked), random.Random(seed))
    assert wait >= timedelta(seconds=asked)
    assert wait.total_seconds() <= max(1.2 * asked, 144) + 1e-3


def test_l8_q23_thirty_with_one_retry_after_are_never_early_and_never_in_lockstep() -> None:
    """Q23. The bounds hold for each, and they spread over most of what the jitter allows."""
    waits = sorted(seconds(1, 60.0, random.Random(seed)) for seed in range(30))
    assert waits[0] >= 60
    assert waits[-1] <= 72
    assert len(set(waits)) == 30
    assert waits[-1] - waits[0] > 6


def test_l8_a_short_retry_after_does_not_shorten_the_step() -> None:
    assert min(seconds(2, 1.0, random.Random(seed)) for seed in range(50)) >= 24


def test_failures_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        retry_delay(0)


@given(st.integers(0, 1000), st.integers(0))
def test_a_worker_without_its_database_tries_about_once_a_second(failures: int, seed: int) -> None:
    wait = reconnect_delay(failures, random.Random(seed))
    assert 0.08 <= wait <= 1.0
    if failures >= 4:
        assert wait >= 0.8
