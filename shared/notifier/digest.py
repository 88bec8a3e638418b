"""The digest: what operators must know becomes a few messages, once a minute, before the queue.

A group of causes is told when its channel's rules say so; what could not be delivered is due again.
Two digests do no harm: one of them has the lock, the other leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from itertools import groupby
from typing import Any, Final, LiteralString

import psycopg
from psycopg.rows import class_row, dict_row

from shared import log
from shared.notifier import causes, wording
from shared.notifier.wording import Group

STEPS: Final = 5  # of marking in one digest: what is left is the next one's

_LOCK: Final = """
select pg_try_advisory_xact_lock(1213154635, hashtext('notifier.digest')) as is_ours"""

_CHANNELS: Final = """
select exists (select from notifier.channels
               where enabled and (name = %(alert)s or min_severity is not null)) as is_any"""

# What happened to the messages that were queued before.
_SETTLE: Final = """
update notifier.alert_groups g
set is_pending = false, is_told = g.is_told or n.status = 'sent',
    last_notified_at = case when n.status = 'sent' then g.last_notified_at end,
    notified_severity = case when n.status = 'sent' or g.is_told then g.notified_severity end,
    undelivered_at = case when n.status = 'sent' then null else now() end
from notifier.notifications n
where n.id = g.notification_id and g.is_pending and n.finished_at is not null
returning g.channel, g.dedupe_key, g.notification_id, n.status, n.error_code"""

_DUE: Final = """
with ranked as (
  select g.*, c.group_wait, c.group_interval, c.repeat_interval, c.max_per_hour,
         array_position(s.names, g.severity) as rank,
         array_position(s.names, g.severity) > array_position(s.names, g.notified_severity)
           as is_worse,
         g.quiet_until > now() as is_quiet
  from notifier.alert_groups g
  join notifier.channels c on c.name = g.channel
  cross join (select array['info', 'warning', 'error', 'critical'] as names) s
  where c.enabled and (c.name = %(alert)s or array_position(s.names, g.severity)
                                             >= array_position(s.names, c.min_severity))
)
select r.channel, r.dedupe_key, r.kind, r.about, r.severity, r.state, r.first_seen, r.last_seen,
       r.total, r.since_notified, r.sample, r.max_per_hour,
       (select i.cause from subscriber_tenantincident i
        where r.kind = 'incident' and i.tenant = r.about->>'tenant'
        order by i.id desc limit 1) as cause,
       (select count(*) from notifier.notifications n
        where n.channel = r.channel and n.kind in ('firing', 'resolved')
          and n.created_at > now() - interval '1 hour') as carried
from ranked r
where (r.is_quiet is not true
       or (r.quiet = 'acknowledged' and (r.is_worse or r.state = 'resolved')))
  and ((r.state = 'resolved' and r.is_told and not r.is_pending)
    or (r.state = 'firing' and r.clear_since is null
        and (r.is_worse
          or (not r.is_pending and r.fired_at <= now() - r.group_wait
              and (r.last_notified_at is null
                or r.last_notified_at <= now() - r.repeat_interval
                or (r.since_notified > 0
                    and r.last_notified_at <= now() - r.group_interval))))))
order by r.channel, r.rank desc, r.state, r.last_notified_at nulls first, r.dedupe_key"""

_TELL: Final = """
with queued as materialized (
  select notifier.notify(%(channel)s, %(subject)s, %(body)s, %(severity)s, %(kind)s,
                         %(dedupe_key)s) as id
)
update notifier.alert_groups g
set notification_id = q.id, last_notified_at = now(), since_notified = 0,
    is_pending = g.state = 'firing', is_told = g.is_told and g.state = 'firing',
    notified_severity = case g.state when 'firing' then g.severity end
from queued q
where g.channel = %(channel)s and g.dedupe_key = %(dedupe_key)s"""

# Once an hour at most, and never by the way that failed.
_UNDELIVERED: Final = """
select g.channel, g.dedupe_key, g.kind, g.about, g.severity, g.state, g.first_seen, g.last_seen,
       g.total, g.since_notified, g.sample
from notifier.alert_groups g
join notifier.channels f on f.name = %(fallback)s and f.enabled
where g.undelivered_at is not null and g.state = 'firing' and g.channel <> f.name
  and not exists (select from notifier.notifications n
                  where n.channel = f.name and n.dedupe_key = 'undelivered'
                    and n.created_at > now() - interval '1 hour')
order by g.channel, g.first_seen, g.dedupe_key"""
_NOTIFY_FALLBACK: Final = """
select notifier.notify(%(fallback)s, %(subject)s, %(body)s, 'error', 'message', 'undelivered')"""

_HEARTBEAT: Final = """
select notifier.notify(c.name, %(subject)s, %(body)s, 'info', 'message', 'heartbeat')
from notifier.channels c
where c.enabled and c.heartbeat is not null
  and not exists (select from notifier.notifications n
                  where n.channel = c.name and n.created_at > now() - c.heartbeat)"""

_FORGET: Final = """
delete from notifier.alert_groups
where state = 'resolved' and not is_told and resolved_at < now() - interval '30 days'"""

_PROBLEMS: Final = """
select exists (select from notifier.channels
               where enabled and (name = %(alert)s or min_severity is not null)) as is_told,
       %(fallback)s = '' or exists (select from notifier.channels
               where enabled and name = %(fallback)s) as has_fallback,
       (select count(*) from notifier.alert_groups
        where undelivered_at is not null and state = 'firing') as undelivered"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due(Group):
    max_per_hour: int
    carried: int  # alerts in the last hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why alerts reach nobody, or not everybody."""

    cause: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Who is told, and where this is. Callable: one of a processor's chores."""

    alert_channel: str
    fallback_channel: str = ""
    project: str = ""  # names the environment

    def __call__(self, connection: psycopg.Connection[Any]) -> int:
        """One digest; how many messages it queued. Raises what psycopg raises.

        Without a channel for alerts nothing is marked or looked at: one that is made later hears
        of all that is there by then.
        """
        if not _row(connection, _CHANNELS, self._parameters())["is_any"]:
            _say_that_nobody_is_told()
            return self._locked(connection, _stay_alive, self.project)
        for _ in range(STEPS):
            if self._locked(connection, self._mark) < causes.ROWS:
                break
        return self._locked(connection, self._tell)

    def problems(self, connection: psycopg.Connection[Any]) -> list[Problem]:
        """What keeps alerts from being told. Raises what psycopg raises."""
        found = _row(connection, _PROBLEMS, self._parameters())
        problems = []
        if not found["is_told"]:
            problems.append(
                Problem(
                    cause="Nobody is told of alerts: there is no enabled channel for them.",
                    remedy=f"Make the channel {self.alert_channel}: manage.py channels add. Or set "
                    "NOTIFIER_ALERT_CHANNEL to one that is there.",
                )
            )
        if not found["has_fallback"]:
            problems.append(
                Problem(
                    cause="NOTIFIER_FALLBACK_CHANNEL names no channel that is there and enabled.",
                    remedy="Correct it, or make the channel: manage.py channels add.",
                )
            )
        if found["undelivered"]:
            problems.append(
                Problem(
                    cause=f"{found['undelivered']} alerts could not be delivered.",
                    remedy="They are tried again. See manage.py notify list --status failed.",
                )
            )
        return problems

    def _parameters(self) -> dict[str, Any]:
        return {"alert": self.alert_channel, "fallback": self.fallback_channel}

    def _locked(
        self, connection: psycopg.Connection[Any], step: Callable[..., int], *rest: Any
    ) -> int:
        """A step in a transaction of its own; 0 where another digest is at work."""
        with connection.transaction():
            if not _row(connection, _LOCK)["is_ours"]:
                return 0
            return step(connection, *rest)

    def _mark(self, connection: psycopg.Connection[Any]) -> int:
        return causes.count_failed(connection, alert_channel=self.alert_channel)

    def _tell(self, connection: psycopg.Connection[Any]) -> int:
        causes.count_others(connection, alert_channel=self.alert_channel)
        self._settle(connection)
        causes.clear(connection)
        connection.execute(_FORGET)
        with connection.cursor(row_factory=class_row(_Due)) as cursor:
            due = cursor.execute(_DUE, self._parameters()).fetchall()
        told = sum(
            self._tell_channel(connection, list(groups))
            for _, groups in groupby(due, key=lambda group: group.channel)
        )
        return told + self._fall_back(connection) + _stay_alive(connection, self.project)

    def _settle(self, connection: psycopg.Connection[Any]) -> None:
        with connection.cursor(row_factory=dict_row) as cursor:
            for settled in cursor.execute(_SETTLE).fetchall():
                if settled["status"] != "sent":
                    log.error(
                        "alert.undelivered",
                        channel=settled["channel"],
                        alert=settled["dedupe_key"],
                        notification=settled["notification_id"],
                        status=settled["status"],
                        code=settled["error_code"],
                    )

    def _tell_channel(self, connection: psycopg.Connection[Any], due: list[_Due]) -> int:
        """The worst first, as many as the channel takes in an hour; what is critical always."""
        room = max(due[0].max_per_hour - due[0].carried, 0)
        chosen = [g for place, g in enumerate(due) if place < room or g.severity == "critical"]
        held_back = len(due) - len(chosen)
        for group in chosen:
            text = wording.alert(
                group, project=self.project, held_back=held_back, per_hour=group.max_per_hour
            )
            message = {
                "channel": group.channel,
                "dedupe_key": group.dedupe_key,
                "severity": group.severity,
                "kind": group.state,
            }
            connection.execute(_TELL, message | _words(text))
        if held_back:
            log.warning("alert.held_back", channel=due[0].channel, count=held_back)
        return len(chosen)

    def _fall_back(self, connection: psycopg.Connection[Any]) -> int:
        with connection.cursor(row_factory=class_row(Group)) as cursor:
            groups = cursor.execute(_UNDELIVERED, self._parameters()).fetchall()
        if groups:
            text = wording.undelivered(groups, project=self.project)
            connection.execute(_NOTIFY_FALLBACK, self._parameters() | _words(text))
        return int(bool(groups))


def _stay_alive(connection: psycopg.Connection[Any], project: str) -> int:
    return connection.execute(_HEARTBEAT, _words(wording.heartbeat(project=project))).rowcount


@cache
def _say_that_nobody_is_told() -> None:
    """Once in a process."""
    log.warning("alert.no_channel")


def _words(text: wording.Text) -> dict[str, Any]:
    return {field.name: getattr(text, field.name) for field in fields(text)}


def _row(
    connection: psycopg.Connection[Any],
    statement: LiteralString,
    parameters: dict[str, Any] | None = None,
) -> dict[str, Any]:
    with connection.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(statement, parameters).fetchone()
    assert row is not None
    return row
