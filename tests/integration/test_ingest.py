"""A message is acknowledged only if its event is committed in one of the two ledgers."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from shared import audit
from shared import envelope as envelopes
from shared.envelope import from_message
from tests.world import NOW, SHOP, World, envelope, message


def test_a_stored_event_is_acknowledged(world):
    assert world.ingester.ingest(message()) is True
    assert len(world.tenant("select 1 from shopify_events")) == 1
    assert world.failed_events() == []


@pytest.mark.parametrize(
    ("sent", "error_type"),
    [
        (message(b"not json"), "ValueError"),
        (message(b"[1]"), "ValueError"),
        (message(b""), "ValueError"),
        (message(b'{"a": NaN}'), "ValueError"),
        (message(b'{"a": "\xff"}'), "ValueError"),
        (message(b'{"a":' * 100_000), "ValueError"),
        (replace(message(), data="***"), "UndecodableMessageError"),
        (message(topic=""), "MissingAttributeError"),
        (message(shop_domain=""), "MissingAttributeError"),
        (message(shop_domain="evil.example.com"), "MissingAttributeError"),
        (message(shop_domain="nobody.myshopify.com"), "UnknownShopError"),
        (message(b'{"id": 1, "myshopify_domain": "x.myshopify.com"}'), "ShopMismatchError"),
        (message(b'{"id": 1, "n": 1e200000}'), "NumericValueOutOfRange"),
    ],
)
def test_what_cannot_be_stored_is_kept_and_acknowledged(world, sent, error_type):
    assert world.ingester.ingest(sent) is True
    kept = world.failed_event()
    assert (kept["error_type"], kept["error_class"]) == (error_type, "permanent")
    assert (kept["status"], kept["next_retry_at"]) == ("pending", None)
    assert kept["payload"] == from_message(sent, NOW).payload
    assert kept["source"] == "pubsub"


def test_a_tenant_that_is_down_costs_a_failed_event(world):
    world.break_tenant()
    assert world.ingester.ingest(message()) is True
    kept = world.failed_event()
    assert (kept["error_type"], kept["error_class"], kept["error_code"]) == (
        "OperationalError",
        "transient",
        "connection_failed",
    )
    assert kept["organization_id"] == "acme"


def test_a_fault_in_our_own_code_is_kept_too(world, monkeypatch):
    def bug(*_args):
        return {}["missing"]

    monkeypatch.setattr("shared.pipeline.parse", bug)
    assert world.ingester.ingest(message()) is True
    kept = world.failed_event()
    assert (kept["error_type"], kept["error_class"]) == ("KeyError", "transient")
    assert "in bug" in kept["traceback"]


def test_without_a_failure_ledger_the_message_is_refused(world):
    world.break_tenant()
    world.app("drop table subscriber_subscriberfailedevent cascade")
    assert world.ingester.ingest(message()) is False


def test_both_bodies_of_a_collision_are_kept(world):
    first, second = (
        message(b'{"id": 1}', webhook_id="same"),
        message(b'{"id": 2}', webhook_id="same"),
    )
    assert world.ingester.ingest(first)
    for _ in range(2):
        assert world.ingester.ingest(second)
    kept = world.failed_event()
    assert (kept["error_type"], kept["occurrences"]) == ("EventCollisionError", 2)
    assert kept["event_id"].startswith("same#")
    world.retry()
    payloads = world.tenant("select event_id, payload from shopify_events order by id")
    assert [row["payload"]["id"] for row in payloads] == [1, 2]
    assert [row["event_id"] for row in payloads] == ["same", kept["event_id"]]


def test_the_subscriber_writes_the_audit_row_that_the_webhook_owed(world):
    owed = replace(envelope(), audited=False)
    ours = envelopes.message_attributes(owed)
    sent = replace(message(owed.payload), attributes=message().attributes | ours)
    assert world.ingester.ingest(sent)
    (row,) = world.app("select * from shopify_shopifyevent")
    assert (row["shop_domain"], row["payload"]) == (SHOP, {"id": 1})
    world.app("drop table shopify_shopifyevent")
    assert world.ingester.ingest(sent), "its failure changes nothing else"


def test_the_lag_is_counted_from_the_webhooks_receipt(world, capsys):
    received_at = datetime.now(UTC) - timedelta(hours=1)
    ours = envelopes.message_attributes(replace(envelope(), received_at=received_at))
    given = message()
    for attributes, hours in ((given.attributes | ours, 1), (message().attributes, 0)):
        assert world.ingester.ingest(replace(given, attributes=attributes))
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        (stored,) = [line for line in lines if line["message"] == "event.stored"]
        assert stored["lag_milliseconds"] // 3_600_000 == hours


# The audit row


def audited(world: World):
    return world.app("select * from shopify_shopifyevent order by id")


def test_the_audit_row_says_what_was_given(world):
    sent = envelope({"id": 1})
    audit.record(world.core.application, sent)
    (row,) = audited(world)
    assert (row["organization_id"], row["topic"], row["payload"]) == (
        "acme",
        "orders/create",
        {"id": 1},
    )
    assert (row["event_id"], row["payload_sha256"]) == (sent.event_id, sent.payload_sha256)
    assert (row["triggered_at"], row["received_at"]) == (sent.triggered_at, sent.received_at)
    assert (row["needs_publish"], row["outbox_body"]) == (False, None)


def test_a_second_delivery_makes_no_second_audit_row_and_a_second_body_does(world):
    sent = envelope({"id": 1})
    other = replace(envelope({"id": 2}), event_id=sent.event_id)
    for one in (sent, sent, other, other):
        audit.record(world.core.application, one)
    first, second = audited(world)
    assert (first["event_id"], second["event_id"]) == (
        sent.event_id,
        f"{sent.event_id}#{other.payload_sha256.hex()[:16]}",
    )


@pytest.mark.parametrize("body", [b"", b"not json", b"\xff", b'{"a": NaN}'])
def test_a_body_that_is_no_json_is_audited_without_it(world, body):
    audit.record(world.core.application, envelope(body))
    assert audited(world)[0]["payload"] is None


def test_an_unknown_shop_is_audited_without_an_owner(world):
    audit.record(world.core.application, envelope(shop_domain="nobody.myshopify.com"))
    assert audited(world)[0]["organization_id"] is None


def test_a_missing_column_is_a_failed_event_with_postgresqls_own_code(world):
    world.tenant("alter table shopify_orders drop column payload")
    assert world.ingester.ingest(message())
    kept = world.failed_event()
    assert (kept["error_type"], kept["error_code"]) == ("UndefinedColumn", "42703")
    assert '"payload"' in kept["error_message"]
