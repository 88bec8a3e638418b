"""The relay's queue as a processor deals with it: claim, start, verdict; one statement each.

A claim holds an event under a token until its lease ends, and whatever follows must present the
token: who comes late changes nothing. An attempt counts from its start on. Leases and schedules go
by the database's clock.
"""

import json
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, LiteralString, TypeVar
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import class_row, scalar_row
from psycopg.types.json import Jsonb

from shared.notifier.model import (
    TIMEOUT_SECONDS,
    TIMEOUT_SECONDS_MAX,
    Acceptance,
    Message,
    Profile,
    Status,
    Verdict,
)
from shared.notifier.outcome import Outcome
from shared.text import cap, clean

T = TypeVar("T")

CLAIM_SECONDS: Final = 30  # from a claim to its start, and beyond the longest attempt
TEXT_BYTES: Final = 2048

# An event whose lease ran out is claimed like any other; if it was started, that attempt is lost.
_CLAIM: Final = """
with picked as materialized (
  select q.id from pgrelay.queue q
  where q.done_at is null and q.due_at <= now() and q.lane <> all(%(busy)s::text[])
    and (q.lease_token is null or q.leased_until <= now())
  order by q.due_at, q.id
  limit 1
  for update skip locked
), claimed as (
  update pgrelay.queue q
  set lease_token = %(token)s, claimed_by = %(processor)s,
      leased_until = now() + make_interval(secs => %(seconds)s)
  from picked p where q.id = p.id
  returning q.id, q.notification_id, q.attempt
)
select g.generation, c.id, c.notification_id, c.attempt,
       case when c.id is null then (
         select extract(epoch from min(q.due_at) - now())::float8 from pgrelay.queue q
         where q.done_at is null and q.lease_token is null) end as next_seconds
from pgrelay.reload_state g left join claimed c on true"""

_RELEASE: Final = """
update pgrelay.queue set lease_token = null, leased_until = null
where id = %(id)s and lease_token = %(token)s and done_at is null and started_at is null
returning id"""

# Who is to get a message is settled by its first attempt, whatever becomes of the channel.
_START: Final = """
with held as materialized (
  select q.id, q.notification_id, q.attempt, q.expire_at, q.started_at from pgrelay.queue q
  where q.id = %(id)s and q.lease_token = %(token)s and q.done_at is null
  for update
), known as materialized (
  select h.id as queue_id, h.notification_id as wanted_id, h.attempt, n.*,
         p.name as profile, p.transport, p.settings, p.timeout_seconds, c.max_retries,
         array(select r from unnest(c.recipients) r where r is not null group by r order by r)
           as to_now,
         case when n.id is null then 'unknown'
              when n.finished_at is not null or n.attempts <> h.attempt - 1 then 'stale'
              when h.started_at is not null then 'lost'
              when c.name is null or not c.enabled then 'invalid'
              when h.expire_at <= now() then 'expired'
              else 'start' end as step
  from held h
  left join notifier.notifications n on n.id = h.notification_id
  left join notifier.channels c on c.name = n.channel
  left join notifier.profiles p on p.name = c.profile
), started as (
  update pgrelay.queue q
  set started_at = now(), leased_until = now() + make_interval(secs =>
        least(greatest(k.timeout_seconds, 0), %(longest)s)::float8 + %(seconds)s)
  from known k where q.id = k.queue_id and k.step = 'start'
), attempted as (
  insert into notifier.attempts (notification_id, attempt, processor)
  select wanted_id, attempt, %(processor)s from known where step = 'start'
), addressed as (
  insert into notifier.deliveries (notification_id, recipient, state)
  select k.wanted_id, r, 'pending' from known k, unnest(k.to_now) r
  where k.step = 'start' and k.attempt = 1
)
select k.step, coalesce(k.channel, '') as channel, k.subject, k.body, k.severity, k.kind,
       k.dedupe_key, k.created_at, k.profile, k.transport, k.settings::text as settings,
       k.timeout_seconds, coalesce(k.max_retries, 0) as max_retries, k.to_now,
       (select jsonb_object_agg(s.key, s.ref) from notifier.profile_secrets s
        where s.profile = k.profile) as secrets,
       (select jsonb_object_agg(d.recipient, d.state) from notifier.deliveries d
        where d.notification_id = k.wanted_id) as states,
       array(select c.name from notifier.channels c where c.profile = k.profile) as lanes
from known k"""

# The verdict and the next attempt are there together or not at all.
_CONCLUDE: Final = """
with held as materialized (
  select q.id, q.notification_id, q.attempt, q.lane, q.expire_at from pgrelay.queue q
  where q.id = %(id)s and q.lease_token = %(token)s and q.done_at is null
  for update
), recorded as materialized (
  select h.*, notifier.set_status(h.notification_id, h.attempt, %(status)s, %(code)s, %(text)s,
                                  %(partial)s) as is_recorded
  from held h
), closed as (
  update pgrelay.queue q
  set done_at = now(), outcome = case when r.is_recorded then %(status)s else 'stale' end,
      error_code = %(code)s, error = %(text)s, lease_token = null, leased_until = null
  from recorded r where q.id = r.id
), attempted as (
  update notifier.attempts a
  set finished_at = now(), verdict = %(status)s, class = %(class)s, ambiguous = %(ambiguous)s,
      error_code = %(code)s, reply = %(reply)s
  from recorded r
  where a.notification_id = r.notification_id and a.attempt = r.attempt and a.finished_at is null
), delivered as (
  update notifier.deliveries d set state = x.state, code = x.code, updated_at = now()
  from recorded r,
       unnest(%(recipients)s::text[], %(states)s::text[], %(codes)s::text[])
         as x (recipient, state, code)
  where d.notification_id = r.notification_id and d.recipient = x.recipient
), again as (
  insert into pgrelay.queue (notification_id, attempt, lane, due_at, expire_at)
  select r.notification_id, r.attempt + 1, r.lane,
         now() + make_interval(secs => %(delay)s), r.expire_at
  from recorded r where r.is_recorded and %(status)s = 'retry'
)
select is_recorded from recorded"""

# The notification cannot be asked, or is none: the answer stands on the event alone.
_ANSWER: Final = """
update pgrelay.queue
set done_at = now(), outcome = %(outcome)s, error_code = %(code)s, error = %(text)s,
    lease_token = null, leased_until = null
where id = %(id)s and lease_token = %(token)s and done_at is null
returning true"""

# While the notifier could not be used, events were answered alone: their notifications follow.
_CATCH_UP: Final = """
update notifier.notifications n
set status = case q.outcome when 'sent' then 'sent' else 'failed' end,
    error_code = q.error_code, error = q.error, finished_at = clock_timestamp()
from pgrelay.queue q
where n.finished_at is null and q.notification_id = n.id and q.outcome in ('sent', 'failed')
  and not exists (select from pgrelay.queue o
                  where o.notification_id = n.id and o.done_at is null)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An event that is ours until its lease ends."""

    id: int
    token: UUID
    notification_id: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one look at the queue found."""

    generation: int
    claim: Claim | None
    next_seconds: float | None  # until something is due, if nothing could be claimed


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt, started; or one that its processor lost."""

    claim: Claim
    profile: Profile
    message: Message
    max_retries: int
    states: dict[str, Acceptance]  # by recipient, before the attempt
    lanes: tuple[str, ...] = ()  # the channels that share its profile
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of an event: a status, `stale`, or `gone`: the lease was lost, ask the other."""

    outcome: str
    code: str
    text: str
    channel: str = ""


GONE: Final = Answer(outcome="gone", code="lease_lost", text="The lease went to another.")
STALE: Final = Answer(
    outcome="stale", code="stale", text="The notification has moved on: this is not its attempt."
)
_ANSWERS: Final = {
    "unknown": Answer(
        outcome="failed",
        code="notification_unknown",
        text="There is no notification with this id.",
    ),
    "stale": STALE,
    "invalid": Answer(
        outcome="invalid",
        code="channel_unusable",
        text="The channel is missing or disabled: see manage.py channels list.",
    ),
    "expired": Answer(
        outcome="expired", code="expired", text="Its time was over before an attempt could start."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    generation: int
    id: int | None
    notification_id: int | None
    attempt: int | None
    next_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    step: str
    channel: str
    subject: str
    body: str
    severity: str
    kind: str
    dedupe_key: str | None
    created_at: datetime
    profile: str
    transport: str
    settings: str | None  # as text: whoever wrote it may have outdone our parser
    timeout_seconds: Decimal
    max_retries: int
    to_now: list[str]
    secrets: dict[str, str] | None
    states: dict[str, str] | None
    lanes: list[str] = field(default_factory=list)


class Queue:
    """The queue over one connection, in autocommit mode. Methods raise what psycopg raises."""

    def __init__(self, connection: psycopg.Connection[Any], *, processor: str) -> None:
        self.connection = connection
        self._processor = processor

    def turn(self, busy: list[str]) -> Turn:
        """Claims the event that is due longest, but none whose lane is `busy`."""
        token = uuid4()
        parameters = {
            "busy": busy,
            "token": token,
            "processor": self._processor,
            "seconds": CLAIM_SECONDS,
        }
        (looked,) = self._rows(_Looked, _CLAIM, parameters)
        claimed = None
        if looked.id is not None:
            assert looked.notification_id is not None
            assert looked.attempt is not None
            claimed = Claim(
                id=looked.id,
                token=token,
                notification_id=looked.notification_id,
                attempt=looked.attempt,
            )
        return Turn(generation=looked.generation, claim=claimed, next_seconds=looked.next_seconds)

    def release(self, claim: Claim) -> None:
        """Gives back an event that was not started, untouched."""
        self.connection.execute(_RELEASE, {"id": claim.id, "token": claim.token})

    def start(self, claim: Claim) -> Job | Answer:
        """Opens the attempt, or answers why there is none. It is committed when this returns."""
        parameters = {
            "id": claim.id,
            "token": claim.token,
            "processor": self._processor,
            "longest": TIMEOUT_SECONDS_MAX,
            "seconds": CLAIM_SECONDS,
        }
        found = self._rows(_Found, _START, parameters)
        if not found:
            return GONE
        if found[0].step in ("start", "lost"):
            return _job(claim, found[0])
        return self._refused(claim, _ANSWERS[found[0].step], found[0].channel)

    def conclude(self, job: Job, verdict: Verdict, outcome: Outcome) -> bool | None:
        """Records what became of an attempt, and the next one.

        None: the lease was lost, nothing is changed. False: the notification had moved on.
        """
        text = stored(verdict.text)
        is_sent = outcome.status is Status.SENT and outcome.partial is None
        parameters = {
            "class": verdict.result.value,
            "ambiguous": verdict.ambiguous,
            "code": None if is_sent else verdict.code,
            "text": None if is_sent else text,
            "reply": text,
            "partial": None if outcome.partial is None else Jsonb(outcome.partial),
            "recipients": list(outcome.decisions),
            "states": [made.acceptance.value for made in outcome.decisions.values()],
            "codes": [stored(made.code) for made in outcome.decisions.values()],
            "delay": outcome.delay_seconds,
        }
        return self._concluded(job.claim, outcome.status, parameters)

    def answer(self, claim: Claim, outcome: str, code: str, text: str) -> bool:
        """Ends the event alone, where no notification can be told; False: the lease was lost."""
        parameters = {"id": claim.id, "token": claim.token, "outcome": outcome}
        parameters |= {"code": code, "text": stored(text)}
        return self.connection.execute(_ANSWER, parameters).fetchone() is not None

    def catch_up(self) -> int:
        """Ends the notifications whose events are all over; how many."""
        return self.connection.execute(_CATCH_UP).rowcount

    def _refused(self, claim: Claim, answer: Answer, channel: str) -> Answer:
        if answer.outcome in ("invalid", "expired"):
            nothing: dict[str, Any] = dict.fromkeys(("class", "partial", "reply"))
            nothing |= {"recipients": [], "states": [], "codes": [], "delay": 0, "ambiguous": False}
            said = {"code": answer.code, "text": answer.text}
            is_held = self._concluded(claim, Status(answer.outcome), nothing | said) is not None
        else:
            is_held = self.answer(claim, answer.outcome, answer.code, answer.text)
        return replace(answer, channel=channel) if is_held else GONE

    def _concluded(self, claim: Claim, status: Status, parameters: dict[str, Any]) -> bool | None:
        parameters |= {"id": claim.id, "token": claim.token, "status": status.value}
        with self.connection.cursor(row_factory=scalar_row) as cursor:
            return cursor.execute(_CONCLUDE, parameters).fetchone()

    def _rows(self, kind: type[T], statement: LiteralString, parameters: dict[str, Any]) -> list[T]:
        with self.connection.cursor(row_factory=class_row(kind)) as cursor:
            return cursor.execute(statement, parameters).fetchall()


def stored(text: str) -> str:
    """`text` as a column takes it."""
    return cap(clean(text), TEXT_BYTES)


def _job(claim: Claim, found: _Found) -> Job:
    first = dict.fromkeys(found.to_now, Acceptance.PENDING) if claim.attempt == 1 else {}
    known = {who: Acceptance(state) for who, state in (found.states or {}).items()}
    states = known or first
    profile = Profile(
        name=found.profile,
        transport=found.transport,
        settings=_settings(found.settings),
        secrets=found.secrets or {},
        timeout_seconds=_number(found.timeout_seconds),
    )
    message = Message(
        notification_id=claim.notification_id,
        subject=found.subject,
        body=found.body,
        recipients=tuple(sorted(states)),
        pending=tuple(sorted(w for w, state in states.items() if state is Acceptance.PENDING)),
        created_at=found.created_at,
        channel=found.channel,
        severity=found.severity,
        kind=found.kind,
        dedupe_key=found.dedupe_key,
    )
    return Job(
        claim=claim,
        profile=profile,
        message=message,
        max_retries=found.max_retries,
        states=states,
        lanes=(found.channel, *found.lanes),
        is_lost=found.step == "lost",
    )


def _settings(text: str | None) -> Any:
    """None, which is malformed, for numbers and depths that the database takes and Python does not.

    An error here would meet every processor that claims the event, and stop it.
    """
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None


def _number(value: Decimal | None) -> Any:
    """A whole number as such: whether it will do is the transports' to say."""
    if value is None:
        return TIMEOUT_SECONDS
    if value.is_finite() and value == value.to_integral_value():
        return int(value)
    return value
