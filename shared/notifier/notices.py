"""Notifications and alerts as an operator sees them, and what an operator does to them by hand."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString, TypeVar

import psycopg
from psycopg.rows import class_row, dict_row
from psycopg.types.json import Jsonb

from shared.triage import Operator

T = TypeVar("T")

STATUSES: Final = ("queued", "retry", "sent", "failed", "expired", "invalid")
SEVERITIES: Final = ("info", "warning", "error", "critical")

_COLUMNS: Final = """
select id, channel, severity, kind, subject, body, dedupe_key, status, attempts, error_code, error,
       partial, created_at, finished_at
from notifier.notifications"""
_FIND: Final = (
    _COLUMNS
    + """
where (%(status)s::text is null or status = %(status)s)
  and (%(channel)s::text is null or channel = %(channel)s)
order by id desc limit %(limit)s"""
)
_ONE: Final = _COLUMNS + " where id = %(id)s"
_ATTEMPTS: Final = """
select attempt, processor, started_at, finished_at, verdict, class, ambiguous, error_code, reply
from notifier.attempts where notification_id = %(id)s order by attempt"""
_DELIVERIES: Final = """
select recipient, state, code from notifier.deliveries
where notification_id = %(id)s order by recipient"""

_NOTED: Final = """, noted as (
  insert into subscriber_operatoraction (actor, action, reason, scope, count)
  select %(actor)s, %(action)s, %(reason)s, %(scope)s::jsonb, count(*)
  from changed having count(*) > 0
)"""

# As new ones, with all retries: what became of the old ones stays on record.
_REQUEUE: Final = (
    """
with changed as materialized (
  select n.id, notifier.notify(n.channel, n.subject, n.body, n.severity, n.kind, n.dedupe_key)
           as requeued_as
  from notifier.notifications n
  where n.id = any(%(ids)s) and n.status in ('failed', 'expired', 'invalid')
)"""
    + _NOTED
    + """
select id, requeued_as from changed order by id"""
)

_SEND: Final = (
    """
with changed as materialized (
  select notifier.notify(%(channel)s, %(subject)s, %(body)s, %(severity)s, %(kind)s) as id
)"""
    + _NOTED
    + """
select id from changed"""
)

_ALERTS: Final = """
select channel, dedupe_key, kind, severity, state, first_seen, last_seen, total, since_notified,
       sample, last_notified_at, notification_id, is_told, undelivered_at,
       case when quiet_until > now() then quiet end as quiet,
       nullif(quiet_until, 'infinity') as quiet_until, quiet_by, quiet_reason
from notifier.alert_groups where %(all)s or state = 'firing'
order by state, last_seen desc, dedupe_key, channel"""

_QUIET: Final = (
    """
with changed as (
  update notifier.alert_groups
  set quiet = %(quiet)s, quiet_by = %(actor)s, quiet_reason = %(reason)s,
      quiet_until = case when %(seconds)s::float8 is null then 'infinity'
                         else now() + make_interval(secs => %(seconds)s) end
  where dedupe_key = %(key)s and (%(channel)s::text is null or channel = %(channel)s)
  returning channel
)"""
    + _NOTED
    + """
select channel from changed order by channel"""
)
_UNQUIET: Final = (
    """
with changed as (
  update notifier.alert_groups
  set quiet = null, quiet_by = null, quiet_reason = null, quiet_until = null
  where dedupe_key = %(key)s and (%(channel)s::text is null or channel = %(channel)s)
    and quiet is not null
  returning channel
)"""
    + _NOTED
    + """
select channel from changed order by channel"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notification."""

    id: int
    channel: str
    severity: str
    kind: str
    subject: str
    body: str
    dedupe_key: str | None
    status: str
    attempts: int
    error_code: str | None
    error: str | None
    partial: dict[str, Any] | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to send it, and what the server said."""

    attempt: int
    processor: str
    started_at: datetime
    finished_at: datetime | None
    verdict: str | None
    class_: str | None
    ambiguous: bool
    error_code: str | None
    reply: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What became of it for one recipient."""

    recipient: str
    state: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """What one channel knows of one cause."""

    channel: str
    dedupe_key: str
    kind: str
    severity: str
    state: str
    first_seen: datetime
    last_seen: datetime
    total: int
    since_notified: int
    sample: list[int]
    last_notified_at: datetime | None
    notification_id: int | None
    is_told: bool
    undelivered_at: datetime | None
    quiet: str | None
    quiet_until: datetime | None  # None of a quiet one: until it is resolved
    quiet_by: str | None
    quiet_reason: str | None


class Notices:
    """Over one connection, in autocommit mode. Methods raise what psycopg raises."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def find(
        self, *, status: str | None = None, channel: str | None = None, limit: int
    ) -> list[Notice]:
        """The newest first."""
        return self._rows(Notice, _FIND, status=status, channel=channel, limit=limit)

    def one(self, id: int) -> Notice | None:
        """By its id."""
        return next(iter(self._rows(Notice, _ONE, id=id)), None)

    def attempts(self, id: int) -> list[Attempt]:
        """The first one first."""
        with self._connection.cursor(row_factory=dict_row) as cursor:
            rows = cursor.execute(_ATTEMPTS, {"id": id}).fetchall()
        return [Attempt(class_=row.pop("class"), **row) for row in rows]

    def deliveries(self, id: int) -> list[Delivery]:
        """Of those it went to."""
        return self._rows(Delivery, _DELIVERIES, id=id)

    def requeue(self, ids: list[int], by: Operator) -> dict[int, int]:
        """Sends again what reached nobody; the new notification's id for each old one."""
        found = self._changed(_REQUEUE, "notify requeue", by, {"notifications": ids}, ids=ids)
        return {row["id"]: row["requeued_as"] for row in found}

    def send(
        self,
        channel: str,
        subject: str,
        body: str,
        by: Operator,
        *,
        severity: str = "info",
        kind: str = "message",
    ) -> int:
        """Queues a message; its id."""
        message = {"channel": channel, "subject": subject, "body": body}
        message |= {"severity": severity, "kind": kind}
        (row,) = self._changed(_SEND, "notify send", by, {"channel": channel}, **message)
        return row["id"]

    def alerts(self, *, every: bool = False) -> list[Alert]:
        """Those that fire; with `every`, also those that were resolved lately."""
        return self._rows(Alert, _ALERTS, all=every)

    def quiet(
        self, key: str, how: str, by: Operator, *, channel: str | None, seconds: float | None
    ) -> list[str]:
        """Silences or acknowledges an alert for some seconds, or until it is resolved.

        Returns the channels that knew of it.
        """
        named = {"key": key, "channel": channel, "quiet": how, "seconds": seconds}
        action = "notify silence" if how == "silenced" else "notify acknowledge"
        return self._channels(_QUIET, action, by, **named)

    def unquiet(self, key: str, by: Operator, *, channel: str | None) -> list[str]:
        """Lets a quiet alert speak again; where it was quiet."""
        return self._channels(_UNQUIET, "notify unsilence", by, key=key, channel=channel)

    def _channels(
        self, statement: LiteralString, action: str, by: Operator, **named: Any
    ) -> list[str]:
        scope = {"alert": named["key"], "channel": named["channel"]}
        return [row["channel"] for row in self._changed(statement, action, by, scope, **named)]

    def _changed(
        self,
        statement: LiteralString,
        action: str,
        by: Operator,
        scope: dict[str, Any],
        **parameters: Any,
    ) -> list[dict[str, Any]]:
        parameters |= {"actor": by.actor, "action": action, "reason": by.reason}
        parameters |= {"scope": Jsonb(scope)}
        with self._connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(statement, parameters).fetchall()

    def _rows(self, kind: type[T], statement: LiteralString, **parameters: Any) -> list[T]:
        with self._connection.cursor(row_factory=class_row(kind)) as cursor:
            return cursor.execute(statement, parameters).fetchall()
