"""Incidents: tenants whose database is unavailable, or that an operator has paused.

While one is open the tenant's failed events are parked. An unavailable tenant is probed after 1, 2,
4, 8 and then every 15 minutes with its longest due failed event, the canary; a pause is never
probed. Any answer but a connection failure ends the incident.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.rows import class_row, dict_row, scalar_row

from shared import backoff, db, log
from shared.errors import WorkerLost

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

_END: Final = """
update subscriber_tenantincident set ended_at = clock_timestamp()
where tenant = %(tenant)s and ended_at is null and kind = %(kind)s
returning id, tenant, started_at, ended_at"""

# What was given up in an incident for want of a connection. A statement after the end, in one
# transaction with it: only so does it see every verdict that made sure of the incident.
_REQUEUE: Final = """
with given_up as (
  select f.id, row_number() over (order by f.id) as place
  from subscriber_subscriberfailedevent f
  where f.tenant = %(tenant)s and f.status = 'failed' and f.updated_at >= %(started_at)s
    and f.payload is not null
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
         jsonb_build_object('tenant', %(tenant)s::text, 'incident', %(id)s::bigint), count(*)
  from requeued having count(*) > 0
)
select id from requeued"""

# Parked rows come back a few at a time, in the order in which they came due.
_STAGGER: Final = """
update subscriber_subscriberfailedevent f
set next_retry_at = now() + make_interval(secs => (%(done)s + p.place)::float8 / %(per_second)s),
    updated_at = now()
from (select id, row_number() over (order by due_at, id) as place
      from (select id, due_at from subscriber_subscriberfailedevent
            where tenant = %(tenant)s and status = 'pending' and lease_token is null
              and due_at <= %(ended_at)s
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

_UNPAUSED: Final = """
insert into subscriber_operatoraction (actor, action, reason, scope, count)
values (%(actor)s, 'unpause', %(reason)s, jsonb_build_object('tenant', %(tenant)s::text), 1)"""

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
            "minutes": backoff.PROBE_MINUTES,
            "steps": len(backoff.PROBE_MINUTES),
        }
        if any(row["opened"] for row in self._application.fetch(dict_row, _OPEN, parameters)):
            log.warning("incident.opened", organization_id=tenant, cause=cause)

    def answered(self, tenant: str) -> None:
        """The tenant's database answered: ends its incident, if one is open.

        What was given up for want of a connection meanwhile is requeued, what is parked comes due
        again a few at a time.
        """
        if ended := self._end(tenant, "unavailable"):
            parked = self._stagger(tenant, ended)
            log.warning(
                "incident.ended", organization_id=tenant, requeued=ended.requeued, parked=parked
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
        """Lets them go again, a few at a time; whether it was paused.

        The pause may have taken over an incident: what had been given up in that is requeued.
        """
        ended = self._end(tenant, "paused", by={"actor": actor, "reason": reason})
        if ended:
            self._stagger(tenant, ended)
        return ended is not None

    def open(self) -> list[Incident]:
        """All that are open, the oldest first."""
        return self._application.fetch(class_row(Incident), _OPEN_INCIDENTS)

    def _end(self, tenant: str, kind: str, by: dict[str, str] | None = None) -> "_Ended | None":
        """Ends the tenant's incident and requeues what was given up in it: both or neither.

        `by` is who ended a pause, and why.
        """

        def end(connection: psycopg.Connection[Any]) -> _Ended | None:
            with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
                incident = cursor.execute(_END, {"tenant": tenant, "kind": kind}).fetchone()
                if incident is None:
                    return None
                if by:
                    cursor.execute(_UNPAUSED, {"tenant": tenant} | by)
                requeued = cursor.execute(_REQUEUE, incident | _returning()).fetchall()
                return _Ended(at=incident["ended_at"], requeued=len(requeued))

        return self._application.run(end)

    def _stagger(self, tenant: str, ended: "_Ended") -> int:
        """Spreads the tenant's rows that were due at the end behind those that were requeued."""
        parked = 0
        while True:
            parameters = {
                "tenant": tenant,
                "ended_at": ended.at,
                "done": ended.requeued + parked,
                "batch": PARKED_BATCH,
                "per_second": PARKED_PER_SECOND,
            }
            moved = len(self._application.fetch(scalar_row, _STAGGER, parameters))
            parked += moved
            if moved < PARKED_BATCH:
                return parked


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    at: datetime
    requeued: int


def _returning() -> dict[str, Any]:
    """What counts as want of a connection, and how fast that comes back."""
    return {
        "classes": list(db.CONNECTION_CLASSES),
        "codes": [*db.CONNECTION_CODES, WorkerLost.code],
        "per_second": PARKED_PER_SECOND,
    }
