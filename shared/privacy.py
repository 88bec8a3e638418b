"""Requests of the compliance topics: recorded when they come, remembered where they take effect.

The application database holds the request and its receipts, the tenant's database the suppression.
What is to be removed is removed later, by `shared/erasure.py`.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from psycopg.rows import class_row, scalar_row
from psycopg.types.json import Jsonb

from shared import db, jsontext, log, subjects
from shared.model import Envelope, Event
from shared.store import Marks
from shared.subjects import Hasher, RequestKind, Subject, Wish

DUE_DAYS: Final = 30

# The time of a request is when Shopify sent it, so that a delivery that comes again later moves
# nothing; and never in the future, for the header is not signed.
_RECORD: Final = """
insert into privacy_request as r
  (kind, shop_domain, organization_id, event_id, customer_id, email, orders, subject_hash,
   requested_at, due_at)
select %(kind)s, %(shop_domain)s,
       (select organization_id from shopify_shopifyconnection
        where myshopify_domain = %(shop_domain)s order by status <> 'active', id limit 1),
       %(event_id)s, %(customer_id)s, %(email)s, %(orders)s, %(subject_hash)s, t.at,
       t.at + make_interval(days => %(days)s)
from (select least(%(at)s::timestamptz, now()) as at) t
on conflict (shop_domain, event_id) do update set event_id = r.event_id
returning r.id, r.requested_at, r.xmax = 0 as is_new"""

_SUPPRESS: Final = """
insert into shopify_erasures (subject_hash, event_id, shop_domain, subject_kind, erased_at)
select s.hash, %(event_id)s, %(shop_domain)s, s.kind, %(erased_at)s
from unnest(%(hashes)s::text[], %(kinds)s::text[]) s (hash, kind)
on conflict do nothing
returning subject_hash"""

# A leased row keeps its lease: it is this very replay that asks, and has its verdict to give.
_FORGET: Final = """
with failed as (
  update subscriber_subscriberfailedevent set
    payload = null, redacted_at = coalesce(redacted_at, now()),
    envelope = envelope || '{"attributes": {}}', traceback = '', updated_at = now(),
    status = case when lease_token is null then 'resolved' else status end,
    resolution = case when lease_token is not null then resolution
                      when resolution is null or resolution = 'replayed' then 'erased'
                      else resolution end,
    resolved_at = case when lease_token is null then coalesce(resolved_at, now()) end,
    next_retry_at = case when lease_token is not null then next_retry_at end
  where shop_domain = %(shop_domain)s and event_id = %(event_id)s
)
insert into shopify_shopifyevent as a
  (organization_id, topic, shop_domain, event_id, payload_sha256, triggered_at, received_at)
select null, %(topic)s, %(shop_domain)s, %(event_id)s, %(sha256)s, %(triggered_at)s,
       %(received_at)s
where %(is_audited)s
on conflict (shop_domain, event_id) do update set
  payload = null, needs_publish = false, outbox_envelope = null, outbox_body = null
returning id"""

_REQUESTS: Final = """
select id, kind, shop_domain, organization_id, event_id, customer_id, email, orders, subject_hash,
       requested_at, recorded_at, due_at, attempted_at, exported_at, done_at,
       done_at is null and due_at < now() as is_overdue
from privacy_request"""

_ONE: Final = _REQUESTS + " where id = %(id)s"
_OPEN: Final = _REQUESTS + " where done_at is null order by due_at, id limit %(limit)s"
_ALL: Final = _REQUESTS + " order by done_at is not null, due_at, id limit %(limit)s"

# Erasures that are open, those first that were tried longest ago: one tenant that is down must not
# keep the others waiting.
_NEXT: Final = """
select id from privacy_request
where done_at is null and kind <> 'customers/data_request'
order by attempted_at nulls first, id limit 1000"""

# Once a day, so that the log is not full of it.
_OVERDUE: Final = """
update privacy_request set overdue_logged_at = now()
where done_at is null and due_at < now()
  and (overdue_logged_at is null or overdue_logged_at < now() - interval '1 day')
returning id, kind, shop_domain, due_at"""

_RECEIPTS: Final = """
select database, organization_id, state, reason, counts, started_at, finished_at
from privacy_receipt where request_id = %(id)s order by database desc, organization_id"""

_HOLDERS: Final = """
select organization_id from shopify_shopifyconnection where myshopify_domain = %(shop)s
union select %(organization_id)s::text where %(organization_id)s::text is not null
order by 1"""

_HAS_DATABASE: Final = """
select exists (select from databases_database d
               join databases_databasecredential c on c.database_id = d.id
               where d.organization_id = %(organization_id)s and d.deleted_at is null
                 and (lower(d.type) = 'shopify' or lower(d.database_name) = 'shopify'))"""

_EXPORTED: Final = """
update privacy_request
set exported_at = now(),
    done_at = case when kind = 'customers/data_request' then coalesce(done_at, now())
                   else done_at end
where id = %(id)s
returning id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A recorded request."""

    id: int
    kind: str
    shop_domain: str
    organization_id: str | None
    event_id: str
    customer_id: str | None  # None: none was named, or they were erased
    email: str | None
    orders: list[str]
    subject_hash: str | None
    requested_at: datetime
    recorded_at: datetime
    due_at: datetime
    attempted_at: datetime | None
    exported_at: datetime | None
    done_at: datetime | None
    is_overdue: bool

    def wish(self) -> Wish:
        """What it asks for, as far as that is still on record."""
        return Wish(
            kind=RequestKind(self.kind),
            customer_id=self.customer_id,
            email=self.email,
            orders=tuple(self.orders),
        )

    def targets(self) -> tuple[Subject, ...]:
        """The subjects meant."""
        return self.wish().targets(self.shop_domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of a request in one database."""

    database: str
    organization_id: str
    state: str
    reason: str | None
    counts: dict[str, int]
    started_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What is to be suppressed for a request: subjects, and from when back."""

    event_id: str
    shop_domain: str
    targets: tuple[Subject, ...]
    erased_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    id: int
    requested_at: datetime
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overdue:
    id: int
    kind: str
    shop_domain: str
    due_at: datetime


class Privacy:
    """The requests in one application database."""

    def __init__(
        self,
        application: db.Pool,
        hasher: Hasher,
        *,
        share_one_database: bool = False,  # all organizations do
    ) -> None:
        self._application = application
        self._share_one_database = share_one_database
        self.hasher = hasher

    def marks(self, shop_domain: str, event: Event) -> Marks:
        """By what an erasure of the event's subjects would be known."""
        if not self.hasher.has_key:
            return Marks(subjects=None, hidden_id=event.resource_id)
        found = subjects.of(shop_domain, event.topic, event.parsed)
        return Marks(
            subjects="{" + ",".join(self.hasher.digests(shop_domain, found)) + "}",
            hidden_id=self.hasher.hidden(shop_domain, event.resource_type, event.resource_id),
        )

    def record(self, envelope: Envelope, event: Event) -> Recorded | None:
        """Puts the request of a compliance event on record; what is to be suppressed for it.

        Safe to repeat. Raises ValueError for a body that is not the topic's, and
        ConfigurationError when an erasure is asked for and there is no key.
        """
        shop, (_, body) = envelope.shop_domain, jsontext.read(envelope.payload)
        asked = subjects.wish(event.topic, shop, body)
        if asked is None:
            return None
        targets = asked.targets(shop)
        parameters = {
            "kind": asked.kind.value,
            "shop_domain": shop,
            "event_id": envelope.event_id,
            "customer_id": asked.customer_id,
            "email": asked.email,
            "orders": Jsonb(list(asked.orders)),
            "subject_hash": self._hash(asked, shop),
            "at": event.source_updated_at,
            "days": DUE_DAYS,
        }
        (row,) = self._application.fetch(class_row(_Recording), _RECORD, parameters)
        if row.is_new:
            log.warning("privacy.requested", request=row.id, kind=asked.kind, shop_domain=shop)
        if not asked.kind.is_erasure:
            return None
        return Recorded(
            event_id=envelope.event_id,
            shop_domain=shop,
            targets=targets,
            erased_at=row.requested_at,
        )

    def suppress(self, tenant: db.Pool, recorded: Recorded) -> None:
        """From here on no event from before brings the subjects back. Safe to repeat."""
        tenant.fetch(scalar_row, _SUPPRESS, suppression(self.hasher, recorded))

    def forget(self, envelope: Envelope) -> None:
        """An event that was suppressed: its payload leaves the failure ledger and audit row too."""
        parameters = {
            "shop_domain": envelope.shop_domain,
            "event_id": envelope.event_id,
            "topic": envelope.topic,
            "sha256": envelope.payload_sha256,
            "triggered_at": envelope.triggered_at,
            "received_at": envelope.received_at,
            # Native deliveries have no audit row; one that the subscriber owes gets it without.
            "is_audited": envelope.source == "webhook",
        }
        self._application.fetch(scalar_row, _FORGET, parameters)

    def find(self, request: int) -> Request | None:
        """The request with that id."""
        found = self._application.fetch(class_row(Request), _ONE, {"id": request})
        return found[0] if found else None

    def requests(self, *, limit: int, only_open: bool = False) -> list[Request]:
        """Requests, the open ones first, by when they are due."""
        statement = _OPEN if only_open else _ALL
        return self._application.fetch(class_row(Request), statement, {"limit": limit})

    def erasures(self) -> list[int]:
        """The open requests that ask for an erasure, in the order in which to try them."""
        return self._application.fetch(scalar_row, _NEXT)

    def receipts(self, request: int) -> list[Receipt]:
        """What became of it where."""
        return self._application.fetch(class_row(Receipt), _RECEIPTS, {"id": request})

    def holders(self, request: Request) -> list[str]:
        """The organizations that the shop is or was connected to."""
        names = {"shop": request.shop_domain, "organization_id": request.organization_id}
        return self._application.fetch(scalar_row, _HOLDERS, names)

    def has_database(self, organization: str) -> bool:
        """Whether a way to the organization's tenant database is on record."""
        if self._share_one_database:
            return True
        names = {"organization_id": organization}
        return self._application.fetch(scalar_row, _HAS_DATABASE, names)[0]

    def exported(self, request: int) -> None:
        """An export was written; a data request is done with it."""
        self._application.fetch(scalar_row, _EXPORTED, {"id": request})

    def log_overdue(self) -> int:
        """Says in the log which requests are overdue, each once a day; how many it said."""
        found = self._application.fetch(class_row(_Overdue), _OVERDUE)
        for each in found:
            log.error(
                "privacy.overdue",
                request=each.id,
                kind=each.kind,
                shop_domain=each.shop_domain,
                due_at=each.due_at.isoformat(),
            )
        return len(found)

    def _hash(self, asked: Wish, shop: str) -> str | None:
        if asked.kind.is_erasure:
            return self.hasher.digest(shop, asked.targets(shop)[0])
        return next(iter(self.hasher.digests(shop, asked.targets(shop)[:1])), None)


def suppression(hasher: Hasher, recorded: Recorded) -> dict[str, Any]:
    """The parameters of `_SUPPRESS` and its like."""
    shop = recorded.shop_domain
    return {
        "shop_domain": shop,
        "event_id": recorded.event_id,
        "erased_at": recorded.erased_at,
        "hashes": [hasher.digest(shop, target) for target in recorded.targets],
        "kinds": [target.kind.value for target in recorded.targets],
    }
