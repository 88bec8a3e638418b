"""Erasures carried out: a page at a time, each page and its progress committed as one.

First the orders of the customer are looked for everywhere, then the suppression takes hold of all
that was found, then the tables are emptied. Progress is kept in the database that it is about, so
that whoever is killed anywhere, between two databases too, goes on where the last page ended, and
what a receipt counts was removed once. Runs beside each other take turns by the page.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg.rows import scalar_row
from psycopg.types.json import Jsonb

from shared import db, holdings, log, migrate, privacy, redact
from shared.directory import Directory
from shared.errors import HookledgerError
from shared.holdings import AUDIT, EVENTS, FAILED, OF_ORDERS, OTHER_SNAPSHOTS, SNAPSHOTS, Holdings
from shared.privacy import Privacy, Recorded, Request
from shared.subjects import RequestKind

LIMITS: Final = db.Limits(statement=20, lock=1)

# Stores read this table in their statement: the lock waits until those are over that began before
# the suppression was there, and the next ones see it.
_FENCE: Final = "lock table shopify_erasures in access exclusive mode"

_FENCED: Final = """
select coalesce((progress ->> 'fenced')::int, 0) from shopify_erasures
where subject_hash = %(hash)s and event_id = %(event_id)s"""
_NOTE_FENCE: Final = """
update shopify_erasures
set progress = coalesce(progress, '{}') || jsonb_build_object('fenced', %(targets)s::int)
where subject_hash = %(hash)s and event_id = %(event_id)s"""

_SUPPRESS: Final = """
insert into shopify_erasures (subject_hash, event_id, shop_domain, subject_kind, erased_at)
select s.hash, %(event_id)s, %(shop_domain)s, s.kind, %(erased_at)s
from unnest(%(hashes)s::text[], %(kinds)s::text[]) s (hash, kind)
on conflict do nothing"""

_TENANT_PROGRESS: Final = """
select coalesce(progress, '{}') from shopify_erasures
where subject_hash = %(hash)s and event_id = %(event_id)s for update"""
_KEEP_TENANT_PROGRESS: Final = """
update shopify_erasures set progress = %(progress)s
where subject_hash = %(hash)s and event_id = %(event_id)s"""
_DROP_ORDERS: Final = """
update shopify_erasures set progress = progress - 'orders'
where subject_hash = %(hash)s and event_id = %(event_id)s"""

_RECEIPT: Final = """
insert into privacy_receipt as r (request_id, database, organization_id)
values (%(id)s, %(database)s, %(organization_id)s)
on conflict (request_id, database, organization_id) do update set state = r.state
returning state"""
_FINISH: Final = """
update privacy_receipt
set state = %(state)s, reason = %(reason)s, counts = %(counts)s, progress = null,
    finished_at = now()
where request_id = %(id)s and database = %(database)s and organization_id = %(organization_id)s
  and state = 'open'
returning id"""
_WAITING: Final = """
update privacy_receipt set reason = %(reason)s
where request_id = %(id)s and database = 'tenant' and organization_id = %(organization_id)s
  and state = 'open'
returning id"""
_APPLICATION_PROGRESS: Final = """
select coalesce(progress, '{}') from privacy_receipt
where request_id = %(id)s and database = 'application' and state = 'open' for update"""
_KEEP_APPLICATION_PROGRESS: Final = """
update privacy_receipt set progress = %(progress)s
where request_id = %(id)s and database = 'application' and state = 'open'"""

# Found where an order and its customer are named together; needed where only the order is.
_FOUND: Final = """
update privacy_request r
set orders = (select coalesce(jsonb_agg(o order by o), '[]')
              from (select jsonb_array_elements_text(r.orders) union
                    select unnest(%(orders)s::text[])) f (o))
where id = %(id)s and done_at is null
returning id"""

_ATTEMPTED: Final = """
update privacy_request set attempted_at = now() where id = %(id)s and done_at is null
returning id"""

# Earlier requests name the customer too.
_EMPTY_REQUESTS: Final = """
update privacy_request o
set customer_id = null, email = null, orders = '[]', done_at = coalesce(o.done_at, now())
from privacy_request r
where r.id = %(id)s and o.id <> r.id and o.shop_domain = r.shop_domain
  and o.requested_at <= r.requested_at
  and (o.done_at is not null or o.kind = 'customers/data_request')
  and num_nonnulls(o.customer_id, o.email) > 0
  and (r.kind = 'shop/redact' or o.customer_id = r.customer_id
       or (r.customer_id is null and o.email = r.email))
returning o.id"""

_DONE: Final = """
update privacy_request
set done_at = now(), customer_id = null, email = null, orders = '[]'
where id = %(id)s and done_at is null
  and not exists (select from privacy_receipt where request_id = %(id)s and state = 'open')
returning id"""

NO_DATABASE: Final = "There is no database with a credential on record: nothing of ours reaches it."
NO_CONNECTION: Final = "The shop was never connected: no database of a merchant holds its events."
DATABASE_DROPPED: Final = "The server says that there is no such database any more."


@dataclass(slots=True, kw_only=True)
class Report:
    """What one run did."""

    done: int = 0  # requests
    waiting: int = 0  # requests that could not be finished yet
    removed: Counter[str] = field(default_factory=Counter)  # rows, by table


class _OutOfTime(Exception):
    """The run's budget is spent; the next one goes on."""


class Erasure:
    """Carries out what was requested."""

    def __init__(
        self,
        application: db.Pool,
        directory: Directory,
        privacy: Privacy,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._directory = directory
        self._privacy = privacy
        self._clock = clock

    def run(self, *, budget_seconds: float, only: int | None = None) -> Report:
        """Carries out open requests, or the one named, until none is left or time is up.

        No page is begun after the budget. A tenant that is out of reach costs one attempt a run.
        Raises one of db.UNREACHABLE when the application database is out of reach.
        """
        report = Report()
        self._privacy.log_overdue()
        pass_ = _Pass(self, self._clock() + budget_seconds, report)
        for id in self._privacy.erasures() if only is None else [only]:
            request = self._privacy.find(id)
            if request is None or request.done_at or not RequestKind(request.kind).is_erasure:
                continue
            try:
                if pass_.carry_out(request):
                    report.done += 1
                else:
                    report.waiting += 1
            except _OutOfTime:
                report.waiting += 1
                break
            except db.UNREACHABLE:
                raise
            except Exception as error:  # noqa: BLE001 - one request's fault is not the others'
                report.waiting += 1
                log.error("privacy.failed", error, request=id)
        if report.done or report.removed:
            log.info("privacy.erased", requests=report.done, removed=dict(report.removed))
        return report


class _Pass:
    """One run over the open requests."""

    def __init__(self, erasure: Erasure, deadline: float, report: Report) -> None:
        self._application = erasure._application
        self._directory = erasure._directory
        self._privacy = erasure._privacy
        self._clock = erasure._clock
        self._deadline = deadline
        self._report = report
        self._out_of_reach: dict[str, str] = {}  # why, by organization

    def carry_out(self, request: Request) -> bool:
        """Whether the request is done with."""
        self._in_time()
        self._app(_ATTEMPTED, id=request.id)
        organizations = self._open_tenants(request)
        # Finds first, in all databases: an order may be named in one, and its refund in another.
        self._application_part(request, "find")
        self._each_tenant(request, organizations, self._find)
        self._each_tenant(request, organizations, self._empty)
        self._application_part(request, "empty")
        self._app(_EMPTY_REQUESTS, id=request.id)
        return bool(self._app(_DONE, id=request.id))

    # The tenants

    def _open_tenants(self, request: Request) -> list[str]:
        """The organizations in whose databases something is to be done."""
        found = self._privacy.holders(request)
        if not found:
            self._receipt(request, "tenant", "")
            self._finish(request, "tenant", "", state="gone", reason=NO_CONNECTION)
        organizations = []
        for organization in found:
            if self._receipt(request, "tenant", organization) != "open":
                continue
            if not self._privacy.has_database(organization):
                self._finish(request, "tenant", organization, state="gone", reason=NO_DATABASE)
            else:
                organizations.append(organization)
        return organizations

    def _each_tenant(
        self,
        request: Request,
        organizations: list[str],
        part: Callable[[Request, str, psycopg.Connection[Any]], None],
    ) -> None:
        for organization in organizations:
            if organization in self._out_of_reach:
                self._wait(request, organization)
                continue
            try:
                target = self._directory.target(organization)
                with db.connect(target, LIMITS) as connection:
                    part(request, organization, connection)
            except db.DatabaseNotFoundError:
                self._finish(request, "tenant", organization, state="gone", reason=DATABASE_DROPPED)
                self._out_of_reach[organization] = DATABASE_DROPPED
            except (psycopg.Error, HookledgerError) as error:
                self._out_of_reach[organization] = redact.message(error)
                self._wait(request, organization)
                log.warning(
                    "privacy.tenant_waits", error, request=request.id, organization_id=organization
                )

    def _wait(self, request: Request, organization: str) -> None:
        reason = self._out_of_reach[organization]
        self._app(_WAITING, id=request.id, organization_id=organization, reason=reason)

    def _find(
        self, request: Request, _organization: str, connection: psycopg.Connection[Any]
    ) -> None:
        self._prepare(request, connection)
        progress = self._tenant_part(request, connection, _finds(request))
        self._found(request, progress)

    def _empty(
        self, request: Request, organization: str, connection: psycopg.Connection[Any]
    ) -> None:
        request = self._again(request)
        self._suppress(request, connection)
        steps = [*_finds(request), *_empties(request)]
        counts = self._tenant_part(request, connection, steps).get("counts", {})
        connection.execute(_DROP_ORDERS, self._key(request))
        self._finish(request, "tenant", organization, counts=counts)
        self._report.removed.update(counts)

    def _prepare(self, request: Request, connection: psycopg.Connection[Any]) -> None:
        migrate.apply(connection, migrate.Series.TENANT)
        try:
            self._suppress(request, connection)
        except pg.UndefinedTable:
            migrate.apply_again(connection, migrate.Series.TENANT)
            self._suppress(request, connection)

    def _suppress(self, request: Request, connection: psycopg.Connection[Any]) -> None:
        recorded = Recorded(
            event_id=request.event_id,
            shop_domain=request.shop_domain,
            targets=request.targets(),
            erased_at=request.requested_at,
        )
        key = self._key(request) | {"targets": len(recorded.targets)}
        if connection.execute(_FENCED, key).fetchone() == (len(recorded.targets),):
            return
        with connection.transaction():
            connection.execute(_FENCE)
            connection.execute(_SUPPRESS, privacy.suppression(self._privacy.hasher, recorded))
            connection.execute(_NOTE_FENCE, key)

    def _key(self, request: Request) -> dict[str, Any]:
        """Which row of the tenant's holds the progress."""
        hash_ = self._privacy.hasher.digest(request.shop_domain, request.targets()[0])
        return {"hash": hash_, "event_id": request.event_id}

    def _tenant_part(
        self, request: Request, connection: psycopg.Connection[Any], steps: list[tuple[str, str]]
    ) -> dict[str, Any]:
        """Takes the steps that are left, a page at a time; returns the progress."""
        key, wanted = self._key(request), _wanted(request)
        while True:
            self._in_time()
            with connection.transaction():
                (progress,) = connection.execute(_TENANT_PROGRESS, key).fetchone() or ({},)
                _look_again(steps, progress, wanted)
                step = _next(steps, progress)
                if step is None:
                    return progress
                self._tenant_page(connection, wanted, step, progress)
                connection.execute(_KEEP_TENANT_PROGRESS, key | {"progress": Jsonb(progress)})

    def _tenant_page(
        self,
        connection: psycopg.Connection[Any],
        wanted: Holdings,
        step: tuple[str, str],
        progress: dict[str, Any],
    ) -> None:
        what, table = step
        rows, end = holdings.tenant_page(connection, table, wanted, progress.get("after") or 0)
        mine, removed, hasher = wanted.mine(rows), 0, self._privacy.hasher
        if what == "find":
            progress["orders"] = sorted({*progress.get("orders", []), *wanted.orders(mine)})
        elif table == EVENTS:
            removed = holdings.empty_events(connection, wanted, mine, hasher)
        else:
            removed = holdings.empty_snapshots(connection, table, wanted, mine, hasher)
        _advance(progress, step, end, removed)

    # The application database

    def _application_part(self, request: Request, what: str) -> None:
        """Takes the steps of this part that are left, a page at a time."""
        request = self._again(request)
        if self._receipt(request, "application", "") != "open":
            return
        is_shop = request.kind == RequestKind.SHOP_REDACT
        steps = [] if is_shop else [("find", FAILED), ("find", AUDIT)]
        if what == "empty":
            steps += [("empty", FAILED), ("empty", AUDIT)]
        wanted = _wanted(request)
        while True:
            self._in_time()
            progress = self._application.run(
                lambda connection: self._application_page(connection, request, wanted, steps)
            )
            if progress is not None:
                break
        self._found(request, progress)
        if what == "empty" and not self._waits(request):
            self._finish(request, "application", "", counts=progress.get("counts", {}))
            self._report.removed.update(progress.get("counts", {}))

    def _application_page(
        self,
        connection: psycopg.Connection[Any],
        request: Request,
        wanted: Holdings,
        steps: list[tuple[str, str]],
    ) -> dict[str, Any] | None:
        """One page; the progress once nothing is left."""
        key = {"id": request.id}
        with connection.transaction():
            row = connection.execute(_APPLICATION_PROGRESS, key).fetchone()
            if row is None:  # somebody else has finished
                return {}
            progress = row[0]
            _look_again(steps, progress, wanted)
            step = _next(steps, progress)
            if step is None:
                return progress
            what, table = step
            after = progress.get("after") or ""
            rows, end = holdings.application_page(connection, table, wanted, after)
            mine, removed = wanted.mine(rows), 0
            if what == "find":
                progress["orders"] = sorted({*progress.get("orders", []), *wanted.orders(mine)})
            else:
                removed = holdings.empty_application(connection, table, mine)
            _advance(progress, step, end, removed)
            connection.execute(_KEEP_APPLICATION_PROGRESS, key | {"progress": Jsonb(progress)})
        return None

    def _waits(self, request: Request) -> bool:
        """Whether a tenant that is out of reach may still name an order of the customer's."""
        receipts = self._privacy.receipts(request.id)
        return any(r.database == "tenant" and r.state == "open" for r in receipts)

    # Both

    def _found(self, request: Request, progress: dict[str, Any]) -> None:
        if orders := progress.get("orders"):
            self._app(_FOUND, id=request.id, orders=orders)

    def _again(self, request: Request) -> Request:
        """The request with the orders that were found meanwhile."""
        return self._privacy.find(request.id) or request

    def _receipt(self, request: Request, database: str, organization: str) -> str:
        named = {"id": request.id, "database": database, "organization_id": organization}
        return self._application.fetch(scalar_row, _RECEIPT, named)[0]

    def _finish(
        self,
        request: Request,
        database: str,
        organization: str,
        *,
        state: str = "done",
        reason: str | None = None,
        counts: dict[str, int] | None = None,
    ) -> None:
        self._app(
            _FINISH,
            id=request.id,
            database=database,
            organization_id=organization,
            state=state,
            reason=reason,
            counts=Jsonb(counts or {}),
        )

    def _app(self, statement: Any, **parameters: Any) -> list[Any]:
        return self._application.fetch(scalar_row, statement, parameters)

    def _in_time(self) -> None:
        if self._clock() >= self._deadline:
            raise _OutOfTime


def _wanted(request: Request) -> Holdings:
    return Holdings(
        shop=request.shop_domain,
        event_id=request.event_id,
        targets=request.targets(),
        until=request.requested_at,
    )


def _finds(request: Request) -> list[tuple[str, str]]:
    is_shop = request.kind == RequestKind.SHOP_REDACT
    return [] if is_shop else [("find", table) for table in OF_ORDERS]


def _empties(request: Request) -> list[tuple[str, str]]:
    others = OTHER_SNAPSHOTS if request.kind == RequestKind.SHOP_REDACT else ()
    return [("empty", table) for table in (EVENTS, *SNAPSHOTS, *others)]


def _next(steps: list[tuple[str, str]], progress: dict[str, Any]) -> tuple[str, str] | None:
    taken = progress.get("taken", [])
    return next((step for step in steps if list(step) not in taken), None)


def _advance(
    progress: dict[str, Any], step: tuple[str, str], end: int | str | None, removed: int
) -> None:
    """Notes a page: how far it went, or that its step is over, and what was removed."""
    if end is None:
        progress["taken"] = [*progress.get("taken", []), list(step)]
    progress["after"] = end
    if removed:
        counts = progress.setdefault("counts", {})
        counts[step[1]] = counts.get(step[1], 0) + removed


def _look_again(steps: list[tuple[str, str]], progress: dict[str, Any], wanted: Holdings) -> None:
    """All is emptied once more, if further orders were found since that began."""
    if not any(what == "empty" for what, _ in steps):
        return
    known = len(wanted.targets)
    if progress.get("targets", known) != known:
        progress["taken"] = [each for each in progress["taken"] if each[0] == "find"]
        progress["after"] = None
    progress["targets"] = known
