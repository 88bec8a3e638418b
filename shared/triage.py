"""Triage: the failure ledger as an operator sees it, and what an operator does to it by hand.

What is meant is said by a scope; nothing is ever done to a row that a worker holds. A change and
the record of who made it, when and why are one statement; thousands of rows take several, each of
its own, so that whoever is killed between two has done and recorded whole steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, LiteralString

from psycopg.rows import class_row, scalar_row
from psycopg.types.json import Jsonb

from shared import db

STEP_ROWS: Final = 1000

# What a scope may say, and what that means of a row. Joined by "and", never formatted.
_MEANS: Final[dict[str, LiteralString]] = {
    "ids": "f.id = any(%(ids)s)",
    "organization": "f.organization_id = %(organization)s",
    "shop": "f.shop_domain = %(shop)s",
    "topic": "f.topic = %(topic)s",
    "error_type": "f.error_type = %(error_type)s",
    "code": "f.error_code = %(code)s",
    "fingerprint": "f.fingerprint = %(fingerprint)s",
    "since": "f.created_at >= %(since)s",
    "until": "f.created_at < %(until)s",
}

_LIST: Final = """
select f.id, f.status, f.event_id, f.topic, f.shop_domain, f.organization_id, f.error_type,
       f.error_class, f.error_code, f.error_message, f.fingerprint, f.retry_count, f.max_retries,
       f.occurrences, f.created_at, f.last_attempted_at, f.resolved_at, f.resolution,
       case when f.status = 'pending' then f.due_at end as due_at,
       f.lease_token is not null as is_leased
from subscriber_subscriberfailedevent f
where f.status = any(%(statuses)s)"""
_BEFORE: Final = " and f.id < %(before)s"
_NEWEST: Final = """
order by f.id desc limit %(limit)s"""
_LONGEST_DUE: Final = """
order by f.due_at, f.id limit %(limit)s"""

_TALLY: Final = """
select f.status, f.lease_token is not null as is_leased, count(*) as count
from subscriber_subscriberfailedevent f
where true"""
_BY_STATUS: Final = """
group by 1, 2"""

# The rows of one step. Each is looked at again by the statement that changes it.
_STEP: Final = """
select f.id from subscriber_subscriberfailedevent f
where f.status = any(%(statuses)s) and f.lease_token is null and f.id > %(after)s"""
_STEP_ORDER: Final = """
order by f.id limit %(step)s"""

_NOTED: Final = """, noted as (
  insert into subscriber_operatoraction (actor, action, reason, scope, count)
  select %(actor)s, %(action)s, %(reason)s,
         %(scope)s::jsonb || jsonb_build_object('rows', jsonb_agg(id order by id)), count(*)
  from moved having count(*) > 0
)
select id from moved"""

# A row without a payload has nothing that could be replayed.
_REQUEUE: Final = (
    """
with picked as (
  select f.id, row_number() over (order by f.id) - 1 as place
  from (select id from subscriber_subscriberfailedevent
        where id = any(%(ids)s) and status = any(%(statuses)s) and lease_token is null
        order by id for update) f
), moved as (
  update subscriber_subscriberfailedevent f
  set status = 'pending', retry_count = 0, alerted_at = null, updated_at = now(),
      next_retry_at = now()
        + make_interval(secs => (%(done)s + p.place)::float8 / %(per_second)s::float8)
  from picked p
  where f.id = p.id and f.status in ('pending', 'failed') and f.lease_token is null
    and f.payload is not null
  returning f.id
)"""
    + _NOTED
)

_RESOLVE: Final = (
    """
with picked as (
  select id from subscriber_subscriberfailedevent
  where id = any(%(ids)s) and status = any(%(statuses)s) and lease_token is null
  order by id for update
), moved as (
  update subscriber_subscriberfailedevent f
  set status = 'resolved', resolution = 'operator', resolved_at = now(), next_retry_at = null,
      updated_at = now()
  from picked p
  where f.id = p.id and f.status in ('pending', 'failed') and f.lease_token is null
  returning f.id
)"""
    + _NOTED
)

_SEEN: Final = """
insert into subscriber_operatoraction (actor, action, reason, scope, count)
select %(actor)s, 'view', %(reason)s, jsonb_build_object('rows', jsonb_build_array(id)), 1
from subscriber_subscriberfailedevent where id = %(row)s
returning id"""

_KNOWN: Final = """
select exists (select from shopify_shopifyconnection where organization_id = %(organization)s)
    or exists (select from databases_database where organization_id = %(organization)s)"""


class Status(StrEnum):
    """The states of a failed event."""

    PENDING = "pending"
    RESOLVED = "resolved"
    FAILED = "failed"


UNRESOLVED: Final = (Status.PENDING, Status.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which failed events are meant: those for which all holds that is said. None says nothing."""

    ids: tuple[int, ...] | None = None
    organization: str | None = None
    shop: str | None = None  # "" is a shop too: the unknown one
    topic: str | None = None
    error_type: str | None = None
    code: str | None = None
    fingerprint: str | None = None
    since: datetime | None = None  # recorded then or later
    until: datetime | None = None  # recorded before

    def said(self) -> dict[str, Any]:
        """What it says, by name."""
        values = {name: getattr(self, name) for name in _MEANS}
        return {name: value for name, value in values.items() if value is not None}

    def conditions(self) -> LiteralString:
        """The same as SQL, to be added to a where clause; parameters as `parameters` has them."""
        said = self.said()
        return "".join(" and " + means for name, means in _MEANS.items() if name in said)

    def parameters(self) -> dict[str, Any]:
        """The values for `conditions`."""
        return {name: list(v) if name == "ids" else v for name, v in self.said().items()}

    def as_json(self) -> dict[str, Any]:
        """The same for the record; {"all": true} when it says nothing."""
        said = {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in self.parameters().items()
        }
        return said or {"all": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A failed event in a list."""

    id: int
    status: str
    event_id: str
    topic: str
    shop_domain: str
    organization_id: str | None
    error_type: str
    error_class: str
    error_code: str
    error_message: str
    fingerprint: str
    retry_count: int
    max_retries: int
    occurrences: int
    created_at: datetime
    last_attempted_at: datetime | None
    resolved_at: datetime | None
    resolution: str | None
    due_at: datetime | None  # of a pending one
    is_leased: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many rows of a scope are in one state."""

    status: str
    is_leased: bool
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Who does something, and why."""

    actor: str
    reason: str


class Triage:
    """The failure ledger in one application database, as an operator deals with it."""

    def __init__(self, application: db.Pool) -> None:
        self._application = application

    def find(
        self,
        scope: Scope,
        statuses: tuple[Status, ...] = UNRESOLVED,
        *,
        limit: int,
        longest_due: bool = False,
        before: int | None = None,
    ) -> list[Listed]:
        """Up to `limit` failed events, the newest first, or those that are due longest.

        `before` is the last id of the page before.
        """
        order = _LONGEST_DUE if longest_due else _NEWEST
        parameters = scope.parameters() | {"statuses": _names(statuses), "limit": limit}
        if before is not None:
            parameters["before"] = before
            order = _BEFORE + order
        statement = _LIST + scope.conditions() + order
        return self._application.fetch(class_row(Listed), statement, parameters)

    def tally(self, scope: Scope) -> list[Tally]:
        """How many rows the scope has, by state."""
        statement = _TALLY + scope.conditions() + _BY_STATUS
        return self._application.fetch(class_row(Tally), statement, scope.parameters())

    def movable(self, scope: Scope, statuses: tuple[Status, ...]) -> Iterator[list[int]]:
        """The rows in these states that nobody holds, by id, at most a thousand at a time."""
        statement = _STEP + scope.conditions() + _STEP_ORDER
        parameters = scope.parameters() | {"statuses": _names(statuses), "step": STEP_ROWS}
        after = 0
        while found := self._application.fetch(
            scalar_row, statement, parameters | {"after": after}
        ):
            yield found
            after = found[-1]

    def requeue(
        self,
        scope: Scope,
        by: Operator,
        *,
        statuses: tuple[Status, ...] = (Status.FAILED,),
        per_second: float,
    ) -> int:
        """Makes rows due afresh, spread over time; returns how many.

        Those that were given up, or, by `statuses`, those that wait for their next try as well.
        Leased and resolved rows, and rows without a payload, are left alone.
        """
        record = _record("requeue", scope, statuses, by) | {"per_second": per_second}
        moved = 0
        for ids in self.movable(scope, statuses):
            step = record | {"ids": ids, "done": moved}
            moved += len(self._application.fetch(scalar_row, _REQUEUE, step))
        return moved

    def resolve(
        self, scope: Scope, by: Operator, *, statuses: tuple[Status, ...] = UNRESOLVED
    ) -> int:
        """Closes rows for good, whatever is delivered later; returns how many.

        Leased rows are left alone.
        """
        record = _record("resolve", scope, statuses, by)
        return sum(
            len(self._application.fetch(scalar_row, _RESOLVE, record | {"ids": ids}))
            for ids in self.movable(scope, statuses)
        )

    def seen(self, row: int, by: Operator) -> None:
        """Records that somebody looked at a failed event's payload."""
        named = {"actor": by.actor, "reason": by.reason, "row": row}
        self._application.fetch(scalar_row, _SEEN, named)

    def knows(self, organization: str) -> bool:
        """Whether the organization has a shop or a database on record."""
        return self._application.fetch(scalar_row, _KNOWN, {"organization": organization})[0]


def _record(
    action: str, scope: Scope, statuses: tuple[Status, ...], by: Operator
) -> dict[str, Any]:
    """What is written down with each step."""
    names = _names(statuses)
    return {
        "statuses": names,
        "actor": by.actor,
        "action": action,
        "reason": by.reason,
        "scope": Jsonb(scope.as_json() | {"status": names}),
    }


def _names(statuses: tuple[Status, ...]) -> list[str]:
    return [status.value for status in statuses]
