"""One failed event with all that is known of it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from psycopg.rows import class_row, scalar_row

from shared import db

_SHOW: Final = """
select id, event_id, payload_sha256, source, topic, event_type, shop_domain, organization_id,
       tenant, envelope, octet_length(payload) as payload_bytes, error_type, error_class,
       error_code, error_message, traceback, fingerprint, status, retry_count, max_retries,
       case when status = 'pending' then due_at end as due_at, last_attempted_at, resolved_at,
       resolution, occurrences, leased_until, alerted_at, created_at, updated_at, redacted_at
from subscriber_subscriberfailedevent where id = %(id)s"""

_PAYLOAD: Final = "select payload from subscriber_subscriberfailedevent where id = %(id)s"

_ATTEMPTS: Final = """
select attempt, started_at, finished_at, outcome, error_type, error_message
from subscriber_replayattempt where failed_event_id = %(id)s order by id"""

_ACTIONS: Final = """
select acted_at, actor, action, reason, count from subscriber_operatoraction
where scope -> 'rows' @> to_jsonb(%(id)s::bigint) order by id"""

_INCIDENT: Final = """
select kind, started_at, probe_count, cause from subscriber_tenantincident
where tenant = %(tenant)s and ended_at is null"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """All of a failed event but its payload."""

    id: int
    event_id: str
    payload_sha256: bytes
    source: str
    topic: str
    event_type: str
    shop_domain: str
    organization_id: str | None
    tenant: str
    envelope: dict[str, Any]
    payload_bytes: int | None  # None: taken away
    error_type: str
    error_class: str
    error_code: str
    error_message: str
    traceback: str
    fingerprint: str
    status: str
    retry_count: int
    max_retries: int
    due_at: datetime | None  # of a pending one
    last_attempted_at: datetime | None
    resolved_at: datetime | None
    resolution: str | None
    occurrences: int
    leased_until: datetime | None
    alerted_at: datetime | None
    created_at: datetime
    updated_at: datetime
    redacted_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One replay of a failed event."""

    attempt: int
    started_at: datetime
    finished_at: datetime | None  # None while it runs
    outcome: str | None
    error_type: str | None
    error_message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What somebody did to a failed event, alone or with others."""

    acted_at: datetime
    actor: str
    action: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident:
    """The incident for which a failed event is parked."""

    kind: str
    started_at: datetime
    probe_count: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dossier:
    """A failed event, its history, and the incident for which it is parked, if it is."""

    event: Shown
    attempts: list[Attempt]
    actions: list[Action]
    incident: OpenIncident | None


def find(application: db.Pool, row: int) -> Dossier | None:
    """The failed event with that primary key."""
    named = {"id": row}
    found = application.fetch(class_row(Shown), _SHOW, named)
    if not found:
        return None
    (event,) = found
    incidents = application.fetch(class_row(OpenIncident), _INCIDENT, {"tenant": event.tenant})
    return Dossier(
        event=event,
        attempts=application.fetch(class_row(Attempt), _ATTEMPTS, named),
        actions=application.fetch(class_row(Action), _ACTIONS, named),
        incident=incidents[0] if incidents else None,
    )


def payload(application: db.Pool, row: int) -> bytes | None:
    """Its body's bytes, if they are still there."""
    found = application.fetch(scalar_row, _PAYLOAD, {"id": row})
    return found[0] if found else None
