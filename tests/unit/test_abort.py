"""The one abort signal, rule L6: the first reason, a lost lease above all, and its own clock."""

from __future__ import annotations

import threading

import pytest

from leasequeue import (
    AbortSignal,
    Cancelled,
    LeaseLost,
    LeaseQueueError,
    ShuttingDown,
    TimedOut,
)


class Clock:
    """A monotonic clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_l6_a_signal_is_quiet_until_it_is_set() -> None:
    abort = AbortSignal()
    abort.check()
    assert (abort.is_set(), abort.reason, abort.lease_is_over()) == (False, None, False)
    assert abort.wait(0.0) is False


@pytest.mark.parametrize(
    "reason", [Cancelled("c"), ShuttingDown("s"), TimedOut("t"), LeaseLost("l")], ids=type
)
def test_l6_every_reason_is_raised_where_the_work_looks(reason: LeaseQueueError) -> None:
    abort = AbortSignal()
    abort.set(reason)
    assert abort.wait(60.0) is True
    with pytest.raises(type(reason)) as raised:
        abort.check()
    assert raised.value is reason


def test_l6_the_first_reason_stays_but_for_a_lost_lease() -> None:
    abort = AbortSignal()
    first, lost = Cancelled("c"), LeaseLost("l")
    abort.set(first)
    abort.set(ShuttingDown("s"))
    assert abort.reason is first
    abort.set(lost)
    assert abort.reason is lost
    abort.set(Cancelled("again"))
    assert abort.reason is lost


def test_l4_a_lease_that_is_not_renewed_is_over_by_this_clock(clock: Clock) -> None:
    abort = AbortSignal(lease_seconds=120, clock=clock)
    clock.now += 119.9
    assert abort.reason is None
    clock.now += 0.1
    assert abort.lease_is_over()
    assert isinstance(abort.reason, LeaseLost)


def test_l4_a_renewal_counts_from_when_it_was_sent(clock: Clock) -> None:
    abort = AbortSignal(lease_seconds=120, clock=clock)
    sent_at = clock.now + 40
    clock.now += 60  # The answer took twenty seconds.
    abort.renewed(sent_at, 120)
    clock.now = sent_at + 119.9
    assert abort.reason is None
    clock.now = sent_at + 120
    assert isinstance(abort.reason, LeaseLost)


def test_l4_a_late_answer_takes_back_no_later_renewal(clock: Clock) -> None:
    abort = AbortSignal(lease_seconds=120, clock=clock)
    abort.renewed(clock.now + 80, 120)
    abort.renewed(clock.now + 40, 120)
    clock.now += 199
    assert abort.reason is None


def test_l4_a_renewal_that_arrives_after_the_end_brings_nothing_back(clock: Clock) -> None:
    abort = AbortSignal(lease_seconds=120, clock=clock)
    clock.now += 121
    assert abort.is_set()
    abort.renewed(clock.now, 120)
    assert isinstance(abort.reason, LeaseLost)


def test_l6_a_timeout_is_its_own_reason(clock: Clock) -> None:
    abort = AbortSignal(lease_seconds=120, timeout_seconds=30, clock=clock)
    clock.now += 30
    assert isinstance(abort.reason, TimedOut)
    assert not abort.lease_is_over()
    clock.now += 90
    assert abort.lease_is_over()


def test_l6_a_timeout_does_not_hide_an_earlier_cancel(clock: Clock) -> None:
    abort = AbortSignal(timeout_seconds=30, clock=clock)
    abort.set(Cancelled("c"))
    clock.now += 31
    assert isinstance(abort.reason, Cancelled)


def test_l6_a_waiting_job_is_woken_by_another_thread() -> None:
    abort = AbortSignal()
    waiting = threading.Event()
    woken: list[bool] = []

    def wait() -> None:
        waiting.set()
        woken.append(abort.wait(600))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(20)
    abort.set(ShuttingDown("s"))
    thread.join(20)
    assert woken == [True]


def test_l4_a_waiting_job_is_woken_by_the_end_of_its_own_lease() -> None:
    assert AbortSignal(lease_seconds=0.02).wait(600) is True
    assert AbortSignal(timeout_seconds=0.02).wait(600) is True
