"""The one statement: what it writes, what it says it did, and that the states converge."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest

from shared import db, store
from shared.errors import EventCollisionError
from shared.model import LedgerOutcome, Outcome, SnapshotOutcome
from shared.parse import parse
from shared.topics import SNAPSHOT_TABLES
from tests.world import NOW, ORGANIZATION, SHOP, World, envelope

HOUR = timedelta(hours=1)
INSERTED = Outcome(ledger=LedgerOutcome.INSERTED, snapshot=SnapshotOutcome.INSERTED)
UPDATED = Outcome(ledger=LedgerOutcome.INSERTED, snapshot=SnapshotOutcome.UPDATED)
STALE = Outcome(ledger=LedgerOutcome.INSERTED, snapshot=SnapshotOutcome.STALE)
DUPLICATE = Outcome(ledger=LedgerOutcome.DUPLICATE, snapshot=SnapshotOutcome.STALE)
LEDGER_ONLY = Outcome(ledger=LedgerOutcome.INSERTED, snapshot=SnapshotOutcome.SKIPPED)


def order(updated_at=NOW, topic="orders/updated", shop=SHOP, **body: Any):
    """An envelope of order 1 with its own clock."""
    clock = {"updated_at": updated_at.isoformat()} if updated_at else {}
    return envelope({"id": 1, **clock, **body}, topic, shop_domain=shop)


@pytest.fixture
def apply(world: World):
    return world.core.pipeline.apply


def snapshot(world: World) -> dict[str, Any]:
    (row,) = world.tenant("select * from shopify_orders")
    return row


def test_an_event_makes_a_ledger_row_and_a_snapshot(world, apply):
    sent = replace(order(note="x"), source_event_id="e", api_version="2026-04", trace_id="t" * 32)
    assert apply(sent) == INSERTED
    (event,) = world.tenant("select * from shopify_events")
    assert event["event_id"] == sent.event_id
    assert (event["organization_id"], event["shop_domain"]) == (ORGANIZATION, SHOP)
    assert (event["topic"], event["event_type"]) == ("orders/updated", "updated")
    assert (event["resource_type"], event["resource_id"]) == ("orders", "1")
    assert (event["received_at"], event["triggered_at"]) == (sent.received_at, sent.triggered_at)
    assert event["source_updated_at"] == NOW
    assert event["payload_sha256"] == sent.payload_sha256
    assert (event["source_event_id"], event["api_version"]) == ("e", "2026-04")
    assert (event["payload_raw"], event["trace_id"]) == (None, "t" * 32)
    row = snapshot(world)
    assert row["payload"] == event["payload"]
    assert row["parsed_payload"] == event["parsed_payload"]
    assert (row["shopify_id"], row["event_id"], row["is_deleted"]) == ("1", sent.event_id, False)
    assert row["first_seen_at"] == row["last_seen_at"] == sent.received_at


def test_an_event_without_an_id_or_a_table_is_in_the_ledger_only(world, apply):
    assert apply(envelope({}, "orders/updated")) == LEDGER_ONLY
    assert apply(envelope({"id": 1}, "themes/update")) == LEDGER_ONLY
    assert apply(envelope({"order_edit": {"id": 5, "order_id": 1}}, "orders/edited")) == LEDGER_ONLY
    assert apply(envelope({"id": 1}, "brand_new/topic")) == LEDGER_ONLY
    assert len(world.tenant("select 1 from shopify_events")) == 4
    assert world.tenant("select 1 from shopify_orders") == []


def test_a_duplicate_moves_its_receipt_and_nothing_else(world, apply):
    first = order()
    apply(first)
    before = world.tenant("select * from shopify_events")[0], snapshot(world)
    again = replace(first, received_at=NOW + HOUR, trace_id="later", source_event_id="later")
    assert apply(again) == DUPLICATE
    after = world.tenant("select * from shopify_events")[0], snapshot(world)
    assert after[0] == {**before[0], "received_at": NOW + HOUR}
    assert after[1] == {**before[1], "last_seen_at": NOW + HOUR}


def test_a_duplicate_is_weighed_with_the_clocks_of_the_ledger(world, apply):
    first = order(updated_at=None)
    apply(first)
    newer = order(updated_at=None)
    apply(replace(newer, triggered_at=NOW + HOUR))
    late = replace(first, triggered_at=NOW + 5 * HOUR)
    assert apply(late) == DUPLICATE
    assert snapshot(world)["event_id"] == newer.event_id


def test_a_duplicate_of_an_adopted_row_counts_as_equal(world, apply):
    sent = order()
    apply(sent)
    world.tenant("update shopify_events set payload_sha256 = null")
    assert apply(sent).ledger is LedgerOutcome.DUPLICATE


def test_a_second_body_under_one_id_is_refused_and_changes_nothing(world, apply):
    first = order()
    apply(first)
    before = world.tenant("select * from shopify_events"), snapshot(world)
    other = order(updated_at=NOW + HOUR)
    with pytest.raises(EventCollisionError):
        apply(replace(other, event_id=first.event_id))
    assert (world.tenant("select * from shopify_events"), snapshot(world)) == before


def test_a_known_body_under_another_topic_does_not_touch_the_snapshot(world, apply):
    first = order()
    apply(first)
    apply(replace(first, topic="orders/delete"))
    assert snapshot(world)["is_deleted"] is False


@pytest.mark.parametrize(
    ("later", "outcome"),
    [
        pytest.param(order(NOW + HOUR), UPDATED, id="a newer clock"),
        pytest.param(order(NOW - HOUR), STALE, id="an older clock"),
        pytest.param(
            order(NOW.astimezone(ZoneInfo("Asia/Tokyo")) + HOUR),
            UPDATED,
            id="instants count, not their spelling",
        ),
        pytest.param(
            replace(order(), triggered_at=NOW + HOUR), UPDATED, id="equal clocks: triggered-at"
        ),
        pytest.param(
            replace(order(), triggered_at=None), STALE, id="equal clocks: none is the least"
        ),
        pytest.param(
            replace(order(), event_id="ffff"), UPDATED, id="all equal: the greater event id"
        ),
        pytest.param(
            replace(order(), event_id="Zzzz"),
            STALE,
            id="ids are compared by bytes, not by language",
        ),
    ],
)
def test_the_greater_source_version_wins(world, apply, later, outcome):
    apply(replace(order(), event_id="aaaa"))
    assert apply(later) == outcome
    assert (snapshot(world)["event_id"] == later.event_id) is (outcome == UPDATED)


def test_last_seen_advances_with_stale_events_and_first_seen_never_moves(world, apply):
    apply(order())
    apply(replace(order(NOW - HOUR), received_at=NOW + HOUR))
    apply(replace(order(NOW - HOUR), received_at=NOW - HOUR))
    row = snapshot(world)
    assert (row["first_seen_at"], row["last_seen_at"]) == (NOW, NOW + HOUR)


def deletion(triggered_at):
    return replace(envelope({"id": 1}, "orders/delete"), triggered_at=triggered_at)


def test_a_tombstone_stays_when_an_older_update_comes_late(world, apply):
    apply(order(NOW))
    apply(deletion(NOW + HOUR))
    assert apply(order(NOW + HOUR / 2)) == STALE
    assert snapshot(world)["is_deleted"] is True


def test_a_later_update_brings_a_deleted_resource_back(world, apply):
    apply(deletion(NOW))
    assert apply(order(NOW + HOUR)) == UPDATED
    assert snapshot(world)["is_deleted"] is False


def test_at_an_equal_clock_the_deletion_wins_in_either_order(world, apply):
    update, delete = order(NOW), deletion(NOW)
    for first, second in ((update, delete), (delete, update)):
        world.tenant("truncate shopify_orders, shopify_events")
        apply(first)
        apply(second)
        assert snapshot(world)["is_deleted"] is True


def test_a_disconnected_inventory_level_is_a_tombstone(world, apply):
    level = {"inventory_item_id": 7, "location_id": 8}
    apply(envelope({**level, "updated_at": NOW.isoformat()}, "inventory_levels/update"))
    gone = replace(envelope(level, "inventory_levels/disconnect"), triggered_at=NOW + HOUR)
    assert apply(gone) == UPDATED
    (row,) = world.tenant("select shopify_id, is_deleted from shopify_inventory_levels")
    assert row == {"shopify_id": "7:8", "is_deleted": True}


EXEMPT = ("id", "received_at", "inserted_at", "first_seen_at", "last_seen_at", "trace_id")


def state(world: World) -> list[dict[str, Any]]:
    """Both tables without the columns that tell when something came."""
    rows = world.tenant("select * from shopify_events order by event_id") + world.tenant(
        "select * from shopify_orders order by shopify_id"
    )
    return [{k: v for k, v in row.items() if k not in EXEMPT} for row in rows]


def test_every_order_of_arrival_with_duplicates_ends_in_the_same_state(world, apply):
    events = [
        replace(order(NOW, "orders/create"), event_id="b"),
        replace(order(NOW, "orders/updated", note="same clock"), event_id="a"),
        replace(order(NOW + HOUR, "orders/paid"), event_id="d"),
        replace(deletion(NOW + HOUR), event_id="c"),
    ]
    ends = []
    for arrival in itertools.permutations([*events, events[2]]):
        world.tenant("truncate shopify_orders, shopify_events")
        for event in arrival:
            apply(event)
        ends.append(state(world))
    assert all(end == ends[0] for end in ends)
    assert ends[0][-1]["is_deleted"] is True


def test_a_dry_run_says_the_same_and_leaves_nothing_behind(world, apply):
    sent = order()
    assert apply(sent, dry_run=True) == INSERTED
    assert world.tenant("select 1 from shopify_events") == []
    assert apply(sent) == INSERTED


def test_a_dropped_table_comes_back_with_the_event(world, apply):
    apply(order())
    world.tenant("drop table shopify_orders")
    assert apply(order(NOW + HOUR)) == INSERTED
    world.tenant("drop table shopify_events, shopify_schema_version")
    assert apply(order(NOW + 2 * HOUR)) == UPDATED


def test_a_missing_column_is_added_only_by_a_pending_migration(world, apply):
    world.tenant("alter table shopify_orders drop column source_triggered_at")
    with pytest.raises(psycopg.errors.UndefinedColumn):
        apply(order())
    world.tenant("delete from shopify_schema_version")
    assert apply(order()) == INSERTED


@pytest.mark.parametrize(
    ("body", "payload", "raw_kept"),
    [
        (b'{"id": 820982911946154508}', {"id": 820982911946154508}, False),
        (b'{"id": 9, "n": 123456789012345678901234567890}', None, False),
        (b'{"id": 9, "d": 0.1000000000000000055511151231257827}', None, False),
        ('{"id": 9, "t": "caf\u00e9 \U0001f600"}'.encode(), {"id": 9, "t": "café 😀"}, False),
        (
            b'{"id": 9, "t": "a\\u0000b", "\\u0000": 1}',
            {"id": 9, "t": "a\ufffdb", "\ufffd": 1},
            True,
        ),
        (b'{"id": 9, "t": "\\ud800"}', {"id": 9, "t": "\ufffd"}, True),
        (b'{"id": 9, "t": "\\\\u0000"}', {"id": 9, "t": "\\u0000"}, False),
        (b'{"id": 9, "a": [3, 1, 2, {"z": null}]}', {"id": 9, "a": [3, 1, 2, {"z": None}]}, False),
    ],
)
def test_the_payload_comes_back_as_the_value_that_was_sent(world, apply, body, payload, raw_kept):
    apply(envelope(body))
    (row,) = world.tenant("select payload, payload::text as text, payload_raw from shopify_events")
    if payload is None:
        assert body.split(b": ")[-1].rstrip(b"}").decode() in row["text"]
    else:
        assert row["payload"] == payload
    assert row["payload_raw"] == (body if raw_kept else None)


def test_another_organizations_or_shops_events_do_not_meet(world, apply):
    world.connect_shop("other.myshopify.com")
    world.connect_shop("third.myshopify.com", "third")
    for shop in (SHOP, "other.myshopify.com", "third.myshopify.com"):
        assert apply(replace(order(shop=shop), event_id="same")) == INSERTED
    rows = world.tenant("select organization_id, shop_domain from shopify_orders order by id")
    assert [tuple(row.values()) for row in rows] == [
        (ORGANIZATION, SHOP),
        (ORGANIZATION, "other.myshopify.com"),
        ("third", "third.myshopify.com"),
    ]


def test_a_connection_that_died_while_it_was_idle_is_replaced_unseen(world, apply):
    apply(order())
    killed = world.tenant(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name = 'hookledger'"
    )
    assert killed
    assert apply(order(NOW + HOUR)) == UPDATED


def test_the_snapshot_tables_are_a_closed_set(world):
    found = world.tenant(
        "select table_name from information_schema.tables where table_name like 'shopify\\_%%'"
    )
    others = {"shopify_events", "shopify_erasures", "shopify_schema_version"}
    assert {row["table_name"] for row in found} == SNAPSHOT_TABLES | others


def test_behind_a_transaction_pooler_nothing_is_prepared_and_timeouts_are_local(world):
    target = db.Target(conninfo=world.tenant_url, pooler_mode="transaction")
    pool = db.Pool(target, size=1, limits=db.Limits(statement=7))
    for n in range(8):
        sent = order(note=n)
        assert store.store(pool, ORGANIZATION, sent, parse(sent)).ledger is LedgerOutcome.INSERTED
    one = pool.run(
        lambda c: (
            c.execute("select count(*) from pg_prepared_statements").fetchone(),
            c.execute("show statement_timeout").fetchone(),
        )
    )
    assert one == ((0,), ("7s",))
    (connection, _), *_ = pool._idle
    shown = psycopg.Cursor(connection).execute("show statement_timeout").fetchone()
    assert shown == ("0",)
    pool.close()
