"""An envelope becomes an event: the body read once, its clock and resource found, its text kept."""

from typing import Any, Final

from shared import fields, jsontext, topics
from shared.envelope import is_shop_domain
from shared.errors import ShopMismatchError
from shared.model import Envelope, Event

_SHOP_KEYS: Final = ("myshopify_domain", "shop_domain")


def parse(envelope: Envelope) -> Event:
    """The event in an opened envelope.

    `source_updated_at` is the body's own clock by the topic's rule, else triggered-at, publish
    time, receipt. `resource_id` is None where the body names no id. `parsed` is `fields.parsed`.

    Raises ValueError, never with anything from the payload in it, when the payload is not a JSON
    object. Whatever the object holds beyond that, an event comes out.
    """
    topic = topics.lookup(envelope.topic)
    text, body = _object(envelope.payload)
    return Event(
        topic=topic.name,
        resource_type=topic.resource,
        event_type=topic.operation,
        table=topic.table,
        resource_id=fields.resource_id(body, topic.id),
        is_deleted=topic.is_deletion,
        source_updated_at=fields.instant(body, topic.clock)
        or envelope.triggered_at
        or envelope.published_at
        or envelope.received_at,
        payload=text,
        payload_raw=envelope.payload if text.encode() != envelope.payload else None,
        parsed=fields.parsed(body, topic),
    )


def check_shop(envelope: Envelope) -> None:
    """Raises ShopMismatchError when the body itself names another shop.

    The signature covers the body only, so the shop in a header or attribute is but a claim.
    """
    claimed = claimed_shop(envelope.payload)
    if claimed is not None and claimed != envelope.shop_domain:
        raise ShopMismatchError(
            "The body names another shop than the header or attribute. It is not stored under "
            "either; find out who sent it."
        )


def claimed_shop(body: bytes) -> str | None:
    """The shop that a body itself names at its top, in lower case; None where it names none.

    Only a `*.myshopify.com` name counts: other values are custom domains, or placeholders.
    """
    if not any(key.encode() in body for key in _SHOP_KEYS):
        return None
    try:
        _, value = _object(body)
    except ValueError:
        return None
    named = (value.get(key) for key in _SHOP_KEYS)
    shops = (name.lower() for name in named if isinstance(name, str))
    return next((shop for shop in shops if is_shop_domain(shop)), None)


def _object(body: bytes) -> tuple[str, dict[str, Any]]:
    text, value = jsontext.read(body)
    if not isinstance(value, dict):
        raise ValueError("The body is JSON, but not an object.")  # noqa: TRY004 - it is the contract
    return text, value
