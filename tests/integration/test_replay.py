"""The retry run: what is due is replayed once, by one worker, as at the first try."""

import itertools
import threading
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from shared.leases import Leases
from shared.model import Encoding
from shared.replay import Replayer, Request
from tests.world import NOW, World, envelope


def replayer(world: World, *, leases: Leases | None = None, batch_limit=50, **options) -> Replayer:
    core = world.core
    return Replayer(
        core.application,
        leases or core.leases,
        core.incidents,
        core.pipeline,
        **{"batch_limit": batch_limit, "parallelism": 4} | options,
    )


def counts(report):
    return report.retried, report.resolved, report.failed, report.deferred, report.lost


def test_what_failed_is_stored_and_resolved_once_its_cause_is_gone(world):
    world.tenant("alter table shopify_orders drop column parsed_payload")
    for n in range(3):
        world.fail(envelope({"id": n}))
    assert counts(world.retry()) == (3, 0, 3, 0, 0)
    assert {(row["retry_count"], row["error_code"]) for row in world.failed_events()} == {
        (1, "42703")
    }
    assert world.tenant("select 1 from shopify_events") == []
    world.tenant("alter table shopify_orders add column parsed_payload jsonb")
    assert counts(world.retry()) == (0, 0, 0, 0, 0), "nothing is due for two minutes"
    for row in world.failed_events():
        world.make_due(row["id"])
    assert counts(world.retry()) == (3, 3, 0, 0, 0)
    assert {row["status"] for row in world.failed_events()} == {"resolved"}
    assert len(world.tenant("select 1 from shopify_events")) == 3


def test_every_verdict_carries_the_start_of_the_run(world):
    world.fail()
    world.fail(envelope(shop_domain="nobody.myshopify.com"))
    (before,) = world.app("select now()")[0].values()
    world.retry()
    started = {row["last_attempted_at"] for row in world.failed_events()}
    assert len(started) == 1
    assert before <= started.pop() <= min(row["updated_at"] for row in world.failed_events())


def test_the_error_of_the_newest_replay_is_the_one_shown(world):
    world.fail(envelope(shop_domain="nobody.myshopify.com"))
    world.retry()
    kept = world.failed_event()
    assert (kept["error_type"], kept["error_class"]) == ("UnknownShopError", "permanent")
    assert "connect_shop" in kept["error_message"]


def test_a_replay_sees_the_clocks_of_the_first_try(world):
    sent = replace(envelope(), triggered_at=None, published_at=NOW - timedelta(hours=3))
    world.fail(sent)
    world.retry()
    (row,) = world.tenant("select received_at, source_updated_at from shopify_events")
    assert row == {"received_at": NOW, "source_updated_at": NOW - timedelta(hours=3)}


def test_a_collision_is_replayed_under_an_id_of_its_own(world):
    first, second = envelope({"id": 1}), envelope({"id": 2})
    world.core.pipeline.apply(first)
    world.fail(replace(second, event_id=first.event_id))
    assert counts(world.retry()) == (1, 1, 0, 0, 0)
    ids = [
        row["event_id"] for row in world.tenant("select event_id from shopify_events order by id")
    ]
    assert ids == [first.event_id, f"{first.event_id}#{second.payload_sha256.hex()[:16]}"]


def test_what_cannot_be_decoded_runs_out_of_retries_with_its_bytes_kept(world):
    row = world.fail(envelope(b"???", encoding=Encoding.BASE64))
    for _ in range(5):
        world.make_due(row)
        world.retry()
    kept = world.failed_event()
    assert (kept["status"], kept["error_type"]) == ("failed", "UndecodableMessageError")
    assert kept["payload"] == b"???"


def test_limit_caps_the_rows_of_one_run_over_batches(world):
    for _ in range(7):
        world.fail()
    retrier = replayer(world, batch_limit=2)
    assert counts(retrier.run(Request(limit=5), budget_seconds=60)) == (5, 5, 0, 0, 0)
    assert counts(retrier.run(Request(), budget_seconds=60)) == (2, 2, 0, 0, 0)


def test_a_named_row_is_replayed_alone(world):
    rows = [world.fail() for _ in range(3)]
    assert counts(world.retry(event_id=rows[1])) == (1, 1, 0, 0, 0)
    assert [row["status"] for row in world.failed_events()] == ["pending", "resolved", "pending"]


@pytest.mark.parametrize("state", ["not due", "leased", "resolved", "failed", "unknown"])
def test_naming_a_row_that_is_not_there_to_be_replayed_does_nothing(world, state):
    row = world.fail()
    change = {
        "not due": "next_retry_at = now() + interval '1 minute'",
        "leased": "lease_token = gen_random_uuid(), leased_until = now() + interval '1 minute'",
        "resolved": "status = 'resolved', resolution = 'operator', resolved_at = now()",
        "failed": "status = 'failed'",
        "unknown": "id = default",
    }[state]
    world.app("update subscriber_subscriberfailedevent set " + change)
    before = world.failed_event()
    assert counts(world.retry(event_id=row)) == (0, 0, 0, 0, 0)
    assert world.failed_event() == before


def test_after_the_budget_nothing_starts_and_the_rest_is_given_back(world):
    rows = [world.fail() for _ in range(4)]
    seconds = itertools.chain([0, 0, 1, 2], itertools.repeat(99))
    retrier = replayer(world, batch_limit=4, clock=lambda: next(seconds))
    report = retrier.run(Request(), budget_seconds=10)
    assert counts(report) == (2, 2, 0, 2, 0)
    left = [row for row in world.failed_events() if row["status"] == "pending"]
    assert [row["id"] for row in left] == rows[2:]
    assert {(row["lease_token"], row["retry_count"]) for row in left} == {(None, 0)}


def test_two_runs_at_once_replay_each_row_once(world):
    rows = [world.fail() for _ in range(40)]
    reports = []

    def run():
        retrier = replayer(world, batch_limit=3)
        reports.append(retrier.run(Request(), budget_seconds=60))

    workers = [threading.Thread(target=run) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sum(report.resolved for report in reports) == len(rows)
    assert len(world.attempts()) == len(rows)
    assert {row["status"] for row in world.failed_events()} == {"resolved"}


class Interrupted(Leases):
    """A ledger whose worker loses its lease at the given step, as after a long pause."""

    def __init__(self, world: World, step: str) -> None:
        super().__init__(world.core.application, lease_seconds=120)
        self._world, self._step = world, step

    def start(self, token, row):
        if self._step == "start":
            self._lose(row)
        return super().start(token, row)

    def resolve(self, token, row, run_started_at):
        if self._step == "verdict":
            self._lose(row)
        return super().resolve(token, row, run_started_at)

    def _lose(self, row):
        self._world.expire_lease(row)
        self._world.core.leases.reap()


@pytest.mark.parametrize(("step", "charged"), [("start", 0), ("verdict", 1)])
def test_a_worker_that_lost_its_lease_gives_no_verdict(world, step, charged):
    world.fail()
    retrier = replayer(world, leases=Interrupted(world, step))
    assert counts(retrier.run(Request(limit=1), budget_seconds=60)) == (0, 0, 0, 0, 1)
    kept = world.failed_event()
    assert (kept["status"], kept["retry_count"]) == ("pending", charged)


def test_the_next_run_takes_over_what_a_dead_worker_left(world):
    started, untouched = world.fail(), world.fail()
    token = uuid4()
    world.core.leases.claim(token, 2)
    world.core.leases.start(token, started)
    for row in (started, untouched):
        world.expire_lease(row)
    assert counts(world.retry()) == (1, 1, 0, 0, 0)
    first, second = world.failed_events()
    assert (first["status"], first["error_type"], first["retry_count"]) == (
        "pending",
        "WorkerLost",
        1,
    )
    assert (second["status"], second["retry_count"]) == ("resolved", 0)


def test_a_dry_run_tells_what_would_happen_and_changes_nothing(world):
    stored = envelope({"id": 1, "updated_at": NOW.isoformat()})
    world.core.pipeline.apply(stored)
    rows = [
        world.fail(stored),
        world.fail(envelope({"id": 2})),
        world.fail(envelope({"id": 1, "updated_at": (NOW + timedelta(1)).isoformat()})),
        world.fail(envelope({"id": 1, "updated_at": (NOW - timedelta(1)).isoformat()})),
        world.fail(envelope(b"[]")),
    ]
    before = world.failed_events()
    report = world.retry(dry_run=True)
    assert counts(report) == (5, 4, 1, 0, 0)
    assert report.rows == [
        {"id": rows[0], "ledger": "duplicate", "snapshot": "stale"},
        {"id": rows[1], "ledger": "inserted", "snapshot": "inserted"},
        {"id": rows[2], "ledger": "inserted", "snapshot": "updated"},
        {"id": rows[3], "ledger": "inserted", "snapshot": "stale"},
        {
            "id": rows[4],
            "error_type": "ValueError",
            "error_message": "The body is JSON, but not an object.",
        },
    ]
    assert world.failed_events() == before
    assert len(world.tenant("select 1 from shopify_events")) == 1
    assert len(world.retry(dry_run=True, limit=2).rows) == 2
