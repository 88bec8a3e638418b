"""The failure ledger: one row an event, one worker a row, one verdict a replay."""

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest

from shared.envelope import from_message
from shared.errors import StorageConfigurationError, UnknownShopError
from shared.faults import fingerprint
from shared.leases import Verdict
from tests.world import NOW, ORGANIZATION, SHOP, World, envelope, message

SOURCES_QUERIES = """
SELECT id, source, event_type, shop_domain, retry_count, next_retry_at, error_type
FROM subscriber_subscriberfailedevent
WHERE status = 'pending'
  AND (next_retry_at IS NULL OR next_retry_at <= NOW())
ORDER BY created_at;

SELECT id, event_id, shop_domain, retry_count, error_type, error_message, updated_at
FROM subscriber_subscriberfailedevent
WHERE status = 'failed'
ORDER BY updated_at DESC;

SELECT status, COUNT(*)
FROM subscriber_subscriberfailedevent
WHERE created_at >= NOW() - INTERVAL '24 hours'
GROUP BY status;
"""


@pytest.fixture
def failures(world: World):
    return world.core.failures


# Recording


def test_a_failed_event_holds_all_that_a_replay_needs(world, failures):
    sent = envelope({"id": 7}, trace_id="t" * 32, api_version="2026-04")
    row = failures.record(sent, StorageConfigurationError("No database."))
    kept = world.failed_event()
    assert kept["id"] == row
    assert (kept["event_id"], kept["shop_domain"], kept["topic"]) == (
        sent.event_id,
        SHOP,
        "orders/create",
    )
    assert (kept["source"], kept["event_type"]) == ("webhook", "create")
    assert (kept["payload"], kept["payload_sha256"]) == (sent.payload, sent.payload_sha256)
    assert (kept["error_type"], kept["error_class"], kept["error_code"], kept["error_message"]) == (
        "StorageConfigurationError",
        "permanent",
        "storage_configuration",
        "No database.",
    )
    assert (kept["status"], kept["retry_count"], kept["max_retries"]) == ("pending", 0, 5)
    assert (kept["next_retry_at"], kept["last_attempted_at"], kept["resolved_at"]) == (None,) * 3
    assert kept["due_at"] == kept["created_at"]
    token = uuid4()
    world.core.leases.claim(token, 1)
    assert world.core.leases.start(token, row).as_envelope() == sent


def test_the_owner_is_the_one_given_else_the_shops_first_connection_else_nobody(world, failures):
    world.app(
        "insert into shopify_shopifyconnection (organization_id, myshopify_domain)"
        " values ('second', %(shop)s)",
        shop=SHOP,
    )
    for given, shop, owner in (
        ("given", SHOP, "given"),
        (None, SHOP, ORGANIZATION),
        (None, "nobody.myshopify.com", None),
    ):
        row = failures.record(envelope(shop_domain=shop), RuntimeError("x"), given)
        kept = next(failed for failed in world.failed_events() if failed["id"] == row)
        assert kept["organization_id"] == owner
        assert kept["tenant"] == owner or shop


def test_a_row_without_its_owner_beats_no_row(world, failures):
    world.app("drop table shopify_shopifyconnection")
    failures.record(envelope(), RuntimeError("x"))
    assert world.failed_event()["organization_id"] is None


def test_a_second_delivery_adds_an_occurrence_and_refreshes_the_error_only(world, failures):
    sent = envelope()
    row = failures.record(sent, RuntimeError("first"))
    token = uuid4()
    world.core.leases.claim(token, 1)
    before = world.failed_event()
    assert failures.record(replace(sent, trace_id="f" * 32), UnknownShopError("second")) == row
    after = world.failed_event()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        "occurrences",
        "error_type",
        "error_class",
        "error_code",
        "error_message",
        "traceback",
        "fingerprint",
        "updated_at",
    }
    assert (after["occurrences"], after["error_type"]) == (2, "UnknownShopError")
    assert world.core.leases.resolve(token, row, NOW) is Verdict.RESOLVED, (
        "the lease was left alone"
    )


def test_what_was_given_up_keeps_the_error_that_led_to_it(world, failures):
    sent = envelope()
    failures.record(sent, psycopg.OperationalError("connection refused"))
    world.app("update subscriber_subscriberfailedevent set status = 'failed'")
    before = world.failed_event()
    failures.record(sent, UnknownShopError("second"))
    after = world.failed_event()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"occurrences", "updated_at"}


def test_a_second_body_under_one_id_gets_a_row_of_its_own(world, failures):
    first, second = envelope({"a": 1}), envelope({"a": 2})
    second = replace(second, event_id=first.event_id)
    for sent in (first, second, second):
        failures.record(sent, RuntimeError("x"))
    one, two = world.failed_events()
    assert (one["payload"], one["occurrences"]) == (first.payload, 1)
    assert (two["payload"], two["occurrences"]) == (second.payload, 2)
    assert two["event_id"] == f"{first.event_id}#{second.payload_sha256.hex()[:16]}"
    assert two["envelope"]["event_id"] == two["event_id"], "it is replayed under that id"


def test_a_row_that_a_replay_resolved_is_opened_again_whole(world, failures):
    sent = envelope()
    row = world.fail(sent)
    world.retry()
    world.app(
        "update subscriber_subscriberfailedevent set payload = null, envelope = '{}',"
        " redacted_at = now(), alerted_at = now(), retry_count = 3"
    )
    assert world.fail(sent) == row
    kept = world.failed_event()
    assert (kept["status"], kept["retry_count"], kept["payload"]) == ("pending", 0, sent.payload)
    assert kept["envelope"]["event_id"] == sent.event_id
    assert [kept[name] for name in ("resolved_at", "resolution", "redacted_at", "alerted_at")] == [
        None
    ] * 4


@pytest.mark.parametrize(
    "end",
    ["status = 'resolved', resolution = 'operator', resolved_at = now()", "status = 'failed'"],
)
def test_what_an_operator_resolved_or_the_schedule_gave_up_stays_so(world, end):
    sent = envelope()
    world.fail(sent)
    world.app("update subscriber_subscriberfailedevent set " + end)
    before = world.failed_event()
    world.fail(sent)
    after = world.failed_event()
    assert (after["status"], after["resolution"]) == (before["status"], before["resolution"])
    assert after["occurrences"] == 2


def test_no_content_can_make_the_failure_ledger_refuse(world, failures):
    hostile = from_message(
        message(
            b"\xff\x00\xfe",
            topic="\x00" * 3 + "\ud800" + "é" * 5000,
            shop_domain="\ud800\x00" + "x" * 5000,
            webhook_id="\x00\ud834" + "i" * 5000,
            triggered_at="\x00",
        ),
        NOW,
    )
    error = RuntimeError("\x00\ud800 " + "x" * 100_000)
    error.__cause__ = ValueError("\x00")
    failures.record(hostile, error)
    kept = world.failed_event()
    assert kept["payload"] == b"\xff\x00\xfe"
    assert len(kept["error_message"].encode()) <= 8 * 1024
    assert len(kept["traceback"].encode()) <= 64 * 1024


def test_failures_of_one_kind_have_one_fingerprint():
    a = fingerprint("X", "c", 'row 17 of "orders" failed', "orders/create")
    assert a == fingerprint("X", "c", 'row 4 of "products" failed', "orders/create")
    assert a != fingerprint("X", "c", 'row 4 of "products" failed', "orders/paid")
    assert a != fingerprint("Y", "c", 'row 17 of "orders" failed', "orders/create")


@pytest.mark.parametrize(
    "forbidden",
    [
        "status = 'resolved'",
        "status = 'resolved', resolved_at = now()",
        "resolved_at = now()",
        "status = 'failed', next_retry_at = now()",
        "status = 'failed', lease_token = gen_random_uuid(), leased_until = now()",
        "lease_token = gen_random_uuid()",
        "payload = null",
        "status = 'running'",
        "retry_count = -1",
    ],
)
def test_the_table_itself_forbids_states_that_make_no_sense(world, forbidden):
    world.fail()
    with pytest.raises(psycopg.errors.CheckViolation):
        world.app("update subscriber_subscriberfailedevent set " + forbidden)


def test_connecting_a_shop_makes_all_its_unresolved_rows_due_staggered(world, failures):
    rows = [world.fail() for _ in range(25)]
    world.app(
        "update subscriber_subscriberfailedevent"
        " set status = 'failed', retry_count = 5, alerted_at = now() where id <= %(row)s",
        row=rows[11],
    )
    token = uuid4()
    world.core.leases.claim(token, 1)
    elsewhere = world.fail(envelope(shop_domain="other.myshopify.com"))
    assert failures.requeue_shop(SHOP, "new-owner", actor="jane") == 24
    [noted] = world.app("select actor, action, scope, count from subscriber_operatoraction")
    assert noted == {"actor": "jane", "action": "requeue", "scope": {"shop": SHOP}, "count": 24}
    kept = {row["id"]: row for row in world.failed_events()}
    moved = [row for row in kept.values() if row["organization_id"] == "new-owner"]
    assert len(moved) == 24
    assert {(row["status"], row["retry_count"], row["alerted_at"]) for row in moved} == {
        ("pending", 0, None)
    }
    assert (moved[-1]["next_retry_at"] - moved[0]["next_retry_at"]) == timedelta(seconds=2.3)
    assert kept[elsewhere]["next_retry_at"] is None


def test_the_operational_queries_run_as_they_are_written(world):
    world.fail()
    due, failed, recent = (
        world.app(query)  # pyright: ignore[reportArgumentType]
        for query in SOURCES_QUERIES.split(";")
        if query.strip()
    )
    assert [row["error_type"] for row in due] == ["RuntimeError"]
    assert failed == []
    assert recent == [{"status": "pending", "count": 1}]
