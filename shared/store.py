"""One event into a tenant database: event ledger and snapshot, in one statement.

The statement is one round trip and one transaction (READ COMMITTED). A snapshot takes a state only
if its source version, (source_updated_at, is_deleted, source_triggered_at, event_id), is greater:
with `is_deleted` in any other place the states do not converge. Text is compared by bytes
(collate "C"), as Python does. A NULL never compares as newer, hence the coalesces; minus infinity
is never stored, because clients cannot read it.

An event from before its subject was erased leaves its identity in the event ledger and nothing
else. Its clock and the time when it was triggered say so; of a known event, the ledger row's, or
that the row was emptied. Without the key that knows who was erased nothing is stored of a shop that
has erasures.
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, LiteralString

import psycopg
from psycopg import errors as pg
from psycopg import sql
from psycopg.rows import args_row

from shared import db, migrate
from shared.errors import ConfigurationError, EventCollisionError
from shared.model import Envelope, Event, LedgerOutcome, Outcome, SnapshotOutcome

# The source version of a state, of a row called {row}. The one place that says what is newer.
_VERSION: Final = """(
  coalesce({row}.source_updated_at, '-infinity'), {row}.is_deleted,
  coalesce({row}.source_triggered_at, '-infinity'), coalesce({row}.event_id, '') collate "C")"""

# A known event keeps its row; only received_at follows a duplicate, as in the earlier system.
_LEDGER: Final = """
with input as materialized (
  select x.erased_at,
         coalesce(x.erased_at >= greatest(%(source_updated_at)s, %(triggered_at)s), false)
           as is_erased,
         %(payload)s::jsonb as payload, %(parsed)s::jsonb as parsed
  from (select max(erased_at) as erased_at from shopify_erasures
        where subject_hash = any(%(subjects)s::text[])) x
  where %(subjects)s::text[] is not null
     or not exists (select from shopify_erasures where shop_domain = %(shop_domain)s)
), ledger as (
  insert into shopify_events as e
    (event_id, organization_id, shop_domain, topic, event_type, resource_type, resource_id,
     payload, parsed_payload, received_at, source_event_id, api_version, triggered_at,
     source_updated_at, payload_sha256, payload_raw, trace_id)
  select %(event_id)s, %(organization_id)s, %(shop_domain)s, %(topic)s, %(event_type)s,
         %(resource_type)s,
         case when i.is_erased then %(hidden_id)s else %(resource_id)s end::text,
         case when not i.is_erased then i.payload end,
         case when not i.is_erased then i.parsed end, %(received_at)s,
         %(source_event_id)s, %(api_version)s, %(triggered_at)s, %(source_updated_at)s,
         %(sha256)s, case when not i.is_erased then %(payload_raw)s::bytea end, %(trace_id)s
  from input i
  on conflict (organization_id, shop_domain, event_id) do update set
    received_at = case when coalesce(e.payload_sha256, excluded.payload_sha256)
                            = excluded.payload_sha256
                       then excluded.received_at else e.received_at end
  returning e.topic, e.source_updated_at, e.triggered_at,
            e.xmax = 0 as inserted,
            coalesce(e.payload_sha256, %(sha256)s) <> %(sha256)s as collision,
            coalesce((select i.erased_at >= greatest(coalesce(e.source_updated_at,
                                                               %(source_updated_at)s),
                                                      e.triggered_at)
                             or (i.erased_at is not null and e.payload is null)
                      from input i), false) as is_erased
)"""

# A duplicate's fallback clock may differ from the first delivery's; the ledger's row decides, so
# that snapshots rebuilt from the ledger come out the same. An adopted row has no clock.
_SNAPSHOT: Final = """, state as (
  select coalesce(l.source_updated_at, %(source_updated_at)s::timestamptz) as source_updated_at,
         case when l.source_updated_at is null then %(triggered_at)s::timestamptz
              else l.triggered_at end as source_triggered_at
  from ledger l
  where not l.collision and not l.is_erased and l.topic = %(topic)s
), snapshot as (
  insert into {table} as s
    (organization_id, shop_domain, shopify_id, topic, event_type, payload, parsed_payload,
     is_deleted, first_seen_at, last_seen_at, source_updated_at, source_triggered_at, event_id)
  select %(organization_id)s, %(shop_domain)s, %(resource_id)s, %(topic)s, %(event_type)s,
         i.payload, i.parsed, %(is_deleted)s, %(received_at)s, %(received_at)s,
         v.source_updated_at, v.source_triggered_at, %(event_id)s
  from input i, state v
  on conflict (organization_id, shop_domain, shopify_id) do update set
    (topic, event_type, payload, parsed_payload, is_deleted,
     source_updated_at, source_triggered_at, event_id) = (
      select case when newer then excluded.topic else s.topic end,
             case when newer then excluded.event_type else s.event_type end,
             case when newer then excluded.payload else s.payload end,
             case when newer then excluded.parsed_payload else s.parsed_payload end,
             case when newer then excluded.is_deleted else s.is_deleted end,
             case when newer then excluded.source_updated_at else s.source_updated_at end,
             case when newer then excluded.source_triggered_at else s.source_triggered_at end,
             case when newer then excluded.event_id else s.event_id end
      from (select {incoming} > {present} as newer) version),
    last_seen_at = greatest(s.last_seen_at, excluded.last_seen_at)
  returning s.xmax = 0 as inserted, s.event_id = %(event_id)s as ours
)
select l.inserted, l.collision, l.is_erased, p.inserted as snapshot_inserted, p.ours
from ledger l left join snapshot p on true"""

_LEDGER_ONLY: Final = """
select l.inserted, l.collision, l.is_erased, null::boolean as snapshot_inserted,
       null::boolean as ours
from ledger l"""


_CURSOR: Final = "_hookledger_cursor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """By what an erasure of the event's subjects would be known."""

    subjects: str | None = "{}"  # their hashes, as the literal of an array; None without a key
    hidden_id: str | None = None  # in place of `resource_id`, if they were erased


_UNMARKED: Final = Marks()


@dataclass(frozen=True, slots=True)
class _Row:
    inserted: bool
    collision: bool
    is_erased: bool
    snapshot_inserted: bool | None
    ours: bool | None


def store(
    pool: db.Pool,
    organization_id: str,
    envelope: Envelope,
    event: Event,
    marks: Marks | None = None,
    *,
    dry_run: bool = False,
) -> Outcome:
    """Stores `event` and says what that did; a dry run says the same and leaves nothing behind.

    A table that is missing is made by running the tenant migrations again, a missing column only
    if a migration is pending. Raises EventCollisionError when the id is known with another body,
    and what psycopg raises.
    """
    values = parameters(organization_id, envelope, event, marks)
    table = event.table if event.resource_id is not None else None
    write = partial(_write, table, values, dry_run)
    try:
        return pool.run(write)
    except pg.UndefinedTable:
        _heal(pool, again=True)
    except pg.UndefinedColumn:
        if not _heal(pool, again=False):
            raise
    return pool.run(write)


def _write(
    table: str | None, values: dict[str, Any], dry_run: bool, connection: psycopg.Connection[Any]
) -> Outcome:
    kept = connection.transaction(force_rollback=True) if dry_run else nullcontext()
    with kept:
        return _outcome(_cursor(connection).execute(statement(table), values).fetchone())


def _cursor(connection: psycopg.Connection[Any]) -> psycopg.Cursor[_Row]:
    """The connection's own cursor for stores: a new one would learn anew how to write each type,
    which is a sixth of what a store costs us."""
    kept: dict[str, Any] = connection.__dict__
    if _CURSOR not in kept:
        kept[_CURSOR] = connection.cursor(row_factory=args_row(_Row))
    return kept[_CURSOR]


def _outcome(row: _Row | None) -> Outcome:
    if row is None:
        raise ConfigurationError(
            "PRIVACY_HASH_KEY is missing, but erasures are on record for this shop: without it "
            "nobody can tell what must not come back. See docs/privacy.md."
        )
    if row.collision:
        raise EventCollisionError(
            "This event id is in the event ledger with another body. Both are kept: this one is "
            "stored under an id of its own when it is replayed."
        )
    if row.is_erased:
        return Outcome(ledger=LedgerOutcome.SUPPRESSED, snapshot=SnapshotOutcome.SKIPPED)
    return Outcome(
        ledger=LedgerOutcome.INSERTED if row.inserted else LedgerOutcome.DUPLICATE,
        snapshot=_snapshot_outcome(row),
    )


def _snapshot_outcome(row: _Row) -> SnapshotOutcome:
    if row.snapshot_inserted is None:
        return SnapshotOutcome.SKIPPED
    if row.snapshot_inserted:
        return SnapshotOutcome.INSERTED
    return SnapshotOutcome.UPDATED if row.inserted and row.ours else SnapshotOutcome.STALE


def version(row: str) -> sql.Composed:
    """The source version of a row of that name, to compare with another's or to sort by."""
    return sql.SQL(_VERSION).format(row=sql.Identifier(row))


@cache
def statement(table: str | None) -> bytes:
    """The statement for one snapshot table of the closed set, or for the event ledger alone.

    Rendered once, and without spare space: psycopg remembers what it made of a statement, but
    only of one of at most 4,096 bytes.
    """
    text: LiteralString = _LEDGER + (_LEDGER_ONLY if table is None else _SNAPSHOT)
    composed = sql.SQL(text).format(
        table=sql.Identifier(table or ""), incoming=version("excluded"), present=version("s")
    )
    return b" ".join(composed.as_bytes(None).split())


def parameters(
    organization_id: str, envelope: Envelope, event: Event, marks: Marks | None = None
) -> dict[str, Any]:
    """The statement's parameters. Without marks no erasure is looked for."""
    marks = marks or _UNMARKED
    return {
        "organization_id": organization_id,
        "event_id": envelope.event_id,
        "shop_domain": envelope.shop_domain,
        "topic": event.topic,
        "event_type": event.event_type,
        "resource_type": event.resource_type,
        "resource_id": event.resource_id,
        "payload": event.payload,
        "parsed": json.dumps(event.parsed),
        "received_at": envelope.received_at,
        "source_event_id": envelope.source_event_id,
        "api_version": envelope.api_version,
        "triggered_at": envelope.triggered_at,
        "source_updated_at": event.source_updated_at,
        "sha256": envelope.payload_sha256,
        "payload_raw": event.payload_raw,
        "trace_id": envelope.trace_id,
        "is_deleted": event.is_deleted,
        "subjects": marks.subjects,
        "hidden_id": marks.hidden_id,
    }


def _heal(pool: db.Pool, *, again: bool) -> bool:
    """Brings the tenant's schema up to date; whether anything was there to be done."""
    with db.connect(pool.target, migrate.LIMITS) as connection:
        if again:
            migrate.apply_again(connection, migrate.Series.TENANT)
            return True
        return bool(migrate.apply(connection, migrate.Series.TENANT))
