"""What must hold once all is well again: every event in its ledger once, every state the newest."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from tests.chaos.events import TABLES, Event

SHOWN: Final = 5

_LEDGER: Final = "select event_id, payload from shopify_events where shop_domain = %(shop)s"
_SNAPSHOT: Final = """
select shopify_id, event_id, is_deleted, payload from {table} where shop_domain = %(shop)s"""
_UNFINISHED: Final = """
select event_id, status, error_type, error_message from subscriber_subscriberfailedevent
where status <> 'resolved'"""
_LEFT_OPEN: Final = {
    "leases": "select count(*) from subscriber_subscriberfailedevent where lease_token is not null",
    "incidents": "select count(*) from subscriber_tenantincident where ended_at is null",
    "messages in the outbox": "select count(*) from shopify_shopifyevent where needs_publish",
    "attempts under way": "select count(*) from subscriber_replayattempt where finished_at is null",
}
_AUDITED: Final = "select event_id from shopify_shopifyevent"


def differences(
    sent: Sequence[Event],
    application_url: str,
    tenant_urls: dict[str, str],
    not_audited: set[str],
) -> list[str]:
    """What does not balance, in words; `tenant_urls` is by shop.

    An audit row may be missing where the log has said so: the event itself comes first.
    """
    found = list(_application(sent, application_url, not_audited))
    for shop, url in tenant_urls.items():
        ours = [event for event in sent if event.shop == shop and not event.is_broken]
        with psycopg.connect(url, row_factory=dict_row) as connection:
            found += _ledger(connection, shop, ours)
            for resource, table in TABLES.items():
                about = [event for event in ours if event.resource == resource]
                found += _snapshots(connection, shop, table, about)
    return found


def _application(sent: Sequence[Event], url: str, not_audited: set[str]) -> Iterator[str]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        for what, query in _LEFT_OPEN.items():
            (count,) = (connection.execute(query).fetchone() or {"count": 0}).values()  # type: ignore[call-overload]
            if count:
                yield f"{count} {what} are left"
        unfinished = connection.execute(_UNFINISHED).fetchall()
        audited = {row["event_id"] for row in connection.execute(_AUDITED)}
    broken = {event.event_id for event in sent if event.is_broken}
    for row in unfinished:
        if row["event_id"] not in broken:
            yield f"failed event: {row}"
    yield from _missing("broken events are not kept", broken - {r["event_id"] for r in unfinished})
    through_webhook = {event.event_id for event in sent if not event.is_native}
    yield from _missing("events have no audit row", through_webhook - audited - not_audited)
    yield from _missing("native events have an audit row", audited - through_webhook)


def _ledger(connection: psycopg.Connection[Any], shop: str, ours: list[Event]) -> Iterator[str]:
    rows = connection.execute(_LEDGER, {"shop": shop}).fetchall()
    often = Counter(row["event_id"] for row in rows)
    wanted = {event.event_id: json.loads(event.body) for event in ours}
    yield from _missing(f"events of {shop} are lost", wanted.keys() - often.keys())
    yield from _missing(f"events of {shop} are nobody's", often.keys() - wanted.keys())
    yield from _missing(f"events of {shop} are there twice", {e for e, n in often.items() if n > 1})
    for row in rows:
        if row["event_id"] in wanted and row["payload"] != wanted[row["event_id"]]:
            yield f"event {row['event_id']} of {shop} has another payload"


def _snapshots(
    connection: psycopg.Connection[Any], shop: str, table: str, about: list[Event]
) -> Iterator[str]:
    newest: dict[str, Event] = {}
    for event in about:
        key = str(event.resource_id)
        if key not in newest or event.version() > newest[key].version():
            newest[key] = event
    query = sql.SQL(_SNAPSHOT).format(table=sql.Identifier(table))
    rows = {row["shopify_id"]: row for row in connection.execute(query, {"shop": shop})}
    yield from _missing(f"snapshots in {table} of {shop} are missing", newest.keys() - rows.keys())
    yield from _missing(f"snapshots in {table} of {shop} are nobody's", rows.keys() - newest.keys())
    for key in newest.keys() & rows.keys():
        event, row = newest[key], rows[key]
        wanted = (event.event_id, event.is_deletion, json.loads(event.body))
        if (row["event_id"], row["is_deleted"], row["payload"]) != wanted:
            yield f"{table} {key} of {shop} has the state of {row['event_id']}, not {wanted[0]}"


def _missing(what: str, ids: set[str]) -> Iterator[str]:
    if ids:
        yield f"{len(ids)} {what}: {', '.join(sorted(ids)[:SHOWN])}"
