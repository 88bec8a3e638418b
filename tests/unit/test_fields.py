"""What is read from a body: by rule, exact, and nothing from a malformed value."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev import samples
from shared import jsontext
from shared.fields import FIELDS, instant, parsed, resource_id
from shared.topics import TOPICS, lookup

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.builds(jsontext.Number, st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
GID = "gid://shopify/Customer/9203318845570162779"


def _id(topic: str, body: dict[str, Any]) -> str | None:
    return resource_id(body, lookup(topic).id)


def _clock(topic: str, body: dict[str, Any]) -> datetime | None:
    return instant(body, lookup(topic).clock)


def _sample(topic: str, **changes: Any) -> dict[str, Any]:
    return parsed(jsontext.read(samples.load(topic))[1] | changes, lookup(topic))


# -- ids


@pytest.mark.parametrize(
    ("topic", "body", "found"),
    [
        ("orders/create", {"id": 2**53 + 1}, "9007199254740993"),
        ("orders/create", {"id": 2**63 + 1}, "9223372036854775809"),
        ("orders/create", {"id": "9007199254740993"}, "9007199254740993"),
        ("orders/edited", {"id": 1, "order_edit": {"id": 2, "order_id": 3}}, "2"),
        ("orders/risk_assessment_changed", {"order_id": "7"}, "7"),
        (
            "orders/risk_assessment_changed",
            {"order_id": None, "admin_graphql_api_order_id": "gid://shopify/Order/7"},
            "7",
        ),
        ("checkouts/create", {"id": 5, "name": "#6", "token": "t"}, "5"),
        ("checkouts/create", {"name": "#6", "token": "t"}, "6"),
        ("checkouts/create", {"id": None, "name": None, "token": "t"}, "t"),
        ("checkouts/create", {"name": "#", "token": "t"}, "t"),
        ("checkouts/create", {"name": "#6 again", "token": "t"}, "t"),
        ("checkouts/delete", {"id": 6}, "6"),
        ("inventory_levels/update", {"inventory_item_id": 1, "location_id": 2}, "1:2"),
        ("inventory_levels/disconnect", {"inventory_item_id": 1, "location_id": 2}, "1:2"),
        ("inventory_levels/update", {"inventory_item_id": 1}, None),
        ("customers/redact", {"shop_id": 1, "customer": {"id": 2}}, "2"),
        ("customers/redact", {"shop_id": 1, "customer": {"email": "a@example.com"}}, None),
        ("customers/merge", {"admin_graphql_api_customer_kept_id": GID}, "9203318845570162779"),
        ("customers/purchasing_summary", {"customerId": GID}, "9203318845570162779"),
        ("customer.tags_added", {"customerId": GID}, GID),
        ("shop/redact", {"shop_id": 1}, "1"),
        ("carts/create", {"id": "c-1", "token": "c-1"}, "c-1"),
        ("returns/update", {"admin_graphql_api_id": "gid://shopify/Return/9"}, "9"),
        (
            "fulfillment_orders/moved",
            {"original_fulfillment_order": {"id": "gid://x/1"}},
            "gid://x/1",
        ),
        (
            "subscription_billing_cycles/skip",
            {"subscription_contract_id": 8, "cycle_index": 0},
            "8:0",
        ),
        ("audit_events/admin_api_activity", {"events": [{"id": 1}]}, None),
        ("moons/risen", {"admin_graphql_api_id": GID}, GID),
        ("moons/risen", {"id": 3, "admin_graphql_api_id": GID}, "3"),
    ],
)
def test_a_resource_id_is_where_the_topics_rule_says(
    topic: str, body: dict[str, Any], found: str | None
) -> None:
    assert _id(topic, body) == found


@pytest.mark.parametrize("value", [None, True, "", [], {}, jsontext.Number("1.0"), "x" * 256])
def test_what_cannot_be_an_id_is_none(value: object) -> None:
    assert _id("orders/create", {"id": value}) is None


@given(st.integers())
def test_an_integer_id_is_its_exact_digits(number: int) -> None:
    assert _id("orders/create", {"id": number}) == str(number)


# -- clocks


@pytest.mark.parametrize(
    ("written", "instant_"),
    [
        ("2025-03-04T11:52:08+09:00", datetime(2025, 3, 4, 2, 52, 8, tzinfo=UTC)),
        ("2025-03-04T02:52:08Z", datetime(2025, 3, 4, 2, 52, 8, tzinfo=UTC)),
        ("2025-03-04T02:52:08.123Z", datetime(2025, 3, 4, 2, 52, 8, 123000, tzinfo=UTC)),
        ("2025-03-04T02:52:08.123456789Z", datetime(2025, 3, 4, 2, 52, 8, 123456, tzinfo=UTC)),
        ("2025-03-04", datetime(2025, 3, 4, tzinfo=UTC)),
        ("2025-03-04 02:52:08", datetime(2025, 3, 4, 2, 52, 8, tzinfo=UTC)),
    ],
)
def test_a_time_is_an_instant_in_utc_however_it_is_written(
    written: str, instant_: datetime
) -> None:
    found = _clock("orders/updated", {"updated_at": written})
    assert found is not None
    assert (found, found.tzinfo) == (instant_, UTC)


@pytest.mark.parametrize(
    "value",
    [None, "", "soon", "2025-13-01", "0001-01-01T00:00:00+09:00", 1741056728, True, [], {}],
)
def test_what_is_no_time_is_absent(value: object) -> None:
    assert _clock("orders/updated", {"updated_at": value}) is None


@pytest.mark.parametrize(
    ("topic", "body"),
    [
        (
            "orders/edited",
            {"order_edit": {"committed_at": "2025-03-04", "created_at": "2024-01-01"}},
        ),
        ("orders/edited", {"order_edit": {"committed_at": None, "created_at": "2025-03-04"}}),
        ("refunds/create", {"processed_at": "2025-03-04", "created_at": "2024-01-01"}),
        ("order_transactions/create", {"processed_at": None, "created_at": "2025-03-04"}),
        ("customer.tags_added", {"occurredAt": "2025-03-04"}),
        ("discounts/delete", {"deleted_at": "2025-03-04", "updated_at": "2024-01-01"}),
        ("product_feeds/incremental_sync", {"metadata": {"occured_at": "2025-03-04"}}),
        ("product_listings/update", {"product_listing": {"updated_at": "2025-03-04"}}),
        ("audit_events/admin_api_activity", {"events": [{"time": 1741046400}]}),
        ("moons/risen", {"updated_at": "2025-03-04"}),
    ],
)
def test_a_clock_is_where_the_topics_rule_says(topic: str, body: dict[str, Any]) -> None:
    assert _clock(topic, body) == datetime(2025, 3, 4, tzinfo=UTC)


@pytest.mark.parametrize("seconds", [None, True, "1741046400", 10**30, -(10**30), []])
def test_seconds_since_1970_that_are_none_are_absent(seconds: object) -> None:
    body = {"events": [{"time": seconds}]}
    assert _clock("audit_events/admin_api_activity", body) is None


@pytest.mark.parametrize(
    "topic", ["orders/delete", "inventory_levels/disconnect", "app/uninstalled", "customers/redact"]
)
def test_where_the_rule_knows_no_clock_none_is_read(topic: str) -> None:
    assert _clock(topic, {"updated_at": "2025-03-04", "created_at": "2025-03-04"}) is None


# -- parsed


def test_every_snapshot_resource_has_fields() -> None:
    assert set(FIELDS) == {topic.resource for topic in TOPICS.values() if topic.table}


def test_an_order_is_parsed_into_what_people_query() -> None:
    order = _sample("orders/create")
    assert order["id"] == "9117305562284810243"
    assert order["customer_id"] == "9203318845570162779"
    assert order["admin_graphql_api_id"] == "gid://shopify/Order/9117305562284810243"
    assert (order["total_price"], order["total_shipping"]) == ("10600", "800")
    assert order["currency"] == "JPY"
    assert order["financial_status"] == "pending"
    assert order["email"] == "noe.ashgrove@example.com"
    assert order["created_at"] == "2025-03-04T02:52:07Z"
    assert order["line_items_count"] == 2
    assert order["tags"] == ["gift", "première commande"]


@pytest.mark.parametrize(
    ("topic", "parents"),
    [
        ("refunds/create", {"order_id": "9117305562284810243"}),
        ("fulfillments/create", {"order_id": "9117305562284810243"}),
        ("orders/edited", {"order_id": "9117305562284810243"}),
        (
            "inventory_levels/update",
            {"inventory_item_id": "9188240071563309461", "location_id": "71440923"},
        ),
        ("customer.tags_added", {"customer_id": "9203318845570162779"}),
    ],
)
def test_the_ids_of_parents_are_parsed_as_text(topic: str, parents: dict[str, str]) -> None:
    assert parents.items() <= _sample(topic).items()


@pytest.mark.parametrize("topic", ["orders/delete", "products/delete"])
def test_a_deletion_is_parsed_into_its_id_alone(topic: str) -> None:
    assert list(_sample(topic)) == ["id"]


@pytest.mark.parametrize("topic", ["shop/update", "orders/risk_assessment_changed"])
def test_a_topic_of_the_event_ledger_alone_is_parsed_into_ids_alone(topic: str) -> None:
    body = {"id": 7, "order_id": 7, "name": "Harbor", "created_at": "2025-03-04"}
    assert set(parsed(body, lookup(topic))) <= {"id", "order_id"}


def test_an_element_that_a_list_does_not_have_is_absent() -> None:
    assert "currency" not in _sample("refunds/create", transactions=[], total_duties_set=None)


def test_a_field_that_is_null_is_left_out_as_if_it_were_absent() -> None:
    assert "cancelled_at" not in _sample("orders/create", cancelled_at=None)


@pytest.mark.parametrize(
    ("value", "money"),
    [
        ("414.95", "414.95"),
        ("10600", "10600"),
        ("-0.50", "-0.50"),
        (0, "0"),
        (jsontext.Number("12.30"), "12.30"),
        ("12,30", None),
        ("twelve", None),
        ("1e400", None),
        ("", None),
        (True, None),
        ({}, None),
    ],
)
def test_money_is_decimal_text_to_the_digit_or_left_out(value: object, money: str | None) -> None:
    assert _sample("orders/create", total_price=value).get("total_price") == money


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created_at", "yesterday"),
        ("created_at", 17),
        ("order_number", "17"),
        ("order_number", True),
        ("test", "false"),
        ("tags", ["a"]),
        ("name", {"a": 1}),
        ("name", True),
        ("location_id", [1]),
        ("location_id", ""),
        ("admin_graphql_api_id", {"a": 1}),
    ],
)
def test_a_malformed_field_is_left_out(field: str, value: object) -> None:
    assert field not in _sample("orders/create", **{field: value})


def test_a_number_where_text_is_expected_is_given_as_text() -> None:
    assert _sample("orders/create", name=1047)["name"] == "1047"


def test_a_list_that_is_none_is_not_counted() -> None:
    assert "line_items_count" not in _sample("orders/create", line_items={"0": {}})


@given(st.sampled_from(sorted(TOPICS)), st.data())
def test_whatever_a_body_holds_it_is_parsed_into_json_without_a_float(
    topic: str, data: st.DataObject
) -> None:
    columns = lookup(topic)
    rules = [*columns.id, *columns.clock, *(r for rules in columns.parents.values() for r in rules)]
    rules += [r for field in FIELDS.get(columns.resource, ()) for r in field.rules]
    keys = sorted({part.strip("#@").split(".")[0] for rule in rules for part in rule.split("+")})
    body = data.draw(st.dictionaries(st.sampled_from([*keys, "other"]), ANYTHING))
    instant(body, columns.clock)
    found = parsed(body, columns)
    assert found == json.loads(json.dumps(found), parse_float=pytest.fail)
