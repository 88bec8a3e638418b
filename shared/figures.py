"""What waits, what was given up, what recovers: the application database in numbers."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from psycopg.rows import class_row, scalar_row

from shared import db

GROUPS: Final = 20

# A row that was resolved in the last 24 hours still has its payload: retention takes it after days.
_STATS: Final = """
with waiting as (
  select count(*) as pending,
         count(*) filter (where due_at <= now() and lease_token is null) as due,
         count(*) filter (where lease_token is not null) as leased,
         count(*) filter (where exists (
           select from subscriber_tenantincident i
           where i.tenant = f.tenant and i.ended_at is null)) as parked,
         now() - min(due_at) filter (where due_at <= now()) as oldest_due,
         count(*) filter (where created_at >= now() - interval '24 hours') as recorded_24h
  from subscriber_subscriberfailedevent f where status = 'pending'
), given_up as (
  select count(*) as failed,
         count(*) filter (where created_at >= now() - interval '24 hours') as recorded_24h
  from subscriber_subscriberfailedevent where status = 'failed'
), done as (
  select count(*) as resolved_24h,
         count(*) filter (where created_at >= now() - interval '24 hours') as recorded_24h
  from subscriber_subscriberfailedevent
  where status = 'resolved' and redacted_at is null and resolved_at >= now() - interval '24 hours'
), trouble as (
  select count(*) filter (where kind = 'unavailable') as incidents_open,
         count(*) filter (where kind = 'paused') as paused
  from subscriber_tenantincident where ended_at is null
), unpublished as (
  select count(*) as outbox, now() - min(received_at) as oldest
  from shopify_shopifyevent where needs_publish
)
select w.due, extract(epoch from w.oldest_due)::float8 as oldest_due_seconds, w.pending, w.leased,
       w.parked, g.failed, d.resolved_24h,
       w.recorded_24h + g.recorded_24h + d.recorded_24h as recorded_24h,
       d.recorded_24h::float8 / nullif(w.recorded_24h + g.recorded_24h + d.recorded_24h, 0)
         as recovery_rate_24h,
       t.incidents_open, t.paused, u.outbox,
       extract(epoch from u.oldest)::float8 as oldest_outbox_seconds,
       (select last_run_finished_at from subscriber_retrystate) as last_run_at
from waiting w, given_up g, done d, trouble t, unpublished u"""

_HAS_NOTIFIER: Final = """
select to_regclass('pgrelay.queue') is not null
   and to_regclass('notifier.notifications') is not null"""
_NOTICES: Final = """
select (select count(*) from pgrelay.queue where done_at is null and due_at <= now()) as due,
       (select count(*) from notifier.notifications
        where status in ('failed', 'expired', 'invalid')
          and finished_at >= now() - interval '24 hours') as failed_24h"""

_GROUPS: Final = """
with counted as (
  select fingerprint, count(*) as count, count(*) filter (where status = 'failed') as failed,
         count(distinct tenant) as tenants, min(created_at) as since, max(id) as example_id
  from subscriber_subscriberfailedevent where status in ('pending', 'failed')
  group by fingerprint order by count(*) desc, fingerprint limit %(limit)s
)
select c.*, e.error_type, e.error_class, e.error_code, e.topic, e.error_message
from counted c join subscriber_subscriberfailedevent e on e.id = c.example_id
order by c.count desc, c.fingerprint"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The failure ledger, and what stands around it, in numbers."""

    due: int
    oldest_due_seconds: float | None
    pending: int
    leased: int
    parked: int  # pending rows of tenants with an open incident
    failed: int
    resolved_24h: int
    recorded_24h: int
    recovery_rate_24h: float | None  # of those recorded in 24 hours, the part that is resolved
    incidents_open: int  # tenants that are unavailable
    paused: int  # organizations, by an operator
    outbox: int  # messages that Pub/Sub has not confirmed
    oldest_outbox_seconds: float | None
    last_run_at: datetime | None  # when a retry run last came to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """The notifier in numbers."""

    due: int  # attempts that should be under way
    failed_24h: int  # notifications that reached nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Unresolved failed events of one kind."""

    fingerprint: str
    count: int
    failed: int  # of them, given up
    tenants: int
    since: datetime
    example_id: int
    error_type: str
    error_class: str
    error_code: str
    topic: str
    error_message: str


def stats(application: db.Pool) -> Stats:
    """How many failed events are in which state, how old, and how many recover."""
    return application.fetch(class_row(Stats), _STATS)[0]


def notices(application: db.Pool) -> Notices | None:
    """What the notifier has to do, and what it could not; None where it is not installed."""
    if not application.fetch(scalar_row, _HAS_NOTIFIER)[0]:
        return None
    return application.fetch(class_row(Notices), _NOTICES)[0]


def left(application: db.Pool) -> dict[str, Any]:
    """What a tick leaves: the figures that dashboards draw. JSON-ready."""
    found, notified = stats(application), notices(application)
    shown = asdict(found) | {"last_run_at": None}
    if notified:
        shown |= {"notifier_due": notified.due, "notifier_failed_24h": notified.failed_24h}
    return {name: value for name, value in shown.items() if value is not None}


def groups(application: db.Pool, limit: int = GROUPS) -> list[Group]:
    """The kinds of failures that are not resolved, the most frequent first."""
    return application.fetch(class_row(Group), _GROUPS, {"limit": limit})
