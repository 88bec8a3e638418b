"""The guided demonstration: what the system promises, done before your eyes and then checked."""

import json
import os
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg
from google.pubsub_v1.types import PubsubMessage
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from dev import deliveries, samples
from dev.samples import SHOP_DOMAIN
from dev.stack import PUBSUB_TOPIC, SUBSCRIPTION, Stack

WAIT_SECONDS: Final = 30
TOPICS: Final = (
    "orders/create",
    "orders/paid",
    "products/create",
    "customers/create",
    "inventory_items/create",
    "inventory_levels/update",
    "locations/create",
    "fulfillments/create",
    "refunds/create",
    "order_transactions/create",
    "draft_orders/create",
    "checkouts/create",
    "collections/create",
    "customer.tags_added",
)
DURING_THE_OUTAGE: Final = ("orders/updated", "products/update", "customers/update")

_LEDGER: Final = """
select topic, resource_type, coalesce(resource_id, ''), count(*)
from shopify_events group by 1, 2, 3 order by 1, 3"""
_STATUSES: Final = "select status, count(*) from subscriber_subscriberfailedevent group by 1"
_FAILED_EVENTS: Final = """
select topic, status, error_type, retry_count, resolution
from subscriber_subscriberfailedevent order by id"""


class DemoError(Exception):
    """Something that the demonstration claims is not so."""


@dataclass(kw_only=True)
class Demo:
    """A running stack, and what was checked on it so far."""

    stack: Stack
    console: Console
    checked: int = 0

    def check(self, claim: str, found: Any, expected: Any) -> None:
        """Prints the claim; raises DemoError when it is not so."""
        if found != expected:
            raise DemoError(f"{claim}: found {found!r}, expected {expected!r}")
        self.checked += 1
        self.console.print(f"  [green]✓[/] {claim}")

    def deliver(
        self, topic: str, body: bytes | None = None, *, event_id: str = "", secret: str = ""
    ) -> int:
        """Sends one delivery to the webhook and returns the status of its answer."""
        body = samples.load(topic) if body is None else body
        headers = deliveries.attributes(topic, SHOP_DOMAIN, event_id=event_id or None)
        secret = secret or self.stack.env["SHOPIFY_CLIENT_SECRETS"]
        signed = deliveries.signed(headers, body, secret)
        return deliveries.post(self.stack.functions["webhook"].url, body, signed).status

    def tenant(self, query: LiteralString, **parameters: Any) -> list[tuple[Any, ...]]:
        """Rows of the tenant database."""
        return _rows(self.stack.tenant_url, query, parameters)

    def application(self, query: LiteralString, **parameters: Any) -> list[tuple[Any, ...]]:
        """Rows of the application database."""
        return _rows(self.stack.env["APP_DATABASE_URL"], query, parameters)

    def settle(self) -> None:
        """Waits until Pub/Sub has handed everything over and been acknowledged."""
        assert self.stack.pubsub is not None
        deadline = time.monotonic() + WAIT_SECONDS
        while self.stack.pubsub.broker.depth(SUBSCRIPTION):
            if time.monotonic() > deadline:
                raise DemoError("Pub/Sub still holds messages that nobody acknowledged")
            time.sleep(0.02)


def run(console: Console) -> bool:
    """Runs all scenes on a fresh stack; whether every claim held."""
    console.print(Panel.fit("[bold]Hookledger[/]: from a signed webhook to the merchant's table"))
    # Nothing of the caller's settings: the demonstration is the same everywhere.
    environ = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
    with tempfile.TemporaryDirectory(prefix="hookledger demo ") as folder:
        with console.status("Starting") as status:
            stack = Stack(
                Path(folder),
                environ=environ,
                retry_every=0,
                say=lambda what: status.update(f"Starting the {what}"),
            )
            stack.start()
        try:
            return _played(Demo(stack=stack, console=console))
        finally:
            with console.status("Stopping"):
                stack.remove()


def _played(demo: Demo) -> bool:
    started = time.monotonic()
    try:
        for scene in (_deliveries, _native, _duplicate, _order, _forgery, _silence, _outage):
            title = (scene.__doc__ or "").strip()
            demo.console.print(f"\n[bold]{title}[/]")
            scene(demo)
    except DemoError as error:
        demo.console.print(f"  [bold red]✗ {error}[/]")
        return False
    _show(demo)
    seconds = time.monotonic() - started
    demo.console.print(f"\n[bold green]{demo.checked} claims checked[/] in {seconds:.0f} s.")
    return True


def _deliveries(demo: Demo) -> None:
    """Fourteen deliveries, signed as Shopify signs them"""
    statuses = {demo.deliver(topic) for topic in TOPICS}
    demo.check(f"{len(TOPICS)} deliveries were answered 200", statuses, {200})
    demo.settle()
    stored = [row[0] for row in demo.tenant("select topic from shopify_events order by id")]
    demo.check("each is in the merchant's event ledger", sorted(stored), sorted(TOPICS))
    (order,) = demo.tenant("select payload::text, shopify_id from shopify_orders")
    sent = json.loads(samples.load("orders/paid"))
    demo.check("the order's snapshot is what Shopify sent", json.loads(order[0]), sent)
    demo.check(f"its id is exact: {sent['id']}", order[1], str(sent["id"]))
    audited = demo.application("select count(*) from shopify_shopifyevent")[0][0]
    demo.check("each has its audit row", audited, len(TOPICS))


def _native(demo: Demo) -> None:
    """One event that Shopify publishes to Pub/Sub itself"""
    assert demo.stack.pubsub is not None
    attributes = deliveries.attributes("shop/update", SHOP_DOMAIN)
    message = PubsubMessage(data=samples.load("shop/update"), attributes=attributes)
    demo.stack.pubsub.broker.publish(PUBSUB_TOPIC, [message])
    demo.settle()
    event_id = attributes["X-Shopify-Webhook-Id"]
    found = demo.tenant("select count(*) from shopify_events where event_id = %(id)s", id=event_id)
    demo.check("it is in the event ledger", found[0][0], 1)
    query: LiteralString = "select count(*) from shopify_shopifyevent where event_id = %(id)s"
    demo.check("and makes no audit row", demo.application(query, id=event_id)[0][0], 0)


def _duplicate(demo: Demo) -> None:
    """The same delivery, three times"""
    event_id = str(uuid.uuid4())
    demo.check(
        "every time the answer is 200",
        {demo.deliver("collections/create", event_id=event_id) for _ in range(3)},
        {200},
    )
    demo.settle()
    found = demo.tenant("select count(*) from shopify_events where event_id = %(id)s", id=event_id)
    demo.check("there is one row", found[0][0], 1)


def _order(demo: Demo) -> None:
    """Two updates of a product, the newer one first"""
    product = json.loads(samples.load("products/update"))
    newer = {**product, "title": "Newer", "updated_at": "2030-01-02T10:00:00+01:00"}
    older = {**product, "title": "Older", "updated_at": "2030-01-02T08:59:59Z"}
    for state in (newer, older):
        demo.check(
            f"{state['title']} ({state['updated_at']}) accepted",
            demo.deliver("products/update", json.dumps(state).encode()),
            200,
        )
        demo.settle()
    titles = demo.tenant(
        "select payload ->> 'title' from shopify_products where shopify_id = %(id)s",
        id=str(product["id"]),
    )
    demo.check("the snapshot shows the newer one", titles, [("Newer",)])


def _forgery(demo: Demo) -> None:
    """A delivery that Shopify never signed"""
    before = demo.tenant("select count(*) from shopify_events")
    demo.check("the answer is 401", demo.deliver("orders/create", secret="guessed"), 401)  # noqa: S106 - a wrong one
    demo.settle()
    demo.check("nothing was stored", demo.tenant("select count(*) from shopify_events"), before)


def _silence(demo: Demo) -> None:
    """Pub/Sub refuses, and takes messages again"""
    assert demo.stack.pubsub is not None
    event_id = str(uuid.uuid4())
    stored: LiteralString = "select count(*) from shopify_events where event_id = %(id)s"
    demo.stack.pubsub.broker.refuse_publishes(True)
    status = demo.deliver("orders/cancelled", event_id=event_id)
    demo.check("a delivery meanwhile was still answered 200", status, 200)
    demo.stack.pubsub.broker.refuse_publishes(False)
    demo.check("it waits in the outbox", demo.tenant(stored, id=event_id), [(0,)])
    answer = deliveries.post(demo.stack.functions["retry"].url).json()
    demo.check("the retry function sends it again", answer["republished"], 1)
    demo.settle()
    demo.check("it is in the event ledger", demo.tenant(stored, id=event_id), [(1,)])


def _outage(demo: Demo) -> None:
    """The merchant's database goes away, and comes back"""
    before = demo.tenant("select count(*) from shopify_events")[0][0]
    count = len(DURING_THE_OUTAGE)
    demo.stack.tenant_database.stop()
    statuses = {demo.deliver(topic) for topic in DURING_THE_OUTAGE}
    demo.check(f"{count} deliveries meanwhile were still answered 200", statuses, {200})
    demo.settle()
    demo.check("they wait in the failure ledger", demo.application(_STATUSES), [("pending", count)])
    demo.stack.tenant_database.start()
    answer = deliveries.post(demo.stack.functions["retry"].url).json()
    summary = {name: answer[name] for name in ("retried", "resolved", "failed")}
    expected = {"retried": count, "resolved": count, "failed": 0}
    demo.check("the retry function replays them all", summary, expected)
    demo.check("none is left", demo.application(_STATUSES), [("resolved", count)])
    after = demo.tenant("select count(*) from shopify_events")[0][0]
    demo.check("they are in the event ledger", after, before + count)


def _show(demo: Demo) -> None:
    ledger = Table("topic", "resource", "id", "events", title="The merchant's event ledger")
    for row in demo.tenant(_LEDGER):
        ledger.add_row(*map(str, row))
    failed = Table("topic", "status", "was", "retries", "resolution", title="The failure ledger")
    for row in demo.application(_FAILED_EVENTS):
        failed.add_row(*map(str, row))
    demo.console.print("\n", ledger, "\n", failed)


def _rows(url: str, query: LiteralString, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query, parameters).fetchall()
