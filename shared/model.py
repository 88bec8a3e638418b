"""The things that flow: an envelope comes in, an event is made of it, an outcome comes back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any


class Source(StrEnum):
    """Where an event came in: through our webhook, or natively from Shopify's Pub/Sub."""

    WEBHOOK = "webhook"
    PUBSUB = "pubsub"


class Encoding(StrEnum):
    """What is still to be undone before `Envelope.payload` is the body."""

    NONE = ""
    BASE64 = "base64"
    GZIP = "gzip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A payload and all that is needed to route and replay it.

    Text is clean (no NUL, no lone surrogate) and short enough for an index; times are aware.
    """

    event_id: str  # X-Shopify-Webhook-Id, or "sha256:…" where there is none
    shop_domain: str  # "" when unknown
    topic: str  # "" when unknown
    source: Source
    payload: bytes  # the body, byte for byte, once `encoding` is undone
    payload_sha256: bytes  # of the payload, 32 bytes
    received_at: datetime  # our receipt
    encoding: Encoding = Encoding.NONE
    source_event_id: str | None = None  # X-Shopify-Event-Id: correlates, never identifies
    api_version: str | None = None
    triggered_at: datetime | None = None
    published_at: datetime | None = None
    message_id: str | None = None
    delivery_attempt: int | None = None
    trace_id: str | None = None
    audited: bool = True  # false: the subscriber still owes the audit row
    attributes: Mapping[str, str] = field(default_factory=dict)  # as they came


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What parsing makes of an envelope: ready to be stored in one statement."""

    topic: str
    resource_type: str
    event_type: str  # the topic's operation
    table: str | None  # the snapshot table; None: event ledger only
    resource_id: str | None  # None: event ledger only
    is_deleted: bool
    source_updated_at: datetime  # the clock of the source version, never missing
    payload: str  # the body's own JSON text, with what jsonb cannot hold replaced
    payload_raw: bytes | None  # the exact bytes, where `payload` had to differ from them
    parsed: Mapping[str, Any]  # normalised fields, JSON-ready


class LedgerOutcome(StrEnum):
    """What a store did to the event ledger. A collision is an error instead."""

    INSERTED = "inserted"
    DUPLICATE = "duplicate"
    SUPPRESSED = "suppressed"  # from before its subject was erased: it holds the identity only


class SnapshotOutcome(StrEnum):
    """What a store did to the snapshot."""

    INSERTED = "inserted"
    UPDATED = "updated"
    STALE = "stale"  # it held this state, or a newer one, already
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one store did."""

    ledger: LedgerOutcome
    snapshot: SnapshotOutcome
