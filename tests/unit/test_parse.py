"""From an envelope to an event: any JSON object becomes one, and its text is not touched."""

import json
import os
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest

from dev import samples
from shared.model import Envelope, Event, Source
from shared.parse import claimed_shop, parse
from shared.topics import TOPICS, lookup

RECEIVED = datetime(2026, 5, 1, 12, tzinfo=UTC)
PUBLISHED = RECEIVED - timedelta(seconds=2)
TRIGGERED = RECEIVED - timedelta(seconds=4)
PAYLOADS = os.environ.get("HOOKLEDGER_PAYLOADS", "")


def _envelope(
    body: bytes,
    topic: str = "orders/updated",
    *,
    triggered_at: datetime | None = TRIGGERED,
    published_at: datetime | None = PUBLISHED,
) -> Envelope:
    return Envelope(
        event_id="d-1",
        shop_domain=samples.SHOP_DOMAIN,
        topic=topic,
        source=Source.WEBHOOK,
        payload=body,
        payload_sha256=sha256(body).digest(),
        received_at=RECEIVED,
        triggered_at=triggered_at,
        published_at=published_at,
    )


def _parse(body: str, topic: str = "orders/updated") -> Event:
    return parse(_envelope(body.encode(), topic))


@pytest.mark.parametrize("topic", samples.topics())
def test_every_sample_becomes_an_event_with_its_own_bytes_as_text(topic: str) -> None:
    body = samples.load(topic)
    event = parse(_envelope(body, topic))
    assert (event.topic, event.table) == (topic, TOPICS[topic].table)
    assert event.resource_id is not None
    assert event.payload.encode() == body
    assert event.payload_raw is None


def test_an_event_bears_its_topics_resource_operation_and_snapshot() -> None:
    event = _parse('{"id": 7}', "orders/create")
    assert (event.resource_type, event.event_type) == ("orders", "create")
    assert (event.table, event.resource_id) == ("shopify_orders", "7")


@pytest.mark.parametrize(
    ("topic", "deleted"),
    [
        ("orders/delete", True),
        ("inventory_levels/disconnect", True),
        ("orders/cancelled", False),
        ("domains/destroy", False),
    ],
)
def test_a_deletion_is_marked(topic: str, deleted: bool) -> None:
    assert _parse('{"id": 7}', topic).is_deleted is deleted


def test_an_unknown_topic_becomes_an_event_for_the_ledger_alone() -> None:
    event = _parse('{"id": 7}', "moons/risen")
    assert (event.resource_type, event.event_type, event.table) == ("moons", "risen", None)
    assert event.resource_id == "7"


def test_the_bodys_own_clock_comes_first() -> None:
    event = _parse('{"id": 7, "updated_at": "2025-03-04T11:52:08+09:00"}')
    assert event.source_updated_at == datetime(2025, 3, 4, 2, 52, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("triggered_at", "published_at", "clock"),
    [
        (TRIGGERED, PUBLISHED, TRIGGERED),
        (None, PUBLISHED, PUBLISHED),
        (None, None, RECEIVED),
    ],
)
@pytest.mark.parametrize("body", [b'{"id": 7}', b'{"updated_at": null}', b'{"updated_at": "?"}'])
def test_without_a_clock_in_the_body_it_is_triggered_at_then_publish_time_then_receipt(
    body: bytes, triggered_at: datetime | None, published_at: datetime | None, clock: datetime
) -> None:
    envelope = _envelope(body, triggered_at=triggered_at, published_at=published_at)
    assert parse(envelope).source_updated_at == clock


@pytest.mark.parametrize(
    "body",
    [
        r'{"id":7,"a":"\u2028 \/ \u0026","a" :  1.10}',
        '{"id": 820982911946154508, "x": 0.1000000000000000055511151231257827}',
        '{ "note": "été 🐈" }\n',
    ],
)
def test_the_payload_is_the_bodys_own_text(body: str) -> None:
    event = _parse(body)
    assert event.payload == body
    assert event.payload_raw is None


def test_what_jsonb_cannot_hold_is_replaced_everywhere_and_the_bytes_are_kept() -> None:
    body = r'{"id": "7\u0000", "a\ud83d": "\\u0000", "name": "x\uDE00"}'
    event = _parse(body)
    assert event.payload == r'{"id": "7\ufffd", "a\ufffd": "\\u0000", "name": "x\ufffd"}'
    assert event.payload_raw == body.encode()
    assert event.resource_id == "7\ufffd"
    assert event.parsed == {"id": "7\ufffd", "name": "x\ufffd"}


def test_a_byte_order_mark_is_stripped_and_the_bytes_are_kept() -> None:
    event = parse(_envelope(b'\xef\xbb\xbf{"id": 7}'))
    assert event.payload == '{"id": 7}'
    assert event.payload_raw == b'\xef\xbb\xbf{"id": 7}'


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 10**30 + 1])
def test_ids_beyond_every_machine_number_are_exact_everywhere(number: int) -> None:
    event = _parse(f'{{"id": {number}, "customer": {{"id": {number}}}}}')
    assert event.resource_id == event.parsed["id"] == event.parsed["customer_id"] == str(number)
    assert json.loads(event.payload)["id"] == number


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'"x"', b"17", b"{", b'{"a": NaN}', b"\xff", b'{"a":' * 100_000]
)
def test_a_body_that_is_no_json_object_is_a_plain_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"^The body is ") as caught:
        parse(_envelope(body))
    assert type(caught.value) is ValueError


# -- claimed_shop


@pytest.mark.parametrize(
    ("body", "shop"),
    [
        ('{"myshopify_domain": "a.myshopify.com"}', "a.myshopify.com"),
        ('{"shop_domain": "a.myshopify.com"}', "a.myshopify.com"),
        ('{"shop_domain": "A.MyShopify.com"}', "a.myshopify.com"),
        (
            '{"shop_domain": "b.myshopify.com", "myshopify_domain": "a.myshopify.com"}',
            "a.myshopify.com",
        ),
        ('{"myshopify_domain": null, "shop_domain": "a.myshopify.com"}', "a.myshopify.com"),
        ('{"shop_domain": "a.example.com"}', None),
        ('{"shop_domain": "{shop}.myshopify.com"}', None),
        ('{"shop_domain": "a.myshopify.com.example.com"}', None),
        ('{"shop_domain": 17}', None),
        ('{"shop": {"shop_domain": "a.myshopify.com"}}', None),
        ('{"note": "shop_domain"}', None),
        ('{"id": 1}', None),
        ('["shop_domain"]', None),
        ('{"shop_domain": "a.myshopify.com"', None),
        ("", None),
    ],
)
def test_a_body_names_its_shop_at_its_top_or_not_at_all(body: str, shop: str | None) -> None:
    assert claimed_shop(body.encode()) == shop


def test_a_body_without_such_a_key_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.jsontext.read", pytest.fail)
    assert claimed_shop(b'{"id": 1}') is None


# -- a folder of captured payloads, where there is one


def _topics_of(path: Path) -> list[str]:
    """`orders__create.json` is one topic; `orders__1.json` may be of any of its resource."""
    resource, _, operation = path.stem.partition("__")
    if not operation.isdecimal():
        return [path.stem.replace("__", "/")]
    return [name for name in TOPICS if lookup(name).resource == resource]


@pytest.mark.skipif(not PAYLOADS, reason="HOOKLEDGER_PAYLOADS names no folder of payloads")
def test_every_captured_payload_becomes_an_event_of_a_known_topic() -> None:
    paths = sorted(Path(PAYLOADS).glob("*/*.json"))
    assert paths
    for path in paths:
        topics = _topics_of(path)
        assert topics, path.name
        for topic in topics:
            event = parse(_envelope(path.read_bytes(), topic))
            assert topic in TOPICS, path.name
            assert event.payload.encode() == path.read_bytes(), path.name
            assert json.loads(json.dumps(event.parsed)) == event.parsed, path.name
