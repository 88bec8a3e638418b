"""Leases on failed events: who is replaying which row, and what came of it.

Every state change is one UPDATE that names the state it leaves; no row is an answer, not an error.
Whoever claims rows holds them under a token until the lease ends, and every verdict must present
the token: a late worker changes nothing. Leases and schedules go by the database's clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from psycopg.rows import class_row, scalar_row

from shared import backoff, db
from shared import envelope as envelopes
from shared.errors import WorkerLost
from shared.faults import describe
from shared.model import Envelope

_RUN_STARTED: Final = """
update subscriber_retrystate set last_run_started_at = now(), heartbeat_at = now()
returning now()"""

_RUN_FINISHED: Final = """
update subscriber_retrystate set last_run_finished_at = now(), heartbeat_at = now()
returning (select count(*) from subscriber_tenantincident
           where ended_at is null and kind = 'unavailable')"""

# Once its canary is out, a tenant waits for the verdict, or for the canary's lease to end.
_TAKEN: Final = """, probed as (
  update subscriber_tenantincident i
  set last_probe_at = now(), probe_count = probe_count + 1,
      next_probe_at = now() + make_interval(secs => %(lease_seconds)s)
  where ended_at is null and kind = 'unavailable' and tenant in (select tenant from locked)
), claimed as (
  update subscriber_subscriberfailedevent f
  set lease_token = %(token)s, updated_at = now(),
      leased_until = now() + make_interval(secs => %(lease_seconds)s)
  from locked l where f.id = l.id
  returning f.id, l.tenant, l.turn
)
select c.id, c.tenant,
       exists (select from subscriber_tenantincident i
               where i.tenant = c.tenant and i.ended_at is null) as is_canary
from claimed c order by c.turn"""

# Turn by turn: of each tenant the row that is due longest, then of each its next one. The tenants
# are found by hopping through the index from where the last turn stopped; nothing is read that is
# not claimed, however long the ledger is. What was picked is looked up by its id, row by row: right
# after a burst the planner knows little of the table, and would join with all that is due. A tenant
# with an incident has no turn until its probe is due, and then for one row only, the canary.
_CLAIM: Final = (
    """
with recursive rest as (
  (select f.tenant, f.due_at, f.id from subscriber_subscriberfailedevent f
   where f.status = 'pending' and f.lease_token is null
     and f.tenant > (select last_tenant from subscriber_retrystate)
   order by f.tenant, f.due_at, f.id limit 1)
  union all
  select n.* from rest r cross join lateral (
    select f.tenant, f.due_at, f.id from subscriber_subscriberfailedevent f
    where f.status = 'pending' and f.lease_token is null and f.tenant > r.tenant
    order by f.tenant, f.due_at, f.id limit 1) n
), start as (
  (select f.tenant, f.due_at, f.id from subscriber_subscriberfailedevent f
   where f.status = 'pending' and f.lease_token is null
     and f.tenant <= (select last_tenant from subscriber_retrystate)
   order by f.tenant, f.due_at, f.id limit 1)
  union all
  select n.* from start r cross join lateral (
    select f.tenant, f.due_at, f.id from subscriber_subscriberfailedevent f
    where f.status = 'pending' and f.lease_token is null and f.tenant > r.tenant
      and f.tenant <= (select last_tenant from subscriber_retrystate)
    order by f.tenant, f.due_at, f.id limit 1) n
), longest as (
  select * from rest union all select * from start
), head as (
  select t.id, t.due_at, t.tenant from longest t
  where t.due_at <= now() and t.tenant <> all(%(busy)s::text[])
    and not exists (select from subscriber_tenantincident i
                    where i.tenant = t.tenant and i.ended_at is null and i.next_probe_at > now())
), ring as (
  select * from head
  union all
  select d.* from ring r cross join lateral (
    select f.id, f.due_at, f.tenant from subscriber_subscriberfailedevent f
    where f.status = 'pending' and f.lease_token is null and f.tenant = r.tenant
      and (f.due_at, f.id) > (r.due_at, r.id) and f.due_at <= now()
    order by f.due_at, f.id limit 1) d
  where not exists (select from subscriber_tenantincident i
                    where i.tenant = r.tenant and i.ended_at is null)
), picked as materialized (
  select id, row_number() over () as turn from (select id from ring limit %(limit)s) r
), locked as materialized (
  select f.id, f.tenant, p.turn
  from (select id, turn from picked order by id) p cross join lateral (
    select f.id, f.tenant from subscriber_subscriberfailedevent f
    where f.id = p.id and f.status = 'pending' and f.lease_token is null and f.due_at <= now()
    for update skip locked) f
), stopped as (
  update subscriber_retrystate s set last_tenant = l.tenant
  from (select tenant from locked order by turn desc limit 1) l
)"""
    + _TAKEN
)

_CLAIM_ONE: Final = (
    """
with locked as materialized (
  select id, tenant, 1 as turn from subscriber_subscriberfailedevent f
  where id = %(only_id)s and status = 'pending' and lease_token is null and due_at <= now()
    and not exists (select from subscriber_tenantincident i
                    where i.tenant = f.tenant and i.ended_at is null and i.kind = 'paused')
  for update of f skip locked
)"""
    + _TAKEN
)

_DUE: Final = """
select id, envelope, payload, retry_count from subscriber_subscriberfailedevent
where status = 'pending' and lease_token is null and due_at <= now()
  and (%(only_id)s::bigint is null or id = %(only_id)s) and id > %(after)s
order by id
limit 1"""

# From here on the replay counts: whoever dies after this statement is charged for it.
_START: Final = """
with leased as (
  update subscriber_subscriberfailedevent
  set leased_until = now() + make_interval(secs => %(lease_seconds)s), updated_at = now()
  where id = %(id)s and status = 'pending' and lease_token = %(token)s
  returning id, envelope, payload, retry_count
), attempt as (
  insert into subscriber_replayattempt (failed_event_id, attempt, lease_token, started_at)
  select id, retry_count + 1, %(token)s, now() from leased
  on conflict (failed_event_id) where finished_at is null do update
    set lease_token = excluded.lease_token, started_at = excluded.started_at
)
select id, envelope, payload, retry_count from leased"""

_RESOLVE: Final = """
with verdict as (
  update subscriber_subscriberfailedevent
  set status = 'resolved', resolved_at = now(), next_retry_at = null,
      resolution = case when payload is null then 'erased' else 'replayed' end,
      last_attempted_at = %(run_started_at)s, updated_at = now(),
      lease_token = null, leased_until = null
  where id = %(id)s and status = 'pending' and lease_token = %(token)s
  returning id
), attempt as (
  update subscriber_replayattempt a set finished_at = now(), outcome = 'resolved'
  from verdict v
  where a.failed_event_id = v.id and a.lease_token = %(token)s and a.finished_at is null
)
select id from verdict"""

# An event that was erased while it was replayed is done with, however that ended: there is nothing
# left to be stored. What is given up for want of a connection is brought back by the end of an
# incident. So there is one when the verdict is committed, and it is locked until then, whatever
# another run has ended.
_RESCHEDULE: Final = """
with verdict as (
  update subscriber_subscriberfailedevent
  set retry_count = retry_count + 1,
      status = case when payload is null then 'resolved'
                    when retry_count + 1 >= max_retries then 'failed' else 'pending' end,
      resolution = case when payload is null then 'erased' end,
      resolved_at = case when payload is null then now() end,
      next_retry_at = case when payload is not null and retry_count + 1 < max_retries
        then now() + make_interval(
          mins => (%(schedule)s::int[])[least(retry_count + 1, %(schedule_length)s)]) end,
      error_type = %(error_type)s, error_class = %(error_class)s, error_code = %(error_code)s,
      error_message = %(error_message)s, traceback = %(traceback)s, fingerprint = %(fingerprint)s,
      last_attempted_at = %(run_started_at)s, updated_at = now(),
      lease_token = null, leased_until = null
  where id = %(id)s and status = 'pending' and lease_token = %(token)s
  returning id, tenant, status
), incident as (
  insert into subscriber_tenantincident as i (tenant, kind, started_at, next_probe_at, cause)
  select v.tenant, 'unavailable', %(run_started_at)s,
         now() + make_interval(mins => %(probe_minutes)s), %(error_message)s
  from verdict v where v.status = 'failed' and %(is_connection_failure)s
  on conflict (tenant) where ended_at is null do update set tenant = i.tenant
), attempt as (
  update subscriber_replayattempt a
  set finished_at = now(), error_type = %(error_type)s, error_message = %(error_message)s,
      outcome = case when v.status = 'pending' then 'rescheduled' else v.status end
  from verdict v
  where a.failed_event_id = v.id and a.lease_token = %(token)s and a.finished_at is null
)
select status from verdict"""

# The attempt that found the organization paused never was one. From here on the row is known by its
# organization, and claims leave it out.
_HOLD: Final = """
with held as (
  update subscriber_subscriberfailedevent
  set lease_token = null, leased_until = null, updated_at = now(),
      organization_id = %(organization_id)s
  where id = %(id)s and status = 'pending' and lease_token = %(token)s
  returning id
), attempt as (
  delete from subscriber_replayattempt a using held h
  where a.failed_event_id = h.id and a.lease_token = %(token)s and a.finished_at is null
)
select id from held"""

_RELEASE: Final = """
update subscriber_subscriberfailedevent
set lease_token = null, leased_until = null, updated_at = now()
where id = any(%(ids)s) and status = 'pending' and lease_token = %(token)s
returning id"""

# Leases that ran out. A row whose replay had started is charged as a failed replay, so that an
# event which kills its worker also runs out of retries; one that nobody started comes due again.
_REAP: Final = """
with expired as materialized (
  select f.id, f.lease_token, a.id as attempt_id, a.started_at
  from subscriber_subscriberfailedevent f
  left join subscriber_replayattempt a
    on a.failed_event_id = f.id and a.lease_token = f.lease_token and a.finished_at is null
  where f.lease_token is not null and f.leased_until <= now()
  order by f.id
  for update of f skip locked
), attempt as (
  update subscriber_replayattempt a
  set finished_at = now(), outcome = 'lost', error_type = %(error_type)s,
      error_message = %(error_message)s
  from expired x where a.id = x.attempt_id
)
update subscriber_subscriberfailedevent f
set lease_token = null, leased_until = null, updated_at = now(),
    retry_count = f.retry_count + c.charge,
    status = case when f.payload is null then 'resolved'
                  when f.retry_count + c.charge >= f.max_retries then 'failed' else 'pending' end,
    resolution = case when f.payload is null then 'erased' end,
    resolved_at = case when f.payload is null then now() end,
    next_retry_at = case
      when f.payload is null then null
      when c.charge = 0 then f.next_retry_at
      when f.retry_count + 1 < f.max_retries then now() + make_interval(
        mins => (%(schedule)s::int[])[least(f.retry_count + 1, %(schedule_length)s)]) end,
    last_attempted_at = coalesce(x.started_at, f.last_attempted_at),
    error_type = case when c.charge = 0 then f.error_type else %(error_type)s end,
    error_class = case when c.charge = 0 then f.error_class else %(error_class)s end,
    error_code = case when c.charge = 0 then f.error_code else %(error_code)s end,
    error_message = case when c.charge = 0 then f.error_message else %(error_message)s end,
    traceback = case when c.charge = 0 then f.traceback else %(traceback)s end,
    fingerprint = case when c.charge = 0 then f.fingerprint else %(fingerprint)s end
from expired x, lateral (select case when x.attempt_id is null then 0 else 1 end as charge) c
where f.id = x.id
returning f.id, f.status, c.charge = 1 as charged"""

_SCHEDULE: Final[dict[str, Any]] = {
    "schedule": backoff.SCHEDULE_MINUTES,
    "schedule_length": len(backoff.SCHEDULE_MINUTES),
    "probe_minutes": backoff.PROBE_MINUTES[0],
}


class Verdict(StrEnum):
    """What a replay did to its failed event."""

    RESOLVED = "resolved"
    RESCHEDULED = "rescheduled"
    FAILED = "failed"
    HELD = "held"  # its organization is paused; not charged
    LOST = "lost"  # the lease had gone to another; nothing was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A row that was leased."""

    id: int
    tenant: str
    is_canary: bool  # the tenant has an incident, and this row is to find out how it is


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent:
    """What a replay needs of a row."""

    id: int
    envelope: dict[str, Any]
    payload: bytes | None  # None: it was erased after the row was claimed
    retry_count: int

    def as_envelope(self) -> Envelope:
        """The envelope as the first try saw it, with an empty payload if that was erased."""
        return envelopes.from_json(self.envelope, self.payload or b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """A row whose lease had run out."""

    id: int
    status: str
    charged: bool


class Leases:
    """The failure ledger in one application database, as a worker deals with it."""

    def __init__(self, application: db.Pool, *, lease_seconds: int) -> None:
        self._application = application
        self._lease_seconds = lease_seconds

    def run_started(self) -> datetime:
        """Notes that a retry run starts, and when, by the database's clock."""
        return self._application.fetch(scalar_row, _RUN_STARTED)[0]

    def run_finished(self) -> int:
        """Notes that a retry run came to its end; how many tenants are unavailable then."""
        return self._application.fetch(scalar_row, _RUN_FINISHED)[0]

    def claim(
        self, token: UUID, limit: int, only_id: int | None = None, *, busy: Sequence[str] = ()
    ) -> list[Claim]:
        """Leases up to `limit` due rows and returns them in the order of their turns.

        `only_id` names the one row to lease: if it is due, and its tenant is not paused. Tenants
        that are `busy` have no turn.
        """
        leasing = {"token": token, "lease_seconds": self._lease_seconds}
        if only_id is not None:
            only = leasing | {"only_id": only_id}
            return self._application.fetch(class_row(Claim), _CLAIM_ONE, only)
        turns = leasing | {"limit": limit, "busy": list(busy)}
        return self._application.fetch(class_row(Claim), _CLAIM, turns)

    def start(self, token: UUID, row: int) -> FailedEvent | None:
        """Renews the lease and opens an attempt; None when the lease has gone to another."""
        parameters = {"token": token, "id": row, "lease_seconds": self._lease_seconds}
        started = self._application.fetch(class_row(FailedEvent), _START, parameters)
        return started[0] if started else None

    def resolve(self, token: UUID, row: int, run_started_at: datetime) -> Verdict:
        """The replay succeeded."""
        parameters = {"token": token, "id": row, "run_started_at": run_started_at}
        resolved = self._application.fetch(scalar_row, _RESOLVE, parameters)
        return Verdict.RESOLVED if resolved else Verdict.LOST

    def reschedule(
        self, token: UUID, row: int, run_started_at: datetime, error: BaseException, topic: str
    ) -> Verdict:
        """The replay failed: due again by the schedule, or given up when its retries are spent.

        Resolved, if the event was erased meanwhile.
        """
        parameters = {"token": token, "id": row, "run_started_at": run_started_at}
        parameters |= _SCHEDULE | describe(error, topic)
        parameters["is_connection_failure"] = db.is_connection_failure(error)
        match self._application.fetch(scalar_row, _RESCHEDULE, parameters):
            case ["pending"]:
                return Verdict.RESCHEDULED
            case ["failed"]:
                return Verdict.FAILED
            case ["resolved"]:
                return Verdict.RESOLVED
            case _:
                return Verdict.LOST

    def hold(self, token: UUID, row: int, organization_id: str) -> Verdict:
        """The row's organization is paused: it waits for the end of that, uncharged."""
        parameters = {"token": token, "id": row, "organization_id": organization_id}
        held = self._application.fetch(scalar_row, _HOLD, parameters)
        return Verdict.HELD if held else Verdict.LOST

    def release(self, token: UUID, rows: list[int]) -> int:
        """Gives back rows that were claimed and not started, uncharged; returns how many."""
        return len(self._application.fetch(scalar_row, _RELEASE, {"token": token, "ids": rows}))

    def reap(self) -> list[Reaped]:
        """Ends leases that ran out, and charges the replays that had started under them."""
        lost = WorkerLost("The worker that had started this replay never gave its verdict.")
        parameters = _SCHEDULE | describe(lost, topic="")
        return self._application.fetch(class_row(Reaped), _REAP, parameters)

    def due(self, limit: int, only_id: int | None = None) -> Iterator[FailedEvent]:
        """Up to `limit` due rows, one by one and without claiming them."""
        after = 0
        for _ in range(limit):
            parameters = {"only_id": only_id, "after": after}
            found = self._application.fetch(class_row(FailedEvent), _DUE, parameters)
            if not found:
                return
            after = found[0].id
            yield found[0]
