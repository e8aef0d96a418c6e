"""The lease itself, rules L1 to L9 and L16: every transition, and what each leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

import leasequeue
from leasequeue import Ended, Lease, LeaseLost, LeaseTable, runs
from support.engine import (
    LEASE_SECONDS,
    NOON,
    World,
    after,
    await_blocked,
    begun,
    in_background,
    scalar,
    snapshot,
)

Connection = psycopg.Connection[Any]


@pytest.fixture
def world(connection: Connection) -> World:
    return World.new(connection)


# L1: claim


def test_l1_a_claim_takes_the_oldest_due_row_and_opens_its_attempt(world: World) -> None:
    younger = world.run("b", "b", now=after(2))
    older = world.run("a", "a", now=after(1))
    world.run("c", "c", now=after(60))
    first = world.held("alice", now=after(3))
    second = world.held("bob", now=after(3))
    assert (first.id, second.id) == (older, younger)
    assert world.claim("carol", now=after(3)) is None
    row = world.row(older)
    assert (row["status"], row["attempts"], row["lease_owner"]) == ("running", 1, "alice")
    assert row["lease_expires_at"] == after(3 + LEASE_SECONDS)
    [attempt] = row["lease_history"]
    assert (attempt["worker"], attempt["lease_token"]) == ("alice", first.token)
    assert (attempt["started_at"], attempt["ended_at"]) == (after(3), None)


def test_l1_an_expired_lease_is_claimable_and_a_live_one_is_not(world: World) -> None:
    run = world.run("a")
    dead = world.held("alice")
    assert world.claim("bob", now=after(LEASE_SECONDS)) is None
    taken = world.held("bob", now=after(LEASE_SECONDS + 1))
    assert (taken.id, taken.attempt) == (run, 2)
    assert taken.token != dead.token
    assert world.outcomes(run) == ["expired", None]
    assert world.row(run)["crashes"] == 1


def test_l1_a_row_that_another_session_is_claiming_is_passed_over(
    world: World, database_url: str
) -> None:
    first, second = world.run("a", "a"), world.run("b", "b", now=after(1))
    with begun(database_url) as rival:
        claimed = leasequeue.claim(rival, leasequeue.RUNS, "rival", 120, now=after(2))
        assert isinstance(claimed, Lease)
        other = leasequeue.claim(world.conn, leasequeue.RUNS, "alice", 120, now=after(2))
        assert isinstance(other, Lease)
        assert (claimed.id, other.id) == (first, second)


def test_l1_a_row_that_an_insert_merely_references_is_still_claimed(
    world: World, database_url: str
) -> None:
    run = world.run("a")
    with psycopg.connect(database_url) as rival:
        rival.execute("insert into run_results (run_id, table_name) values (%s, 't')", [run])
        assert world.held().id == run


def test_q12_of_500_expired_leases_the_one_that_meets_a_unique_index_holds_up_no_other(
    world: World,
) -> None:
    """Q12. The database refuses the claim of one row; the 499 others recover."""
    connection = world.connection("many")
    world.conn.execute("drop index connection_runs_one_active")
    world.conn.execute(
        """
        insert into connection_runs (workspace_id, connection_id, provider, kind, payload,
               status, attempts, queued_at, started_at, lease_owner, lease_token, lease_expires_at)
        select %s, %s, 'folder', 'sync', jsonb_build_object('n', n), 'running', 1,
               %s, %s, 'dead', nextval('lease_tokens'), %s
          from generate_series(1, 500) as n
        """,
        [world.workspace, connection, NOON, NOON, after(120)],
    )
    # An index of the user's own that the seventh row's next attempt runs into.
    world.conn.execute(
        "insert into connection_runs (workspace_id, connection_id, provider, kind,"
        " payload, attempts, queued_at) values (%s, %s, 'folder', 'sync', '{\"n\": 7}', 2, %s)",
        [world.workspace, connection, after(10_000)],
    )
    world.conn.execute("create unique index own on connection_runs ((payload ->> 'n'), attempts)")
    recovered: set[int] = set()
    while True:
        claimed = leasequeue.claim(world.conn, leasequeue.RUNS, "alice", 120, now=after(200))
        if claimed is None:
            break
        assert isinstance(claimed, Lease)
        recovered.add(claimed.row["payload"]["n"])
    assert recovered == set(range(1, 501)) - {7}


def test_a_refusal_that_is_no_matter_of_one_row_is_raised(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasequeue.lease.REFUSED_MAX", 3)
    for name in "abcde":
        world.run(name, name)
    world.conn.execute("alter table run_attempts add constraint broken check (attempt > 9)")
    with pytest.raises(psycopg.errors.CheckViolation):
        leasequeue.claim(world.conn, leasequeue.RUNS, "alice", 120, now=NOON)


def test_l1_any_table_with_the_lease_columns_can_be_leased(world: World) -> None:
    world.conn.execute("""
        create table letters (like connection_runs including defaults including identity
            including constraints including indexes);
        alter table letters alter connection_id drop not null, alter provider drop not null;
        create table letter_attempts (like run_attempts including all);
        alter table letter_attempts rename run_id to letter_id;
        insert into letters (workspace_id, kind) values (1, 'letter');
    """)
    letters = LeaseTable(table="letters", attempts="letter_attempts", key="letter_id")
    held = leasequeue.claim(world.conn, letters, "alice", 120)
    assert isinstance(held, Lease)
    assert leasequeue.renew(world.conn, held) is False
    assert leasequeue.checkpoint(world.conn, held, {"payload": Jsonb({"page": 3})}) is False
    assert leasequeue.release(world.conn, held) == "queued"
    again = leasequeue.claim(world.conn, letters, "bob", 120)
    assert isinstance(again, Lease)
    assert again.row["payload"] == {"page": 3}
    assert leasequeue.seal(world.conn, again, "succeeded") == "succeeded"
    assert scalar(
        world.conn, "select array_agg(outcome order by attempt) from letter_attempts"
    ) == [
        "released",
        "succeeded",
    ]


# L2: the fence

_WRITES: dict[str, Callable[[Connection, Lease], object]] = {
    "renew": lambda conn, held: leasequeue.renew(conn, held, now=after(400)),
    "check_control": lambda conn, held: leasequeue.check_control(conn, held, now=after(400)),
    "checkpoint": lambda conn, held: leasequeue.checkpoint(
        conn, held, {"payload": Jsonb({"stale": True})}, now=after(400)
    ),
    "seal": lambda conn, held: leasequeue.seal(conn, held, "succeeded", now=after(400)),
    "requeue": lambda conn, held: leasequeue.requeue(
        conn, held, timedelta(0), error_code="x", error="x", now=after(400)
    ),
    "release": lambda conn, held: leasequeue.release(conn, held, now=after(400)),
    "record_result": lambda conn, held: leasequeue.record_result(
        conn, held, "t", upserted=1, now=after(400)
    ),
}


@pytest.mark.parametrize("write", _WRITES)
def test_l2_q1_a_stale_attempt_of_the_same_worker_matches_no_row(world: World, write: str) -> None:
    """Q1. The owner's name is the same; only the token tells the two attempts apart."""
    world.run("a")
    stale = world.held("alice")
    world.held("alice", now=after(LEASE_SECONDS + 1))
    before = snapshot(world.conn, "connection_runs"), snapshot(world.conn, "run_attempts")
    with pytest.raises(LeaseLost):
        _WRITES[write](world.conn, stale)
    assert before == (snapshot(world.conn, "connection_runs"), snapshot(world.conn, "run_attempts"))
    assert snapshot(world.conn, "run_results") == []


@pytest.mark.parametrize("write", _WRITES)
def test_l2_q2_a_token_of_a_lease_given_back_is_refused_for_ever(world: World, write: str) -> None:
    """Q2. Released and taken again: the old token writes nothing, and no token comes back."""
    run = world.run("a")
    tokens: list[int] = []
    for turn in range(3):
        held = world.held("alice", now=after(turn))
        leasequeue.release(world.conn, held, now=after(turn))
        tokens.append(held.token)
        with pytest.raises(LeaseLost):
            _WRITES[write](world.conn, held)
    current = world.held("alice", now=after(9))
    assert len({*tokens, current.token}) == 4
    assert sorted(tokens) == tokens
    with pytest.raises(LeaseLost):
        _WRITES[write](world.conn, replace(current, token=tokens[0]))
    assert world.status(run) == "running"


@pytest.mark.parametrize("write", _WRITES)
def test_l2_q3_after_a_requeue_the_same_worker_seals_nothing(world: World, write: str) -> None:
    """Q3. A retryable failure put the row back; whatever its last holder writes has no effect."""
    run = world.run("a")
    held = world.held("alice")
    leasequeue.requeue(
        world.conn, held, timedelta(seconds=5), error_code="busy", error="busy", now=NOON
    )
    with pytest.raises(LeaseLost):
        _WRITES[write](world.conn, held)
    row = world.row(run)
    assert (row["status"], row["queued_at"]) == ("queued", after(5))
    assert world.outcomes(run) == ["retried"]


def test_l2_a_fence_and_the_rows_it_protects_roll_back_together(world: World) -> None:
    world.run("a")
    stale = world.held("alice")
    world.conn.execute("create table written (n integer)")
    world.held("bob", now=after(LEASE_SECONDS + 1))

    def write() -> None:
        with world.conn.transaction():
            world.conn.execute("insert into written values (1)")
            leasequeue.checkpoint(world.conn, stale, {}, now=after(200))

    with pytest.raises(LeaseLost):
        write()
    assert snapshot(world.conn, "written") == []


def test_l2_a_fence_held_in_a_transaction_keeps_rivals_off_after_the_lease_has_run_out(
    world: World, database_url: str
) -> None:
    run = world.run("a")
    held = world.held("alice")
    with psycopg.connect(database_url) as holder, holder.transaction():
        leasequeue.renew(holder, held, now=after(119))
        assert world.claim("bob", now=after(1000)) is None
    assert world.row(run)["lease_owner"] == "alice"


# L3: the database's clock


def test_l3_q19_a_worker_whose_clock_is_ahead_steals_no_live_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q19. Ten minutes ahead, an hour behind: only the database's clock counts."""
    run = world.run("a", now=NOON)
    held = leasequeue.claim(world.conn, leasequeue.RUNS, "alice", 120)
    assert isinstance(held, Lease)
    real, monotonic = time.time, time.monotonic
    for seconds in (600.0, -3600.0):
        with monkeypatch.context() as wrong:
            wrong.setattr(time, "time", lambda by=seconds: real() + by)
            wrong.setattr(time, "monotonic", lambda by=seconds: monotonic() + by)
            assert runs.claim(world.conn, "bob", 120, ["sync"]) is None
            leasequeue.renew(world.conn, held)
    left = scalar(
        world.conn,
        "select extract(epoch from lease_expires_at - now()) from connection_runs where id = %s",
        run,
    )
    assert 100 < left <= 120


# L4: renew


def test_l4_a_renewal_extends_the_lease_from_now(world: World) -> None:
    run = world.run("a")
    held = world.held()
    assert leasequeue.renew(world.conn, held, now=after(40)) is False
    assert world.row(run)["lease_expires_at"] == after(40 + LEASE_SECONDS)


def test_l4_a_transaction_that_was_open_for_long_takes_back_no_later_renewal(
    world: World,
) -> None:
    """Its now() is when it began, and the keeper has renewed since."""
    run = world.run("a")
    held = world.held()
    leasequeue.renew(world.conn, held, now=after(100))
    leasequeue.checkpoint(world.conn, held, {}, now=after(30))
    leasequeue.renew(world.conn, held, now=after(20))
    assert world.row(run)["lease_expires_at"] == after(100 + LEASE_SECONDS)


def test_l4_a_lease_counts_from_before_its_claim_was_sent(world: World) -> None:
    world.run("a")
    before = time.monotonic()
    held = world.held()
    assert before <= held.claimed_at <= time.monotonic()


def test_l4_renewals_and_checkpoints_touch_no_index(world: World) -> None:
    """A renewal is a heap-only update: no index grows however long a job takes."""
    world.run("a")
    held = world.held()
    for second in range(40):
        leasequeue.renew(world.conn, held, now=after(second))
        leasequeue.checkpoint(world.conn, held, {}, now=after(second))
        leasequeue.check_control(world.conn, held, now=after(second))
    world.conn.execute("select pg_stat_force_next_flush()")
    for table in ("connection_runs", "run_attempts"):
        updated, hot = world.conn.execute(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = %s", [table]
        ).fetchone() or (0, 0)
        # The claim itself moves the row within the partial indexes, once.
        assert updated >= 40
        assert updated - hot <= 2, table


# L5 and L7: control and cancel


def test_l5_one_query_tells_held_from_cancelled_from_lost(world: World) -> None:
    run = world.run("a")
    held = world.held()
    assert leasequeue.check_control(world.conn, held, now=after(2)) is False
    assert world.row(run)["lease_history"][0]["seen_at"] == after(2)
    world.cancel(run)
    assert leasequeue.check_control(world.conn, held, now=after(4)) is True
    assert leasequeue.renew(world.conn, held, now=after(4)) is True
    assert leasequeue.checkpoint(world.conn, held, {}, now=after(4)) is True
    leasequeue.seal(world.conn, held, "succeeded", now=after(5))
    with pytest.raises(LeaseLost):
        leasequeue.check_control(world.conn, held, now=after(6))


def test_l7_a_queued_run_is_cancelled_by_one_update(world: World) -> None:
    run = world.run("a")
    assert world.cancel(run, now=after(1)) == {run: "cancelled"}
    row = world.row(run)
    assert (row["status"], row["finished_at"], row["attempts"]) == ("cancelled", after(1), 0)
    assert world.claim(now=after(2)) is None
    assert world.cancel(run, now=after(3)) == {}


def test_l7_a_running_run_is_asked_and_ends_cancelled_with_what_it_gathered(world: World) -> None:
    run = world.run("a")
    held = world.held()
    leasequeue.record_result(world.conn, held, "files", upserted=3, now=NOON)
    assert world.cancel(run, now=after(1)) == {run: "running"}
    assert leasequeue.seal(world.conn, held, "cancelled", now=after(2)) == "cancelled"
    row = world.row(run)
    assert (row["status"], row["cancel_requested_at"]) == ("cancelled", after(1))
    assert row["results"][0]["upserted"] == 3


def test_l7_q13_a_cancel_that_lands_before_the_finish_wins(world: World) -> None:
    """Q13. The last control check said go on; then the cancel; then the finish."""
    run = world.run("a")
    held = world.held()
    assert leasequeue.check_control(world.conn, held, now=after(1)) is False
    world.cancel(run, now=after(2))
    assert leasequeue.seal(world.conn, held, "succeeded", now=after(3)) == "cancelled"
    assert (world.status(run), world.outcomes(run)) == ("cancelled", ["cancelled"])


def test_l7_q13_a_cancel_that_commits_while_the_finish_waits_for_its_row_wins(
    world: World, database_url: str
) -> None:
    """Q13, statement by statement: the finish began first and must look again."""
    run = world.run("a")
    held = world.held()
    with (
        begun(database_url) as user,
        psycopg.connect(database_url, autocommit=True) as worker,
    ):
        leasequeue.request_cancel(user, leasequeue.RUNS, world.workspace, [run], now=after(1))
        with in_background(lambda: leasequeue.seal(worker, held, "succeeded", now=after(2))):
            await_blocked(world.conn, worker.info.backend_pid)
            user.commit()
    assert world.status(run) == "cancelled"


def test_l7_a_cancel_that_waits_for_a_finish_changes_nothing(
    world: World, database_url: str
) -> None:
    run = world.run("a")
    held = world.held()
    with (
        begun(database_url) as worker,
        psycopg.connect(database_url, autocommit=True) as user,
    ):
        leasequeue.seal(worker, held, "succeeded", now=after(1))
        answers: list[dict[int, str]] = []
        with in_background(
            lambda: answers.append(
                leasequeue.request_cancel(user, leasequeue.RUNS, world.workspace, [run])
            )
        ):
            await_blocked(world.conn, user.info.backend_pid)
            worker.commit()
    assert answers == [{}]
    row = world.row(run)
    assert (row["status"], row["cancel_requested_at"]) == ("succeeded", None)


def test_l7_a_cancel_that_waits_for_a_claim_asks_the_running_job(
    world: World, database_url: str
) -> None:
    run = world.run("a")
    with (
        begun(database_url) as worker,
        psycopg.connect(database_url, autocommit=True) as user,
    ):
        held = leasequeue.claim(worker, leasequeue.RUNS, "alice", 120, now=NOON)
        assert isinstance(held, Lease)
        with in_background(
            lambda: leasequeue.request_cancel(user, leasequeue.RUNS, world.workspace, [run])
        ):
            await_blocked(world.conn, user.info.backend_pid)
            worker.commit()
    row = world.row(run)
    assert row["status"] == "running"
    assert row["cancel_requested_at"] is not None


@pytest.mark.parametrize("letting_go", ["requeue", "release", "failed"])
def test_l7_q14_a_late_failure_after_a_cancel_is_not_retried(world: World, letting_go: str) -> None:
    """Q14. However the holder lets go, the run ends `cancelled`, and keeps why."""
    run = world.run("a")
    held = world.held()
    leasequeue.request_cancel(
        world.conn, leasequeue.RUNS, world.workspace, [run], reason="removed", now=after(1)
    )
    match letting_go:
        case "requeue":
            status = leasequeue.requeue(
                world.conn, held, timedelta(5), error_code="late", error="late", now=after(2)
            )
        case "release":
            status = leasequeue.release(world.conn, held, now=after(2))
        case _:
            status = leasequeue.seal(
                world.conn, held, "failed", error_code="late", error="late", now=after(2)
            )
    assert status == "cancelled"
    row = world.row(run)
    assert (row["finished_at"], row["error_code"]) == (after(2), "removed")
    assert world.outcomes(run) == ["cancelled"]
    assert world.claim(now=after(99_999)) is None


def test_l7_a_cancelled_run_whose_worker_died_is_ended_by_the_next_claim(world: World) -> None:
    run = world.run("a")
    world.held()
    world.cancel(run, now=after(1))
    claimed = world.claim("bob", now=after(LEASE_SECONDS + 1))
    assert isinstance(claimed, Ended)
    assert (claimed.id, claimed.status) == (run, "cancelled")
    assert (world.status(run), world.outcomes(run)) == ("cancelled", ["expired"])
    assert world.claim("bob", now=after(LEASE_SECONDS + 1)) is None


def test_l7_two_who_cancel_the_same_runs_lock_them_in_one_order(
    world: World, database_url: str
) -> None:
    first, second = world.run("a", "a"), world.run("b", "b")
    with (
        begun(database_url) as one,
        psycopg.connect(database_url, autocommit=True) as other,
    ):
        one.execute("select 1 from connection_runs where id = %s for update", [first])
        with in_background(
            lambda: leasequeue.request_cancel(
                other, leasequeue.RUNS, world.workspace, [second, first]
            )
        ):
            await_blocked(world.conn, other.info.backend_pid)
            # Were the second locked already, this would be a deadlock.
            one.execute("select 1 from connection_runs where id = %s for update nowait", [second])
            one.commit()


def test_l7_another_workspace_cancels_nothing(world: World) -> None:
    run = world.run("a")
    other = World.new(world.conn, "Other")
    assert other.cancel(run) == {}
    assert world.status(run) == "queued"


# L8: retry in place


def test_l8_a_retryable_failure_requeues_the_same_row_until_the_third(world: World) -> None:
    run = world.run("a")
    at = 0.0
    for failure, status in ((1, "queued"), (2, "queued"), (3, "failed")):
        held = world.held(now=after(at))
        assert held.id == run
        got = leasequeue.requeue(
            world.conn,
            held,
            timedelta(seconds=5),
            error_code="busy",
            error=f"busy {failure}",
            now=after(at),
        )
        assert got == status
        assert world.claim(now=after(at + 4.9)) is None
        at += 5
    row = world.row(run)
    assert (row["status"], row["error_code"], row["error"]) == ("failed", "busy", "busy 3")
    assert world.outcomes(run) == ["retried", "retried", "failed"]
    assert [a["retry_at"] for a in row["lease_history"]] == [after(5), after(10), None]


def test_l8_a_partial_result_ends_partial_after_the_last_attempt(world: World) -> None:
    run = world.run("a")
    statuses = [
        leasequeue.requeue(
            world.conn,
            world.held(),
            timedelta(0),
            error_code="partial",
            error="2 of 9 files",
            exhausted="partial",
            now=NOON,
        )
        for _ in range(3)
    ]
    assert statuses == ["queued", "queued", "partial"]
    assert world.status(run) == "partial"


def test_l8_a_checkpoint_forgives_earlier_failures(world: World) -> None:
    run = world.run("a")
    for _ in range(5):
        held = world.held()
        leasequeue.checkpoint(world.conn, held, {}, now=NOON)
        leasequeue.requeue(
            world.conn, held, timedelta(0), error_code="busy", error="busy", now=NOON
        )
    assert (world.status(run), world.row(run)["failures"]) == ("queued", 1)


# L9: the crash budget


def test_l9_q10_three_deaths_without_progress_end_the_run_visibly(world: World) -> None:
    """Q10. After the third claim has died too, the run ends, and says why."""
    run = world.run("a")
    at = 0.0
    for worker in ("alice", "bob", "carol"):
        world.held(worker, now=after(at))
        at += LEASE_SECONDS + 1
    ended = world.claim("dave", now=after(at))
    assert isinstance(ended, Ended)
    row = world.row(run)
    assert (row["status"], row["error_code"], row["attempts"]) == ("failed", "crash_budget", 3)
    assert row["error"] == "its last 3 workers died without any progress"
    assert world.outcomes(run) == ["expired"] * 3
    assert row["finished_at"] == after(at)


def test_l9_progress_resets_the_count(world: World) -> None:
    run = world.run("a")
    at = 0.0
    for _ in range(6):
        held = world.held(now=after(at))
        leasequeue.checkpoint(world.conn, held, {}, now=after(at))
        at += LEASE_SECONDS + 1
    assert (world.status(run), world.row(run)["attempts"]) == ("running", 6)


def test_l9_q11_hand_overs_spend_no_budget(world: World) -> None:
    """Q11. Three rolling deploys within one long run, and then three more."""
    run = world.run("a")
    for _ in range(6):
        assert leasequeue.release(world.conn, world.held(), now=NOON) == "queued"
    row = world.row(run)
    assert (row["failures"], row["crashes"], row["queued_at"]) == (0, 0, NOON)
    assert world.outcomes(run) == ["released"] * 6


def test_l10_a_lease_given_back_is_claimable_at_once_in_its_old_place(world: World) -> None:
    old = world.run("a", "a", now=NOON)
    held = world.held()
    world.run("b", "b", now=after(5))
    attempts = world.row(old)["attempts"]
    leasequeue.release(world.conn, held, now=after(10))
    assert world.row(old)["attempts"] == attempts
    assert world.held("bob", now=after(10)).id == old


# L16: terminal is final


@pytest.mark.parametrize("status", ["succeeded", "partial", "failed", "cancelled"])
def test_l16_nothing_leaves_a_terminal_status(world: World, status: str) -> None:
    run = world.run("a")
    held = world.held()
    match status:
        case "cancelled":
            world.cancel(run)
            leasequeue.seal(world.conn, held, "succeeded", now=NOON)
        case "failed":
            leasequeue.seal(world.conn, held, "failed", error_code="x", error="x", now=NOON)
        case "partial":
            leasequeue.seal(world.conn, held, "partial", now=NOON)
        case _:
            leasequeue.seal(world.conn, held, "succeeded", now=NOON)
    before = snapshot(world.conn, "connection_runs")
    for write in _WRITES.values():
        with pytest.raises(LeaseLost):
            write(world.conn, held)
    assert world.cancel(run) == {}
    assert world.claim(now=after(9_999)) is None
    assert leasequeue.promote(world.conn, now=after(9_999)) == 0
    assert snapshot(world.conn, "connection_runs") == before


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("status = 'succeeded'", "finished_means_terminal"),
        ("finished_at = now()", "finished_means_terminal"),
        ("status = 'running', started_at = now()", "running_means_leased"),
        ("lease_owner = 'alice'", "running_means_leased"),
        ("lease_token = 7", "running_means_leased"),
        ("lease_expires_at = now()", "running_means_leased"),
        ("status = 'failed', finished_at = now()", "failed_says_why"),
        ("status = 'waiting'", "only_a_purge_waits"),
        ("status = 'lost'", "connection_runs_status_check"),
    ],
)
def test_l16_the_database_refuses_a_status_without_what_it_implies(
    world: World, change: LiteralString, constraint: str
) -> None:
    world.run("a")
    statement = sql.SQL("update connection_runs set ") + sql.SQL(change)
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        world.conn.execute(statement)
    assert refused.value.diag.constraint_name == constraint
