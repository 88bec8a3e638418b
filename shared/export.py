"""What is held of a customer, as one JSON document: each body as it came, to the digit."""

import base64
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final

import psycopg

from shared import db, holdings, jsontext
from shared.directory import Directory
from shared.errors import ConfigurationError
from shared.holdings import AUDIT, EVENTS, FAILED, OF_ORDERS, SNAPSHOTS, Holdings, Row
from shared.privacy import Privacy, Request
from shared.subjects import RequestKind

LIMITS: Final = db.Limits(statement=20)


class Export:
    """Reads what the databases hold of a request's customer."""

    def __init__(self, application: db.Pool, directory: Directory, privacy: Privacy) -> None:
        self._application = application
        self._directory = directory
        self._privacy = privacy

    def write(self, request: Request, write: Callable[[str], object]) -> dict[str, int]:
        """Writes the document, piece by piece; returns how many entries each store has.

        Raises ConfigurationError when the request names nobody any more, and what the first
        tenant raises that is out of reach: a document that lacks something is none.
        """
        targets = request.targets()
        if request.kind == RequestKind.SHOP_REDACT:
            raise ConfigurationError(f"Request {request.id} is about no customer.")
        if not targets:
            raise ConfigurationError(
                f"Request {request.id} names nobody any more: what it was about was erased."
            )
        organizations = self._organizations(request)
        wanted = self._wanted(request, organizations)
        counts: dict[str, int] = {}
        head = {
            "request": request.id,
            "kind": request.kind,
            "shop_domain": request.shop_domain,
            "requested_at": request.requested_at.isoformat(),
            "customer": {"id": request.customer_id, "email": request.email},
            "orders": list(request.orders),
            "organizations_without_database": [o for o, t in organizations.items() if t is None],
        }
        write(json.dumps(head, ensure_ascii=False)[:-1])
        for name, rows in self._stores(wanted, organizations):
            counts[name] = counts.get(name, 0) + _list(name, rows, write)
        write("}\n")
        return counts

    def _stores(
        self, wanted: Holdings, organizations: dict[str, db.Target | None]
    ) -> Iterator[tuple[str, Iterator[Row]]]:
        for table in (EVENTS, *SNAPSHOTS):
            yield table, self._of_tenants(table, wanted, organizations)
        yield FAILED, self._of_application(FAILED, wanted)
        yield AUDIT, self._of_application(AUDIT, wanted)

    def _of_tenants(
        self, table: str, wanted: Holdings, organizations: dict[str, db.Target | None]
    ) -> Iterator[Row]:
        for target in dict.fromkeys(filter(None, organizations.values())):
            with db.connect(target, LIMITS) as connection:
                yield from _mine_of_tenant(connection, table, wanted)

    def _of_application(self, table: str, wanted: Holdings) -> Iterator[Row]:
        after: str | None = ""
        while after is not None:
            rows, after = self._application.run(
                lambda connection, after=after: holdings.application_page(
                    connection, table, wanted, after
                )
            )
            yield from wanted.mine(rows)

    def _organizations(self, request: Request) -> dict[str, db.Target | None]:
        """Where the shop's events may be; None where no database is on record any more."""
        found: dict[str, db.Target | None] = {}
        for organization in self._privacy.holders(request):
            has_database = self._privacy.has_database(organization)
            found[organization] = self._directory.target(organization) if has_database else None
        return found

    def _wanted(self, request: Request, organizations: dict[str, db.Target | None]) -> Holdings:
        """The customer, and the orders that are theirs: those may be named alone elsewhere."""
        wanted = Holdings(
            shop=request.shop_domain, event_id=request.event_id, targets=request.targets()
        )
        orders: set[str] = set()
        for table in (FAILED, AUDIT):
            orders |= wanted.orders(self._of_application(table, wanted))
        for table in OF_ORDERS:
            orders |= wanted.orders(self._of_tenants(table, wanted, organizations))
        return wanted.with_orders(orders)


def _mine_of_tenant(
    connection: psycopg.Connection[Any], table: str, wanted: Holdings
) -> Iterator[Row]:
    after: int | None = 0
    while after is not None:
        rows, after = holdings.tenant_page(connection, table, wanted, after)
        yield from wanted.mine(rows)


def _list(name: str, rows: Iterator[Row], write: Callable[[str], object]) -> int:
    write(f",\n{json.dumps(name)}: [")
    count = 0
    for row in rows:
        write(",\n" if count else "\n")
        write(_entry(row))
        count += 1
    write("]")
    return count


def _entry(row: Row) -> str:
    """An entry; its payload is the body's own text, or base64 where that is no JSON."""
    entry: dict[str, Any] = {
        "topic": row.topic,
        "event_id": row.event_id,
        "resource_id": row.resource_id,
        "parsed": row.parsed,
    }
    received_at = getattr(row, "received_at", None)
    if isinstance(received_at, datetime):
        entry["received_at"] = received_at.isoformat()
    text = json.dumps(entry, ensure_ascii=False)[:-1]
    match row.payload:
        case None:
            return f'{text}, "payload": null}}'
        case str():
            return f'{text}, "payload": {row.payload}}}'
        case raw:
            body = jsontext.jsonb_text(raw)
            if body is not None:
                return f'{text}, "payload": {body}}}'
            return f'{text}, "payload_base64": "{base64.b64encode(raw).decode("ascii")}"}}'
