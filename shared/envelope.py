"""Envelopes: made of a webhook's headers and body, or of a message; kept in the failure ledger."""

import binascii
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from shared.errors import UndecodableMessageError
from shared.message import Message
from shared.model import Encoding, Envelope, Source
from shared.text import KEY_CHARACTERS, clean

# Shopify's own casing of what it sends; other X-Shopify-* names are cased word by word.
_SHOPIFY_CASING: Final = {
    name.lower(): name
    for name in (
        "X-Shopify-API-Version",
        "X-Shopify-Event-Id",
        "X-Shopify-Hmac-Sha256",
        "X-Shopify-Name",
        "X-Shopify-Shop-Domain",
        "X-Shopify-Topic",
        "X-Shopify-Triggered-At",
        "X-Shopify-Webhook-Id",
    )
}
VERSION: Final = "1"
COMPRESS_OVER_BYTES: Final = 1024 * 1024
# Pub/Sub takes 10 MB a request; the attributes need room beside the data.
MESSAGE_DATA_BYTES: Final = 9_500_000
# No request to Cloud Run is larger, so no body that we compressed was.
BODY_BYTES: Final = 32 * 1024 * 1024
ATTRIBUTE_VALUE_BYTES: Final = 1024
ATTRIBUTES_MAX: Final = 90

_ENCODING: Final = "content-encoding"
_SHOP_DOMAIN = re.compile(r"[a-z0-9][a-z0-9-]*\.myshopify\.com")
_TOPIC = re.compile(r"[a-z0-9_]+[/.][a-z0-9_]+")
_ID = re.compile(r"[A-Za-z0-9:#_.-]{1,300}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
_CLOUD_TRACE = re.compile(r"([0-9a-fA-F]{32})(?:/.*)?")


def from_webhook(
    headers: Iterable[tuple[str, str]], body: bytes, received_at: datetime
) -> Envelope:
    """The envelope of a delivery over HTTPS, as it will look to the subscriber."""
    lower = _lower(headers)
    # Those that are known come first: none of them is left out for another.
    named = sorted(_shopifys(lower), key=lambda name: name not in _SHOPIFY_CASING)
    attributes = {_cased(name): _cut(lower[name]) for name in named if len(name) <= KEY_CHARACTERS}
    return _envelope(
        lower,
        body,
        attributes=dict(list(attributes.items())[:ATTRIBUTES_MAX]),
        received_at=received_at,
        source=Source.WEBHOOK,
    )


def not_whole(headers: Iterable[tuple[str, str]], envelope: Envelope) -> int:
    """How many of Shopify's headers Pub/Sub's limits have cut or left out of `envelope`."""
    lower = _lower(headers)
    kept = envelope.attributes
    return sum(kept.get(_cased(name)) != lower[name] for name in _shopifys(lower))


def from_message(message: Message, now: datetime) -> Envelope:
    """The envelope of a Pub/Sub message. Whatever the message holds, an envelope comes out.

    Data that cannot be decoded stays as it is, and `opened` says why when it is asked.
    """
    lower = _lower(message.attributes.items())
    payload, encoding = _body(message.data, lower.get(_ENCODING, ""))
    ours = lower.get("hookledger-source") == Source.WEBHOOK
    envelope = _envelope(
        lower,
        payload,
        attributes={clean(name): clean(value) for name, value in message.attributes.items()},
        received_at=(timestamp(lower.get("hookledger-received-at")) if ours else None) or now,
        source=Source.WEBHOOK if ours else Source.PUBSUB,
    )
    return replace(
        envelope,
        encoding=encoding,
        published_at=timestamp(message.publish_time),
        message_id=_key(clean(message.message_id or "")) or None,
        delivery_attempt=message.delivery_attempt,
        audited=not ours or lower.get("hookledger-audited") != "false",
    )


def may_be_large(message: Message) -> bool:
    """Whether more than COMPRESS_OVER_BYTES may come out of the message: a few kilobytes may be a
    bomb."""
    encodings = (v for k, v in message.attributes.items() if clean(k).lower() == _ENCODING)
    return len(message.data) > COMPRESS_OVER_BYTES or any(encodings)


def message_data(envelope: Envelope) -> bytes:
    """The data of the message that carries `envelope`: its body, compressed when it is large."""
    if len(envelope.payload) <= COMPRESS_OVER_BYTES:
        return envelope.payload
    # Level 1: a few hundred kilobytes saved, and the shop is waiting for its answer. No clock in
    # the header: the same body makes the same bytes.
    return gzip.compress(envelope.payload, compresslevel=1, mtime=0)


def message_attributes(envelope: Envelope) -> dict[str, str]:
    """The attributes of the message that carries `envelope`: Shopify's, and our own."""
    attributes = {
        **envelope.attributes,
        "hookledger-version": VERSION,
        "hookledger-source": envelope.source.value,
        "hookledger-audited": "true" if envelope.audited else "false",
        "hookledger-received-at": envelope.received_at.isoformat(),
    }
    if envelope.trace_id:
        attributes["traceparent"] = f"00-{envelope.trace_id}-{envelope.trace_id[:16]}-01"
    if len(envelope.payload) > COMPRESS_OVER_BYTES:
        attributes[_ENCODING] = "gzip"
    return attributes


def ids(envelope: Envelope) -> dict[str, str | None]:
    """What a log line may say of an envelope: what is an id or a name by its form, and no more."""
    return {
        "event_id": envelope.event_id if _ID.fullmatch(envelope.event_id) else None,
        "shop_domain": envelope.shop_domain if is_shop_domain(envelope.shop_domain) else None,
        "topic": envelope.topic if is_topic(envelope.topic) else None,
        "trace_id": envelope.trace_id,
    }


def opened(envelope: Envelope) -> Envelope:
    """`envelope` with its payload decoded; raises UndecodableMessageError where that cannot be."""
    match envelope.encoding:
        case Encoding.NONE:
            return envelope
        case Encoding.BASE64:
            raise UndecodableMessageError(
                "The message's data is not base64, so nobody can read it. Correct the publisher."
            )
        case Encoding.GZIP:
            raise UndecodableMessageError(
                "The message says content-encoding gzip, but its data is not gzip of at most "
                f"{BODY_BYTES} bytes, so nobody can read it. Correct the publisher."
            )


def collided(envelope: Envelope) -> Envelope:
    """`envelope` under an id of its own, for a second body that came under a known event id."""
    suffix = f"#{envelope.payload_sha256.hex()[:16]}"
    return replace(envelope, event_id=envelope.event_id.removesuffix(suffix) + suffix)


def uncollided(envelope: Envelope) -> Envelope:
    """`envelope` under the id that it was delivered with."""
    suffix = f"#{envelope.payload_sha256.hex()[:16]}"
    return replace(envelope, event_id=envelope.event_id.removesuffix(suffix))


def to_json(envelope: Envelope) -> dict[str, Any]:
    """All of an envelope but its payload, for the failure ledger's `envelope` column."""
    return {
        "event_id": envelope.event_id,
        "shop_domain": envelope.shop_domain,
        "topic": envelope.topic,
        "source": envelope.source.value,
        "encoding": envelope.encoding.value,
        "received_at": envelope.received_at.isoformat(),
        "source_event_id": envelope.source_event_id,
        "api_version": envelope.api_version,
        "triggered_at": _iso(envelope.triggered_at),
        "published_at": _iso(envelope.published_at),
        "message_id": envelope.message_id,
        "delivery_attempt": envelope.delivery_attempt,
        "trace_id": envelope.trace_id,
        "audited": envelope.audited,
        "attributes": dict(envelope.attributes),
    }


def from_json(kept: Mapping[str, Any], payload: bytes) -> Envelope:
    """The envelope that `to_json` wrote, with its payload: a replay sees what the first try saw."""
    received_at = timestamp(kept["received_at"])
    assert received_at is not None
    return Envelope(
        event_id=kept["event_id"],
        shop_domain=kept["shop_domain"],
        topic=kept["topic"],
        source=Source(kept["source"]),
        payload=payload,
        payload_sha256=hashlib.sha256(payload).digest(),
        received_at=received_at,
        encoding=Encoding(kept["encoding"]),
        source_event_id=kept["source_event_id"],
        api_version=kept["api_version"],
        triggered_at=timestamp(kept["triggered_at"]),
        published_at=timestamp(kept["published_at"]),
        message_id=kept["message_id"],
        delivery_attempt=kept["delivery_attempt"],
        trace_id=kept["trace_id"],
        audited=kept["audited"],
        attributes=kept["attributes"],
    )


def is_shop_domain(text: str) -> bool:
    """Whether `text` is a `*.myshopify.com` name, in lower case."""
    return len(text) <= KEY_CHARACTERS and _SHOP_DOMAIN.fullmatch(text) is not None


def is_topic(text: str) -> bool:
    """Whether `text` has the form of a topic: `word/word` or `word.word`."""
    return len(text) <= KEY_CHARACTERS and _TOPIC.fullmatch(text) is not None


def timestamp(text: object) -> datetime | None:
    """An ISO 8601 time as an instant in UTC (a time without offset is UTC), or None."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def trace_id(lower: Mapping[str, str]) -> str | None:
    """The trace that a request or message belongs to: 32 hex digits, or None."""
    if found := _TRACEPARENT.fullmatch(lower.get("traceparent", "")):
        return found.group(1)
    if found := _CLOUD_TRACE.fullmatch(lower.get("x-cloud-trace-context", "")):
        return found.group(1).lower()
    return None


def _envelope(
    lower: Mapping[str, str],
    payload: bytes,
    *,
    attributes: Mapping[str, str],
    received_at: datetime,
    source: Source,
) -> Envelope:
    shop = _key(lower.get("x-shopify-shop-domain", "").strip().lower())
    topic = _key(lower.get("x-shopify-topic", "").strip())
    triggered_at = _cut(lower.get("x-shopify-triggered-at", ""))
    webhook_id = lower.get("x-shopify-webhook-id", "").strip()
    if not webhook_id or len(webhook_id) > KEY_CHARACTERS:
        webhook_id = _identity(shop, topic, triggered_at, payload)
    return Envelope(
        event_id=webhook_id,
        shop_domain=shop,
        topic=topic,
        source=source,
        payload=payload,
        payload_sha256=hashlib.sha256(payload).digest(),
        received_at=received_at,
        source_event_id=_key(lower.get("x-shopify-event-id", "")) or None,
        api_version=_key(lower.get("x-shopify-api-version", "")) or None,
        triggered_at=timestamp(triggered_at),
        trace_id=trace_id(lower),
        attributes=attributes,
    )


def _lower(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names in lower case, clean values; of names alike but for case, the first with a value."""
    lower: dict[str, str] = {}
    for name, value in pairs:
        key = clean(name).lower()
        lower[key] = lower.get(key) or clean(value)
    return lower


def _shopifys(lower: Mapping[str, str]) -> list[str]:
    return [name for name in lower if name.startswith("x-shopify-")]


def _cased(name: str) -> str:
    return _SHOPIFY_CASING.get(name, name.title())


def _identity(shop: str, topic: str, triggered_at: str, payload: bytes) -> str:
    parts = [shop.encode(), topic.encode(), triggered_at.encode(), payload]
    return "sha256:" + hashlib.sha256(b"\x00".join(parts)).hexdigest()


def _body(data: str | bytes, content_encoding: str) -> tuple[bytes, Encoding]:
    """The body in a message's base64 data, or the data as it came and what could not be undone."""
    raw = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    try:
        decoded = binascii.a2b_base64(raw, strict_mode=True)
    except (binascii.Error, ValueError):
        return raw, Encoding.BASE64
    if content_encoding.strip().lower() != "gzip":
        return decoded, Encoding.NONE
    try:
        return _gunzip(decoded), Encoding.NONE
    except (zlib.error, EOFError, ValueError):
        return decoded, Encoding.GZIP


def _gunzip(data: bytes) -> bytes:
    """gzip undone, of at most BODY_BYTES: a small message must not fill the memory."""
    stream = zlib.decompressobj(wbits=31)
    body = stream.decompress(data, BODY_BYTES)
    if not stream.eof or stream.unused_data:
        raise EOFError
    return body


def _key(text: str) -> str:
    """`text` for an index; what had to be cut is no name any more, and looks like none."""
    return text if len(text) <= KEY_CHARACTERS else text[: KEY_CHARACTERS - 1] + "…"


def _cut(value: str) -> str:
    """A header's value as Pub/Sub takes it: at most 1,024 bytes."""
    return value.encode()[:ATTRIBUTE_VALUE_BYTES].decode("utf-8", "ignore")


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None
