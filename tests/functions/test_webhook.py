"""The webhook function: a delivery is 200 when it is durable, and otherwise says what it is."""

import base64
import gzip
import hashlib
import hmac
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from dev import deliveries, samples
from dev.functions import Function
from dev.postgres import Server
from dev.pubsub_grpc import PubSubServer
from shared import bootstrap, db, migrate, signature
from tests.functions.rig import (
    ANSWER_SECONDS,
    NOBODY,
    PUBSUB_TOPIC,
    Inbox,
    Log,
    Silence,
    Starter,
    allowed,
    frozen,
    in_chunks,
    incompressible,
    new_shop,
    raw,
    timed,
)
from tests.world import ORGANIZATION, World

SECRET = "shpss_first"
OLD_SECRET = "shpss_second"
LIMIT = 1000  # bytes of a body, for the function that is set so small
EMAIL = "jane.planted@example.com"
BODY = b'{"id": 820982911946154508, "note": "z\xc3\xbcrich"}'


@dataclass(frozen=True)
class Delivery:
    """A delivery of a new event in a shop of its own, ready to be sent, as often as one likes."""

    body: bytes
    headers: dict[str, str]

    @property
    def event_id(self) -> str:
        return self.headers["X-Shopify-Webhook-Id"]

    @property
    def shop(self) -> str:
        return self.headers["X-Shopify-Shop-Domain"]

    def to(self, function: Function) -> deliveries.Answer:
        return deliveries.post(function.url, self.body, self.headers)

    def accepted(self) -> dict[str, str]:
        return {"status": "accepted", "event_id": self.event_id}


def delivery(
    body: bytes = BODY, *, topic: str = "orders/create", secret: str = SECRET, **headers: str | None
) -> Delivery:
    """A signed delivery. `headers` by their names in snake case; None leaves one out."""
    made: dict[str, str | None] = {
        **deliveries.signed(deliveries.attributes(topic, new_shop()), body, secret)
    }
    for name, value in headers.items():
        made[_cased(name)] = value
    return Delivery(body, {name: value for name, value in made.items() if value is not None})


def _cased(name: str) -> str:
    return name.replace("_", "-").title().replace("Api", "API")


@pytest.fixture(scope="module")
def settings(world: World, inbox: Inbox) -> dict[str, str]:
    return {
        "APP_DATABASE_URL": world.app_url,
        "SHOPIFY_CLIENT_SECRETS": f"{SECRET}, {OLD_SECRET}",
        "PUBSUB_TOPIC": PUBSUB_TOPIC,
        "PUBSUB_EMULATOR_HOST": inbox.host,
    }


@pytest.fixture(scope="module")
def webhook(start_shared: Starter, settings: dict[str, str]) -> Function:
    return start_shared("webhook", **settings)


@pytest.fixture(scope="module")
def strict(start_shared: Starter, settings: dict[str, str]) -> Function:
    return start_shared("webhook", **settings | {"WEBHOOK_MAX_BODY_BYTES": str(LIMIT)})


@pytest.fixture
def pubsub(inbox: Inbox) -> Iterator[Inbox]:
    """Pub/Sub to be broken, whole again after the test."""
    yield inbox
    inbox.broker.refuse_publishes(False)
    inbox.broker.hang_publishes(0)


def audit_rows(world: World, shop: str) -> list[dict[str, Any]]:
    return world.app(
        "select * from shopify_shopifyevent where shop_domain = %(shop)s order by id", shop=shop
    )


def failed_events(world: World, shop: str) -> list[dict[str, Any]]:
    return world.app(
        "select * from subscriber_subscriberfailedevent where shop_domain = %(shop)s", shop=shop
    )


def left_no_trace(world: World, inbox: Inbox, event_id: str) -> bool:
    """Whether neither database nor Pub/Sub has heard of the event."""
    known = world.app(
        "select 1 from shopify_shopifyevent where event_id = %(id)s"
        " union all select 1 from subscriber_subscriberfailedevent where event_id = %(id)s",
        id=event_id,
    )
    return not known and not inbox.messages(event_id)


# What is accepted


def test_an_accepted_delivery_is_answered_with_its_event_id(webhook: Function) -> None:
    sent = delivery()
    answer = sent.to(webhook)
    assert (answer.status, answer.json()) == (200, sent.accepted())


def test_an_accepted_delivery_is_in_the_audit_table(webhook: Function, world: World) -> None:
    sent = delivery()
    sent.to(webhook)
    (row,) = audit_rows(world, sent.shop)
    assert row["event_id"] == sent.event_id
    assert row["topic"] == "orders/create"
    assert row["payload"] == json.loads(BODY)
    assert bytes(row["payload_sha256"]) == hashlib.sha256(BODY).digest()
    assert row["triggered_at"] == datetime.fromisoformat(sent.headers["X-Shopify-Triggered-At"])
    assert row["organization_id"] is None, "nobody has connected this shop"


def test_the_audit_row_names_the_organization_of_a_connected_shop(
    webhook: Function, world: World
) -> None:
    shop = new_shop()
    world.connect_shop(shop)
    delivery(x_shopify_shop_domain=shop).to(webhook)
    (row,) = audit_rows(world, shop)
    assert row["organization_id"] == ORGANIZATION


def test_the_message_is_the_body_and_shopifys_headers_in_its_casing_and_ours(
    webhook: Function, world: World, inbox: Inbox
) -> None:
    trace = uuid.uuid4().hex
    sent = delivery(
        x_shopify_name="main subscription",
        x_shopify_test="true",
        traceparent=f"00-{trace}-00f067aa0ba902b7-01",
        hookledger_audited="false",  # not a stranger's to say
        user_agent="Shopify-Captain-Hook",
    )
    sent_lower = {name.lower(): value for name, value in sent.headers.items()}
    assert deliveries.post(webhook.url, BODY, sent_lower).status == 200
    message = inbox.message(sent.event_id)
    (row,) = audit_rows(world, sent.shop)
    assert message.data == BODY
    attributes = dict(message.attributes)
    assert attributes.pop("traceparent").split("-")[1] == trace
    assert datetime.fromisoformat(attributes.pop("hookledger-received-at")) == row["received_at"]
    assert attributes == {
        **{name: value for name, value in sent.headers.items() if name.startswith("X-Shopify-")},
        "hookledger-version": "1",
        "hookledger-source": "webhook",
        "hookledger-audited": "true",
    }


def test_a_header_in_utf_8_arrives_as_it_was_written(webhook: Function, inbox: Inbox) -> None:
    sent = delivery(x_shopify_name="Zürich".encode().decode("latin-1"))
    assert sent.to(webhook).status == 200
    assert inbox.message(sent.event_id).attributes["X-Shopify-Name"] == "Zürich"


def test_a_header_that_pubsub_does_not_carry_whole_is_cut_and_the_log_says_so(
    webhook: Function, inbox: Inbox
) -> None:
    log, sent = Log(webhook), delivery(x_shopify_name=EMAIL * 100)
    assert sent.to(webhook).status == 200
    assert inbox.message(sent.event_id).attributes["X-Shopify-Name"] == (EMAIL * 100)[:1024]
    (line,) = log.events("webhook.headers_cut")
    assert (line["headers"], line["event_id"]) == (1, sent.event_id)
    assert EMAIL not in log.text()


def test_a_shop_in_capitals_is_the_same_shop(webhook: Function, world: World) -> None:
    shop = new_shop()
    assert delivery(x_shopify_shop_domain=shop.upper()).to(webhook).status == 200
    assert len(audit_rows(world, shop)) == 1


@pytest.mark.parametrize(
    "absent", ["X-Shopify-API-Version", "X-Shopify-Event-Id", "X-Shopify-Triggered-At"]
)
def test_headers_that_only_inform_are_optional(webhook: Function, absent: str) -> None:
    assert delivery(**{absent.lower().replace("-", "_"): None}).to(webhook).status == 200


def test_an_unreadable_time_is_no_time(webhook: Function, world: World) -> None:
    sent = delivery(x_shopify_triggered_at="yesterday")
    assert sent.to(webhook).status == 200
    assert audit_rows(world, sent.shop)[0]["triggered_at"] is None


def test_without_a_webhook_id_the_event_id_is_of_the_content(
    webhook: Function, world: World
) -> None:
    sent = delivery(x_shopify_webhook_id=None)
    first, second = sent.to(webhook).json()["event_id"], sent.to(webhook).json()["event_id"]
    assert first == second
    assert first.startswith("sha256:")
    assert [row["event_id"] for row in audit_rows(world, sent.shop)] == [first]


def test_a_delivery_that_comes_twice_has_one_audit_row(
    webhook: Function, world: World, inbox: Inbox
) -> None:
    sent = delivery()
    assert [sent.to(webhook).status for _ in range(2)] == [200, 200]
    assert len(audit_rows(world, sent.shop)) == 1
    assert len(inbox.messages(sent.event_id)) == 2, "the subscriber knows it from its event id"


def test_another_body_under_a_known_id_is_audited_beside_the_first(
    webhook: Function, world: World, inbox: Inbox
) -> None:
    first = delivery()
    other = delivery(
        b'{"id": 2}', x_shopify_webhook_id=first.event_id, x_shopify_shop_domain=first.shop
    )
    assert [sent.to(webhook).status for sent in (first, other)] == [200, 200]
    digest = hashlib.sha256(other.body).hexdigest()[:16]
    ids = [row["event_id"] for row in audit_rows(world, first.shop)]
    assert ids == [first.event_id, f"{first.event_id}#{digest}"]
    assert [m.data for m in inbox.messages(first.event_id)] == [BODY, b'{"id": 2}']


def test_any_of_the_configured_secrets_verifies(webhook: Function) -> None:
    assert delivery(secret=OLD_SECRET).to(webhook).status == 200


@pytest.mark.parametrize("topic", samples.topics())
def test_every_topic_is_accepted(webhook: Function, inbox: Inbox, topic: str) -> None:
    shop = new_shop()
    body = samples.load(topic, shop)
    sent = delivery(body, topic=topic, x_shopify_shop_domain=shop)
    assert sent.to(webhook).status == 200
    assert inbox.message(sent.event_id).data == body


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_any_content_type_is_taken(
    webhook: Function, inbox: Inbox, content_type: str | None
) -> None:
    body = b"a=1&b=2"
    sent = delivery(body, content_type=content_type)
    assert sent.to(webhook).status == 200
    assert inbox.message(sent.event_id).data == body


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b' {\t"id" :1 ,\r\n "n":  1.50 }\n\n', id="odd spacing"),
        pytest.param(b'{"id":1,"id":2,"a":{"b":1,"b":2}}', id="duplicate keys"),
        pytest.param('{"id":1,"n":"a\u2028b\u2029c"}'.encode(), id="line separators"),
        pytest.param(rb'{"id":1,"n":"\/ \u0026 \u2028 \u003c"}', id="needless escapes"),
        pytest.param(rb'{"id":1,"\u0000":"\u0000 \ud800"}', id="what jsonb refuses"),
        pytest.param(b'\xef\xbb\xbf{"id":1}', id="byte order mark"),
        pytest.param(b'{"id":1,"n":"\xff\xfe"}', id="not UTF-8"),
        pytest.param(b"\x00\x01\x02", id="not text"),
        pytest.param(b'{"id":', id="cut off"),
        pytest.param(b"[1, 2]", id="no object"),
        pytest.param(b'{"id":1,"price":NaN}', id="not strict JSON"),
        pytest.param(b'{"id":' * 5000 + b"1" + b"}" * 5000, id="nested deeply"),
    ],
)
def test_the_body_arrives_byte_for_byte(webhook: Function, inbox: Inbox, body: bytes) -> None:
    sent = delivery(body)
    assert sent.to(webhook).status == 200
    message = inbox.message(sent.event_id)
    assert message.data == body
    assert message.attributes["hookledger-audited"] == "true"


@pytest.mark.parametrize("shift", range(4))
def test_a_body_of_300_kb_may_have_a_multibyte_character_anywhere(
    webhook: Function, inbox: Inbox, shift: int
) -> None:
    body = ('{"id":1,"n":"' + "x" * shift + "日本語🎉" * 24_000 + '"}').encode()
    assert len(body) > 300_000
    sent = delivery(body)
    assert sent.to(webhook).status == 200
    assert inbox.message(sent.event_id).data == body


@pytest.mark.parametrize("split", [1, 7, 100])
def test_a_body_in_chunks_is_taken(webhook: Function, inbox: Inbox, split: int) -> None:
    sent = delivery()
    chunks = [BODY[:split], BODY[split:]]
    answer = in_chunks(webhook, chunks, sent.headers)
    assert (answer.status, answer.json()) == (200, sent.accepted())
    assert inbox.message(sent.event_id).data == BODY


def test_a_body_of_a_megabyte_travels_as_it_is(webhook: Function, inbox: Inbox) -> None:
    body = b'{"n":"' + b"x" * (1024 * 1024 - 8) + b'"}'
    sent = delivery(body)
    assert sent.to(webhook).status == 200
    message = inbox.message(sent.event_id)
    assert message.data == body
    assert "content-encoding" not in message.attributes


@pytest.mark.parametrize("megabytes", [1.1, 5, 9.9, 12])
def test_a_larger_body_travels_compressed(
    webhook: Function, inbox: Inbox, megabytes: float
) -> None:
    filling = base64.b64encode(incompressible(1000)) * int(megabytes * 1_000_000 / 1336 + 1)
    body = b'{"n":"%b"}' % filling
    sent = delivery(body)
    assert sent.to(webhook).status == 200
    message = inbox.message(sent.event_id)
    assert message.attributes["content-encoding"] == "gzip"
    assert len(message.data) < len(body)
    assert gzip.decompress(message.data) == body


def test_many_deliveries_at_once_are_all_accepted(
    webhook: Function, world: World, inbox: Inbox
) -> None:
    sent = [delivery() for _ in range(60)]
    with ThreadPoolExecutor(30) as threads:
        answers = list(threads.map(lambda each: each.to(webhook), sent))
    assert [answer.status for answer in answers] == [200] * 60
    for each in sent:
        message = inbox.message(each.event_id)
        audited = message.attributes["hookledger-audited"]
        # When the database is overrun, the subscriber is told to write the row.
        assert len(audit_rows(world, each.shop)) == (audited == "true")


# What Pub/Sub cannot carry


@pytest.fixture(scope="module")
def heavy_body() -> bytes:
    body = b'{"id":1,"n":"%b"}' % base64.b64encode(incompressible(10_000_000))
    assert len(gzip.compress(body, 1)) > 9_500_000
    return body


def test_a_body_that_pubsub_cannot_carry_is_kept_in_the_failure_ledger(
    webhook: Function, world: World, inbox: Inbox, heavy_body: bytes
) -> None:
    sent = delivery(heavy_body)
    answer, seconds = timed(lambda: sent.to(webhook))
    assert (answer.status, answer.json()) == (200, sent.accepted())
    assert seconds < ANSWER_SECONDS
    (row,) = failed_events(world, sent.shop)
    assert (row["event_id"], row["error_type"]) == (sent.event_id, "UnpublishableBodyError")
    assert (row["error_class"], row["status"]) == ("transient", "pending")
    assert bytes(row["payload"]) == heavy_body
    assert row["envelope"]["attributes"]["X-Shopify-Topic"] == "orders/create"
    assert inbox.messages(sent.event_id) == []


def test_an_empty_body_is_kept_in_the_failure_ledger(
    webhook: Function, world: World, inbox: Inbox
) -> None:
    sent = delivery(b"")
    answer = sent.to(webhook)
    assert (answer.status, answer.json()) == (200, sent.accepted())
    (row,) = failed_events(world, sent.shop)
    assert (row["error_type"], row["error_class"]) == ("ValueError", "permanent")
    assert bytes(row["payload"]) == b""
    assert inbox.messages(sent.event_id) == []


def test_what_pubsub_cannot_carry_is_refused_when_the_ledger_cannot_be_written(
    start: Starter, settings: dict[str, str]
) -> None:
    down = start("webhook", **settings | {"APP_DATABASE_URL": f"postgresql://a:b@{NOBODY}/app"})
    assert delivery(b"").to(down).status == 503


# What is refused for its signature


def _hex(body: bytes) -> str:
    return hmac.digest(SECRET.encode(), body, hashlib.sha256).hex()


def _url_safe(body: bytes) -> str:
    return signature.header(body, SECRET).replace("+", "-").replace("/", "_").rstrip("=")


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda body: None, id="missing"),
        pytest.param(lambda body: "", id="empty"),
        pytest.param(lambda body: signature.header(body, "another secret"), id="another secret"),
        pytest.param(lambda body: signature.header(body, ""), id="the empty secret"),
        pytest.param(lambda body: signature.header(body + b" ", SECRET), id="another body"),
        pytest.param(_hex, id="hexadecimal"),
        pytest.param(_url_safe, id="url-safe base64"),
        pytest.param(lambda body: signature.header(body, SECRET)[:-4], id="cut off"),
        pytest.param(lambda body: signature.header(body, SECRET) + "AAAA", id="longer"),
        pytest.param(lambda body: "sha256=" + signature.header(body, SECRET), id="with a prefix"),
        pytest.param(lambda body: "not base64!", id="not base64"),
        pytest.param(lambda body: "\xe9\xff" * 22, id="not ASCII"),
        pytest.param(lambda body: "A" * 4000, id="long"),
    ],
)
def test_nothing_is_known_of_a_delivery_without_a_valid_signature(
    webhook: Function, world: World, inbox: Inbox, made: Callable[[bytes], str | None]
) -> None:
    sent = delivery(x_shopify_hmac_sha256=made(BODY))
    headers = sent.headers.copy()
    headers["X-Shopify-Hmac-Sha256"] = headers.pop("X-Shopify-Hmac-Sha256", "") or ""
    if made(BODY) is None:
        del headers["X-Shopify-Hmac-Sha256"]
    answer = deliveries.post(webhook.url, BODY, headers)
    assert answer.status == 401
    assert left_no_trace(world, inbox, sent.event_id)


@pytest.mark.parametrize(
    "topic", ["customers/redact", "customers/data_request", "shop/redact", "orders/create"]
)
def test_no_topic_is_exempt_from_the_signature(webhook: Function, topic: str) -> None:
    assert delivery(topic=topic, x_shopify_hmac_sha256=None).to(webhook).status == 401


def test_a_signature_is_refused_before_anything_is_asked(
    start: Starter, settings: dict[str, str]
) -> None:
    with Silence() as database, Silence() as pubsub:
        silent = start(
            "webhook",
            **settings | {"APP_DATABASE_URL": database.url, "PUBSUB_EMULATOR_HOST": pubsub.host},
        )
        assert delivery(secret="wrong").to(silent).status == 401
        assert (database.callers(), pubsub.callers()) == (0, 0)


# What is refused for its headers or its contradiction

FAULTS = [
    pytest.param({"x_shopify_topic": None}, BODY, id="no topic"),
    pytest.param({"x_shopify_topic": ""}, BODY, id="empty topic"),
    pytest.param({"x_shopify_topic": "orders"}, BODY, id="half a topic"),
    pytest.param({"x_shopify_topic": "orders/create/more"}, BODY, id="too long a topic"),
    pytest.param({"x_shopify_topic": "orders create"}, BODY, id="topic without a slash"),
    pytest.param({"x_shopify_topic": "Orders/Create"}, BODY, id="topic in capitals"),
    pytest.param(
        {"x_shopify_topic": "orders/" + "x" * 300},
        BODY,
        id="endless topic",
    ),
    pytest.param({"x_shopify_shop_domain": None}, BODY, id="no shop"),
    pytest.param({"x_shopify_shop_domain": ""}, BODY, id="empty shop"),
    pytest.param({"x_shopify_shop_domain": "shop.example.com"}, BODY, id="another domain"),
    pytest.param({"x_shopify_shop_domain": "myshopify.com"}, BODY, id="only the domain"),
    pytest.param({"x_shopify_shop_domain": ".myshopify.com"}, BODY, id="no name"),
    pytest.param({"x_shopify_shop_domain": "a.b.myshopify.com"}, BODY, id="name within a name"),
    pytest.param({"x_shopify_shop_domain": "a.myshopify.com.evil.com"}, BODY, id="longer domain"),
    pytest.param({"x_shopify_shop_domain": "https://a.myshopify.com"}, BODY, id="a URL"),
    pytest.param({"x_shopify_shop_domain": "a'--.myshopify.com"}, BODY, id="SQL"),
    pytest.param({}, b'{"myshopify_domain":"other.myshopify.com"}', id="body of another shop"),
    pytest.param({}, b'{"shop_domain":"OTHER.myshopify.com"}', id="body of a shop in capitals"),
]


@pytest.mark.parametrize(("headers", "body"), FAULTS)
def test_a_delivery_that_does_not_say_what_it_is_gets_400_and_leaves_no_trace(
    webhook: Function, world: World, inbox: Inbox, headers: dict[str, str | None], body: bytes
) -> None:
    sent = delivery(body, **headers)
    answer = sent.to(webhook)
    assert answer.status == 400
    assert list(answer.json()) == ["error"]
    assert left_no_trace(world, inbox, sent.event_id)


@pytest.mark.parametrize(
    ("headers", "body"), [pytest.param(*fault.values, id=fault.id) for fault in FAULTS]
)
def test_the_signature_is_judged_before_the_headers(
    webhook: Function, headers: dict[str, str | None], body: bytes
) -> None:
    assert delivery(body, secret="wrong", **headers).to(webhook).status == 401


@pytest.mark.parametrize("key", ["myshopify_domain", "shop_domain"])
def test_a_body_may_name_its_own_shop_or_a_domain_of_the_merchants(
    webhook: Function, key: str
) -> None:
    shop = new_shop()
    for named in (shop, shop.upper(), "www.merchant.example", "", None, 7):
        body = json.dumps({"id": 1, key: named}).encode()
        assert delivery(body, x_shopify_shop_domain=shop).to(webhook).status == 200


# What is refused for its size


def test_a_body_of_exactly_the_limit_is_taken(strict: Function, inbox: Inbox) -> None:
    sent = delivery(_sized(LIMIT))
    assert sent.to(strict).status == 200
    assert inbox.message(sent.event_id).data == sent.body


def test_chunks_of_exactly_the_limit_are_taken(strict: Function, inbox: Inbox) -> None:
    sent = delivery(_sized(LIMIT))
    answer = in_chunks(strict, [sent.body[:400], sent.body[400:]], sent.headers)
    assert answer.status == 200
    assert inbox.message(sent.event_id).data == sent.body


@pytest.mark.parametrize("size", [LIMIT + 1, 100_000, 30_000_000])
def test_a_body_over_the_limit_gets_413(
    strict: Function, world: World, inbox: Inbox, size: int
) -> None:
    sent = delivery(_sized(size))
    head = "POST / HTTP/1.1\r\nHost: localhost\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in sent.headers.items())
    head += f"Content-Length: {size}\r\n\r\n"
    answer = raw(strict, [head.encode(), sent.body])
    assert answer.status == 413
    assert list(answer.json()) == ["error"]
    assert left_no_trace(world, inbox, sent.event_id)


def test_a_body_that_says_it_is_over_the_limit_gets_413_before_it_is_sent(
    strict: Function,
) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000000\r\n\r\n"
    assert raw(strict, [head]).status == 413


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([1] * (LIMIT + 1), id="one byte too many, bytewise"),
        pytest.param([LIMIT, 1], id="one chunk too many"),
        pytest.param([LIMIT + 1], id="one chunk, one byte too many"),
        pytest.param([100_000] * 3, id="far too many"),
    ],
)
def test_chunks_over_the_limit_get_413(
    strict: Function, world: World, inbox: Inbox, chunks: list[int]
) -> None:
    sent = delivery(_sized(sum(chunks)))
    places = [sum(chunks[:n]) for n in range(len(chunks))]
    parts = [sent.body[start : start + size] for start, size in zip(places, chunks, strict=True)]
    answer = in_chunks(strict, parts, sent.headers)
    assert answer.status == 413
    assert left_no_trace(world, inbox, sent.event_id)


def _sized(size: int) -> bytes:
    return b'{"n":"' + b"x" * (size - 8) + b'"}'


# Other methods


def test_get_says_that_the_function_is_up(webhook: Function) -> None:
    answer = deliveries.request("GET", webhook.url)
    assert (answer.status, answer.json()) == (200, {"status": "ok"})


def test_head_does_too(webhook: Function) -> None:
    answer = deliveries.request("HEAD", webhook.url)
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS"])
def test_other_methods_are_not_allowed(webhook: Function, method: str) -> None:
    assert allowed(webhook, method) == (405, "GET, HEAD, POST")


def test_a_delivery_by_another_method_leaves_no_trace(
    webhook: Function, world: World, inbox: Inbox
) -> None:
    sent = delivery()
    assert deliveries.request("PUT", webhook.url, BODY, sent.headers).status == 405
    assert left_no_trace(world, inbox, sent.event_id)


# When Pub/Sub does not take it


def in_outbox(world: World, sent: Delivery) -> tuple[bytes, dict[str, str]]:
    """What the outbox holds of a delivery: data and attributes of its message."""
    (row,) = audit_rows(world, sent.shop)
    assert row["needs_publish"] is True
    return bytes(row["outbox_body"]), row["outbox_envelope"]["attributes"]


def republish(world: World, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """What the retry function does with the outbox."""
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", settings["PUBSUB_EMULATOR_HOST"])
    core = bootstrap.core({**world.environ, **settings})
    with closing(core.application):
        return core.outbox().republish(budget_seconds=60)


def test_a_delivery_that_pubsub_refuses_waits_in_the_outbox_and_arrives_as_it_was(
    webhook: Function,
    pubsub: Inbox,
    world: World,
    settings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, whole = delivery(), delivery()
    assert whole.to(webhook).status == 200
    pubsub.broker.refuse_publishes(True)
    answer, seconds = timed(lambda: sent.to(webhook))
    assert (answer.status, answer.json()) == (200, sent.accepted())
    assert seconds < ANSWER_SECONDS
    data, attributes = in_outbox(world, sent)
    pubsub.broker.refuse_publishes(False)
    assert pubsub.messages(sent.event_id) == []
    assert republish(world, settings, monkeypatch) >= 1
    message = pubsub.message(sent.event_id)
    assert (message.data, dict(message.attributes)) == (data, attributes)
    assert set(attributes) == set(pubsub.message(whole.event_id).attributes)
    (row,) = audit_rows(world, sent.shop)
    assert (row["needs_publish"], row["outbox_body"]) == (False, None)


def test_a_large_delivery_waits_in_the_outbox_compressed(
    webhook: Function, pubsub: Inbox, world: World
) -> None:
    body = json.dumps({"text": "x" * 2_000_000}).encode()
    sent = delivery(body)
    pubsub.broker.refuse_publishes(True)
    assert sent.to(webhook).status == 200
    data, attributes = in_outbox(world, sent)
    assert (gzip.decompress(data), attributes["content-encoding"]) == (body, "gzip")


def test_a_moments_refusal_of_pubsub_is_waited_out(
    webhook: Function, pubsub: Inbox, world: World
) -> None:
    sent = delivery()
    pubsub.broker.refuse_publishes(True)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(sent.to, webhook)
        time.sleep(0.3)
        pubsub.broker.refuse_publishes(False)
        assert answer.result().status == 200
    (row,) = audit_rows(world, sent.shop)
    assert row["needs_publish"] is False


def test_a_hanging_pubsub_is_given_up_in_time(
    webhook: Function, pubsub: Inbox, world: World
) -> None:
    sent = delivery()
    pubsub.broker.hang_publishes(10)
    answer, seconds = timed(lambda: sent.to(webhook))
    assert answer.status == 200
    assert seconds < ANSWER_SECONDS
    in_outbox(world, sent)


def test_a_pubsub_that_goes_down_costs_no_delivery(
    start: Starter, settings: dict[str, str], world: World
) -> None:
    with PubSubServer() as server:
        webhook = start("webhook", **settings | {"PUBSUB_EMULATOR_HOST": Inbox(server).host})
        assert delivery().to(webhook).status == 200
    sent = delivery()
    answer, seconds = timed(lambda: sent.to(webhook))
    assert answer.status == 200
    assert seconds < ANSWER_SECONDS
    in_outbox(world, sent)


def test_a_topic_that_does_not_exist_costs_no_delivery(
    start: Starter, settings: dict[str, str], world: World
) -> None:
    webhook = start("webhook", **settings | {"PUBSUB_TOPIC": "projects/demo/topics/nowhere"})
    sent = delivery()
    assert sent.to(webhook).status == 200
    in_outbox(world, sent)


# When the application database does not take it


def test_without_the_application_database_the_subscriber_is_told_to_audit(
    start: Starter, settings: dict[str, str], inbox: Inbox
) -> None:
    webhook = start(
        "webhook", **settings | {"APP_DATABASE_URL": f"postgresql://app:secret@{NOBODY}/app"}
    )
    sent = delivery()
    answer, seconds = timed(lambda: sent.to(webhook))
    assert (answer.status, answer.json()) == (200, sent.accepted())
    assert seconds < ANSWER_SECONDS
    message = inbox.message(sent.event_id)
    assert message.data == BODY
    assert message.attributes["hookledger-audited"] == "false"


def test_an_application_database_that_never_speaks_costs_no_delivery(
    start: Starter, settings: dict[str, str], inbox: Inbox
) -> None:
    with Silence() as database:
        webhook = start("webhook", **settings | {"APP_DATABASE_URL": database.url})
        for sent in (delivery(), delivery()):
            answer, seconds = timed(lambda sent=sent: sent.to(webhook))
            assert answer.status == 200
            assert seconds < ANSWER_SECONDS
            message = inbox.message(sent.event_id)
            assert message.attributes["hookledger-audited"] == "false"
        assert database.callers() == 1, "it is left alone for a while after it failed"


@pytest.fixture(scope="module")
def own_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server to be frozen, with an application database."""
    server = Server(tmp_path_factory.mktemp("frozen"), durable=False)
    with server:
        with db.connect(db.Target(conninfo=server.url()), migrate.LIMITS) as connection:
            migrate.apply(connection, migrate.Series.APP)
        yield server
    server.remove()


@pytest.mark.parametrize("warm", [True, False], ids=["with a connection", "without a connection"])
def test_an_application_database_that_freezes_costs_no_delivery(
    start: Starter, settings: dict[str, str], inbox: Inbox, own_postgres: Server, warm: bool
) -> None:
    webhook = start("webhook", **settings | {"APP_DATABASE_URL": own_postgres.url()})
    if warm:
        before = delivery()
        assert before.to(webhook).status == 200
        assert inbox.message(before.event_id).attributes["hookledger-audited"] == "true"
    during = delivery()
    with frozen(own_postgres):
        answer, seconds = timed(lambda: during.to(webhook))
    assert answer.status == 200
    assert seconds < ANSWER_SECONDS
    assert inbox.message(during.event_id).attributes["hookledger-audited"] == "false"


def test_a_database_without_our_tables_costs_no_delivery(
    start: Starter, settings: dict[str, str], inbox: Inbox, empty_url: str
) -> None:
    webhook = start("webhook", **settings | {"APP_DATABASE_URL": empty_url})
    sent = delivery()
    assert sent.to(webhook).status == 200
    assert inbox.message(sent.event_id).attributes["hookledger-audited"] == "false"


def test_a_locked_audit_table_costs_no_delivery(
    webhook: Function, world: World, inbox: Inbox
) -> None:
    sent = delivery()
    application = db.Target(conninfo=world.app_url)
    with db.connect(application, migrate.LIMITS) as operator, operator.transaction():
        operator.execute("lock table shopify_shopifyevent in access exclusive mode")
        answer, seconds = timed(lambda: sent.to(webhook))
    assert answer.status == 200
    assert seconds < ANSWER_SECONDS
    assert inbox.message(sent.event_id).attributes["hookledger-audited"] == "false"


# When neither does


def test_with_both_down_the_answer_is_503_in_time(start: Starter, settings: dict[str, str]) -> None:
    with PubSubServer() as server:
        nowhere = {"APP_DATABASE_URL": f"postgresql://a:b@{NOBODY}/app"}
        webhook = start(
            "webhook", **settings | nowhere | {"PUBSUB_EMULATOR_HOST": Inbox(server).host}
        )
        assert delivery().to(webhook).status == 200
    answer, seconds = timed(lambda: delivery().to(webhook))
    assert answer.status == 503
    assert seconds < ANSWER_SECONDS


def test_with_both_hanging_the_answer_is_503_in_time(
    start: Starter, settings: dict[str, str], pubsub: Inbox, own_postgres: Server
) -> None:
    webhook = start("webhook", **settings | {"APP_DATABASE_URL": own_postgres.url()})
    assert delivery().to(webhook).status == 200
    pubsub.broker.hang_publishes(10)
    with frozen(own_postgres):
        answer, seconds = timed(lambda: delivery().to(webhook))
    assert answer.status == 503
    assert seconds < ANSWER_SECONDS


SLOW_DISK = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "google.pubsub_v1":
            time.sleep(1)

sys.meta_path.insert(0, Slow())
"""


def test_a_cold_instance_on_a_slow_disk_answers_in_time_too(
    start: Starter, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Silence() as database, Silence() as pubsub:
        hanging = {"APP_DATABASE_URL": database.url, "PUBSUB_EMULATOR_HOST": pubsub.host}
        webhook = start("webhook", **settings | hanging)
        answer, seconds = timed(lambda: delivery().to(webhook))
    assert answer.status == 503
    assert seconds < ANSWER_SECONDS


def test_a_hanging_failure_ledger_is_a_503_in_time(
    start: Starter, settings: dict[str, str]
) -> None:
    body = incompressible(19_000_000)
    with Silence() as database:
        webhook = start("webhook", **settings | {"APP_DATABASE_URL": database.url})
        answer, seconds = timed(lambda: delivery(body).to(webhook))
    assert answer.status == 503
    assert seconds < ANSWER_SECONDS


# Settings, and what is written down


def test_without_its_settings_the_function_starts_and_names_each_of_them(start: Starter) -> None:
    webhook = start("webhook")
    log = Log(webhook)
    answer = delivery().to(webhook)
    assert (answer.status, answer.body) == (500, b"")
    (event,) = log.events("function.failed")
    for name in ("APP_DATABASE_URL", "SHOPIFY_CLIENT_SECRETS", "PUBSUB_TOPIC"):
        assert f"{name} is missing" in event["error_message"]
    assert deliveries.request("GET", webhook.url).status == 200, "it is up, if of no use"


def test_every_wrong_setting_is_named_and_none_is_shown(
    start: Starter, settings: dict[str, str]
) -> None:
    wrong = {"PUBSUB_TOPIC": "shopify-events", "WEBHOOK_MAX_BODY_BYTES": "lots"}
    webhook = start("webhook", **settings | wrong)
    log = Log(webhook)
    assert delivery().to(webhook).status == 500
    for name in wrong:
        assert name in log.text()
    assert SECRET not in log.text()


@pytest.mark.parametrize("kind", ["database", "pubsub", "ledger", "shop", "signature", "size"])
def test_no_secret_and_nothing_of_a_body_is_written_down(
    start: Starter, settings: dict[str, str], world: World, kind: str
) -> None:
    password = "planted-Pa55"
    wrong_password = make_conninfo(world.app_url, password=password)
    changes = {
        "database": {"APP_DATABASE_URL": f"postgresql://app:{password}@{NOBODY}/app"},
        "pubsub": {"PUBSUB_TOPIC": "projects/demo/topics/nowhere"},
        "ledger": {"APP_DATABASE_URL": wrong_password},
        "size": {"WEBHOOK_MAX_BODY_BYTES": "10"},
    }
    webhook = start("webhook", **settings | changes.get(kind, {}), LOG_LEVEL="DEBUG")
    body = json.dumps({"email": EMAIL, "myshopify_domain": "other.myshopify.com"}).encode()
    sent = delivery(
        b"" if kind == "ledger" else body if kind == "shop" else body.replace(b"other.my", b""),
        secret="wrong" if kind == "signature" else SECRET,
        x_shopify_name=EMAIL,
    )
    log = Log(webhook)
    answer = sent.to(webhook)
    expected = {"database": 200, "pubsub": 200, "ledger": 503, "shop": 400, "signature": 401}
    assert answer.status == expected.get(kind, 413)
    for planted in (password, SECRET, EMAIL, sent.headers["X-Shopify-Hmac-Sha256"]):
        assert planted not in log.text()
        assert planted.encode() not in answer.body


def test_a_shop_that_was_refused_is_not_written_down(webhook: Function) -> None:
    sent = delivery(x_shopify_shop_domain=EMAIL)
    log = Log(webhook)
    answer = sent.to(webhook)
    assert answer.status == 400
    assert log.events("webhook.refused")
    assert EMAIL not in log.text()


def test_an_instance_that_is_stopped_finishes_what_it_has_begun(
    start: Starter, settings: dict[str, str], pubsub: Inbox
) -> None:
    webhook = start("webhook", **settings)
    assert delivery().to(webhook).status == 200
    pubsub.broker.hang_publishes(1)
    sent = delivery()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(sent.to, webhook)
        time.sleep(0.3)
        webhook.stop(signal.SIGTERM)
        assert answer.result().status == 200
    assert pubsub.message(sent.event_id).data == BODY
