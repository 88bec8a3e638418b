"""Leases: one worker a row, one verdict a replay, and nothing from whoever comes too late."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from shared.leases import Verdict
from tests.world import NOW, World


@pytest.fixture
def leases(world: World):
    return world.core.leases


def claimed(leases, limit, only_id=None) -> list[int]:
    """The rows that a claim of a new worker gets."""
    return [claim.id for claim in leases.claim(uuid4(), limit, only_id)]


# Claiming


def test_what_is_due_longest_comes_first(world, leases):
    rows = [world.fail() for _ in range(4)]
    for place, row in enumerate((rows[2], rows[0], rows[3], rows[1])):
        world.app(
            "update subscriber_subscriberfailedevent"
            " set next_retry_at = now() - make_interval(mins => %(age)s) where id = %(row)s",
            age=10 - place,
            row=row,
        )
    assert claimed(leases, 3) == [rows[2], rows[0], rows[3]]


@pytest.mark.parametrize(
    "state",
    [
        "next_retry_at = now() + interval '1 minute'",
        "status = 'failed'",
        "status = 'resolved', resolution = 'operator', resolved_at = now()",
        "lease_token = gen_random_uuid(), leased_until = now() + interval '1 minute'",
        "lease_token = gen_random_uuid(), leased_until = now() - interval '1 minute'",
    ],
)
def test_only_due_pending_unleased_rows_are_claimed_and_naming_one_changes_nothing(
    world, leases, state
):
    row = world.fail()
    world.app("update subscriber_subscriberfailedevent set " + state)
    assert claimed(leases, 10) == []
    assert claimed(leases, 10, row) == []


def test_naming_a_row_claims_that_row_only(world, leases):
    rows = [world.fail() for _ in range(3)]
    assert claimed(leases, 10, rows[1]) == [rows[1]]


def test_two_claims_at_once_never_meet(world, leases):
    rows = {world.fail() for _ in range(6)}
    with psycopg.connect(world.app_url) as other, other.transaction():
        other.execute(
            "select 1 from subscriber_subscriberfailedevent order by id limit 2 for update"
        )
        assert len(claimed(leases, 10)) == 4, "locked rows are passed over"
    assert set(claimed(leases, 10)) < rows
    assert claimed(leases, 10) == []


# Leases and verdicts


def leased(world: World) -> tuple[Any, int]:
    token, row = uuid4(), world.fail()
    assert [claim.id for claim in world.core.leases.claim(token, 1)] == [row]
    return token, row


def test_starting_opens_an_attempt_and_renews_the_lease(world, leases):
    token, row = leased(world)
    world.expire_lease(row)
    assert leases.start(token, row).id == row
    (attempt,) = world.attempts()
    assert (attempt["failed_event_id"], attempt["attempt"]) == (row, 1)
    assert (attempt["lease_token"], attempt["finished_at"]) == (token, None)
    assert leases.reap() == [], "the lease is fresh again"


@pytest.mark.parametrize("verdict", ["start", "resolve", "reschedule", "release"])
def test_whoever_does_not_hold_the_lease_changes_nothing(world, leases, verdict):
    token, row = leased(world)
    leases.start(token, row)
    before = world.failed_event(), world.attempts()
    stranger = uuid4()
    answer = {
        "start": lambda: leases.start(stranger, row),
        "resolve": lambda: leases.resolve(stranger, row, NOW),
        "reschedule": lambda: leases.reschedule(stranger, row, NOW, RuntimeError("x"), "t"),
        "release": lambda: leases.release(stranger, [row]),
    }[verdict]()
    assert answer in (None, Verdict.LOST, 0)
    assert (world.failed_event(), world.attempts()) == before


@pytest.mark.parametrize("verdict", ["start", "resolve", "reschedule", "release"])
def test_no_verdict_moves_a_row_that_is_no_longer_pending(world, leases, verdict):
    token, row = leased(world)
    leases.start(token, row)
    leases.resolve(token, row, NOW)
    before = world.failed_event()
    answer = {
        "start": lambda: leases.start(token, row),
        "resolve": lambda: leases.resolve(token, row, NOW),
        "reschedule": lambda: leases.reschedule(token, row, NOW, RuntimeError("x"), "t"),
        "release": lambda: leases.release(token, [row]),
    }[verdict]()
    assert answer in (None, Verdict.LOST, 0)
    assert world.failed_event() == before


def test_a_released_row_is_due_again_uncharged(world, leases):
    token, row = leased(world)
    assert leases.release(token, [row]) == 1
    kept = world.failed_event()
    assert (kept["status"], kept["retry_count"], kept["lease_token"]) == ("pending", 0, None)
    assert claimed(leases, 1) == [row]


def test_an_expired_lease_on_a_row_that_nobody_started_costs_nothing(world, leases):
    _, row = leased(world)
    world.expire_lease(row)
    (reaped,) = leases.reap()
    assert (reaped.id, reaped.status, reaped.charged) == (row, "pending", False)
    kept = world.failed_event()
    assert (kept["retry_count"], kept["error_type"], kept["next_retry_at"]) == (
        0,
        "RuntimeError",
        None,
    )
    assert claimed(leases, 1) == [row]


def test_an_expired_lease_on_a_started_row_is_a_failed_replay(world, leases):
    token, row = leased(world)
    leases.start(token, row)
    world.expire_lease(row)
    (reaped,) = leases.reap()
    assert (reaped.id, reaped.status, reaped.charged) == (row, "pending", True)
    kept = world.failed_event()
    assert (kept["retry_count"], kept["error_type"], kept["error_code"]) == (
        1,
        "WorkerLost",
        "worker_lost",
    )
    assert kept["next_retry_at"] - kept["updated_at"] == timedelta(minutes=2)
    (attempt,) = world.attempts()
    assert (attempt["outcome"], attempt["error_type"]) == ("lost", "WorkerLost")
    assert kept["last_attempted_at"] == attempt["started_at"]
    assert leases.resolve(token, row, NOW) is Verdict.LOST, "a late verdict is refused"


def test_an_event_that_kills_its_worker_runs_out_of_retries(world, leases):
    row = world.fail()
    for _ in range(5):
        token = uuid4()
        world.make_due(row)
        leases.claim(token, 1)
        leases.start(token, row)
        world.expire_lease(row)
        (reaped,) = leases.reap()
    assert reaped.status == "failed"
    kept = world.failed_event()
    assert (kept["retry_count"], kept["next_retry_at"]) == (5, None)


def test_a_live_lease_is_left_alone(world, leases):
    token, row = leased(world)
    assert leases.reap() == []
    assert leases.start(token, row) is not None


# The schedule


@pytest.mark.parametrize(
    ("max_retries", "delays"),
    [
        (5, [2, 4, 8, 16, None]),
        (1, [None]),
        (8, [2, 4, 8, 16, 32, 60, 60, None]),
    ],
)
def test_each_failed_replay_takes_the_next_step_of_the_schedule(world, leases, max_retries, delays):
    row = world.fail()
    world.app("update subscriber_subscriberfailedevent set max_retries = %(n)s", n=max_retries)
    for count, minutes in enumerate(delays, 1):
        token = uuid4()
        world.make_due(row)
        assert [claim.id for claim in leases.claim(token, 1)] == [row]
        leases.start(token, row)
        run_started_at = leases.run_started() - timedelta(seconds=9)
        error = ValueError(f"attempt number {count}")
        verdict = leases.reschedule(token, row, run_started_at, error, "orders/create")
        kept = world.failed_event()
        assert kept["retry_count"] == count
        assert kept["last_attempted_at"] == run_started_at
        assert (kept["error_type"], kept["error_message"]) == ("ValueError", str(error))
        assert str(error) in kept["traceback"]
        if minutes is None:
            assert (verdict, kept["status"], kept["next_retry_at"]) == (
                Verdict.FAILED,
                "failed",
                None,
            )
        else:
            assert (verdict, kept["status"]) == (Verdict.RESCHEDULED, "pending")
            assert kept["next_retry_at"] - kept["updated_at"] == timedelta(minutes=minutes)
    outcomes = [attempt["outcome"] for attempt in world.attempts()]
    assert outcomes == ["rescheduled"] * (len(delays) - 1) + ["failed"]


def test_a_first_success_resolves_with_no_retry_counted(world, leases):
    token, row = leased(world)
    leases.start(token, row)
    run_started_at = leases.run_started()
    assert leases.resolve(token, row, run_started_at) is Verdict.RESOLVED
    kept = world.failed_event()
    assert (kept["status"], kept["resolution"], kept["retry_count"]) == ("resolved", "replayed", 0)
    assert kept["resolved_at"] >= kept["last_attempted_at"] == run_started_at
    assert [attempt["outcome"] for attempt in world.attempts()] == ["resolved"]
