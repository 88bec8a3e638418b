"""Causes: what is new is marked and counted in its groups, and what is over is found to be.

By a flag on its own row, in one transaction with the count: nothing is skipped because it was
committed late, and nothing is counted twice.
"""

from typing import Any, Final, LiteralString

import psycopg
from psycopg.rows import scalar_row

from shared import db
from shared.errors import WorkerLost

ROWS: Final = 10_000  # marked in one transaction
CAUSES: Final = 20  # of one kind that have a group of their own; the others are counted together
MANY: Final = 1000  # failed events of one cause that make it critical
STUCK_MINUTES: Final = 10  # in the outbox
CLEAR_SECONDS: Final = 50  # nothing left for so long, which two ticks see: resolved

# Each of these finds rows that are not alerted, marks them, and says what they are about. Whoever
# holds a row keeps it: it is found the next time.

# What an incident will bring back is not given up: the incident alerts.
_FAILED: Final = """
with picked as materialized (
  select f.id from subscriber_subscriberfailedevent f
  where f.status = 'failed' and f.alerted_at is null
    and not exists (
      select from subscriber_tenantincident i
      where i.tenant = f.tenant and i.ended_at is null and f.updated_at >= i.started_at
        and (left(f.error_code, 2) = any(%(classes)s) or f.error_code = any(%(codes)s)))
  order by f.updated_at limit %(rows)s
  for update of f skip locked
), found as (
  update subscriber_subscriberfailedevent f set alerted_at = now()
  from picked p where f.id = p.id
  returning f.id, 'failed' as kind, 'failed:' || f.error_type || ':' || f.error_code as dedupe_key,
    jsonb_build_object('error_type', f.error_type, 'error_code', f.error_code) as about,
    'error' as severity, f.updated_at as seen_at
)"""
_INCIDENTS: Final = """
with picked as materialized (
  select id from subscriber_tenantincident
  where ended_at is null and kind = 'unavailable' and opened_alerted_at is null
  for update skip locked
), found as (
  update subscriber_tenantincident i set opened_alerted_at = now()
  from picked p where i.id = p.id
  returning i.id, 'incident' as kind, 'incident:' || i.tenant as dedupe_key,
    jsonb_build_object('tenant', i.tenant) as about, 'error' as severity, i.started_at as seen_at
)"""
# Told before it was due, as a data request, it is told once more.
_OVERDUE: Final = """
with picked as materialized (
  select id from privacy_request
  where done_at is null and due_at < now() and (alerted_at is null or alerted_at < due_at)
  for update skip locked
), found as (
  update privacy_request r set alerted_at = now()
  from picked p where r.id = p.id
  returning r.id, 'overdue' as kind, 'overdue' as dedupe_key, '{}'::jsonb as about,
    'error' as severity, r.due_at as seen_at
)"""
_REQUESTS: Final = """
with picked as materialized (
  select id from privacy_request
  where done_at is null and kind = 'customers/data_request' and alerted_at is null
  for update skip locked
), found as (
  update privacy_request r set alerted_at = now()
  from picked p where r.id = p.id
  returning r.id, 'request' as kind, 'request' as dedupe_key, '{}'::jsonb as about,
    'warning' as severity, r.recorded_at as seen_at
)"""
# No flag on its rows: it is one thing, as long as it lasts.
_OUTBOX: Final = """
with found as (
  (select id, 'outbox' as kind, 'outbox' as dedupe_key, '{}'::jsonb as about,
          'error' as severity, received_at as seen_at
   from shopify_shopifyevent
   where needs_publish and received_at < now() - make_interval(mins => %(stuck)s)
     and not exists (select from notifier.alert_groups
                     where dedupe_key = 'outbox' and state = 'firing')
   order by received_at, id limit 1)
)"""

# The tail of them all. A cause without a group of its own gets one while there are few. No join of
# causes with their rows: the planner takes both for few, and ten thousand of each are a minute.
_COUNTED: Final = """
, firing as materialized (
  select kind, dedupe_key from notifier.alert_groups
  where state = 'firing' group by kind, dedupe_key
), taken as materialized (
  select kind, count(*) as places from firing where dedupe_key <> kind || ':other' group by kind
), sized as (
  select n.*, f.dedupe_key is not null as is_firing,
         count(*) over (partition by n.kind, n.dedupe_key) as members
  from found n left join firing f on f.kind = n.kind and f.dedupe_key = n.dedupe_key
), placed as (
  select s.*, s.is_firing or coalesce(t.places, 0) + dense_rank() over (
           partition by s.kind, s.is_firing order by s.members desc, s.dedupe_key)
         <= %(causes)s as is_apart
  from sized s left join taken t on t.kind = s.kind
), named as (
  select id, kind, severity, seen_at,
         case when is_apart then dedupe_key else kind || ':other' end as dedupe_key,
         case when is_apart then about else '{}' end as about
  from placed
), grouped as (
  select kind, dedupe_key, about, severity, count(*) as members, min(seen_at) as first_seen,
         max(seen_at) as last_seen, (array_agg(id order by id desc))[1:5] as sample
  from named group by kind, dedupe_key, about, severity
), counted as (
  insert into notifier.alert_groups as g
    (channel, dedupe_key, kind, about, severity, first_seen, last_seen, total, sample,
     since_notified)
  select c.name, x.dedupe_key, x.kind, x.about,
         case when x.kind = 'failed' and x.members >= %(many)s then 'critical'
              else x.severity end,
         x.first_seen, x.last_seen, x.members, x.sample, x.members
  from grouped x cross join notifier.channels c
  where c.enabled and (c.name = %(alert)s or c.min_severity is not null)
  on conflict (channel, dedupe_key) do update set
    (total, sample, first_seen, since_notified, fired_at) = (
      select b.total + excluded.total, (excluded.sample || b.sample)[1:5],
             least(b.first_seen, excluded.first_seen), b.since + excluded.since_notified, b.fired_at
      from (select g.total, g.sample, g.first_seen, g.since_notified as since, g.fired_at
            where g.state = 'firing'
            union all
            select 0, '{}', excluded.first_seen, 0, now() where g.state <> 'firing') b),
    severity = case when excluded.kind = 'failed' and excluded.total >= %(many)s
                      - case g.state when 'firing' then g.total else 0 end then 'critical'
                    else excluded.severity end,
    last_seen = greatest(g.last_seen, excluded.last_seen),
    state = 'firing', clear_since = null, resolved_at = null
)
select count(*) as members from found"""

# Each question has an index of its own, and the order that makes the planner take it: what it looks
# for may stand behind a million rows that are of no interest.
_CLEAR: Final = """
with looked as materialized (
  select g.channel, g.dedupe_key, case g.kind
    when 'failed' then coalesce((
      select g.about = '{}' or (f.error_type, f.error_code)
                               = (g.about->>'error_type', g.about->>'error_code')
      from subscriber_subscriberfailedevent f
      where f.status = 'failed' and (f.error_type, f.error_code)
            >= (coalesce(g.about->>'error_type', ''), coalesce(g.about->>'error_code', ''))
      order by f.error_type, f.error_code limit 1), false)
    when 'incident' then exists (
      select from subscriber_tenantincident i
      where i.ended_at is null and (g.about = '{}' or i.tenant = g.about->>'tenant'))
    when 'overdue' then exists (
      select from privacy_request r where r.done_at is null and r.due_at < now())
    when 'request' then exists (
      select from privacy_request r
      where r.done_at is null and r.kind = 'customers/data_request')
    else coalesce((
      select e.received_at < now() - make_interval(mins => %(stuck)s)
      from shopify_shopifyevent e where e.needs_publish
      order by e.received_at, e.id limit 1), false) end as is_there
  from notifier.alert_groups g where g.state = 'firing'
), decided as (
  select l.channel, l.dedupe_key, l.is_there, not l.is_there
         and g.clear_since <= now() - make_interval(secs => %(clear)s) as is_over
  from looked l join notifier.alert_groups g using (channel, dedupe_key)
)
update notifier.alert_groups g
set clear_since = case when d.is_there then null else coalesce(g.clear_since, now()) end,
    state = case when d.is_over then 'resolved' else 'firing' end,
    resolved_at = case when d.is_over then now() end,
    (quiet, quiet_until, quiet_by, quiet_reason) = (
      select q.* from (select g.quiet, g.quiet_until, g.quiet_by, g.quiet_reason) q
      where not (d.is_over and g.quiet = 'acknowledged'))
from decided d
where g.channel = d.channel and g.dedupe_key = d.dedupe_key
  and (not d.is_there or g.clear_since is not null)"""

_CLOSED: Final = """
update subscriber_tenantincident i set closed_alerted_at = now()
where i.ended_at is not null and i.opened_alerted_at is not null and i.closed_alerted_at is null
  and not exists (select from notifier.alert_groups g
                  where g.kind = 'incident' and g.state = 'firing'
                    and (g.about = '{}' or g.about->>'tenant' = i.tenant))"""

_PARAMETERS: Final[dict[str, Any]] = {
    "rows": ROWS,
    "causes": CAUSES,
    "many": MANY,
    "stuck": STUCK_MINUTES,
    "clear": CLEAR_SECONDS,
    # What the end of an incident brings back.
    "classes": list(db.CONNECTION_CLASSES),
    "codes": [*db.CONNECTION_CODES, WorkerLost.code],
}


def count_failed(connection: psycopg.Connection[Any], *, alert_channel: str) -> int:
    """Counts failed events that were given up, at most ROWS; how many. Raises what psycopg does."""
    return _count(connection, _FAILED, alert_channel)


def count_others(connection: psycopg.Connection[Any], *, alert_channel: str) -> None:
    """Counts incidents, compliance requests, and an outbox that does not empty."""
    for source in (_INCIDENTS, _OVERDUE, _REQUESTS, _OUTBOX):
        _count(connection, source, alert_channel)


def clear(connection: psycopg.Connection[Any]) -> None:
    """Resolves the groups of which nothing is left."""
    for statement in (_CLEAR, _CLOSED):
        connection.execute(statement, _PARAMETERS)


def _count(connection: psycopg.Connection[Any], source: LiteralString, alert_channel: str) -> int:
    with connection.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute(source + _COUNTED, _PARAMETERS | {"alert": alert_channel}).fetchone()
    return found or 0
