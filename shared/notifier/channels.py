"""Channels, each with the way its messages leave, as an operator makes and unmakes them.

A change and the record of who made it, when and why are one statement.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg.rows import class_row, dict_row
from psycopg.types.json import Jsonb

from shared.errors import ConfigurationError
from shared.notifier import mail, transports
from shared.notifier.model import TIMEOUT_SECONDS, Profile
from shared.triage import Operator

_LIST: Final = """
select c.name, p.transport, c.enabled, c.recipients, c.min_severity, c.max_per_hour,
       extract(epoch from c.heartbeat)::float8 as heartbeat_seconds,
       (select max(n.finished_at) from notifier.notifications n
        where n.channel = c.name and n.status = 'sent') as last_sent_at,
       (select max(n.finished_at) from notifier.notifications n
        where n.channel = c.name and n.status in ('failed', 'expired', 'invalid')) as last_failed_at
from notifier.channels c join notifier.profiles p on p.name = c.profile order by c.name"""

_NOTED: Final = """, noted as (
  insert into subscriber_operatoraction (actor, action, reason, scope, count)
  select %(actor)s, %(action)s, %(reason)s, jsonb_build_object('channel', %(name)s::text), 1
  from changed
)
select true as is_changed from changed"""

# A profile of the channel's own, under its name.
_ADD: Final = (
    """
with profile as (
  insert into notifier.profiles (name, transport, settings, timeout_seconds)
  values (%(name)s, %(transport)s, %(settings)s, %(timeout)s) returning name
), secrets as (
  insert into notifier.profile_secrets (profile, key, ref)
  select p.name, s.key, s.ref
  from profile p, unnest(%(keys)s::text[], %(refs)s::text[]) as s (key, ref)
), changed as (
  insert into notifier.channels
    (name, profile, recipients, min_severity, max_per_hour, max_retries, heartbeat)
  select p.name, p.name, %(recipients)s, %(min_severity)s, %(max_per_hour)s, %(max_retries)s,
         make_interval(secs => %(heartbeat)s)
  from profile p returning name
)"""
    + _NOTED
)

_ENABLE: Final = (
    """
with changed as (
  update notifier.channels set enabled = %(enabled)s, updated_at = now()
  where name = %(name)s and enabled <> %(enabled)s returning name
)"""
    + _NOTED
)

_REMOVE: Final = (
    """
with changed as (
  delete from notifier.channels where name = %(name)s returning profile
), unused as (
  delete from notifier.profiles p using changed g
  where p.name = g.profile and not exists (
    select from notifier.channels c where c.profile = p.name and c.name <> %(name)s)
)"""
    + _NOTED
)

_ONE: Final = """
select c.recipients, c.enabled, p.name, p.transport, p.settings,
       p.timeout_seconds::float8 as timeout_seconds,
       (select coalesce(jsonb_object_agg(s.key, s.ref), '{}') from notifier.profile_secrets s
        where s.profile = p.name) as secrets
from notifier.channels c join notifier.profiles p on p.name = c.profile where c.name = %(name)s"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A channel in a list."""

    name: str
    transport: str
    enabled: bool
    recipients: list[str]
    min_severity: str | None
    max_per_hour: int
    heartbeat_seconds: float | None
    last_sent_at: datetime | None
    last_failed_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    """A channel that is to be made."""

    name: str
    transport: str
    settings: Mapping[str, Any]
    secrets: Mapping[str, str] = field(default_factory=dict)  # key to reference
    recipients: tuple[str, ...] = ()
    min_severity: str | None = None
    max_per_hour: int = 20
    max_retries: int = 3
    heartbeat_seconds: float | None = None
    timeout_seconds: int = TIMEOUT_SECONDS

    def check(self) -> None:
        """Raises ConfigurationError for what could never be sent."""
        profile = Profile(
            name=self.name,
            transport=self.transport,
            settings=self.settings,
            secrets=self.secrets,
            timeout_seconds=self.timeout_seconds,
        )
        if fault := transports.check(profile):
            raise ConfigurationError(fault)
        for recipient in self.recipients:
            mail.address(recipient)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Who a channel's messages go to, and how."""

    profile: Profile
    recipients: tuple[str, ...]
    enabled: bool


def find(connection: psycopg.Connection[Any]) -> list[Listed]:
    """All channels, by name."""
    with connection.cursor(row_factory=class_row(Listed)) as cursor:
        return cursor.execute(_LIST).fetchall()


def way(connection: psycopg.Connection[Any], name: str) -> Way:
    """Raises ConfigurationError where there is no such channel."""
    with connection.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_ONE, {"name": name}).fetchone()
    if row is None:
        raise _unknown(name)
    seconds = row["timeout_seconds"]
    return Way(
        profile=Profile(
            name=row["name"],
            transport=row["transport"],
            settings=row["settings"],
            secrets=row["secrets"],
            timeout_seconds=int(seconds) if seconds == int(seconds) else seconds,
        ),
        recipients=tuple(row["recipients"]),
        enabled=row["enabled"],
    )


def add(connection: psycopg.Connection[Any], new: New, by: Operator) -> None:
    """Makes profile, references and channel. Raises ConfigurationError, also if it is there."""
    new.check()
    values = {
        "transport": new.transport,
        "settings": Jsonb(dict(new.settings)),
        "timeout": new.timeout_seconds,
        "keys": list(new.secrets),
        "refs": list(new.secrets.values()),
        "recipients": list(new.recipients),
        "min_severity": new.min_severity,
        "max_per_hour": new.max_per_hour,
        "max_retries": new.max_retries,
        "heartbeat": new.heartbeat_seconds,
    }
    try:
        connection.execute(_ADD, values | _record(new.name, "channel add", by))
    except pg.UniqueViolation:
        raise ConfigurationError(
            f"There is a channel or a profile {new.name} already: manage.py channels remove it "
            "first, or choose another name."
        ) from None


def enable(
    connection: psycopg.Connection[Any], name: str, by: Operator, *, enabled: bool = True
) -> bool:
    """Or disables; whether that changed anything. Raises ConfigurationError if it is unknown."""
    way(connection, name)
    action = "channel enable" if enabled else "channel disable"
    values = _record(name, action, by) | {"enabled": enabled}
    return connection.execute(_ENABLE, values).fetchone() is not None


def remove(connection: psycopg.Connection[Any], name: str, by: Operator) -> None:
    """With its profile, unless others use that. Raises ConfigurationError if it is unknown."""
    if connection.execute(_REMOVE, _record(name, "channel remove", by)).fetchone() is None:
        raise _unknown(name)


def _unknown(name: str) -> ConfigurationError:
    return ConfigurationError(f"There is no channel {name}: see manage.py channels list.")


def _record(name: str, action: str, by: Operator) -> dict[str, Any]:
    return {"name": name, "action": action, "actor": by.actor, "reason": by.reason}
