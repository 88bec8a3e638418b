"""What PostgreSQL gives back is the value that was sent, to the last digit; nothing is refused.

Values are compared with every number as a decimal: no float stands between body and row.
"""

import base64
import json
import os
import random
import re
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shared import jsontext, message, store
from shared.ingest import Ingester
from shared.jsontext import Number, plain
from shared.parse import claimed_shop
from shared.topics import SNAPSHOT_TABLES, TOPICS, lookup
from tests.world import SHOP, World, envelope
from tests.world import message as native

PAYLOADS = os.environ.get("HOOKLEDGER_PAYLOADS", "")
# What these ask for is carried out: their own bodies are taken away too.
COMPLIANCE = {"customers/redact", "customers/data_request", "shop/redact"}
BOM = b"\xef\xbb\xbf"

common = settings(
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
QUICK = settings(common, max_examples=100)
LONG = settings(common, max_examples=1000)


def exact(text: str | bytes) -> Any:
    """JSON with every number as a decimal."""
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


def designed(text: str | bytes) -> Any:
    """The same, with what jsonb cannot hold replaced; of keys that are alike then the last holds,
    as of keys that are alike anyhow."""

    def replaced(value: Any) -> Any:
        match value:
            case list():
                return [replaced(item) for item in value]
            case str():
                return re.sub("[\0\ud800-\udfff]", "\ufffd", value)
            case _:
                return value

    def joined(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {replaced(key): replaced(item) for key, item in pairs}

    return replaced(
        json.loads(text, parse_int=Decimal, parse_float=Decimal, object_pairs_hook=joined)
    )


# -- a folder of captured payloads, where there is one


def topics_of(path: Path) -> list[str]:
    """`orders__create.json` is one topic; `orders__1.json` may be of any of its resource."""
    resource, _, operation = path.stem.partition("__")
    if not operation.isdecimal():
        return [path.stem.replace("__", "/")]
    return [name for name in TOPICS if lookup(name).resource == resource]


@pytest.mark.skipif(not PAYLOADS, reason="HOOKLEDGER_PAYLOADS names no folder of payloads")
def test_every_captured_payload_comes_back_as_it_was_sent(world: World):
    paths = sorted(Path(PAYLOADS).glob("*/*.json"))
    assert paths
    sent: dict[str, tuple[str, str, bytes]] = {}
    for shop in sorted({claimed_shop(path.read_bytes()) or SHOP for path in paths} - {SHOP}):
        world.connect_shop(shop)
    for path in paths:
        for topic in sorted(set(topics_of(path)) - COMPLIANCE):
            body, event_id = path.read_bytes(), str(uuid.uuid4())
            shop = claimed_shop(body) or SHOP
            one = native(body, topic=topic, shop_domain=shop, webhook_id=event_id)
            assert world.ingester.ingest(one), path.name
            sent[event_id] = (path.name, topic, body)
    assert world.failed_events() == []
    rows = world.tenant("select event_id, topic, payload::text, payload_raw from shopify_events")
    assert len(rows) == len(sent)
    for row in rows:
        name, topic, body = sent[row["event_id"]]
        assert row["topic"] == topic
        assert exact(row["payload"]) == designed(body), name
        assert row["payload_raw"] in (None, body), name


# -- any JSON object

STRINGS = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["\0", "a\0b", "\ud800", "\udc00", "\ud83d\ude00", "\\u0000", "\\\0", "e\u0301", "\u2028", ""]
)


@st.composite
def json_strings(draw: st.DrawFn) -> str:
    """A string as JSON text: escaped throughout, or as little as may be."""
    text = draw(STRINGS)
    escaped = draw(st.booleans()) or any("\ud800" <= c <= "\udfff" for c in text)
    return json.dumps(text, ensure_ascii=escaped)


DIGITS = st.text("0123456789", min_size=1, max_size=40)
NUMBERS = (
    st.integers().map(str)
    | st.integers(-(10**400), 10**400).map(str)
    | st.sampled_from(["0", "-0", "0.0", "-0.00", "1e2", "1E+2", "-1.50e-1", "9" * 5000])
    | st.builds(
        "{}{}.{}{}".format,
        st.sampled_from(["", "-"]),
        st.integers(0, 10**30),
        DIGITS,
        st.sampled_from(["", "e7", "E-12", "e+0"]),
    )
)
SPACES = st.sampled_from(["", " ", "\n", "\t "])


@st.composite
def json_objects(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    """An object as JSON text; keys may be there twice."""
    pairs = draw(st.lists(st.tuples(json_strings(), values, SPACES), max_size=4))
    return "{" + ",".join(f"{space}{key}:{space}{value}" for key, value, space in pairs) + "}"


LEAVES = json_strings() | NUMBERS | st.sampled_from(["null", "true", "false", "[]", "{}"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
        | json_objects(inner)
    ),
    max_leaves=12,
)
BODIES = st.builds(
    lambda text, bom: (BOM if bom else b"") + text.encode(), json_objects(VALUES), st.booleans()
)


def comes_back(world: World, body: bytes) -> None:
    sent = envelope(body, "orders/updated")
    world.core.pipeline.apply(sent)
    (row,) = world.tenant(
        "select payload::text, payload_raw from shopify_events where event_id = %(id)s",
        id=sent.event_id,
    )
    assert exact(row["payload"]) == designed(body.removeprefix(BOM))
    changed = body.startswith(BOM) or jsontext.storable(body.decode()) != body.decode()
    assert row["payload_raw"] == (body if changed else None)


@QUICK
@given(BODIES)
@example(b'{"id": 9223372036854775809, "d": 0.1000000000000000055511151231257827021181583404541}')
@example(b'{"\\u0000": 1, "\\ud800": 2, "\\u0000": 3}')
@example(b'{"a\\u0000": 1, "a\\ufffd": 2, "\\ud83d\\ude00": "\\ude00\\ud83d"}')
def test_any_object_comes_back_as_the_value_that_was_sent(world, body):
    comes_back(world, body)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@LONG
@given(BODIES)
def test_any_object_comes_back_as_the_value_that_was_sent_at_length(world, body):
    comes_back(world, body)


@given(NUMBERS)
def test_a_number_is_read_alike_from_a_body_and_from_jsonb(text):
    """jsonb knows no exponent and no minus zero; ids and money must not depend on that."""
    number = Number(text)
    again = plain(number)
    assert Decimal(str(again)) == Decimal(text)
    assert plain(Number(again)) == again
    assert "e" not in str(again).lower()


def test_psycopg_remembers_what_it_made_of_every_statement():
    """It does so for statements of up to 4,096 bytes; longer ones it would read at each store."""
    assert max(len(store.statement(table)) for table in [None, *SNAPSHOT_TABLES]) <= 4096


# -- attributes

HEADERS = (
    *("X-Shopify-Topic", "X-Shopify-Shop-Domain", "X-Shopify-Webhook-Id", "X-Shopify-Event-Id"),
    *("X-Shopify-Triggered-At", "X-Shopify-API-Version", "X-Shopify-Name", "traceparent"),
    *("hookledger-source", "hookledger-received-at", "hookledger-audited", "hookledger-version"),
    *("content-encoding", "googclient_schemaencoding"),
)


def long_text(length: int) -> str:
    """Text that no index makes fit by compressing it."""
    return "".join(random.Random(length).choices("0123456789abcdefäöüéèß\N{SNOWMAN}", k=length))


NOT_UTF_8 = "not-utf-8-here"  # becomes a byte that no UTF-8 has
ODD_VALUES = (
    json_strings()
    | st.integers(1, 20_000).map(lambda length: json.dumps(long_text(length)))
    | st.sampled_from(["null", '""', '" "', "17", "1.5", "true", "[1]", '{"a": null}'])
    | st.just(json.dumps(f"a{NOT_UTF_8}b"))
    | st.sampled_from(
        ["0001-01-01T00:00:00+09:00", "9999-12-31T23:59:59-12:00", "2026-02-30", "gzip", "webhook"]
    ).map(json.dumps)
)
GOOD_VALUES = {
    "X-Shopify-Topic": "orders/updated",
    "X-Shopify-Shop-Domain": SHOP,
    "X-Shopify-Webhook-Id": "known",
    "X-Shopify-Triggered-At": "2026-11-30T12:00:00Z",
}


@st.composite
def pushes(draw: st.DrawFn) -> bytes:
    """A push body whose attributes are some good, some missing, and some as odd as can be."""
    pairs = []
    for name in HEADERS:
        spellings = st.sampled_from([name, name.lower(), name.upper(), name + "\0"])
        for _ in range(draw(st.integers(0, 2))):
            good = st.just(json.dumps(GOOD_VALUES.get(name, "x")))
            pairs.append((json.dumps(draw(spellings)), draw(good | ODD_VALUES)))
    pairs += draw(st.lists(st.tuples(json_strings(), ODD_VALUES), max_size=2))
    attributes = ", ".join(f"{name}: {value}" for name, value in draw(st.permutations(pairs)))
    body = json.dumps({"id": 1, "mark": str(uuid.uuid4())}).encode()
    data = base64.b64encode(body).decode()
    text = f'{{"message": {{"data": "{data}", "attributes": {{{attributes}}}}}}}'
    return text.encode().replace(NOT_UTF_8.encode(), b"\xff\xfe")


def never_refused(world: World, ingester: Ingester, push: bytes) -> None:
    received = message.read(push)
    body = base64.b64decode(received.data)
    assert ingester.ingest(received) is True
    stored = world.tenant(
        "select 1 from shopify_events where payload ->> 'mark' = %(mark)s",
        mark=json.loads(body)["mark"],
    )
    kept = world.app(
        "select 1 from subscriber_subscriberfailedevent where payload = %(body)s", body=body
    )
    assert len(stored) + len(kept) == 1, "in one of the two ledgers, once"


@QUICK
@given(pushes())
def test_whatever_the_attributes_hold_the_event_is_in_one_of_the_two_ledgers(world, push):
    never_refused(world, world.ingester, push)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@LONG
@given(pushes())
def test_whatever_the_attributes_hold_the_event_is_in_a_ledger_at_length(world, push):
    never_refused(world, world.ingester, push)


@pytest.fixture
def down(world: World) -> World:
    """Its tenant cannot be reached."""
    world.break_tenant()
    return world


@settings(common, max_examples=60)
@given(pushes())
def test_while_the_tenant_is_down_the_failure_ledger_takes_whatever_comes(down, push):
    never_refused(down, down.ingester, push)
