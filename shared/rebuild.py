"""Snapshots made again from the event ledger, beside live writers and as often as one likes.

Bodies are parsed afresh, so that a corrected rule in `topics` or `fields` takes effect on what is
already there: `resource_id`, `parsed_payload`, operation and tombstone are recomputed. The clocks
are the ledger's own; where a row has none, as those of the earlier system, its body's clock or
else its receipt. The ledger itself is not changed.

A snapshot row changes only if the ledger holds a newer state, or the same state parsed otherwise.
It keeps its place in time then: `first_seen_at` never moves. A row that is made takes both of its
times from the ledger's receipts.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from itertools import groupby
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg import sql
from psycopg.rows import class_row

from shared import migrate, store, subjects, topics
from shared.errors import ConfigurationError
from shared.model import Envelope, Event, Source
from shared.parse import parse
from shared.subjects import Hasher

BATCH_ROWS: Final = 500
BATCH_BYTES: Final = 8 * 1024 * 1024  # as stored, that is compressed

RESOURCES: Final = tuple(sorted({t.resource for t in topics.TOPICS.values() if t.table}))

_SPAN: Final = """
select coalesce(min(id), 1) - 1 as first, coalesce(max(id), 0) as last from shopify_events
where id > %(after)s"""

# How far the next batch goes: by rows, not by ids, for these have gaps; at least one row.
_BOUND: Final = """
select max(id) from (
  select id, row_number() over (order by id) as place,
         sum(pg_column_size(payload)) over (order by id) as bytes
  from (select id, payload from shopify_events where id > %(after)s and id <= %(last)s
        order by id limit %(batch_rows)s) page) sized
where place = 1 or bytes <= %(batch_bytes)s"""

_EVENTS: Final = """
select id, event_id, shop_domain, topic, payload::text as payload, received_at, triggered_at
from shopify_events
where id > %(after)s and id <= %(bound)s
  and organization_id = %(organization_id)s and topic = any(%(topics)s)
  and (%(shop_domain)s::text is null or shop_domain = %(shop_domain)s)
  and (%(since)s::timestamptz is null or received_at >= %(since)s)
  and (%(until)s::timestamptz is null or received_at < %(until)s)
order by id"""

# One state per resource, the newest; rows are locked in one order, whoever else is rebuilding.
# A row that keeps its state is not written at all.
_UPSERT: Final = """
with input as (
  select r.shopify_id, r.event_type, r.parsed, r.is_deleted,
         e.organization_id, e.shop_domain, e.topic, e.payload, e.received_at, e.event_id,
         coalesce(e.source_updated_at, r.clock) as source_updated_at,
         e.triggered_at as source_triggered_at
  from json_to_recordset(%(rows)s::json) as r
         (id bigint, shopify_id text, event_type text, parsed jsonb, is_deleted boolean,
          clock timestamptz, subjects text[])
  join shopify_events e on e.id = r.id
  where e.payload is not null
    and not exists (select from shopify_erasures x
                    where x.subject_hash = any(r.subjects)
                      and x.erased_at >= greatest(coalesce(e.source_updated_at, r.clock),
                                                  e.triggered_at))
    and (r.subjects is not null or not exists (select from shopify_erasures x
                                               where x.shop_domain = e.shop_domain))
), newest as (
  select distinct on (shop_domain collate "C", shopify_id collate "C") i.*,
         min(received_at) over resource as first_seen_at,
         max(received_at) over resource as last_seen_at
  from input i
  window resource as (partition by shop_domain collate "C", shopify_id collate "C")
  order by shop_domain collate "C", shopify_id collate "C", {incoming_order} desc
)
insert into {table} as s
  (organization_id, shop_domain, shopify_id, topic, event_type, payload, parsed_payload,
   is_deleted, first_seen_at, last_seen_at, source_updated_at, source_triggered_at, event_id)
select organization_id, shop_domain, shopify_id, topic, event_type, payload, parsed,
       is_deleted, first_seen_at, last_seen_at, source_updated_at, source_triggered_at, event_id
from newest
order by shop_domain collate "C", shopify_id collate "C"
on conflict (organization_id, shop_domain, shopify_id) do update set
  topic = excluded.topic, event_type = excluded.event_type, payload = excluded.payload,
  parsed_payload = excluded.parsed_payload, is_deleted = excluded.is_deleted,
  source_updated_at = excluded.source_updated_at,
  source_triggered_at = excluded.source_triggered_at, event_id = excluded.event_id,
  last_seen_at = greatest(s.last_seen_at, excluded.last_seen_at)
where {incoming} > {present}
   or (s.event_id = excluded.event_id
       and (s.topic, s.event_type, s.payload, s.parsed_payload, s.is_deleted,
            s.source_updated_at, s.source_triggered_at)
           is distinct from
           (excluded.topic, excluded.event_type, excluded.payload, excluded.parsed_payload,
            excluded.is_deleted, excluded.source_updated_at, excluded.source_triggered_at))
returning s.shop_domain, s.shopify_id, s.xmax = 0 as inserted"""


class _Fate(StrEnum):
    INSERTED = "inserted"
    OVERWRITTEN = "overwritten"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which events: an organization's, of one shop or all, received from `since` to `until`."""

    organization_id: str
    shop_domain: str | None = None
    resource: str | None = None  # one of RESOURCES
    since: datetime | None = None
    until: datetime | None = None
    after: int = 0  # resumes behind this ledger row

    def topics(self) -> list[str]:
        """The topics whose events make snapshots; raises ConfigurationError for no resource."""
        if self.resource is not None and self.resource not in RESOURCES:
            raise ConfigurationError(
                f"{self.resource} has no snapshots. Those that have: {', '.join(RESOURCES)}."
            )
        return [
            topic.name
            for topic in topics.TOPICS.values()
            if topic.table and self.resource in (None, topic.resource)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was done, or in a dry run would be. The first three count snapshot rows."""

    inserted: int
    overwritten: int
    kept: int
    events: int  # of the ledger that were looked at
    without_payload: int  # skipped: their payload was removed
    without_snapshot: int  # skipped: they name no resource, or their payload is no object

    def as_json(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it got: everything up to ledger row `done` of `last` is rebuilt."""

    first: int
    done: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    id: int
    event_id: str
    shop_domain: str
    topic: str
    payload: str | None
    received_at: datetime
    triggered_at: datetime | None


class Rebuild:
    """One pass over a tenant's event ledger. Walk over it, then ask for its report."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        scope: Scope,
        *,
        hasher: Hasher | None = None,
        dry_run: bool = False,
    ) -> None:
        """`hasher` finds what was erased: nothing of it comes back."""
        self._connection = connection
        self._scope = scope
        self._hasher = hasher or Hasher()
        self._dry_run = dry_run
        self._events: Counter[str] = Counter()
        # Of each snapshot row, by the hash of its key, lest they fill the memory.
        self._fates: dict[int, _Fate] = {}

    def batches(self) -> Iterator[Progress]:
        """Does the next batch each time; each one is committed, and may be done again.

        Events that come in meanwhile are left to their own writers.
        """
        wanted = asdict(self._scope) | {
            "topics": self._scope.topics(),
            "batch_rows": BATCH_ROWS,
            "batch_bytes": BATCH_BYTES,
        }
        first, last = self._one(_SPAN, wanted)
        after = first
        while after < last:
            (bound,) = self._one(_BOUND, wanted | {"after": after, "last": last})
            if bound is None:
                break
            self._batch(wanted | {"after": after, "bound": bound})
            after = bound
            yield Progress(first=first, done=after, last=last)

    def report(self) -> Report:
        """What the batches so far have done."""
        fates = Counter(self._fates.values())
        return Report(
            inserted=fates[_Fate.INSERTED],
            overwritten=fates[_Fate.OVERWRITTEN],
            kept=fates[_Fate.KEPT],
            events=self._events["all"],
            without_payload=self._events["without_payload"],
            without_snapshot=self._events["without_snapshot"],
        )

    def _batch(self, wanted: dict[str, Any]) -> None:
        with self._connection.cursor(row_factory=class_row(_Row)) as cursor:
            rows = cursor.execute(_EVENTS, wanted).fetchall()
        self._events["all"] += len(rows)
        parsed = [(row, event) for row in rows if (event := self._parsed(row))]
        parsed.sort(key=lambda pair: pair[1].table or "")
        for table, of_table in groupby(parsed, key=lambda pair: pair[1].table or ""):
            self._upsert(table, list(of_table))

    def _parsed(self, row: _Row) -> Event | None:
        if row.payload is None:
            self._events["without_payload"] += 1
            return None
        try:
            event = parse(_envelope(row, row.payload))
        except ValueError:  # a row of the earlier system: no object, so nothing of any resource
            event = None
        if event is None or event.resource_id is None:
            self._events["without_snapshot"] += 1
            return None
        return event

    def _upsert(self, table: str, parsed: list[tuple[_Row, Event]]) -> None:
        rows = json.dumps([self._candidate(row, event) for row, event in parsed])
        try:
            written = self._written(table, rows)
        except pg.UndefinedTable:
            if self._dry_run:
                raise
            migrate.apply_again(self._connection, migrate.Series.TENANT)
            written = self._written(table, rows)
        fates = {
            (shop, shopify_id): _Fate.INSERTED if inserted else _Fate.OVERWRITTEN
            for shop, shopify_id, inserted in written
        }
        for key in {(row.shop_domain, event.resource_id) for row, event in parsed}:
            self._note(hash((table, *key)), fates.get(key, _Fate.KEPT))

    def _candidate(self, row: _Row, event: Event) -> dict[str, Any]:
        about = subjects.of(row.shop_domain, event.topic, event.parsed)
        return {
            "id": row.id,
            "shopify_id": event.resource_id,
            "event_type": event.event_type,
            "parsed": event.parsed,
            "is_deleted": event.is_deleted,
            "clock": event.source_updated_at.isoformat(),
            "subjects": self._hasher.digests(row.shop_domain, about)
            if self._hasher.has_key
            else None,
        }

    def _written(self, table: str, rows: str) -> list[tuple[Any, ...]]:
        with self._connection.transaction(force_rollback=self._dry_run):
            return self._connection.execute(_statement(table), {"rows": rows}).fetchall()

    def _note(self, key: int, fate: _Fate) -> None:
        """What becomes of a row in several batches: made is made, and a change outlasts a rest."""
        if self._fates.get(key, _Fate.KEPT) is _Fate.KEPT:
            self._fates[key] = fate

    def _one(self, statement: Any, parameters: dict[str, Any]) -> tuple[Any, ...]:
        row = self._connection.execute(statement, parameters).fetchone()
        assert row is not None, "an aggregate always has a row"
        return row


def _envelope(row: _Row, payload: str) -> Envelope:
    """As much of an envelope as parsing looks at."""
    return Envelope(
        event_id=row.event_id,
        shop_domain=row.shop_domain,
        topic=row.topic,
        source=Source.WEBHOOK,
        payload=payload.encode(),
        payload_sha256=b"",
        received_at=row.received_at,
        triggered_at=row.triggered_at,
    )


@cache
def _statement(table: str) -> sql.Composed:
    return sql.SQL(_UPSERT).format(
        table=sql.Identifier(table),
        incoming=store.version("excluded"),
        incoming_order=store.version("i"),
        present=store.version("s"),
    )
