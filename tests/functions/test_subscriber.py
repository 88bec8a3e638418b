"""The subscriber function: 204 when the event is committed somewhere, 503 when it is nowhere."""

import base64
import gzip
import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from google.pubsub_v1.types import PubsubMessage
from psycopg.conninfo import make_conninfo

from dev import deliveries
from dev.functions import Function
from dev.postgres import Server
from shared import bootstrap, db, migrate
from tests.builders_pubsub import binary_event, structured_event, wrapped_push
from tests.functions.rig import (
    NOBODY,
    PUBSUB_TOPIC,
    SUBSCRIPTION,
    Log,
    Silence,
    Starter,
    eventually,
    new_shop,
)
from tests.world import World

BODY = b'{"id": 820982911946154508, "total_price": "12.50", "note": "z\xc3\xbcrich"}'
EMAIL = "jane.planted@example.com"
NAME = "Quentin Plantedname"
SURNAME = "Vanplanted"  # looks like a column's name
PHONE = "+4179555010203"
CUSTOMER = json.dumps(
    {
        "id": 7,
        "email": EMAIL,
        "customer": {"first_name": NAME, "last_name": SURNAME, "phone": PHONE},
    }
).encode()
PASSWORD = "planted-Pa55word"
PLANTED = (EMAIL, NAME, SURNAME, PHONE, PASSWORD)


@pytest.fixture(scope="module")
def subscriber(start_shared: Starter, world: World) -> Function:
    return start_shared("subscriber", **world.environ, LOG_LEVEL="DEBUG")


@pytest.fixture
def shop(world: World) -> str:
    """A shop of the test's own, connected to the module's tenant database."""
    shop = new_shop()
    world.connect_shop(shop, organization=shop.split(".")[0])
    return shop


def message(shop: str, body: bytes = BODY, **attributes: str) -> PubsubMessage:
    """A message as Shopify publishes it; further attributes by their names in snake case."""
    named = deliveries.attributes("orders/create", shop)
    named |= {name.replace("_", "-"): value for name, value in attributes.items()}
    return PubsubMessage(
        data=body,
        attributes=named,
        message_id=str(uuid.uuid4().int % 10**16),
        publish_time=Timestamp(seconds=int(datetime.now(UTC).timestamp())),
    )


def audit_owed(shop: str, body: bytes = BODY) -> PubsubMessage:
    """A message of our webhook's that it could not audit."""
    return message(
        shop,
        body,
        hookledger_version="1",
        hookledger_source="webhook",
        hookledger_audited="false",
        hookledger_received_at=datetime.now(UTC).isoformat(),
    )


def event_id(message: PubsubMessage) -> str:
    return message.attributes["X-Shopify-Webhook-Id"]


def push(function: Function, message: PubsubMessage) -> int:
    headers, body = wrapped_push(message, subscription=SUBSCRIPTION)
    answer = deliveries.post(function.url, body, headers)
    assert answer.body == b"", "Pub/Sub reads the status only"
    return answer.status


def push_raw(function: Function, inner: dict[str, Any]) -> int:
    """Pushes a `message` object as it is."""
    body = json.dumps({"message": inner, "subscription": SUBSCRIPTION}).encode()
    return deliveries.post(function.url, body, {"Content-Type": "application/json"}).status


def stored(world: World, shop: str) -> list[dict[str, Any]]:
    return world.tenant(
        "select * from shopify_events where shop_domain = %(s)s order by id", s=shop
    )


def failed(world: World, shop: str) -> list[dict[str, Any]]:
    return world.app(
        "select * from subscriber_subscriberfailedevent where shop_domain = %(s)s order by id",
        s=shop,
    )


def audited(world: World, shop: str) -> list[dict[str, Any]]:
    return world.app("select * from shopify_shopifyevent where shop_domain = %(s)s", s=shop)


# What is stored

SHAPES: dict[str, Callable[[PubsubMessage], tuple[dict[str, str], bytes]]] = {
    "push": lambda m: wrapped_push(m, subscription=SUBSCRIPTION),
    "binary event": lambda m: binary_event(m, subscription=SUBSCRIPTION, topic=PUBSUB_TOPIC),
    "structured event": lambda m: structured_event(
        m, subscription=SUBSCRIPTION, topic=PUBSUB_TOPIC
    ),
}


def test_the_three_shapes_of_a_message_store_the_same_event(
    subscriber: Function, world: World
) -> None:
    rows, snapshots = [], []
    for shape in SHAPES.values():
        shop = new_shop()
        world.connect_shop(shop)
        sent = message(shop)
        sent.attributes["X-Shopify-Triggered-At"] = "2026-11-30T10:00:00Z"
        headers, body = shape(sent)
        answer = deliveries.post(subscriber.url, body, headers)
        assert (answer.status, answer.body) == (204, b"")
        (row,) = stored(world, shop)
        assert row["event_id"] == event_id(sent)
        assert row["payload"] == json.loads(BODY)
        assert bytes(row["payload_sha256"]) == hashlib.sha256(BODY).digest()
        own = {"id", "shop_domain", "event_id", "source_event_id", "received_at", "inserted_at"}
        rows.append({name: value for name, value in row.items() if name not in own})
        snapshots += world.tenant(
            "select shopify_id, topic, payload, source_updated_at from shopify_orders"
            " where shop_domain = %(s)s",
            s=shop,
        )
    assert rows[0] == rows[1] == rows[2]
    assert len(snapshots) == 3
    assert snapshots[0] == snapshots[1] == snapshots[2]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_message_that_comes_again_is_acknowledged_and_stored_once(
    subscriber: Function, world: World, shop: str, shape: str
) -> None:
    headers, body = SHAPES[shape](message(shop))
    statuses = [deliveries.post(subscriber.url, body, headers).status for _ in range(3)]
    assert statuses == [204, 204, 204]
    assert len(stored(world, shop)) == 1


def test_attributes_are_found_in_any_case(subscriber: Function, world: World, shop: str) -> None:
    sent = message(shop)
    lower = {name.lower(): value for name, value in sent.attributes.items()}
    assert push(subscriber, PubsubMessage(data=BODY, attributes=lower, message_id="1")) == 204
    assert [row["event_id"] for row in stored(world, shop)] == [event_id(sent)]


def test_a_compressed_body_is_stored_as_it_was(
    subscriber: Function, world: World, shop: str
) -> None:
    sent = message(shop, gzip.compress(BODY), content_encoding="gzip")
    assert push(subscriber, sent) == 204
    (row,) = stored(world, shop)
    assert bytes(row["payload_sha256"]) == hashlib.sha256(BODY).digest()
    assert row["payload"] == json.loads(BODY)


def test_a_body_of_twelve_megabytes_is_stored(
    subscriber: Function, world: World, shop: str
) -> None:
    body = b'{"id":1,"n":"%b"}' % (b"x" * 12_000_000)
    sent = message(shop, gzip.compress(body, 1), content_encoding="gzip")
    assert push(subscriber, sent) == 204
    (row,) = stored(world, shop)
    assert bytes(row["payload_sha256"]) == hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"hello", id="no JSON"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b"{}", id="empty object"),
        pytest.param(b'{"message": "text"}', id="message is text"),
        pytest.param(b'{"message": null}', id="message is null"),
        pytest.param(b'{"data": {"id": 1}}', id="data without a message"),
        pytest.param(b'{"data_base64": "?"}', id="data_base64 is not base64"),
        pytest.param(b"[" * 100_000, id="nested without end"),
        pytest.param(b"\xff\xfe", id="not text"),
    ],
)
def test_a_request_that_is_no_message_is_refused(subscriber: Function, body: bytes) -> None:
    answer = deliveries.post(subscriber.url, body, {"Content-Type": "application/json"})
    assert (answer.status, answer.body) == (400, b"")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_request_by_another_method_stores_nothing(subscriber: Function, method: str) -> None:
    assert deliveries.request(method, subscriber.url).status == 400


# What is kept in the failure ledger


def _without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inner: {name: value for name, value in inner.items() if name not in names}


def _with(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inner: inner | fields


@pytest.mark.parametrize(
    ("change", "error_type"),
    [
        pytest.param(_without("attributes"), "MissingAttributeError", id="attributes absent"),
        pytest.param(_with(attributes=None), "MissingAttributeError", id="attributes null"),
        pytest.param(_with(attributes={}), "MissingAttributeError", id="attributes empty"),
        pytest.param(_with(attributes=[]), "MissingAttributeError", id="attributes a list"),
        pytest.param(_without("data", "attributes"), "MissingAttributeError", id="both absent"),
    ],
)
def test_a_message_that_names_no_shop_is_kept(
    subscriber: Function, world: World, change: Callable[..., dict[str, Any]], error_type: str
) -> None:
    body = json.dumps({"id": uuid.uuid4().hex}).encode()
    inner = {"data": base64.b64encode(body).decode(), "attributes": {}, "messageId": "1"}
    assert push_raw(subscriber, change(inner)) == 204
    kept = body if "data" in change(inner) else b""
    (row,) = world.app(
        "select * from subscriber_subscriberfailedevent"
        " where shop_domain = '' and payload = %(kept)s",
        kept=kept,
    )
    assert (row["error_type"], row["status"]) == (error_type, "pending")
    assert row["event_id"].startswith("sha256:")


@pytest.mark.parametrize(
    ("change", "error_type", "kept"),
    [
        pytest.param(_without("data"), "ValueError", b"", id="data absent"),
        pytest.param(_with(data=None), "ValueError", b"", id="data null"),
        pytest.param(_with(data=""), "ValueError", b"", id="data empty"),
        pytest.param(_with(data="?"), "UndecodableMessageError", b"?", id="data is not base64"),
        pytest.param(
            _with(data="aGVsbG8"), "UndecodableMessageError", b"aGVsbG8", id="base64 cut off"
        ),
        pytest.param(
            _with(data={"id": 1}), "UndecodableMessageError", b'{"id": 1}', id="an object"
        ),
        pytest.param(_with(data="bm8="), "ValueError", b"no", id="body is not JSON"),
        pytest.param(_with(data="W10="), "ValueError", b"[]", id="body is no object"),
        pytest.param(_with(data="AAE="), "ValueError", b"\0\1", id="body is not text"),
    ],
)
def test_a_message_whose_data_nobody_can_read_is_kept(
    subscriber: Function,
    world: World,
    change: Callable[..., dict[str, Any]],
    error_type: str,
    kept: bytes,
) -> None:
    shop = new_shop()
    world.connect_shop(shop)
    attributes = deliveries.attributes("orders/create", shop)
    inner = {"data": "", "attributes": attributes, "messageId": "1"}
    assert push_raw(subscriber, change(inner)) == 204
    (row,) = failed(world, shop)
    assert (row["error_type"], row["error_class"]) == (error_type, "permanent")
    assert row["event_id"] == attributes["X-Shopify-Webhook-Id"]
    assert bytes(row["payload"]) == kept
    assert stored(world, shop) == []


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"not gzip at all", id="not gzip"),
        pytest.param(gzip.compress(BODY)[:-9], id="cut off"),
        pytest.param(gzip.compress(BODY)[:-8] + b"\0" * 8, id="wrong checksum"),
        pytest.param(gzip.compress(BODY) + b"more", id="something after it"),
        pytest.param(gzip.compress(b"\0" * 40_000_000), id="a bomb"),
    ],
)
def test_corrupt_gzip_is_kept_as_it_came(
    subscriber: Function, world: World, shop: str, data: bytes
) -> None:
    assert push(subscriber, message(shop, data, content_encoding="gzip")) == 204
    (row,) = failed(world, shop)
    assert row["error_type"] == "UndecodableMessageError"
    assert bytes(row["payload"]) == data


def _unknown(world: World, shop: str) -> None:
    pass


def _disconnected(world: World, shop: str) -> None:
    world.app(
        "insert into shopify_shopifyconnection (organization_id, myshopify_domain, status)"
        " values ('left', %(shop)s, 'disconnected') returning id",
        shop=shop,
    )


def _ambiguous(world: World, shop: str) -> None:
    world.app(
        "insert into shopify_shopifyconnection (organization_id, myshopify_domain)"
        " values ('one', %(shop)s), ('two', %(shop)s) returning id",
        shop=shop,
    )


def _no_database(world: World, shop: str) -> None:
    world.app(
        "insert into shopify_shopifyconnection (organization_id, myshopify_domain)"
        " values (%(shop)s, %(shop)s) returning id",
        shop=shop,
    )


def _deleted_database(world: World, shop: str) -> None:
    world.connect_shop(shop, organization=shop)
    world.app(
        "update databases_database set deleted_at = now() where organization_id = %(shop)s"
        " returning id",
        shop=shop,
    )


def _no_credential(world: World, shop: str) -> None:
    world.connect_shop(shop, organization=shop)
    world.app(
        "delete from databases_databasecredential where database_id in"
        " (select id from databases_database where organization_id = %(shop)s) returning id",
        shop=shop,
    )


def _foreign_key(world: World, shop: str) -> None:
    world.connect_shop(shop, organization=shop)
    world.app(
        "update databases_databasecredential set password_encrypted = 'gAAAA-of-another-key'"
        " where database_id in"
        " (select id from databases_database where organization_id = %(shop)s) returning id",
        shop=shop,
    )


@pytest.mark.parametrize(
    ("arrange", "error_type", "says"),
    [
        pytest.param(_unknown, "UnknownShopError", "no connection", id="unknown shop"),
        pytest.param(_disconnected, "UnknownShopError", "disconnected", id="disconnected shop"),
        pytest.param(_ambiguous, "AmbiguousShopError", "2 active connections", id="two matches"),
        pytest.param(_no_database, "StorageConfigurationError", "no database", id="no database"),
        pytest.param(_deleted_database, "StorageConfigurationError", "no database", id="deleted"),
        pytest.param(
            _no_credential, "StorageConfigurationError", "no credential", id="no credential"
        ),
        pytest.param(
            _foreign_key, "StorageConfigurationError", "CREDENTIAL_KEYS", id="unreadable credential"
        ),
    ],
)
def test_an_event_without_a_route_is_kept_with_the_reason(
    subscriber: Function,
    world: World,
    arrange: Callable[[World, str], None],
    error_type: str,
    says: str,
) -> None:
    shop = new_shop()
    arrange(world, shop)
    sent = message(shop)
    assert push(subscriber, sent) == 204
    (row,) = failed(world, shop)
    assert (row["event_id"], row["error_type"]) == (event_id(sent), error_type)
    assert (row["error_class"], row["status"], row["retry_count"]) == ("permanent", "pending", 0)
    assert says in row["error_message"]
    assert bytes(row["payload"]) == BODY


def test_an_event_that_was_kept_for_an_unknown_shop_is_stored_once_the_shop_is_connected(
    subscriber: Function, world: World
) -> None:
    shop = new_shop()
    assert push(subscriber, message(shop)) == 204
    world.connect_shop(shop)
    (row,) = failed(world, shop)
    assert world.retry(event_id=row["id"]).resolved == 1
    assert len(stored(world, shop)) == 1


def test_a_tenant_that_is_down_costs_an_acknowledged_pending_failed_event(
    subscriber: Function, world: World
) -> None:
    shop = new_shop()
    world.connect_shop(shop, organization=shop, url=make_conninfo(world.tenant_url, port=1))
    sent = message(shop)
    assert push(subscriber, sent) == 204
    (row,) = failed(world, shop)
    assert (row["status"], row["error_class"]) == ("pending", "transient")
    assert (row["error_type"], row["error_code"]) == ("OperationalError", "connection_failed")
    assert (row["organization_id"], row["occurrences"]) == (shop, 1)
    assert push(subscriber, sent) == 204, "and again when it comes again"
    assert [row["occurrences"] for row in failed(world, shop)] == [2]


def test_a_tenant_that_never_speaks_costs_a_failed_event(
    subscriber: Function, world: World
) -> None:
    shop = new_shop()
    with Silence() as tenant:
        world.connect_shop(shop, organization=shop, url=tenant.url)
        assert push(subscriber, message(shop)) == 204
    (row,) = failed(world, shop)
    assert (row["status"], row["error_class"]) == ("pending", "transient")


def test_a_tenant_that_is_down_does_not_harm_another(
    subscriber: Function, world: World, shop: str
) -> None:
    broken = new_shop()
    world.connect_shop(broken, organization=broken, url=make_conninfo(world.tenant_url, port=1))
    for each in (broken, shop, broken, shop):
        assert push(subscriber, message(each)) == 204
    assert (len(stored(world, shop)), len(failed(world, broken))) == (2, 2)


def test_a_body_that_names_another_shop_is_kept(
    subscriber: Function, world: World, shop: str
) -> None:
    body = b'{"id": 1, "myshopify_domain": "another.myshopify.com"}'
    assert push(subscriber, message(shop, body)) == 204
    assert [row["error_type"] for row in failed(world, shop)] == ["ShopMismatchError"]
    assert stored(world, shop) == []


def test_another_body_under_a_known_id_is_kept_under_an_id_of_its_own(
    subscriber: Function, world: World, shop: str
) -> None:
    first = message(shop)
    second = message(shop, b'{"id": 2}', X_Shopify_Webhook_Id=event_id(first))
    assert [push(subscriber, each) for each in (first, second)] == [204, 204]
    (row,) = failed(world, shop)
    digest = hashlib.sha256(b'{"id": 2}').hexdigest()[:16]
    assert row["event_id"] == f"{event_id(first)}#{digest}"
    assert row["error_type"] == "EventCollisionError"
    assert [row["payload"] for row in stored(world, shop)] == [json.loads(BODY)]


# The audit row


@pytest.mark.parametrize("ending", ["stored", "kept"])
def test_the_audit_row_that_the_webhook_owes_is_written(
    subscriber: Function, world: World, shop: str, ending: str
) -> None:
    shop = shop if ending == "stored" else new_shop()
    sent = audit_owed(shop)
    assert [push(subscriber, sent) for _ in range(2)] == [204, 204]
    (row,) = audited(world, shop)
    assert (row["event_id"], row["payload"]) == (event_id(sent), json.loads(BODY))
    received_at = datetime.fromisoformat(sent.attributes["hookledger-received-at"])
    assert row["received_at"] == received_at


@pytest.mark.parametrize(
    "attributes",
    [
        pytest.param({}, id="native"),
        pytest.param({"hookledger_audited": "false"}, id="native, with a claim"),
        pytest.param(
            {"hookledger_source": "webhook", "hookledger_audited": "true"}, id="audited already"
        ),
    ],
)
def test_no_other_message_makes_an_audit_row(
    subscriber: Function, world: World, shop: str, attributes: dict[str, str]
) -> None:
    assert push(subscriber, message(shop, **attributes)) == 204
    assert len(stored(world, shop)) == 1
    assert audited(world, shop) == []


def test_an_audit_row_that_cannot_be_written_changes_nothing_else(
    subscriber: Function, world: World, shop: str
) -> None:
    log = Log(subscriber)
    assert push(subscriber, message(shop)) == 204
    application = db.Target(conninfo=world.app_url)
    with db.connect(application, migrate.LIMITS) as operator, operator.transaction():
        operator.execute("lock table shopify_shopifyevent in access exclusive mode")
        assert push(subscriber, audit_owed(shop)) == 204
    assert len(stored(world, shop)) == 2
    assert len(log.events("audit.not_written")) == 1


# When the application database is out of reach


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own for an application database that comes and goes."""
    server = Server(tmp_path_factory.mktemp("application"), durable=False)
    with server:
        yield server
    server.remove()


@pytest.fixture
def outage(application: Server, environ: dict[str, str], tenant_url: str) -> Iterator[World]:
    """The world around that application database, which is up again after the test."""
    own = environ | {"APP_DATABASE_URL": application.url()}
    with db.connect(db.Target(conninfo=application.url()), migrate.LIMITS) as connection:
        migrate.apply(connection, migrate.Series.APP)
    with World(bootstrap.core(own), environ=own, tenant_url=tenant_url) as world:
        yield world
    application.start()


def test_an_event_that_can_go_nowhere_is_refused_and_accepted_when_it_comes_again(
    start: Starter, application: Server, outage: World
) -> None:
    shop = new_shop()
    outage.connect_shop(shop)
    subscriber = start("subscriber", **outage.environ)
    sent = message(shop)
    application.stop()
    log = Log(subscriber)
    assert [push(subscriber, sent) for _ in range(2)] == [503, 503]
    assert stored(outage, shop) == []
    assert len(log.events("failure.not_recorded")) == 2
    application.start()
    eventually(lambda: push(subscriber, sent) == 204)
    assert [row["event_id"] for row in stored(outage, shop)] == [event_id(sent)]


def test_a_route_that_is_known_needs_no_application_database(
    start: Starter, application: Server, outage: World
) -> None:
    shop = new_shop()
    outage.connect_shop(shop)
    subscriber = start("subscriber", **outage.environ)
    assert push(subscriber, message(shop)) == 204
    application.stop()
    assert [push(subscriber, message(shop)) for _ in range(3)] == [204] * 3
    assert push(subscriber, audit_owed(shop)) == 204, "the owed audit row changes nothing"
    assert len(stored(outage, shop)) == 5


def test_an_event_whose_tenant_is_down_too_is_refused_and_kept_when_it_comes_again(
    start: Starter, application: Server, outage: World
) -> None:
    shop = new_shop()
    outage.connect_shop(shop, organization=shop, url=make_conninfo(outage.tenant_url, port=1))
    subscriber = start("subscriber", **outage.environ)
    first, second = message(shop), message(shop)
    assert push(subscriber, first) == 204, "kept; from now on the route is known"
    application.stop()
    assert push(subscriber, second) == 503
    application.start()
    eventually(lambda: push(subscriber, second) == 204)
    with psycopg.connect(application.url()) as connection:
        rows = connection.execute(
            "select event_id, status from subscriber_subscriberfailedevent"
            " where shop_domain = %s order by id",
            (shop,),
        ).fetchall()
    assert rows == [(event_id(first), "pending"), (event_id(second), "pending")]


def test_a_message_that_nobody_can_read_is_refused_while_it_cannot_be_kept(
    start: Starter, environ: dict[str, str]
) -> None:
    nowhere = {"APP_DATABASE_URL": f"postgresql://app:secret@{NOBODY}/app"}
    subscriber = start("subscriber", **environ | nowhere)
    assert push_raw(subscriber, {"data": "?", "attributes": None}) == 503


def test_an_application_database_that_never_speaks_is_a_refusal_too(
    start: Starter, environ: dict[str, str]
) -> None:
    with Silence() as database:
        subscriber = start("subscriber", **environ | {"APP_DATABASE_URL": database.url})
        assert push(subscriber, message(new_shop())) == 503


def test_without_its_settings_the_function_starts_and_names_them(start: Starter) -> None:
    subscriber = start("subscriber", LOG_LEVEL="LOUD", TENANT_POOL_SIZE="many")
    log = Log(subscriber)
    assert push(subscriber, message(new_shop())) == 500
    (event,) = log.events("function.failed")
    for fault in ("APP_DATABASE_URL is missing", "LOG_LEVEL must", "TENANT_POOL_SIZE must"):
        assert fault in event["error_message"]


# What is written down


def _alter(statement: str) -> Callable[[str], None]:
    def alter(url: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type]

    return alter


_REFUSE = """
create function refuse() returns trigger language plpgsql as $$
begin
  raise exception {};
end $$;
create trigger refuse before insert on shopify_orders for each row execute function refuse()"""

ALTERATIONS = {
    "a column is missing": ("alter table shopify_orders drop column payload", "UndefinedColumn"),
    "a column has another type": (
        "alter table shopify_orders drop column payload, add column payload integer",
        "DatatypeMismatch",
    ),
    "a value does not convert": (
        "alter table shopify_orders"
        " add column a integer generated always as ((payload->>'email')::integer) stored",
        "InvalidTextRepresentation",
    ),
    "a name does not convert": (
        "alter table shopify_orders add column a integer"
        " generated always as ((payload #>> '{customer,last_name}')::integer) stored",
        "InvalidTextRepresentation",
    ),
    "a time does not convert": (
        "alter table shopify_orders add constraint c"
        " check (((payload->>'email')::timestamptz) is not null)",
        "InvalidDatetimeFormat",
    ),
    "a value is too long": (
        "alter table shopify_orders"
        " add column a varchar(3) generated always as (payload->>'email') stored",
        "StringDataRightTruncation",
    ),
    "a check fails": (
        "alter table shopify_orders add constraint c check (payload->>'email' is null)",
        "CheckViolation",
    ),
    "a value is null": (
        "alter table shopify_orders"
        " add column a text generated always as (payload->>'none') stored not null",
        "NotNullViolation",
    ),
    "a trigger quotes the address": (
        _REFUSE.format("'no % with %', new.payload->>'email', new.payload #>> '{customer,phone}'"),
        "RaiseException",
    ),
}


def _planted(log: Log, *more: str) -> list[str]:
    text = log.text()
    return [word for word in (*PLANTED, *more) if word in text]


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_nothing_of_a_customer_is_written_down_when_a_tenants_table_is_not_ours(
    subscriber: Function, world: World, other_tenant_url: str, alteration: str
) -> None:
    statement, error_type = ALTERATIONS[alteration]
    _alter(statement)(other_tenant_url)
    _keeps_quiet(subscriber, world, url=other_tenant_url, error_type=error_type)


def test_nothing_of_a_customer_is_written_down_when_a_tenants_trigger_tells_a_name(
    subscriber: Function, world: World, other_tenant_url: str
) -> None:
    told = _REFUSE.format("'% is barred', new.payload #>> '{customer,first_name}'")
    _alter(told)(other_tenant_url)
    _keeps_quiet(subscriber, world, url=other_tenant_url, error_type="RaiseException")


@pytest.mark.parametrize(
    ("change", "error_type"),
    [
        pytest.param({"port": 1}, "OperationalError", id="refused"),
        pytest.param({"host": "nowhere.invalid"}, "HostNotFoundError", id="unknown host"),
        pytest.param({"dbname": "nothing"}, "InvalidPassword", id="no such database"),
        pytest.param({"user": "stranger"}, "InvalidPassword", id="no such user"),
        pytest.param({}, "InvalidPassword", id="wrong password"),
    ],
)
def test_no_password_is_written_down_when_a_tenant_cannot_be_reached(
    subscriber: Function, world: World, change: dict[str, Any], error_type: str
) -> None:
    url = make_conninfo(world.tenant_url, **{"password": PASSWORD} | change)
    _keeps_quiet(subscriber, world, url=url, error_type=error_type)


@pytest.mark.parametrize(
    ("data", "attributes", "error_type"),
    [
        pytest.param(f"{EMAIL} {NAME} {PHONE}".encode(), {}, "ValueError", id="not JSON"),
        pytest.param(b"[" + CUSTOMER + b"]", {}, "ValueError", id="no object"),
        pytest.param(CUSTOMER[:-1] + b",}", {}, "ValueError", id="JSON with a fault"),
        pytest.param(CUSTOMER[:-2] + b"\xff}}", {}, "ValueError", id="not UTF-8"),
        pytest.param(
            CUSTOMER, {"content_encoding": "gzip"}, "UndecodableMessageError", id="not gzip"
        ),
        pytest.param(
            CUSTOMER[:-1] + b',"shop_domain":"x.myshopify.com"}', {}, "ShopMismatchError", id="shop"
        ),
        pytest.param(CUSTOMER, {"X_Shopify_Topic": ""}, "MissingAttributeError", id="no topic"),
    ],
)
def test_nothing_of_a_customer_is_written_down_when_a_message_is_wrong(
    subscriber: Function,
    world: World,
    data: bytes,
    attributes: dict[str, str],
    error_type: str,
) -> None:
    _keeps_quiet(subscriber, world, data, error_type=error_type, **attributes)


def test_a_shop_that_is_none_is_not_written_down(subscriber: Function, world: World) -> None:
    log = Log(subscriber)
    assert push(subscriber, message(EMAIL)) == 204
    assert [row["error_type"] for row in failed(world, EMAIL)] == ["MissingAttributeError"]
    assert _planted(log) == []


def test_nothing_of_a_customer_is_written_down_when_a_message_is_stored(
    subscriber: Function, world: World, shop: str
) -> None:
    log = Log(subscriber)
    assert push(subscriber, message(shop, CUSTOMER, X_Shopify_Name=EMAIL, Customer=NAME)) == 204
    assert len(stored(world, shop)) == 1
    assert log.events("event.stored")
    assert _planted(log) == []


def test_nothing_is_written_down_when_not_even_the_failure_ledger_can_be_reached(
    start: Starter, world: World
) -> None:
    urls = [
        f"postgresql://app:{PASSWORD}@{NOBODY}/app",
        make_conninfo(world.app_url, password=PASSWORD),
        make_conninfo(world.app_url, password=PASSWORD, host="nowhere.invalid"),
    ]
    for url in urls:
        subscriber = start("subscriber", **world.environ | {"APP_DATABASE_URL": url})
        log = Log(subscriber)
        assert push(subscriber, message(new_shop(), CUSTOMER, X_Shopify_Name=EMAIL)) == 503
        assert log.events("failure.not_recorded")
        assert _planted(log, world.environ["CREDENTIAL_KEYS"]) == []


def _keeps_quiet(
    subscriber: Function,
    world: World,
    data: bytes = CUSTOMER,
    *,
    error_type: str,
    url: str = "",
    **attributes: str,
) -> None:
    """The event becomes a failed event, and neither log nor error fields hold what was planted."""
    shop = new_shop()
    world.connect_shop(shop, organization=shop, url=url)
    log = Log(subscriber)
    sent = message(shop, data, **{"X_Shopify_Name": EMAIL, "Customer": NAME} | attributes)
    assert push(subscriber, sent) == 204
    (row,) = failed(world, shop)
    assert row["error_type"] == error_type
    assert log.events("failure.recorded")
    assert _planted(log, world.environ["CREDENTIAL_KEYS"]) == []
    told = row["error_message"] + row["traceback"]
    assert [word for word in PLANTED if word in told] == []
