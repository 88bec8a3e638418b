"""Deliveries as Shopify sends them: signed, with its headers, over HTTP."""

import http.client
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from shared import signature

TIMEOUT_SECONDS = 60
API_VERSION = "2026-04"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a function answered."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body read as JSON."""
        return json.loads(self.body)


def attributes(topic: str, shop_domain: str, *, event_id: str | None = None) -> dict[str, str]:
    """Shopify's headers, which are its Pub/Sub attributes too, for a new event."""
    return {
        "X-Shopify-Topic": topic,
        "X-Shopify-Shop-Domain": shop_domain,
        "X-Shopify-Webhook-Id": event_id or str(uuid.uuid4()),
        "X-Shopify-Event-Id": str(uuid.uuid4()),
        "X-Shopify-Triggered-At": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "X-Shopify-API-Version": API_VERSION,
    }


def signed(headers: Mapping[str, str], body: bytes, client_secret: str) -> dict[str, str]:
    """`headers` with the signature of `body`."""
    return {
        **headers,
        "Content-Type": "application/json",
        "X-Shopify-Hmac-Sha256": signature.header(body, client_secret),
    }


def post(url: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
    """POSTs `body` to `url` (http only) and waits for the answer."""
    return request("POST", url, body, headers)


def request(
    method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """Any request to `url` (http only), and its answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(method, parts.path or "/", body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(status=response.status, body=response.read())
    finally:
        connection.close()
