"""Incidents: tenants whose database is unavailable, or that an operator has paused.

While one is open the tenant's failed events are parked. An unavailable tenant is probed after 1, 2,
4, 8 and then every 15 minutes with its longest due failed event, the canary; a pause is never
probed. Any answer but a connection failure ends the incident.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, LiteralString

from psycopg.rows import class_row, dict_row, scalar_row

from shared import db, log
from shared.errors import WorkerLost

PROBE_MINUTES: Final = [1, 2, 4, 8, 15]
PARKED_PER_SECOND: Final = 50
PARKED_BATCH: Final = 1000

_OPEN: Final = """
insert into subscriber_tenantincident as i (tenant, kind, started_at, next_probe_at, cause)
values (%(tenant)s, 'unavailable', %(started_at)s,
        now() + make_interval(mins => (%(minutes)s::int[])[1]), %(cause)s)
on conflict (tenant) where ended_at is null do update set
  cause = excluded.cause,
  next_probe_at = now() + make_interval(
    mins => (%(minutes)s::int[])[least(i.probe_count + 1, %(steps)s)])
  where i.kind = 'unavailable'
returning xmax = 0 as opened"""

# Closing and requeueing are one: whoever dies here has done both or neither.
_CLOSE: Final = """
with closed as (
  update subscriber_tenantincident set ended_at = now()
  where tenant = %(tenant)s and ended_at is null and kind = 'unavailable'
  returning id, tenant, started_at
), given_up as (
  select f.id, row_number() over (order by f.id) as place
  from subscriber_subscriberfailedevent f join closed c on c.tenant = f.tenant
  where f.status = 'failed' and f.updated_at >= c.started_at
    and (left(f.error_code, 2) = any(%(classes)s) or f.error_code = any(%(codes)s))
), requeued as (
  update subscriber_subscriberfailedevent f
  set status = 'pending', retry_count = 0, alerted_at = null, updated_at = now(),
      next_retry_at = now() + make_interval(secs => g.place::float8 / %(per_second)s)
  from given_up g where f.id = g.id and f.status = 'failed'
  returning f.id
), noted as (
  insert into subscriber_operatoraction (actor, action, reason, scope, count)
  select 'system', 'requeue', 'incident ended',
         jsonb_build_object('tenant', c.tenant, 'incident', c.id), count(r.id)
  from closed c left join requeued r on true
  group by c.id, c.tenant
  having count(r.id) > 0
)
select c.id, c.started_at, (select count(*) from requeued) as requeued from closed c"""

# Parked rows come back a few at a time, in the order in which they came due.
_STAGGER: Final = """
update subscriber_subscriberfailedevent f
set next_retry_at = now() + make_interval(secs => (%(done)s + p.place)::float8 / %(per_second)s),
    updated_at = now()
from (select id, row_number() over (order by due_at, id) as place
      from (select id, due_at from subscriber_subscriberfailedevent
            where tenant = %(tenant)s and status = 'pending' and lease_token is null
              and due_at <= now()
            order by due_at, id limit %(batch)s
            for update skip locked) due) p
where f.id = p.id and f.status = 'pending' and f.lease_token is null
returning f.id"""

# Tenants that are to be probed and have no failed event left to do it with. Each question has an
# index of its own; a join would read the whole ledger.
_WITHOUT_CANARY: Final = """
update subscriber_tenantincident i
set last_probe_at = now(), probe_count = probe_count + 1,
    next_probe_at = now() + make_interval(secs => %(lease_seconds)s)
where ended_at is null and kind = 'unavailable' and next_probe_at <= now()
  and (select f.id from subscriber_subscriberfailedevent f
       where f.tenant = i.tenant and f.status = 'pending' and f.lease_token is null
       order by f.due_at, f.id limit 1) is null
  and (select f.id from subscriber_subscriberfailedevent f
       where f.tenant = i.tenant and f.lease_token is not null
       order by f.leased_until limit 1) is null
returning tenant"""

_PAUSE: Final = """
with paused as (
  insert into subscriber_tenantincident as i (tenant, kind, started_at, next_probe_at, cause)
  values (%(tenant)s, 'paused', now(), 'infinity', %(reason)s)
  on conflict (tenant) where ended_at is null do update set
    kind = 'paused', next_probe_at = 'infinity', cause = excluded.cause
    where i.kind <> 'paused'
  returning id
)
insert into subscriber_operatoraction (actor, action, reason, scope, count)
select %(actor)s, 'pause', %(reason)s, jsonb_build_object('tenant', %(tenant)s::text), 1
from paused
returning id"""

_UNPAUSE: Final = """
with ended as (
  update subscriber_tenantincident set ended_at = now()
  where tenant = %(tenant)s and ended_at is null and kind = 'paused'
  returning id
)
insert into subscriber_operatoraction (actor, action, reason, scope, count)
select %(actor)s, 'unpause', %(reason)s, jsonb_build_object('tenant', %(tenant)s::text), 1
from ended
returning id"""

_OPEN_INCIDENTS: Final = """
select id, tenant, kind, started_at, last_probe_at, probe_count, cause
from subscriber_tenantincident where ended_at is null order by started_at, id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One that is open."""

    id: int
    tenant: str
    kind: str
    started_at: datetime
    last_probe_at: datetime | None
    probe_count: int
    cause: str


class Incidents:
    """The incidents in one application database. A tenant is an organization's id."""

    def __init__(self, application: db.Pool, *, lease_seconds: int) -> None:
        self._application = application
        self._lease_seconds = lease_seconds

    def unavailable(self, tenant: str, run_started_at: datetime, cause: str) -> None:
        """A replay failed at the connection: opens an incident, or puts the next probe off."""
        parameters = {
            "tenant": tenant,
            "started_at": run_started_at,
            "cause": cause,
            "minutes": PROBE_MINUTES,
            "steps": len(PROBE_MINUTES),
        }
        if any(row["opened"] for row in self._application.fetch(dict_row, _OPEN, parameters)):
            log.warning("incident.opened", organization_id=tenant, cause=cause)

    def answered(self, tenant: str) -> None:
        """The tenant's database answered: ends its incident, if one is open.

        What was given up for want of a connection meanwhile is requeued, what is parked comes due
        again a few at a time.
        """
        parameters = {
            "tenant": tenant,
            "classes": list(db.CONNECTION_CLASSES),
            "codes": [*db.CONNECTION_CODES, WorkerLost.code],
            "per_second": PARKED_PER_SECOND,
        }
        for row in self._application.fetch(dict_row, _CLOSE, parameters):
            returned = self._stagger(tenant, row["requeued"])
            log.warning(
                "incident.ended",
                organization_id=tenant,
                requeued=row["requeued"],
                parked=returned - row["requeued"],
            )

    def without_canary(self) -> Sequence[str]:
        """Tenants that are due to be probed, with no failed event to do it; each is told once."""
        parameters = {"lease_seconds": self._lease_seconds}
        return self._application.fetch(scalar_row, _WITHOUT_CANARY, parameters)

    def pause(self, tenant: str, *, actor: str, reason: str) -> bool:
        """Holds the tenant's events in the failure ledger; whether it was not paused before."""
        return bool(
            self._application.fetch(
                dict_row, _PAUSE, {"tenant": tenant, "actor": actor, "reason": reason}
            )
        )

    def unpause(self, tenant: str, *, actor: str, reason: str) -> bool:
        """Lets them go again, a few at a time; whether it was paused."""
        ended = self._application.fetch(
            dict_row, _UNPAUSE, {"tenant": tenant, "actor": actor, "reason": reason}
        )
        if ended:
            self._stagger(tenant, 0)
        return bool(ended)

    def open(self) -> list[Incident]:
        """All that are open, the oldest first."""
        return self._application.fetch(class_row(Incident), _OPEN_INCIDENTS)

    def _by_operator(
        self, statement: LiteralString, tenant: str, actor: str, reason: str
    ) -> list[int]:
        parameters = {"tenant": tenant, "actor": actor, "reason": reason}
        return self._application.fetch(scalar_row, statement, parameters)

    def _stagger(self, tenant: str, done: int) -> int:
        """Spreads the tenant's due rows behind `done` others; returns how many there are then."""
        while True:
            parameters = {
                "tenant": tenant,
                "done": done,
                "batch": PARKED_BATCH,
                "per_second": PARKED_PER_SECOND,
            }
            moved = len(self._application.fetch(dict_row, _STAGGER, parameters))
            done += moved
            if moved < PARKED_BATCH:
                return done
