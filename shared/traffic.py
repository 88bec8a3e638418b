"""What came in lately and what became of it: the console's figures, each bounded in what it reads.

Ids grow with time, so the first row of a span of time is found by halving ids: some twenty rows are
read by their key, however many there are, and neither table pays for an index on its times.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psycopg.rows import class_row, scalar_row

from shared import db

COUNTED: Final = 1_000_000  # more is said as "more than"
TROUBLED: Final = 10
HOURS: Final = 48
NOTIFICATIONS: Final = 100

# The newest id that is older than the span; rows above it are within. Null: there are no rows.
_AUDITED: Final = """
with recursive halved (low, high) as (
  select min(id) - 1, max(id) from shopify_shopifyevent
  union all
  select case when p.is_older then p.id else h.low end,
         case when p.is_older then h.high else h.low + (h.high - h.low) / 2 end
  from halved h, lateral (
    select e.id, e.received_at < now() - interval '24 hours' as is_older
    from shopify_shopifyevent e where e.id > h.low + (h.high - h.low) / 2
    order by e.id limit 1) p
  where h.low < h.high
)
select count(*) from (
  select from shopify_shopifyevent
  where id > (select high from halved where low >= high) limit %(counted)s) e"""

# Hours are told apart by ids too, so that counting reads no more than an index.
_HOURLY: Final = """
with edges as (
  select h.hour, coalesce(e.id, 0) as id
  from generate_series(date_trunc('hour', now()) - make_interval(hours => %(hours)s - 1),
                       date_trunc('hour', now()) + interval '1 hour', interval '1 hour') h (hour)
  left join lateral (
    with recursive halved (low, high) as (
      select min(id) - 1, max(id) from subscriber_subscriberfailedevent
      union all
      select case when p.is_older then p.id else a.low end,
             case when p.is_older then a.high else a.low + (a.high - a.low) / 2 end
      from halved a, lateral (
        select f.id, f.created_at < h.hour as is_older
        from subscriber_subscriberfailedevent f where f.id > a.low + (a.high - a.low) / 2
        order by f.id limit 1) p
      where a.low < a.high
    )
    select high as id from halved where low >= high) e on true
), spans as (
  select hour, id as after, lead(id) over (order by hour) as upto from edges
)
select s.hour,
       (select count(*) from subscriber_subscriberfailedevent f
        where f.id > s.after and f.id <= s.upto) as failed,
       (select count(*) from subscriber_subscriberfailedevent f
        where f.status = 'resolved' and f.redacted_at is null
          and f.resolved_at >= s.hour and f.resolved_at < s.hour + interval '1 hour') as resolved
from spans s where s.upto is not null order by s.hour"""

# Each half is read from an index that has its tenants and nothing else.
_TROUBLED: Final = """
select tenant, sum(pending)::bigint as pending, sum(failed)::bigint as failed
from (select tenant, count(*) as pending, 0 as failed from subscriber_subscriberfailedevent
      where status = 'pending' and lease_token is null group by tenant
      union all
      select tenant, 0, count(*) from subscriber_subscriberfailedevent
      where status = 'failed' group by tenant) t
group by tenant order by sum(pending + failed) desc, tenant limit %(limit)s"""

_ROUTES: Final = """
select count(distinct organization_id) as tenants, count(*) as shops
from shopify_shopifyconnection where status = 'active'"""

_HAS_NOTIFICATIONS: Final = "select to_regclass('notifier.notifications') is not null"
# Never the body: it may name anybody.
_NOTIFICATIONS: Final = """
select id, channel, severity, kind, subject, status, attempts, error_code, error, created_at,
       finished_at
from notifier.notifications order by id desc limit %(limit)s"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """What failed for the first time, and what was resolved, in one hour."""

    hour: datetime  # its beginning
    failed: int
    resolved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Troubled:
    """A tenant with failed events that are not resolved; leased ones are not counted."""

    tenant: str
    pending: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Where events can go."""

    tenants: int
    shops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A notification, and what became of it."""

    id: int
    channel: str
    severity: str
    kind: str
    subject: str
    status: str
    attempts: int
    error_code: str | None
    error: str | None
    created_at: datetime
    finished_at: datetime | None


def audited(application: db.Pool) -> int:
    """How many deliveries the webhook received in 24 hours; never more than COUNTED."""
    return application.fetch(scalar_row, _AUDITED, {"counted": COUNTED})[0]


def hourly(application: db.Pool) -> list[Hour]:
    """The last HOURS hours, the oldest first; the last one is not over."""
    return application.fetch(class_row(Hour), _HOURLY, {"hours": HOURS})


def troubled(application: db.Pool, limit: int = TROUBLED) -> list[Troubled]:
    """The tenants with most unresolved failed events."""
    return application.fetch(class_row(Troubled), _TROUBLED, {"limit": limit})


def routes(application: db.Pool) -> Routes:
    """Active connections."""
    return application.fetch(class_row(Routes), _ROUTES)[0]


def notifications(application: db.Pool, limit: int = NOTIFICATIONS) -> list[Notification] | None:
    """The newest notifications; None where the notifier is not installed."""
    if not application.fetch(scalar_row, _HAS_NOTIFICATIONS)[0]:
        return None
    return application.fetch(class_row(Notification), _NOTIFICATIONS, {"limit": limit})
