"""Invented orders of 4.4 KB, as many as wanted, alike but for their ids."""

import hashlib
import json
import random
from datetime import UTC, datetime
from typing import Any, Final

from shared.model import Envelope, Source

SHOP: Final = "bench.myshopify.com"
TOPIC: Final = "orders/updated"
RESOURCES: Final = 1000
EVENT_IDS: Final = 10**15  # from here to ten times as much: all of one length
FIRST_ID: Final = 5_000_000_000_000
_BODY_BYTES: Final = 4_400
_MOMENT: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)


def body(order_id: int) -> bytes:
    """One order as JSON without spaces, of exactly 4,400 bytes."""
    order = _order(order_id)
    order["note"] = "n" * (_BODY_BYTES - len(_json(order)))
    return _json(order)


def envelopes(count: int) -> list[Envelope]:
    """Envelopes with ids of their own over RESOURCES orders."""
    bodies = [body(FIRST_ID + n) for n in range(RESOURCES)]
    digests = [hashlib.sha256(text).digest() for text in bodies]
    chosen = (random.randrange(RESOURCES) for _ in range(count))  # noqa: S311 - no secret
    return [envelope(bodies[n], digests[n], _event_id()) for n in chosen]


def envelope(payload: bytes, digest: bytes, event_id: str) -> Envelope:
    """What the subscriber makes of a delivery that came through the webhook."""
    return Envelope(
        event_id=event_id,
        shop_domain=SHOP,
        topic=TOPIC,
        source=Source.WEBHOOK,
        payload=payload,
        payload_sha256=digest,
        received_at=_MOMENT,
        source_event_id="0b1f4c1e-5f3c-4a62-9d6e-2f1f7f3b9a10",
        api_version="2026-10",
        triggered_at=_MOMENT,
        published_at=_MOMENT,
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    )


def _event_id() -> str:
    return str(random.randrange(EVENT_IDS, 10 * EVENT_IDS))  # noqa: S311 - no secret


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _money(amount: str) -> dict[str, Any]:
    return {
        "shop_money": {"amount": amount, "currency_code": "EUR"},
        "presentment_money": {"amount": amount, "currency_code": "EUR"},
    }


def _line_item(number: int) -> dict[str, Any]:
    return {
        "id": 9_100_000_000_000 + number,
        "admin_graphql_api_id": f"gid://shopify/LineItem/{9_100_000_000_000 + number}",
        "title": f"Bench article {number}",
        "sku": f"BENCH-{number}",
        "vendor": "Bench & Daughters",
        "quantity": number + 1,
        "price": "19.90",
        "price_set": _money("19.90"),
        "product_id": 7_100_000_000_000 + number,
        "variant_id": 8_100_000_000_000 + number,
        "taxable": True,
        "tax_lines": [{"title": "VAT", "rate": 0.19, "price": "3.18", "price_set": _money("3.18")}],
        "properties": [],
    }


def _address() -> dict[str, Any]:
    return {
        "first_name": "Ada",
        "last_name": "Bench",
        "address1": "1 Invented Street",
        "city": "Nowhere",
        "zip": "00000",
        "country": "Germany",
        "country_code": "DE",
        "latitude": 52.5,
        "longitude": 13.25,
    }


def _order(order_id: int) -> dict[str, Any]:
    totals = ("total_price", "subtotal_price", "total_tax", "total_discounts")
    return {
        "id": order_id,
        "admin_graphql_api_id": f"gid://shopify/Order/{order_id}",
        "app_id": 4_410_277,
        "name": "#1001",
        "order_number": 1001,
        "email": "ada@example.com",
        "created_at": "2026-11-30T12:58:00+01:00",
        "updated_at": "2026-11-30T12:59:00+01:00",
        "processed_at": "2026-11-30T12:58:00+01:00",
        "closed_at": None,
        "cancelled_at": None,
        "cancel_reason": None,
        "currency": "EUR",
        "presentment_currency": "EUR",
        "financial_status": "paid",
        "fulfillment_status": None,
        "confirmed": True,
        "test": False,
        "taxes_included": True,
        "source_name": "web",
        "customer_locale": "de",
        "tags": "bench, invented",
        **dict.fromkeys(totals, "39.80"),
        **{f"{name}_set": _money("39.80") for name in totals},
        "total_shipping_price_set": _money("4.90"),
        "customer": {"id": 6_100_000_000_000, "email": "ada@example.com", "state": "enabled"},
        "billing_address": _address(),
        "shipping_address": _address(),
        "line_items": [_line_item(number) for number in range(4)],
        "fulfillments": [],
        "refunds": [],
        "note": "",
    }
