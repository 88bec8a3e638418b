"""What the databases hold of a subject: read page by page, and emptied page by page.

A page is a bounded number of rows from a place on; what the database can tell of them cheaply it
tells, and whom an event is about is decided here, by the same rule that stores go by.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import class_row, scalar_row

from shared import envelope as envelopes
from shared import fields, jsontext, subjects, topics
from shared.subjects import Hasher, Kind, Subject

PAGE_ROWS: Final = 500
PAGE_BYTES: Final = 8 * 1024 * 1024

EVENTS: Final = "shopify_events"
# Where orders are found that belong to a customer, and what may hold anything of a customer.
OF_ORDERS: Final = (EVENTS, "shopify_orders", "shopify_draft_orders", "shopify_checkouts")
SNAPSHOTS: Final = (
    "shopify_customers",
    "shopify_orders",
    "shopify_draft_orders",
    "shopify_checkouts",
    "shopify_fulfillments",
    "shopify_refunds",
    "shopify_order_transactions",
)
OTHER_SNAPSHOTS: Final = tuple(sorted(topics.SNAPSHOT_TABLES - set(SNAPSHOTS)))
FAILED: Final = "subscriber_subscriberfailedevent"
AUDIT: Final = "shopify_shopifyevent"

_WINDOW: Final = """
select max(id) from (select id from {table} where id > %(after)s order by id limit %(rows)s) w"""

# The row's own clock, or that it was there: some bodies have clocks of the future.
_EVENT_PAGE: Final = """
select id, topic, event_id, resource_id,
       case when not %(is_all)s then payload::text end as payload,
       case when not %(is_all)s then parsed_payload end as parsed,
       num_nonnulls(payload, parsed_payload, payload_raw) > 0 as is_full
from shopify_events
where id > %(after)s and id <= %(bound)s and shop_domain = %(shop)s
  and (greatest(coalesce(source_updated_at, received_at), triggered_at) <= %(until)s
       or inserted_at <= %(until)s)
  and (%(is_all)s or event_id = %(event_id)s or resource_id = any(%(ids)s)
       or lower(payload::text) like any(%(needles)s)
       or lower(parsed_payload::text) like any(%(needles)s))
order by id"""

_SNAPSHOT_PAGE: Final = """
select id, topic, event_id, shopify_id as resource_id,
       case when not %(is_all)s then payload::text end as payload, parsed_payload as parsed,
       num_nonnulls(payload, parsed_payload) > 0 as is_full
from {table} s
where id > %(after)s and id <= %(bound)s and shop_domain = %(shop)s
  and (greatest(coalesce(source_updated_at, last_seen_at), source_triggered_at) <= %(until)s
       or exists (select from shopify_events e
                  where e.organization_id = s.organization_id and e.shop_domain = s.shop_domain
                    and e.event_id = s.event_id and e.inserted_at <= %(until)s))
  and (%(is_all)s or shopify_id = any(%(ids)s)
       or lower(payload::text) like any(%(needles)s)
       or lower(parsed_payload::text) like any(%(needles)s))
order by id"""

_EMPTY_EVENTS: Final = """
update shopify_events e
set payload = null, parsed_payload = null, payload_raw = null, resource_id = r.resource_id
from json_to_recordset(%(rows)s::json) as r (id bigint, resource_id text)
where e.id = r.id"""

# A tombstone of an earlier erasure of the same resource makes room for this one.
_CLEAR_TOMBSTONES: Final = """
delete from {table} t using {table} s, json_to_recordset(%(rows)s::json) as r
  (id bigint, resource_id text)
where s.id = r.id and t.organization_id = s.organization_id and t.shop_domain = s.shop_domain
  and t.shopify_id = r.resource_id and t.id <> s.id"""

_EMPTY_SNAPSHOTS: Final = """
update {table} s
set payload = null, parsed_payload = r.parsed, shopify_id = r.resource_id,
    is_deleted = s.is_deleted or r.is_gone
from json_to_recordset(%(rows)s::json) as r
  (id bigint, resource_id text, parsed jsonb, is_gone boolean)
where s.id = r.id"""

_FAILED_PAGE: Final = """
select id, topic, event_id, null as resource_id,
       case when not %(is_all)s then payload end as payload, null::jsonb as parsed,
       payload is not null or status <> 'resolved' as is_full, envelope, created_at as received_at,
       null::timestamptz as triggered_at
from (select *, row_number() over (order by event_id) as place,
             sum(octet_length(payload)) over (order by event_id) as bytes
      from (select * from subscriber_subscriberfailedevent
            where shop_domain = %(shop)s and event_id > %(after)s
            order by event_id limit %(rows)s) page) sized
where place = 1 or coalesce(bytes, 0) <= %(bytes)s
order by event_id"""

_AUDIT_PAGE: Final = """
select id, topic, event_id, null as resource_id,
       case when not %(is_all)s and (lower(payload::text) like any(%(needles)s))
              then convert_to(payload::text, 'UTF8')
            when not %(is_all)s and payload is null then outbox_body end as payload,
       null::jsonb as parsed,
       payload is not null or needs_publish as is_full,
       null::jsonb as envelope, received_at, triggered_at
from shopify_shopifyevent
where shop_domain = %(shop)s and event_id > %(after)s
order by event_id limit %(rows)s"""

# Whoever replays such a row has lost it: its verdict finds no lease.
_EMPTY_FAILED: Final = """
with attempt as (
  update subscriber_replayattempt set finished_at = now(), outcome = 'lost'
  where failed_event_id = any(%(ids)s) and finished_at is null
)
update subscriber_subscriberfailedevent
set payload = null, redacted_at = coalesce(redacted_at, now()), traceback = '',
    envelope = envelope || '{"attributes": {}}', updated_at = now(),
    resolution = case when status = 'resolved' and resolution <> 'replayed' then resolution
                      else 'erased' end,
    status = 'resolved', resolved_at = coalesce(resolved_at, now()), next_retry_at = null,
    lease_token = null, leased_until = null
where id = any(%(ids)s)"""

_EMPTY_AUDIT: Final = """
update shopify_shopifyevent
set payload = null, needs_publish = false, outbox_envelope = null, outbox_body = null
where id = any(%(ids)s)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row that may be about a subject."""

    id: int
    topic: str
    event_id: str
    resource_id: str | None
    payload: str | bytes | None
    parsed: dict[str, Any] | None
    is_full: bool  # something is left to be removed


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRow(Row):
    """A row of the application database."""

    envelope: dict[str, Any] | None
    received_at: datetime
    triggered_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Whose data is meant, and from when back; None is all of it."""

    shop: str
    event_id: str  # of the request: its own event is meant too
    targets: tuple[Subject, ...]
    until: datetime | None = None

    @property
    def is_all(self) -> bool:
        """Whether everything of the shop is meant."""
        return any(target.kind is Kind.SHOP for target in self.targets)

    def mine(self, rows: Iterable[Row]) -> list[Row]:
        """Those of the rows that are about a subject."""
        return [row for row in rows if self._is_mine(row)]

    def with_orders(self, orders: Iterable[str]) -> "Holdings":
        """The same, and these orders too."""
        more = (Subject(Kind.ORDER, order) for order in sorted(orders))
        return replace(self, targets=tuple(dict.fromkeys((*self.targets, *more))))

    def orders(self, rows: Iterable[Row]) -> set[str]:
        """The orders of the customers among the subjects, by the rows that name both."""
        people = {t for t in self.targets if t.kind in (Kind.CUSTOMER, Kind.EMAIL, Kind.GUEST)}
        found = (self.subjects(row) for row in rows)
        return {s.id for each in found if each & people for s in each if s.kind is Kind.ORDER}

    def subjects(self, row: Row) -> set[Subject]:
        """Whom the row is about."""
        body = _body(row.payload)
        if body is None:
            parsed = {"id": row.resource_id} | (row.parsed or {})
            return set(subjects.of(self.shop, row.topic, parsed))
        return set(subjects.of_body(self.shop, row.topic, body))

    def _is_mine(self, row: Row) -> bool:
        if isinstance(row, KeptRow) and not self._is_before(row):
            return False
        if self.is_all or row.event_id == self.event_id:
            return True
        if not self.subjects(row).isdisjoint(self.targets):
            return True
        # What is no JSON object may still hold an address.
        raw = row.payload if isinstance(row.payload, bytes) and _body(row.payload) is None else b""
        return any(needle.encode() in raw.lower() for needle in self._texts())

    def _is_before(self, row: KeptRow) -> bool:
        if self.until is None or row.received_at <= self.until:
            return True
        kept = row.envelope or {}
        clocks = (
            fields.instant(_body(row.payload) or {}, topics.lookup(row.topic).clock),
            row.triggered_at or envelopes.timestamp(kept.get("triggered_at")),
        )
        known = [clock for clock in clocks if clock] or [
            envelopes.timestamp(kept.get("published_at"))
            or envelopes.timestamp(kept.get("received_at"))
        ]
        return all(clock is not None and clock <= self.until for clock in known)

    def parameters(self) -> dict[str, Any]:
        """What all pages ask for."""
        return {
            "shop": self.shop,
            "event_id": self.event_id,
            "until": self.until or "infinity",
            "is_all": self.is_all,
            "ids": [t.id for t in self.targets if t.kind in (Kind.CUSTOMER, Kind.ORDER)],
            "needles": [f"%{_like(text)}%" for text in self._texts()],
            "rows": PAGE_ROWS,
            "bytes": PAGE_BYTES,
        }

    def _texts(self) -> list[str]:
        """Without one of these in it, a body is about none of the subjects."""
        return [json.dumps(t.id, ensure_ascii=False)[1:-1].lower() for t in self.targets]


def tenant_page(
    connection: psycopg.Connection[Any], table: str, wanted: Holdings, after: int
) -> tuple[list[Row], int | None]:
    """Candidates of the next page of a tenant's table, and where it ends; None: there is none."""
    parameters = wanted.parameters() | {"after": after}
    bound = _one(connection, sql.SQL(_WINDOW).format(table=sql.Identifier(table)), parameters)
    if bound is None:
        return [], None
    statement = _EVENT_PAGE if table == EVENTS else _SNAPSHOT_PAGE
    composed = sql.SQL(statement).format(table=sql.Identifier(table))
    with connection.cursor(row_factory=class_row(Row)) as cursor:
        return cursor.execute(composed, parameters | {"bound": bound}).fetchall(), bound


def application_page(
    connection: psycopg.Connection[Any], table: str, wanted: Holdings, after: str
) -> tuple[list[Row], str | None]:
    """The same of the failure ledger or the audit table; the place is an event id."""
    statement = _FAILED_PAGE if table == FAILED else _AUDIT_PAGE
    with connection.cursor(row_factory=class_row(KeptRow)) as cursor:
        rows = cursor.execute(statement, wanted.parameters() | {"after": after}).fetchall()
    return list(rows), rows[-1].event_id if rows else None


def empty_events(
    connection: psycopg.Connection[Any], wanted: Holdings, rows: list[Row], hasher: Hasher
) -> int:
    """Removes what the event ledger's rows hold, but for their identity; how many held anything."""
    changed = _changed(wanted, rows, hasher)
    if changed:
        connection.execute(_EMPTY_EVENTS, {"rows": json.dumps(changed)})
    return len(changed)


def empty_snapshots(
    connection: psycopg.Connection[Any],
    table: str,
    wanted: Holdings,
    rows: list[Row],
    hasher: Hasher,
) -> int:
    """Removes what snapshots hold of persons. A customer's, and all of a shop, are tombstones."""
    is_gone = wanted.is_all or table == "shopify_customers"
    by_id = {row.id: row for row in rows}
    changed = [
        each
        | {
            "is_gone": is_gone,
            "parsed": None if is_gone else subjects.impersonal(by_id[each["id"]].parsed),
        }
        for each in _changed(wanted, rows, hasher)
    ]
    if changed:
        for statement in (_CLEAR_TOMBSTONES, _EMPTY_SNAPSHOTS):
            composed = sql.SQL(statement).format(table=sql.Identifier(table))
            connection.execute(composed, {"rows": json.dumps(changed)})
    return len(changed)


def empty_application(connection: psycopg.Connection[Any], table: str, rows: list[Row]) -> int:
    """Removes what rows of the failure ledger or the audit table hold; the failed events end."""
    ids = [row.id for row in rows if row.is_full]
    if ids:
        connection.execute(_EMPTY_FAILED if table == FAILED else _EMPTY_AUDIT, {"ids": ids})
    return len(ids)


def _changed(wanted: Holdings, rows: list[Row], hasher: Hasher) -> list[dict[str, Any]]:
    """The rows that still hold something, and the id that each may keep."""
    found = []
    for row in rows:
        resource = topics.lookup(row.topic).resource
        hidden = hasher.hidden(wanted.shop, resource, row.resource_id)
        if row.is_full or hidden != row.resource_id:
            found.append({"id": row.id, "resource_id": hidden})
    return found


def _body(payload: str | bytes | None) -> dict[str, Any] | None:
    if payload is None:
        return None
    try:
        _, body = jsontext.read(payload.encode() if isinstance(payload, str) else payload)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _like(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _one(
    connection: psycopg.Connection[Any], statement: sql.Composed, parameters: dict[str, Any]
) -> Any:
    with connection.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(statement, parameters).fetchone()
