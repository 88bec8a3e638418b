"""One sweep: what must not be written down is planted everywhere, and every failure is driven.

Then all that was written is searched: log lines, answers, what commands say, and each column of the
application database but those where bodies, envelopes and requests belong.
"""

import base64
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from psycopg.conninfo import make_conninfo

from dev import deliveries
from dev.functions import Function
from tests.functions.rig import NOBODY, PUBSUB_TOPIC, Inbox, Starter, environment, new_shop
from tests.world import SHOP, World

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

CLIENT_SECRET = "shpss_marker5ecret"
HASH_KEY = "marker-privacy-key"
CREDENTIAL_KEY = Fernet.generate_key().decode("ascii")
PASSWORD = "marker-Pa55word"
TOKEN = "marker-t0ken"
EMAIL = "marker.jane@example.com"
NAME = "Markerlina"
PHONE = "+4930990877123"
STREET = "1 Marker Street"
PLANTED = (CLIENT_SECRET, HASH_KEY, CREDENTIAL_KEY, PASSWORD, TOKEN, EMAIL, NAME, PHONE, STREET)

CUSTOMER = {"id": 7, "email": EMAIL, "first_name": NAME, "phone": PHONE, "token": TOKEN}
ORDER = {"id": 41, "email": EMAIL, "customer": CUSTOMER, "note": STREET, "updated_at": NAME}
BODY = json.dumps(ORDER).encode()

# Where bodies, envelopes and requests belong, and what is encrypted.
BELONGS = {
    "shopify_shopifyevent": {"payload", "outbox_envelope", "outbox_body"},
    "subscriber_subscriberfailedevent": {"payload", "envelope"},
    "privacy_request": {"customer_id", "email"},
}

# A tenant's table that quotes what it is given.
TRAPS = (
    "alter table shopify_orders add column a integer"
    " generated always as ((payload->>'email')::integer) stored",
    "create function f() returns trigger language plpgsql as $$ begin"
    " raise exception 'no % of %', new.payload->>'note', new.payload->>'email'; end $$;"
    " create trigger t before insert on shopify_orders for each row execute function f()",
    "alter table shopify_orders add constraint c check (payload->>'email' is null)",
)


@pytest.fixture(scope="module")
def environ(app_url: str) -> dict[str, str]:
    return {
        "APP_DATABASE_URL": app_url,
        "CREDENTIAL_KEYS": CREDENTIAL_KEY,
        "PRIVACY_HASH_KEY": HASH_KEY,
        "LOG_LEVEL": "DEBUG",
    }


class Written:
    """All that anybody has written down."""

    def __init__(self) -> None:
        self._texts: list[tuple[str, str]] = []
        self._functions: list[Function] = []

    def add(self, where: str, text: str | bytes) -> None:
        self._texts.append((where, text if isinstance(text, str) else text.decode()))

    def watch(self, function: Function) -> Function:
        self._functions.append(function)
        return function

    def found(self, world: World) -> list[tuple[str, str]]:
        """Where which marker stands."""
        texts = list(self._texts)
        texts += [(f"log of {f.name}", f.log_path.read_text()) for f in self._functions]
        texts += _columns(world)
        return sorted({(where, word) for where, text in texts for word in PLANTED if word in text})


def _columns(world: World) -> Iterator[tuple[str, str]]:
    columns = world.app(
        "select table_name as t, column_name as c from information_schema.columns"
        " where table_schema = 'public'"
    )
    tables = {column["t"] for column in columns}
    for table in sorted(tables):
        for row in world.app(f"select to_jsonb(r) as r from {table} r"):  # type: ignore[arg-type]
            for name, value in row["r"].items():
                if name not in BELONGS.get(table, ()):
                    yield f"{table}.{name}", json.dumps(value, ensure_ascii=False)


@pytest.fixture
def written() -> Written:
    return Written()


def push(written: Written, subscriber: Function, data: bytes, **attributes: str) -> None:
    named = deliveries.attributes("orders/create", SHOP) | {"X-Shopify-Name": EMAIL}
    named |= {name.replace("_", "-"): value for name, value in attributes.items()}
    message = {"data": base64.b64encode(data).decode(), "attributes": named, "messageId": "1"}
    answer = deliveries.post(subscriber.url, json.dumps({"message": message}).encode())
    assert answer.status in (204, 503)
    written.add("answer of the subscriber", answer.body)


def deliver(written: Written, webhook: Function, body: bytes, **headers: str) -> int:
    named = deliveries.signed(deliveries.attributes("orders/create", SHOP), body, CLIENT_SECRET)
    named |= {"X-Shopify-Name": EMAIL, "Authorization": f"Bearer {TOKEN}"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    answer = deliveries.post(webhook.url, body, named)
    written.add("answer of the webhook", answer.body)
    return answer.status


def command(written: Written, environ: dict[str, str], *words: str) -> bytes:
    """Runs it and returns what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), *words],
        env=environment(environ),
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=120,
    )
    said = done.stderr if words[:2] == ("failures", "show") else done.stdout + done.stderr
    written.add(" ".join(words), said)
    return done.stdout


def drive_webhook(written: Written, start: Starter, settings: dict[str, str]) -> None:
    webhook = written.watch(start("webhook", **settings))
    assert deliver(written, webhook, BODY) == 200
    assert deliver(written, webhook, b"") == 200
    assert deliver(written, webhook, BODY, X_Shopify_Hmac_Sha256=TOKEN) == 401
    assert deliver(written, webhook, BODY, X_Shopify_Shop_Domain=EMAIL) == 400
    assert deliver(written, webhook, BODY, X_Shopify_Topic=NAME) == 400
    contradicting = json.dumps(ORDER | {"shop_domain": f"{NAME}.myshopify.com"}).encode()
    assert deliver(written, webhook, contradicting) == 400
    broken = {
        "APP_DATABASE_URL": f"postgresql://app:{PASSWORD}@{NOBODY}/app",
        "PUBSUB_EMULATOR_HOST": NOBODY,
        "WEBHOOK_MAX_BODY_BYTES": "1000",
    }
    down = written.watch(start("webhook", **settings | broken))
    assert deliver(written, down, BODY) == 503
    assert deliver(written, down, BODY * 10) == 413
    wrong = {"LEASE_SECONDS": NAME, "PUBSUB_TOPIC": TOKEN, "APP_POOLER_MODE": PASSWORD}
    assert deliver(written, written.watch(start("webhook", **settings | wrong)), BODY) == 500


def drive_subscriber(
    written: Written, start: Starter, world: World, tenants: Iterator[str]
) -> None:
    subscriber = written.watch(start("subscriber", **world.environ))
    push(written, subscriber, BODY)
    for fault in (BODY[:-1], BODY[:-1] + b"\xff}", b"[" + BODY + b"]", EMAIL.encode(), b""):
        push(written, subscriber, fault)
    push(written, subscriber, BODY, content_encoding="gzip")
    push(written, subscriber, gzip.compress(BODY)[:-6], content_encoding="gzip")
    push(written, subscriber, BODY, X_Shopify_Topic="")
    push(written, subscriber, BODY, X_Shopify_Shop_Domain="unknown.myshopify.com")
    push(written, subscriber, json.dumps(CUSTOMER).encode(), X_Shopify_Topic="customers/redact")
    for change in ({"port": 1}, {"dbname": "nothing"}, {"user": "stranger"}, {"host": "x.invalid"}):
        shop, url = new_shop(), make_conninfo(world.tenant_url, **{"password": PASSWORD} | change)
        world.connect_shop(shop, organization=shop, url=url)
        push(written, subscriber, BODY, X_Shopify_Shop_Domain=shop)
    for url in tenants:
        shop = new_shop()
        world.connect_shop(shop, organization=shop, url=url)
        push(written, subscriber, BODY, X_Shopify_Shop_Domain=shop)
    written.add("400", deliveries.post(subscriber.url, BODY).body)
    lost = {"APP_DATABASE_URL": f"postgresql://app:{PASSWORD}@{NOBODY}/app"}
    push(written, written.watch(start("subscriber", **world.environ | lost)), BODY)


def drive_retry(written: Written, start: Starter, world: World) -> None:
    retry = written.watch(start("retry", **world.environ))
    for body in (b'{"dry_run": true}', b"", b"", BODY, NAME.encode()):
        written.add("answer of retry", deliveries.post(retry.url, body).body)
        world.app("update subscriber_subscriberfailedevent set next_retry_at = null")
    lost = {"APP_DATABASE_URL": f"postgresql://app:{PASSWORD}@{NOBODY}/app"}
    down = written.watch(start("retry", **world.environ | lost))
    written.add("answer of retry", deliveries.post(down.url).body)


def drive_commands(written: Written, world: World) -> None:
    environ = world.environ
    command(written, environ, "failures", "list", "--all")
    command(written, environ, "failures", "list", "--all", "--json")
    command(written, environ, "failures", "stats")
    for row in {row["error_type"]: row for row in world.failed_events()}.values():
        shown = json.loads(command(written, environ, "failures", "show", str(row["id"]), "--json"))
        assert shown.pop("envelope")["attributes"], "an envelope is what it is asked for"
        written.add("failures show", json.dumps(shown, ensure_ascii=False))
    command(written, environ, "retry_failed_events", "--dry-run")
    command(written, environ, "preflight")
    command(written, environ, "rotate_credentials")
    command(written, environ, "provision_schema", "--all", "--check")
    command(written, environ, "migrate", "--check")
    wrong = f"postgresql://app:{PASSWORD}@{NOBODY}/app"
    command(written, environ, "connect_shop", "--shop", "x.myshopify.com",
            "--organization", "x", "--database-url", wrong)  # fmt: skip
    command(written, environ | {"APP_DATABASE_URL": wrong}, "failures", "stats")
    command(written, environ | {"APP_DATABASE_URL": wrong}, "preflight")


def test_nothing_that_was_planted_is_written_down_anywhere(
    start: Starter, world: World, inbox: Inbox, written: Written, traps: list[str]
) -> None:
    settings = {
        "APP_DATABASE_URL": world.app_url,
        "SHOPIFY_CLIENT_SECRETS": CLIENT_SECRET,
        "PUBSUB_TOPIC": PUBSUB_TOPIC,
        "PUBSUB_EMULATOR_HOST": inbox.host,
        "LOG_LEVEL": "DEBUG",
    }
    drive_webhook(written, start, settings)
    drive_subscriber(written, start, world, iter(traps))
    drive_retry(written, start, world)
    drive_commands(written, world)
    kinds = {row["error_type"] for row in world.failed_events()}
    assert len(kinds) >= 9, kinds
    found = written.found(world)
    assert found == [], found


@pytest.fixture
def traps(postgres: Any, templates: dict[Any, str]) -> list[str]:
    """Tenant databases that each quote a customer's data in their errors."""
    import psycopg  # noqa: PLC0415

    from shared import migrate  # noqa: PLC0415

    urls = []
    for number, statement in enumerate(TRAPS):
        template = templates[migrate.Series.TENANT]
        url = postgres.create_database(f"sweep_{number}", template=template)
        with psycopg.connect(url) as connection:
            connection.execute(statement)  # type: ignore[call-overload]
        urls.append(url)
    return urls
