"""A small world for tests: the parts of a function process, and what is in its databases."""

import base64
import hashlib
import json
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString, Self

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from shared import bootstrap, db, directory
from shared.ingest import Ingester
from shared.message import Message
from shared.model import Envelope, Source
from shared.replay import Replayer, Report, Request

SHOP = "acme.myshopify.com"
ORGANIZATION = "acme"
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def envelope(body: Any = None, topic: str = "orders/create", **fields: Any) -> Envelope:
    """An envelope; `body` is bytes, or anything that becomes JSON."""
    payload = (
        body
        if isinstance(body, bytes)
        else json.dumps({"id": 1} if body is None else body).encode()
    )
    made = Envelope(
        event_id=str(uuid.uuid4()),
        shop_domain=SHOP,
        topic=topic,
        source=Source.WEBHOOK,
        payload=payload,
        payload_sha256=hashlib.sha256(payload).digest(),
        received_at=NOW,
        triggered_at=NOW - timedelta(seconds=1),
    )
    return replace(made, **fields)


class World:
    """`core` is what a function process works with; `app` and `tenant` look into its databases."""

    def __init__(self, core: bootstrap.Core, *, environ: dict[str, str], tenant_url: str) -> None:
        self.core = core
        self.environ = environ
        self.tenant_url = tenant_url
        self.app_url = core.settings.app_database_url
        self._connections: dict[str, psycopg.Connection[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._disconnect()
        for connection in self._connections.values():
            connection.close()

    @property
    def ingester(self) -> Ingester:
        return self.core.ingester()

    @property
    def replayer(self) -> Replayer:
        return self.core.replayer()

    def connect_shop(
        self, shop: str = SHOP, organization: str = ORGANIZATION, url: str = ""
    ) -> None:
        """What `manage.py connect_shop` puts on record."""
        target = db.Target(conninfo=make_conninfo(url or self.tenant_url, sslmode="disable"))
        self.core.application.run(
            lambda connection: directory.connect_shop(
                connection,
                self.core.keyring,
                shop_domain=shop,
                organization_id=organization,
                target=target,
            )
        )

    def break_tenant(self) -> None:
        """Sends the organization's events to a port where nobody listens."""
        self.connect_shop(url=make_conninfo(self.tenant_url, port=1))
        self.forget()

    def heal_tenant(self) -> None:
        """The tenant database is where it was."""
        self.connect_shop()
        self.forget()

    def forget(self) -> None:
        """A fresh process: nothing remembered, nothing connected."""
        self._disconnect()
        self.core = bootstrap.core(self.environ)

    def app(self, query: LiteralString, **parameters: Any) -> list[dict[str, Any]]:
        """Rows of the application database, if the statement has any."""
        return self._rows(self.app_url, query, parameters)

    def tenant(self, query: LiteralString, **parameters: Any) -> list[dict[str, Any]]:
        """Rows of the tenant database, if the statement has any."""
        return self._rows(self.tenant_url, query, parameters)

    def failed_events(self) -> list[dict[str, Any]]:
        """The failure ledger."""
        return self.app("select * from subscriber_subscriberfailedevent order by id")

    def failed_event(self) -> dict[str, Any]:
        """The failure ledger's only row."""
        (row,) = self.failed_events()
        return row

    def incidents(self) -> list[dict[str, Any]]:
        """All incidents, but for times that may be infinite."""
        return self.app(
            "select id, tenant, kind, started_at, last_probe_at, probe_count, ended_at, cause,"
            " nullif(next_probe_at, 'infinity') as next_probe_at"
            " from subscriber_tenantincident order by id"
        )

    def attempts(self) -> list[dict[str, Any]]:
        """The history of replays."""
        return self.app("select * from subscriber_replayattempt order by id")

    def fail(self, failing: Envelope | None = None, error: BaseException | None = None) -> int:
        """Records a failed event and returns its row's id."""
        return self.core.failures.record(failing or envelope(), error or RuntimeError("broken"))

    def make_due(self, row: int) -> None:
        """Lets a scheduled failed event come due now."""
        self.app(
            "update subscriber_subscriberfailedevent"
            " set next_retry_at = now() - interval '1 second'"
            " where id = %(row)s and status = 'pending'",
            row=row,
        )

    def make_probe_due(self) -> None:
        """Lets the next probe of every incident come due now."""
        self.app(
            "update subscriber_tenantincident set next_probe_at = now() - interval '1 second'"
            " where ended_at is null and kind = 'unavailable'"
        )

    def expire_lease(self, row: int) -> None:
        """Lets a lease run out now."""
        self.app(
            "update subscriber_subscriberfailedevent set leased_until = now() - interval '1 second'"
            " where id = %(row)s",
            row=row,
        )

    def retry(self, limit: int | None = None, event_id: int | None = None, **asked: Any) -> Report:
        """One retry run."""
        request = Request(limit=limit, event_id=event_id, **asked)
        return self.replayer.run(request, budget_seconds=60)

    def _disconnect(self) -> None:
        self.core.application.close()
        self.core.tenants.close()

    def _rows(
        self, url: str, query: LiteralString, parameters: dict[str, Any]
    ) -> list[dict[str, Any]]:
        if url not in self._connections:
            self._connections[url] = psycopg.connect(url, autocommit=True, row_factory=dict_row)
        cursor = self._connections[url].execute(query, parameters)
        return cursor.fetchall() if cursor.description else []


def message(body: bytes = b'{"id": 1}', **attributes: str) -> Message:
    """A native message of Shopify's; attributes by their names without `X-Shopify-`."""

    named = {
        "X-Shopify-Topic": "orders/create",
        "X-Shopify-Shop-Domain": SHOP,
        "X-Shopify-Webhook-Id": str(uuid.uuid4()),
    } | {f"X-Shopify-{name.replace('_', '-').title()}": value for name, value in attributes.items()}
    return Message(data=base64.b64encode(body).decode(), attributes=named)
