"""A tenant's event ledger, as somebody reads it who looks for one event."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import class_row, scalar_row

from shared import topics

# The newest by the key: arrival has an index within a topic only.
_LIST: Final = """
select id, event_id, shop_domain, topic, resource_id, received_at, inserted_at,
       payload is null as is_emptied
from shopify_events
where organization_id = %(organization)s
  and (%(shop)s::text is null or shop_domain = %(shop)s)
  and (%(topic)s::text is null or topic = %(topic)s)
  and (%(resource)s::text is null or resource_type = %(resource)s)
  and (%(resource_id)s::text is null or resource_id = %(resource_id)s)
  and (%(since)s::timestamptz is null or received_at >= %(since)s)
  and (%(until)s::timestamptz is null or received_at < %(until)s)
order by id desc limit %(limit)s"""

_SHOW: Final = """
select id, event_id, source_event_id, organization_id::text as organization_id, shop_domain, topic,
       event_type, resource_type, resource_id, api_version, triggered_at, source_updated_at,
       received_at, inserted_at, payload_sha256, trace_id, parsed_payload,
       payload is null as is_emptied
from shopify_events
where organization_id = %(organization)s and event_id = %(event_id)s
  and (%(shop)s::text is null or shop_domain = %(shop)s)
order by id"""

_PAYLOAD: Final = """
select coalesce(payload_raw, convert_to(payload::text, 'UTF8')) from shopify_events
where id = %(id)s"""

_SNAPSHOT: Final = """
select topic, event_type, event_id, is_deleted, source_updated_at, first_seen_at, last_seen_at
from {table}
where organization_id = %(organization)s and shop_domain = %(shop)s
  and shopify_id = %(resource_id)s"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which events; None is no condition."""

    organization: str
    shop: str | None = None
    topic: str | None = None
    resource: str | None = None  # as in the topic: orders
    resource_id: str | None = None
    since: datetime | None = None  # by our receipt
    until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One event in a list."""

    id: int
    event_id: str
    shop_domain: str
    topic: str
    resource_id: str | None
    received_at: datetime
    inserted_at: datetime
    is_emptied: bool  # retention or an erasure took its payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """All of an event but its payload."""

    id: int
    event_id: str
    source_event_id: str | None
    organization_id: str
    shop_domain: str
    topic: str
    event_type: str
    resource_type: str
    resource_id: str | None
    api_version: str | None
    triggered_at: datetime | None
    source_updated_at: datetime | None
    received_at: datetime
    inserted_at: datetime
    payload_sha256: bytes | None
    trace_id: str | None
    parsed_payload: dict[str, Any] | None
    is_emptied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The newest state of an event's resource, without its payload."""

    topic: str
    event_type: str
    event_id: str | None  # the event whose state it is
    is_deleted: bool
    source_updated_at: datetime | None
    first_seen_at: datetime
    last_seen_at: datetime


def find(connection: psycopg.Connection[Any], scope: Scope, *, limit: int) -> list[Listed]:
    """The newest events of that scope."""
    named = {name: getattr(scope, name) for name in Scope.__dataclass_fields__}
    with connection.cursor(row_factory=class_row(Listed)) as cursor:
        return cursor.execute(_LIST, named | {"limit": limit}).fetchall()


def show(
    connection: psycopg.Connection[Any], organization: str, event_id: str, shop: str | None = None
) -> list[Shown]:
    """The events of that id: one, unless two shops of the organization have the same."""
    named = {"organization": organization, "event_id": event_id, "shop": shop}
    with connection.cursor(row_factory=class_row(Shown)) as cursor:
        return cursor.execute(_SHOW, named).fetchall()


def payload(connection: psycopg.Connection[Any], row: int) -> bytes | None:
    """The body: the exact bytes where they were kept, else the JSON value; None: it was taken."""
    with connection.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(_PAYLOAD, {"id": row}).fetchone()


def snapshot(connection: psycopg.Connection[Any], event: Shown) -> Snapshot | None:
    """The newest state of what the event is about, if its topic has snapshots."""
    table = topics.lookup(event.topic).table
    if table is None or event.resource_id is None:
        return None
    named = {
        "organization": event.organization_id,
        "shop": event.shop_domain,
        "resource_id": event.resource_id,
    }
    with connection.cursor(row_factory=class_row(Snapshot)) as cursor:
        return cursor.execute(
            sql.SQL(_SNAPSHOT).format(table=sql.Identifier(table)), named
        ).fetchone()
