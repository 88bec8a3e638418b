"""Triage: who may be moved by hand and who never, and that each move leaves its record."""

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from shared import audit, dossier, figures, migrate, outbox, triage
from shared.errors import StorageConfigurationError, UnknownShopError
from shared.triage import Operator, Scope, Status, Triage
from tests.world import ORGANIZATION, SHOP, World, envelope

JANE = Operator(actor="jane", reason="the column is back")
EVERYTHING = Scope()
STATES = {
    "pending": "next_retry_at = now() + interval '1 hour', retry_count = 2",
    "failed": "status = 'failed', next_retry_at = null, retry_count = 5, alerted_at = now()",
    "resolved": "status = 'resolved', resolution = 'replayed', resolved_at = now()",
    "leased": "lease_token = gen_random_uuid(), leased_until = now() + interval '1 minute'",
    "leased, over": "lease_token = gen_random_uuid(), leased_until = now() - interval '1 minute'",
}


@pytest.fixture
def by_hand(world: World) -> Triage:
    return Triage(world.core.application)


def put(world: World, state: str, **fields) -> int:
    """A failed event in that state."""
    row = world.fail(envelope(**fields))
    world.app(
        "update subscriber_subscriberfailedevent set " + STATES[state] + " where id = %(row)s",
        row=row,
    )
    return row


def kept(world: World, row: int) -> dict:
    return next(each for each in world.failed_events() if each["id"] == row)


def actions(world: World) -> list[dict]:
    return world.app("select * from subscriber_operatoraction order by id")


# Finding


@pytest.mark.parametrize(
    "scope",
    [
        Scope(organization="other"),
        Scope(shop="other.myshopify.com"),
        Scope(topic="orders/paid"),
        Scope(error_type="UnknownShopError"),
        Scope(code="shop_unknown"),
        Scope(since=datetime.now(UTC) - timedelta(minutes=1)),
        Scope(until=datetime.now(UTC) - timedelta(minutes=1)),
    ],
    ids=lambda scope: next(iter(scope.said())),
)
def test_each_filter_finds_what_it_says(world, by_hand, scope):
    old = world.fail()
    world.app("update subscriber_subscriberfailedevent set created_at = now() - interval '1 day'")
    other = world.core.failures.record(
        envelope(topic="orders/paid", shop_domain="other.myshopify.com"),
        UnknownShopError("x"),
        "other",
    )
    found = by_hand.find(scope, limit=9)
    assert [row.id for row in found] == [old if scope.until else other]
    assert [part.count for part in by_hand.tally(scope)] == [1]
    assert list(by_hand.movable(scope, triage.UNRESOLVED)) == [[found[0].id]]


def test_fingerprint_and_ids_are_filters_and_all_must_hold(world, by_hand):
    one, two = world.fail(), world.fail(envelope(topic="orders/paid"))
    kind = kept(world, two)["fingerprint"]
    assert [row.id for row in by_hand.find(Scope(fingerprint=kind), limit=9)] == [two]
    assert [row.id for row in by_hand.find(Scope(ids=(one, 99)), limit=9)] == [one]
    assert by_hand.find(Scope(ids=(one,), fingerprint=kind), limit=9) == []


def test_an_empty_text_is_a_filter_too(world, by_hand):
    world.fail()
    nameless = world.fail(envelope(shop_domain=""))
    assert [row.id for row in by_hand.find(Scope(shop=""), limit=9)] == [nameless]


def test_the_newest_come_first_or_those_due_longest(world, by_hand):
    rows = [world.fail() for _ in range(3)]
    world.make_due(rows[1])
    world.app(
        "update subscriber_subscriberfailedevent set next_retry_at = now() - interval '1 hour'"
        " where id = %(row)s",
        row=rows[1],
    )
    assert [row.id for row in by_hand.find(EVERYTHING, limit=2)] == [rows[2], rows[1]]
    longest = by_hand.find(EVERYTHING, limit=2, longest_due=True)
    assert [row.id for row in longest] == [rows[1], rows[0]]


def test_rows_are_handed_out_in_bounded_steps(world, by_hand, monkeypatch):
    monkeypatch.setattr(triage, "STEP_ROWS", 2)
    rows = [put(world, "failed") for _ in range(5)]
    assert list(by_hand.movable(EVERYTHING, (Status.FAILED,))) == [rows[:2], rows[2:4], rows[4:]]


def test_what_is_held_or_in_another_state_is_not_movable(world, by_hand):
    rows = {state: put(world, state) for state in STATES}
    assert list(by_hand.movable(EVERYTHING, (Status.FAILED,))) == [[rows["failed"]]]
    assert list(by_hand.movable(EVERYTHING, triage.UNRESOLVED)) == [
        [rows["pending"], rows["failed"]]
    ]


# Requeueing


def test_what_was_given_up_is_tried_afresh(world, by_hand):
    row = put(world, "failed")
    assert by_hand.requeue(EVERYTHING, JANE, per_second=10) == 1
    now = kept(world, row)
    assert (now["status"], now["retry_count"], now["alerted_at"]) == ("pending", 0, None)
    assert now["next_retry_at"] == now["updated_at"], "the first one is due at once"
    assert world.retry().resolved == 1


@pytest.mark.parametrize("state", ["pending", "resolved", "leased", "leased, over"])
def test_requeueing_leaves_all_others_alone(world, by_hand, state):
    row = put(world, state)
    before = kept(world, row)
    assert by_hand.requeue(Scope(ids=(row,)), JANE, per_second=10) == 0
    assert kept(world, row) == before
    assert actions(world) == []


def test_what_waits_for_its_next_try_is_requeued_if_asked(world, by_hand):
    row = put(world, "pending")
    leased = put(world, "leased")
    before = kept(world, leased)
    assert by_hand.requeue(EVERYTHING, JANE, statuses=(Status.PENDING,), per_second=10) == 1
    assert (kept(world, row)["retry_count"], kept(world, leased)) == (0, before)
    assert by_hand.requeue(EVERYTHING, JANE, statuses=(Status.RESOLVED,), per_second=10) == 0


def test_a_row_without_its_payload_is_not_requeued(world, by_hand):
    row = put(world, "failed")
    world.app("update subscriber_subscriberfailedevent set payload = null, redacted_at = now()")
    assert by_hand.requeue(EVERYTHING, JANE, per_second=10) == 0
    assert kept(world, row)["status"] == "failed"


def test_thousands_come_due_one_after_another_in_bounded_statements(world, by_hand):
    world.fail()
    world.app("update subscriber_subscriberfailedevent set status = 'failed'")
    world.app(
        "insert into subscriber_subscriberfailedevent (event_id, payload_sha256, source, topic,"
        " event_type, shop_domain, organization_id, envelope, payload, error_type, error_class,"
        " error_code, error_message, traceback, fingerprint, status)"
        " select n::text, payload_sha256, source, topic, event_type, shop_domain, organization_id,"
        " envelope, payload, error_type, error_class, error_code, error_message, traceback,"
        " fingerprint, 'failed' from subscriber_subscriberfailedevent, generate_series(2, 5000) n"
    )
    assert by_hand.requeue(EVERYTHING, JANE, per_second=10) == 5000
    (spread,) = world.app(
        "select max(next_retry_at) - min(next_retry_at) as length,"
        " count(distinct date_trunc('second', next_retry_at)) as seconds"
        " from subscriber_subscriberfailedevent where status = 'pending'"
    )
    assert spread["length"] >= timedelta(seconds=499.9)
    assert spread["seconds"] >= 490
    assert [action["count"] for action in actions(world)] == [1000] * 5


def test_two_operators_at_once_move_each_row_once(world, by_hand):
    rows = [put(world, "failed") for _ in range(60)]
    moved = []

    def move():
        moved.append(by_hand.requeue(EVERYTHING, JANE, per_second=10))

    operators = [threading.Thread(target=move) for _ in range(3)]
    for each in operators:
        each.start()
    for each in operators:
        each.join()
    assert sum(moved) == len(rows) == sum(action["count"] for action in actions(world))


def test_a_row_that_a_worker_claims_meanwhile_is_left_to_it(world, by_hand):
    """The claim commits between the search for rows and the statement that moves them."""
    row = put(world, "pending")
    world.make_due(row)
    started, moved = threading.Event(), []

    def move():
        started.set()
        moved.append(by_hand.requeue(EVERYTHING, JANE, statuses=(Status.PENDING,), per_second=10))

    with psycopg.connect(world.app_url) as claim:
        claim.execute(
            "update subscriber_subscriberfailedevent set lease_token = gen_random_uuid(),"
            " leased_until = now() + interval '1 minute'"
        )
        operator = threading.Thread(target=move)
        operator.start()
        started.wait()
        _wait_for_a_lock(world)
    operator.join()
    assert (moved, actions(world)) == ([0], [])
    assert kept(world, row)["lease_token"] is not None


def _wait_for_a_lock(world: World) -> None:
    for _ in range(500):
        if world.app("select 1 from pg_locks where not granted"):
            return
        world.app("select pg_sleep(0.01)")
    pytest.fail("the operator never came to the row")


# Resolving


@pytest.mark.parametrize("state", ["pending", "failed"])
def test_what_is_open_can_be_closed_and_stays_so(world, by_hand, state):
    sent = envelope()
    row = world.fail(sent)
    world.app("update subscriber_subscriberfailedevent set " + STATES[state])
    assert by_hand.resolve(Scope(ids=(row,)), JANE) == 1
    now = kept(world, row)
    assert (now["status"], now["resolution"], now["next_retry_at"]) == (
        "resolved",
        "operator",
        None,
    )
    assert now["resolved_at"] is not None
    world.fail(sent)
    assert kept(world, row)["status"] == "resolved", "whatever is delivered later"


@pytest.mark.parametrize("state", ["resolved", "leased", "leased, over"])
def test_resolving_leaves_all_others_alone(world, by_hand, state):
    row = put(world, state)
    before = kept(world, row)
    assert by_hand.resolve(EVERYTHING, JANE) == 0
    assert by_hand.resolve(EVERYTHING, JANE, statuses=tuple(Status)) == 0
    assert kept(world, row) == before
    assert actions(world) == []


def test_only_the_states_that_are_said_are_resolved(world, by_hand):
    pending, failed = put(world, "pending"), put(world, "failed")
    assert by_hand.resolve(EVERYTHING, JANE, statuses=(Status.FAILED,)) == 1
    assert [kept(world, row)["status"] for row in (pending, failed)] == ["pending", "resolved"]


# The record


def test_every_move_leaves_who_when_why_what_and_which(world, by_hand):
    rows = [put(world, "failed"), put(world, "failed")]
    since = datetime(2026, 1, 1, tzinfo=UTC)
    by_hand.requeue(Scope(topic="orders/create", since=since), JANE, per_second=10)
    by_hand.resolve(EVERYTHING, replace(JANE, reason="enough"))
    requeued, resolved = actions(world)
    assert (
        requeued.items()
        >= {
            "actor": "jane",
            "action": "requeue",
            "reason": "the column is back",
            "count": 2,
            "scope": {
                "topic": "orders/create",
                "since": since.isoformat(),
                "status": ["failed"],
                "rows": rows,
            },
        }.items()
    )
    assert (resolved["action"], resolved["reason"], resolved["scope"]["all"]) == (
        "resolve",
        "enough",
        True,
    )
    assert resolved["acted_at"] == kept(world, rows[0])["resolved_at"], "one transaction"


@pytest.mark.parametrize("move", ["requeue", "resolve"])
def test_without_its_record_nothing_is_moved(world, by_hand, move):
    row = put(world, "failed")
    world.app("alter table subscriber_operatoraction add check (actor <> 'jane')")
    moved = {
        "requeue": lambda: by_hand.requeue(EVERYTHING, JANE, per_second=10),
        "resolve": lambda: by_hand.resolve(EVERYTHING, JANE),
    }[move]
    with pytest.raises(psycopg.errors.CheckViolation):
        moved()
    assert kept(world, row)["status"] == "failed"


# Looking


def test_a_dossier_has_the_row_its_history_and_its_incident(world):
    world.break_tenant()
    row = world.fail(envelope({"id": 7}))
    world.retry()
    by_hand = Triage(world.core.application)
    by_hand.requeue(Scope(ids=(row,)), JANE, statuses=(Status.PENDING,), per_second=10)
    found = dossier.find(world.core.application, row)
    assert found is not None
    assert (found.event.id, found.event.payload_bytes) == (row, 9)
    assert found.event.envelope["event_id"] == found.event.event_id
    assert [(each.attempt, each.outcome) for each in found.attempts] == [(1, "rescheduled")]
    assert [(each.action, each.actor) for each in found.actions] == [("requeue", "jane")]
    assert found.incident is not None
    assert found.incident.kind == "unavailable"
    assert dossier.payload(world.core.application, row) == b'{"id": 7}'
    assert dossier.find(world.core.application, 99) is None
    assert dossier.payload(world.core.application, 99) is None


def test_the_numbers_of_a_failure_ledger(world):
    for state in STATES:
        put(world, state)
    world.app(
        "update subscriber_subscriberfailedevent set created_at = now() - interval '2 days'"
        " where status = 'failed'"
    )
    due = world.fail()
    world.app(
        "update subscriber_subscriberfailedevent set next_retry_at = now() - interval '90 seconds'"
        " where id = %(row)s",
        row=due,
    )
    world.core.incidents.pause(ORGANIZATION, actor="jane", reason="x")
    stats = figures.stats(world.core.application)
    assert (stats.due, stats.pending, stats.leased, stats.parked, stats.failed) == (1, 4, 2, 4, 1)
    assert (stats.resolved_24h, stats.recorded_24h, stats.recovery_rate_24h) == (1, 5, 0.2)
    assert stats.oldest_due_seconds == pytest.approx(90, abs=30)
    assert (stats.incidents_open, stats.paused) == (0, 1)


def test_the_numbers_tell_of_incidents_the_outbox_and_the_last_run(world):
    before = figures.stats(world.core.application)
    assert (before.incidents_open, before.outbox, before.last_run_at) == (0, 0, None)
    world.fail()
    world.break_tenant()
    world.retry()
    waiting = envelope()
    row = audit.record(world.core.application, waiting)
    outbox.put(world.core.application, row, waiting.payload, {"X-Shopify-Topic": "orders/create"})
    after = figures.stats(world.core.application)
    assert (after.incidents_open, after.paused, after.outbox) == (1, 0, 1)
    assert after.oldest_outbox_seconds is not None
    assert after.last_run_at is not None


def test_the_notifier_has_numbers_where_it_is_installed(world):
    assert figures.notices(world.core.application) is None
    with psycopg.connect(world.app_url) as connection:
        migrate.apply(connection, migrate.Series.NOTIFIER)
    world.app("select notifier.notify('ops', 'due', 'now')")
    world.app("select notifier.set_status(notifier.notify('ops', 'a', 'b'), 1, 'failed')")
    world.app("update pgrelay.queue set done_at = now(), outcome = 'failed' where id = 2")
    found = figures.notices(world.core.application)
    assert found == figures.Notices(due=1, failed_24h=1)


def test_an_empty_failure_ledger_has_numbers_too(world):
    stats = figures.stats(world.core.application)
    assert (stats.due, stats.oldest_due_seconds, stats.recovery_rate_24h) == (0, None, None)
    assert figures.groups(world.core.application) == []


def test_unresolved_failures_are_grouped_by_kind_the_most_frequent_first(world):
    missing = StorageConfigurationError("No database.")
    rare = world.fail(envelope(topic="orders/paid"), missing)
    rows = [world.fail(error=missing) for _ in range(3)]
    put(world, "resolved")
    world.app(
        "update subscriber_subscriberfailedevent set status = 'failed' where id = %(row)s",
        row=rows[0],
    )
    often, seldom = figures.groups(world.core.application)
    assert (often.count, often.failed, often.tenants, often.example_id) == (3, 1, 1, rows[-1])
    assert (often.error_type, often.topic, often.error_message) == (
        "StorageConfigurationError",
        "orders/create",
        "No database.",
    )
    assert (seldom.count, seldom.example_id) == (1, rare)
    assert figures.groups(world.core.application, limit=1) == [often]


def test_an_organization_is_known_by_its_shop_or_its_database(world, by_hand):
    assert by_hand.knows(ORGANIZATION)
    assert not by_hand.knows(SHOP)
    world.app("delete from shopify_shopifyconnection")
    assert by_hand.knows(ORGANIZATION)
    world.app("delete from databases_database")
    assert not by_hand.knows(ORGANIZATION)


# Looking


def test_pages_go_by_key_so_that_new_rows_move_nothing(world, by_hand):
    rows = [world.fail() for _ in range(3)]
    first = by_hand.find(EVERYTHING, limit=2)
    world.fail()
    assert [row.id for row in first] == [rows[2], rows[1]]
    assert [row.id for row in by_hand.find(EVERYTHING, limit=2, before=rows[1])] == [rows[0]]


def test_a_look_at_a_payload_is_recorded_with_its_row(world, by_hand):
    row = world.fail()
    by_hand.seen(row, JANE)
    (action,) = actions(world)
    assert (action["actor"], action["action"], action["count"]) == ("jane", "view", 1)
    assert [each.action for each in dossier.find(world.core.application, row).actions] == ["view"]
