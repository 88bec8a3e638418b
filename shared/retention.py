"""Retention: what is not needed any more goes, a little at a time; what is open never goes by age.

Payloads and tracebacks of resolved failed events, then, if a setting says so, those rows, audit
rows, and the payloads in the tenants' event ledgers. Identities stay longer than any message can
come back: the settings are checked for that. Every step is one statement of a few hundred rows, by
the database's clock, and safe to repeat, beside itself and after a crash.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, LiteralString

from psycopg.rows import class_row, scalar_row

from shared import db, log
from shared.directory import Directory

STEP_ROWS: Final = 500
EVERY_SECONDS: Final = 3600
TENANTS_PER_RUN: Final = 50

# One of several runs has its turn, once an hour; null is due at once.
_TURN: Final = """
update subscriber_retrystate set last_maintenance_at = now()
where last_maintenance_at is null
   or last_maintenance_at <= now() - make_interval(secs => %(every)s)
returning id"""

_AGAIN: Final = "update subscriber_retrystate set last_maintenance_at = null returning id"

# The attributes may hold anything that a publisher sent; ids and clocks of the envelope stay.
_REDACT: Final = """
with old as (
  select id from subscriber_subscriberfailedevent
  where status = 'resolved' and redacted_at is null
    and resolved_at < now() - make_interval(days => %(days)s)
  order by resolved_at, id limit %(rows)s
  for update skip locked
)
update subscriber_subscriberfailedevent f
set payload = null, traceback = '', envelope = f.envelope || '{"attributes": {}}',
    redacted_at = now(), updated_at = now()
from old o
where f.id = o.id and f.status = 'resolved' and f.redacted_at is null
returning f.id"""

# Rows by their ids, which is about the order of their times: over where all of a step are young.
_FORGET_RESOLVED: Final = """
with step as (
  select id, created_at from subscriber_subscriberfailedevent
  where id > %(after)s order by id limit %(rows)s
), gone as (
  delete from subscriber_subscriberfailedevent f using step s
  where f.id = s.id and f.status = 'resolved'
    and f.resolved_at < now() - make_interval(days => %(days)s)
  returning f.id
)
select (select count(*) from gone) as changed, (select max(id) from step) as last,
       coalesce((select min(created_at) from step) >= now() - make_interval(days => %(days)s),
                true) as is_over"""

# What still waits to be published is not a record yet.
_FORGET_AUDIT: Final = """
with step as (
  select id, received_at from shopify_shopifyevent
  where id > %(after)s order by id limit %(rows)s
), gone as (
  delete from shopify_shopifyevent a using step s
  where a.id = s.id and not a.needs_publish
    and a.received_at < now() - make_interval(days => %(days)s)
  returning a.id
)
select (select count(*) from gone) as changed, (select max(id) from step) as last,
       coalesce((select min(received_at) from step) >= now() - make_interval(days => %(days)s),
                true) as is_over"""

# Those that were not visited for longest, but none with an incident or a pause.
_TENANTS: Final = """
select o.tenant, coalesce(r.after_id, 0) as after_id
from unnest(%(tenants)s::text[]) o (tenant)
left join subscriber_tenantretention r on r.tenant = o.tenant
where not exists (select from subscriber_tenantincident i
                  where i.tenant = o.tenant and i.ended_at is null)
order by r.visited_at nulls first, o.tenant
limit %(limit)s"""

_VISITED: Final = """
insert into subscriber_tenantretention (tenant, after_id, visited_at)
values (%(tenant)s, %(after)s, now())
on conflict (tenant) do update set after_id = excluded.after_id, visited_at = excluded.visited_at
returning tenant"""

# Whether the tenant's ledger is the one that was left there, and not another or a restored one.
_STANDS: Final = """
select num_nonnulls(payload, parsed_payload, payload_raw) = 0 from shopify_events
where id <= %(after)s order by id desc limit 1"""

# Up to the first row that is young, so that none is passed over for good. A duplicate moves
# received_at, hence inserted_at.
_STRIP: Final = """
with step as (
  select id, inserted_at < now() - make_interval(days => %(days)s) as is_old
  from shopify_events where id > %(after)s order by id limit %(rows)s
), old as (
  select id from step
  where id < coalesce((select min(id) from step where not is_old), 9223372036854775807)
), stripped as (
  update shopify_events e set payload = null, parsed_payload = null, payload_raw = null
  from old o
  where e.id = o.id and num_nonnulls(e.payload, e.parsed_payload, e.payload_raw) > 0
  returning e.id
)
select (select count(*) from stripped) as changed, (select max(id) from old) as last,
       (select count(*) from old) < %(rows)s as is_over"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """After how many days things go. None keeps them."""

    resolved_payload_days: int
    resolved_days: int | None = None
    audit_days: int | None = None
    event_payload_days: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    changed: int
    last: int | None
    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tenant:
    tenant: str
    after_id: int


class Retention:
    """Keeps the application database and the tenants' event ledgers to the policy."""

    def __init__(
        self,
        application: db.Pool,
        directory: Directory,
        tenants: db.Tenants,
        policy: Policy,
        *,
        share_one_database: bool = False,  # all organizations, that is
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._directory = directory
        self._tenants = tenants
        self._policy = policy
        self._share_one_database = share_one_database
        self._clock = clock

    def run(self, *, budget_seconds: float) -> None:
        """Maintenance, if an hour has passed since the last one, or that was cut off.

        No step starts after the budget. Raises nothing: a fault is logged, and is no other's.
        """
        try:
            if self._application.fetch(scalar_row, _TURN, {"every": EVERY_SECONDS}):
                self._maintain(self._clock() + budget_seconds)
        except Exception as error:  # noqa: BLE001 - replays must not fail for it
            log.error("maintenance.failed", error)

    def _maintain(self, deadline: float) -> None:
        done = Counter[str]()
        chores = {
            "redacted": self._redact,
            "resolved_deleted": self._forget_resolved,
            "audit_deleted": self._forget_audit,
            "payloads_removed": self._strip_all,
        }
        is_complete = True
        for name, chore in chores.items():
            try:
                is_complete &= chore(name, deadline, done)
            except Exception as error:  # noqa: BLE001 - the other chores go on
                log.error("maintenance.failed", error, chore=name)
        if not is_complete:
            self._application.fetch(scalar_row, _AGAIN)
        log.info("maintenance.finished", is_complete=is_complete, **done)

    def _redact(self, name: str, deadline: float, done: Counter[str]) -> bool:
        parameters = {"days": self._policy.resolved_payload_days, "rows": STEP_ROWS}
        while self._clock() < deadline:
            redacted = len(self._application.fetch(scalar_row, _REDACT, parameters))
            done[name] += redacted
            if redacted < STEP_ROWS:
                return True
        return False

    def _forget_resolved(self, name: str, deadline: float, done: Counter[str]) -> bool:
        days = self._policy.resolved_days
        return days is None or self._forget(_FORGET_RESOLVED, days, name, deadline, done)

    def _forget_audit(self, name: str, deadline: float, done: Counter[str]) -> bool:
        days = self._policy.audit_days
        return days is None or self._forget(_FORGET_AUDIT, days, name, deadline, done)

    def _forget(
        self, statement: LiteralString, days: int, name: str, deadline: float, done: Counter[str]
    ) -> bool:
        after = 0
        while self._clock() < deadline:
            step = _walk(self._application, statement, days, after)
            done[name] += step.changed
            if step.is_over or step.last is None:
                return True
            after = step.last
        return False

    def _strip_all(self, name: str, deadline: float, done: Counter[str]) -> bool:
        days = self._policy.event_payload_days
        if days is None:
            return True
        is_complete = True
        for tenant in self._next_tenants():
            if self._clock() >= deadline:
                return False
            try:
                is_complete &= self._strip(tenant, days, name, deadline, done)
            except Exception as error:  # noqa: BLE001 - a tenant that is down waits for its next turn
                log.warning("maintenance.tenant_skipped", error, organization_id=tenant.tenant)
                done["tenants_skipped"] += 1
        return is_complete

    def _next_tenants(self) -> list[_Tenant]:
        tenants = [""] if self._share_one_database else self._directory.organizations()
        parameters = {"tenants": tenants, "limit": TENANTS_PER_RUN}
        return self._application.fetch(class_row(_Tenant), _TENANTS, parameters)

    def _strip(
        self, tenant: _Tenant, days: int, name: str, deadline: float, done: Counter[str]
    ) -> bool:
        """One tenant's event ledger, from where the last visit ended."""
        after = tenant.after_id
        try:
            pool = self._tenants.pool(self._directory.target(tenant.tenant))
            if pool.fetch(scalar_row, _STANDS, {"after": after}) != [True]:
                after = 0
            while self._clock() < deadline:
                step = _walk(pool, _STRIP, days, after)
                done[name] += step.changed
                after = step.last or after
                if step.is_over:
                    return True
            return False
        finally:
            visited = {"tenant": tenant.tenant, "after": after}
            self._application.fetch(scalar_row, _VISITED, visited)


def _walk(pool: db.Pool, statement: LiteralString, days: int, after: int) -> _Step:
    parameters: dict[str, Any] = {"days": days, "after": after, "rows": STEP_ROWS}
    return pool.fetch(class_row(_Step), statement, parameters)[0]
