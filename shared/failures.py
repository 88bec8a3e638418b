"""The failure ledger: what could not be stored yet, who is replaying it, and what came of it.

Every state change is one UPDATE that names the state it leaves; no row is an answer, not an error.
Leases and schedules go by the database's clock.
"""

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg.rows import class_row, scalar_row
from psycopg.types.json import Jsonb

from shared import backoff, db, log, redact, topics
from shared import envelope as envelopes
from shared.errors import HookledgerError, WorkerLost
from shared.model import Envelope

_FIRST_ORGANIZATION: Final = """
select organization_id from shopify_shopifyconnection
where myshopify_domain = %(shop_domain)s order by id limit 1"""

# A further delivery refreshes the error, never the schedule or a lease. What a replay had resolved
# is open again, with whatever retention took from it; what an operator resolved stays resolved.
_RECORD: Final = """
insert into subscriber_subscriberfailedevent as f
  (event_id, payload_sha256, source, topic, event_type, shop_domain, organization_id, envelope,
   payload, error_type, error_class, error_code, error_message, traceback, fingerprint, max_retries)
values
  (%(event_id)s, %(sha256)s, %(source)s, %(topic)s, %(event_type)s, %(shop_domain)s,
   %(organization_id)s, %(envelope)s, %(payload)s, %(error_type)s, %(error_class)s, %(error_code)s,
   %(error_message)s, %(traceback)s, %(fingerprint)s, %(max_retries)s)
on conflict (shop_domain, event_id) do update set
  occurrences = f.occurrences + 1,
  organization_id = coalesce(excluded.organization_id, f.organization_id),
  error_type = excluded.error_type,
  error_class = excluded.error_class,
  error_code = excluded.error_code,
  error_message = excluded.error_message,
  traceback = excluded.traceback,
  fingerprint = excluded.fingerprint,
  status = case when f.resolution = 'replayed' then 'pending' else f.status end,
  retry_count = case when f.resolution = 'replayed' then 0 else f.retry_count end,
  envelope = case when f.resolution = 'replayed' then excluded.envelope else f.envelope end,
  payload = case when f.resolution = 'replayed' then excluded.payload else f.payload end,
  resolved_at = case when f.resolution = 'replayed' then null else f.resolved_at end,
  redacted_at = case when f.resolution = 'replayed' then null else f.redacted_at end,
  alerted_at = case when f.resolution = 'replayed' then null else f.alerted_at end,
  resolution = case when f.resolution = 'replayed' then null else f.resolution end,
  updated_at = now()
where f.payload_sha256 = excluded.payload_sha256
returning id"""

_NOW: Final = "select now()"

# The shortest way that no two claims meet: lock what is due, pass over what another has locked.
_CLAIM: Final = """
with due as materialized (
  select id, due_at from subscriber_subscriberfailedevent
  where status = 'pending' and lease_token is null and due_at <= now()
    and (%(only_id)s::bigint is null or id = %(only_id)s)
  order by due_at, id
  limit %(limit)s
  for update skip locked
), claimed as (
  update subscriber_subscriberfailedevent f
  set lease_token = %(token)s, updated_at = now(),
      leased_until = now() + make_interval(secs => %(lease_seconds)s)
  from due where f.id = due.id
  returning f.id, due.due_at
)
select id from claimed order by due_at, id"""

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
)
select id, envelope, payload, retry_count from leased"""

_RESOLVE: Final = """
with verdict as (
  update subscriber_subscriberfailedevent
  set status = 'resolved', resolution = 'replayed', resolved_at = now(), next_retry_at = null,
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

_RESCHEDULE: Final = """
with verdict as (
  update subscriber_subscriberfailedevent
  set retry_count = retry_count + 1,
      status = case when retry_count + 1 >= max_retries then 'failed' else 'pending' end,
      next_retry_at = case when retry_count + 1 < max_retries then now() + make_interval(
        mins => (%(schedule)s::int[])[least(retry_count + 1, %(schedule_length)s)]) end,
      error_type = %(error_type)s, error_class = %(error_class)s, error_code = %(error_code)s,
      error_message = %(error_message)s, traceback = %(traceback)s, fingerprint = %(fingerprint)s,
      last_attempted_at = %(run_started_at)s, updated_at = now(),
      lease_token = null, leased_until = null
  where id = %(id)s and status = 'pending' and lease_token = %(token)s
  returning id, status
), attempt as (
  update subscriber_replayattempt a
  set finished_at = now(), error_type = %(error_type)s, error_message = %(error_message)s,
      outcome = case when v.status = 'failed' then 'failed' else 'rescheduled' end
  from verdict v
  where a.failed_event_id = v.id and a.lease_token = %(token)s and a.finished_at is null
)
select status from verdict"""

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
    status = case when f.retry_count + c.charge >= f.max_retries then 'failed' else 'pending' end,
    next_retry_at = case
      when c.charge = 0 then f.next_retry_at
      when f.retry_count + 1 < f.max_retries then now() + make_interval(
        mins => (%(schedule)s::int[])[least(f.retry_count + 1, %(schedule_length)s)]) end,
    last_attempted_at = coalesce(x.started_at, f.last_attempted_at),
    error_type = case when c.charge = 0 then f.error_type else %(error_type)s end,
    error_class = case when c.charge = 0 then f.error_class else 'transient' end,
    error_code = case when c.charge = 0 then f.error_code else %(error_code)s end,
    error_message = case when c.charge = 0 then f.error_message else %(error_message)s end,
    traceback = case when c.charge = 0 then f.traceback else '' end
from expired x, lateral (select case when x.attempt_id is null then 0 else 1 end as charge) c
where f.id = x.id
returning f.id, f.status, c.charge = 1 as charged"""

# An operator's move: what waited or was given up is tried afresh, not all in the same minute.
_REQUEUE_SHOP: Final = """
update subscriber_subscriberfailedevent f
set status = 'pending', retry_count = 0, alerted_at = null, updated_at = now(),
    organization_id = %(organization_id)s,
    next_retry_at = now() + make_interval(secs => q.place::float8 / %(per_second)s)
from (select id, row_number() over (order by id) - 1 as place
      from subscriber_subscriberfailedevent
      where shop_domain = %(shop_domain)s and status in ('pending', 'failed')
        and lease_token is null) q
where f.id = q.id and f.status in ('pending', 'failed') and f.lease_token is null
returning f.id"""

REQUEUED_PER_SECOND: Final = 10

_SCHEDULE: Final[dict[str, Any]] = {
    "schedule": backoff.SCHEDULE_MINUTES,
    "schedule_length": len(backoff.SCHEDULE_MINUTES),
}


class Verdict(StrEnum):
    """What a replay did to its failed event."""

    RESOLVED = "resolved"
    RESCHEDULED = "rescheduled"
    FAILED = "failed"
    LOST = "lost"  # the lease had gone to another; nothing was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent:
    """What a replay needs of a row."""

    id: int
    envelope: dict[str, Any]
    payload: bytes
    retry_count: int

    def as_envelope(self) -> Envelope:
        """The envelope as the first try saw it."""
        return envelopes.from_json(self.envelope, self.payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """A row whose lease had run out."""

    id: int
    status: str
    charged: bool


class Failures:
    """The failure ledger in one application database."""

    def __init__(self, application: db.Pool, *, max_retries: int, lease_seconds: int) -> None:
        self._application = application
        self._max_retries = max_retries
        self._lease_seconds = lease_seconds

    def record(
        self, envelope: Envelope, error: BaseException, organization_id: str | None = None
    ) -> int:
        """Keeps the event and why it failed; returns the row's id. No content can make it fail.

        A second body under a known id gets a row of its own. Raises what psycopg raises when the
        ledger cannot be written: then the message must not be acknowledged.
        """
        organization_id = organization_id or self._first_organization(envelope.shop_domain)
        described = describe(error, envelope.topic)
        for candidate in (envelope, envelopes.collided(envelope)):
            row = self._one(_RECORD, described | self._columns(candidate, organization_id))
            if row is not None:
                log.warning("failure.recorded", error, failed_event=row, topic=envelope.topic)
                return row
        raise HookledgerError("The failure ledger has two bodies under this id already.")

    def now(self) -> datetime:
        """The database's clock, which rules leases and schedules."""
        moment = self._one(_NOW, {})
        assert moment is not None
        return moment

    def claim(self, token: UUID, limit: int, only_id: int | None = None) -> list[int]:
        """Leases up to `limit` due rows, longest due first, and returns their ids in that order."""
        parameters = self._leasing(token) | {"limit": limit, "only_id": only_id}
        return self._all(_CLAIM, parameters)

    def start(self, token: UUID, row: int) -> FailedEvent | None:
        """Renews the lease and opens an attempt; None when the lease has gone to another."""
        return self._application.run(
            lambda connection: _failed_event(connection, _START, self._leasing(token) | {"id": row})
        )

    def resolve(self, token: UUID, row: int, run_started_at: datetime) -> Verdict:
        """The replay succeeded."""
        parameters = {"token": token, "id": row, "run_started_at": run_started_at}
        return Verdict.RESOLVED if self._one(_RESOLVE, parameters) else Verdict.LOST

    def reschedule(
        self, token: UUID, row: int, run_started_at: datetime, error: BaseException, topic: str
    ) -> Verdict:
        """The replay failed: due again by the schedule, or given up when its retries are spent."""
        parameters = {
            "token": token,
            "id": row,
            "run_started_at": run_started_at,
        }
        match self._one(_RESCHEDULE, parameters | _SCHEDULE | describe(error, topic)):
            case "pending":
                return Verdict.RESCHEDULED
            case "failed":
                return Verdict.FAILED
            case _:
                return Verdict.LOST

    def release(self, token: UUID, rows: list[int]) -> int:
        """Gives back rows that were claimed and not started, uncharged; returns how many."""
        return len(self._all(_RELEASE, {"token": token, "ids": rows})) if rows else 0

    def reap(self) -> list[Reaped]:
        """Ends leases that ran out, and charges the replays that had started under them."""
        lost = WorkerLost("The worker that had started this replay never gave its verdict.")
        parameters = _SCHEDULE | describe(lost, topic="")
        return self._application.run(lambda connection: _reaped(connection, parameters))

    def due(self, limit: int, only_id: int | None = None) -> "DueEvents":
        """The due rows, at most `limit`, without claiming them."""
        return DueEvents(self._application, limit, only_id)

    def requeue_shop(self, shop_domain: str, organization_id: str) -> int:
        """Makes all unresolved rows of a shop due afresh, staggered; returns how many."""
        parameters = {
            "shop_domain": shop_domain,
            "organization_id": organization_id,
            "per_second": REQUEUED_PER_SECOND,
        }
        return len(self._all(_REQUEUE_SHOP, parameters))

    def _columns(self, envelope: Envelope, organization_id: str | None) -> dict[str, Any]:
        return {
            "event_id": envelope.event_id,
            "sha256": envelope.payload_sha256,
            "source": envelope.source.value,
            "topic": envelope.topic,
            "event_type": topics.lookup(envelope.topic).operation,
            "shop_domain": envelope.shop_domain,
            "organization_id": organization_id,
            "envelope": Jsonb(envelopes.to_json(envelope)),
            "payload": envelope.payload,
            "max_retries": self._max_retries,
        }

    def _first_organization(self, shop_domain: str) -> str | None:
        try:
            return self._one(_FIRST_ORGANIZATION, {"shop_domain": shop_domain})
        except Exception as error:  # noqa: BLE001 - a row without its owner beats no row
            log.warning("failure.owner_unknown", error)
            return None

    def _leasing(self, token: UUID) -> dict[str, Any]:
        return {"token": token, "lease_seconds": self._lease_seconds}

    def _one(self, statement: LiteralString, parameters: dict[str, Any]) -> Any:
        rows = self._all(statement, parameters)
        return rows[0] if rows else None

    def _all(self, statement: LiteralString, parameters: dict[str, Any]) -> list[Any]:
        def work(connection: psycopg.Connection[Any]) -> list[Any]:
            with connection.cursor(row_factory=scalar_row) as cursor:
                return cursor.execute(statement, parameters).fetchall()

        return self._application.run(work)


class DueEvents:
    """Walks over due rows one by one, so that no more than one payload is in memory."""

    def __init__(self, application: db.Pool, limit: int, only_id: int | None) -> None:
        self._application = application
        self._left = limit
        self._parameters = {"only_id": only_id, "after": 0}

    def __iter__(self) -> "DueEvents":
        return self

    def __next__(self) -> FailedEvent:
        row = self._left > 0 and self._application.run(
            lambda connection: _failed_event(connection, _DUE, self._parameters)
        )
        if not row:
            raise StopIteration
        self._left -= 1
        self._parameters["after"] = row.id
        return row


def describe(error: BaseException, topic: str) -> dict[str, str]:
    """The error's columns: type, class, code, message, traceback and fingerprint, all scrubbed."""
    code, message = db.code(error), redact.message(error)
    return {
        "error_type": type(error).__name__,
        "error_class": db.classify(error),
        "error_code": code,
        "error_message": message,
        "traceback": redact.traceback(error),
        "fingerprint": fingerprint(type(error).__name__, code, message, topic),
    }


def fingerprint(error_type: str, code: str, message: str, topic: str) -> str:
    """The same for failures of one kind: the error without its names and numbers, and the topic."""
    shape = re.sub(r"\d+|\"[^\"]*\"|'[^']*'", "?", message)
    return hashlib.sha256("\n".join((error_type, code, shape, topic)).encode()).hexdigest()[:16]


def _failed_event(
    connection: psycopg.Connection[Any], statement: LiteralString, parameters: dict[str, Any]
) -> FailedEvent | None:
    with connection.cursor(row_factory=class_row(FailedEvent)) as cursor:
        return cursor.execute(statement, parameters).fetchone()


def _reaped(connection: psycopg.Connection[Any], parameters: dict[str, Any]) -> list[Reaped]:
    with connection.cursor(row_factory=class_row(Reaped)) as cursor:
        return cursor.execute(_REAP, parameters).fetchall()
