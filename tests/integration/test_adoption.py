"""Tables that the earlier system made: adopted with their rows, and written to from then on."""

from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql

from shared import db, migrate
from shared.model import LedgerOutcome, SnapshotOutcome
from tests.world import NOW, SHOP, World, envelope

RESOURCES = (
    *("orders", "products", "customers", "inventory_items", "inventory_levels", "locations"),
    *("fulfillments", "refunds", "order_transactions", "draft_orders", "checkouts", "collections"),
)

# As a web framework's models would make them: other names for keys and indexes, other types.
EVENTS = """
create table shopify_events (
  id serial primary key,
  event_id varchar(64) not null,
  organization_id {organization} not null,
  shop_domain varchar(255) not null,
  topic varchar(20) not null,
  event_type varchar(50) not null,
  resource_type varchar(50) not null,
  resource_id varchar(30) not null,
  payload jsonb not null,
  parsed_payload jsonb not null,
  received_at timestamptz not null,
  inserted_at timestamptz not null default now(),
  constraint events_uniq unique (shop_domain, event_id, organization_id)
);
create index events_by_topic on shopify_events (organization_id, topic, received_at);
create index events_by_resource on shopify_events (organization_id, resource_type, resource_id)"""
SNAPSHOT = """
create table {table} (
  id serial primary key,
  organization_id {organization} not null,
  shop_domain varchar(255) not null,
  shopify_id varchar(30) not null,
  topic varchar(20) not null,
  event_type varchar(50) not null,
  payload jsonb not null,
  parsed_payload jsonb,
  is_deleted boolean,
  first_seen_at timestamptz not null default now(),
  last_seen_at timestamptz,
  constraint {key} unique (organization_id, shop_domain, shopify_id)
);
create index {index} on {table} (organization_id, topic)"""
LONG_TOPIC = "orders/a_topic_that_is_longer_than_twenty_characters"


def make_earlier(url: str, organization_type: str) -> None:
    """The earlier system's tables, with an event, its order, and an order of which no event is."""
    organization = sql.SQL(organization_type)  # type: ignore[arg-type]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(EVENTS).format(organization=organization))
        for resource in RESOURCES:
            connection.execute(
                sql.SQL(SNAPSHOT).format(
                    organization=organization,
                    table=sql.Identifier(f"shopify_{resource}"),
                    key=sql.Identifier(f"uniq_{resource}"),
                    index=sql.Identifier(f"idx_{resource}"),
                )
            )
        connection.execute(
            "insert into shopify_events (event_id, organization_id, shop_domain, topic, event_type,"
            " resource_type, resource_id, payload, parsed_payload, received_at)"
            " values ('known', '42', %s, 'orders/create', 'create', 'orders', '1', '{}', '{}', %s)",
            [SHOP, NOW],
        )
        for order in ("1", "2"):
            connection.execute(
                "insert into shopify_orders (organization_id, shop_domain, shopify_id, topic,"
                " event_type, payload, last_seen_at)"
                " values ('42', %s, %s, 'orders/create', 'create', '{\"old\": true}', %s)",
                [SHOP, order, NOW],
            )


def provision(url: str) -> list[str]:
    with db.connect(db.Target(conninfo=url), migrate.LIMITS) as connection:
        migrate.apply(connection, migrate.Series.TENANT)
        return migrate.drift(connection, migrate.Series.TENANT).differences


@pytest.fixture(params=["bigint", "integer", "text", "varchar(36)"])
def organization_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tenant_url(empty_url: str, organization_type: str) -> str:
    """In the place of a fresh tenant database: one that the earlier system filled."""
    make_earlier(empty_url, organization_type)
    return empty_url


@pytest.fixture
def adopted(world: World, tenant_url: str) -> World:
    """The world after provisioning, with the shop connected to organization 42."""
    world.app("delete from shopify_shopifyconnection")
    world.connect_shop(organization="42")
    assert provision(tenant_url) == []
    return world


def test_rows_are_kept_and_the_pipeline_writes_beside_them(adopted: World):
    before = adopted.tenant("select id, payload from shopify_orders order by id")
    sent = envelope({"id": 7, "updated_at": NOW.isoformat()}, "orders/create")
    outcome = adopted.core.pipeline.apply(sent)
    assert (outcome.ledger, outcome.snapshot) == (LedgerOutcome.INSERTED, SnapshotOutcome.INSERTED)
    after = adopted.tenant("select id, payload from shopify_orders order by id")
    assert after[: len(before)] == before
    (row,) = adopted.tenant(
        "select organization_id::text as organization, event_id from shopify_orders"
        " where shopify_id = '7'"
    )
    assert row == {"organization": "42", "event_id": sent.event_id}


@pytest.mark.parametrize("organization_type", ["bigint", "text"])
def test_a_delivery_of_an_adopted_event_is_a_duplicate_and_not_a_collision(adopted: World):
    sent = replace(envelope({"id": 1}, "orders/create"), event_id="known")
    assert adopted.core.pipeline.apply(sent).ledger is LedgerOutcome.DUPLICATE
    assert len(adopted.tenant("select 1 from shopify_events")) == 1


@pytest.mark.parametrize("organization_type", ["bigint", "text"])
def test_a_snapshot_without_a_version_is_older_than_any_event(adopted: World):
    old = envelope({"id": 2, "updated_at": "2001-01-01T00:00:00Z"}, "orders/updated")
    assert adopted.core.pipeline.apply(old).snapshot is SnapshotOutcome.UPDATED
    (row,) = adopted.tenant(
        "select payload, is_deleted, event_id from shopify_orders where shopify_id = '2'"
    )
    assert row["payload"]["id"] == 2
    assert (row["is_deleted"], row["event_id"]) == (False, old.event_id)


@pytest.mark.parametrize("organization_type", ["bigint", "text"])
def test_what_was_too_short_or_not_null_takes_our_events(adopted: World):
    without_id = envelope({}, LONG_TOPIC)
    sent = replace(without_id, event_id="sha256:" + "f" * 64 + "#" + "0" * 16)
    assert adopted.core.pipeline.apply(sent).ledger is LedgerOutcome.INSERTED
    (row,) = adopted.tenant("select resource_id from shopify_events where topic like 'orders/a%%'")
    assert row["resource_id"] is None


@pytest.mark.parametrize("organization_type", ["bigint"])
def test_a_name_where_the_table_has_numbers_is_a_failed_event_that_says_so(adopted: World):
    adopted.connect_shop("named.myshopify.com", "acme")
    with pytest.raises(pg.InvalidTextRepresentation) as caught:
        adopted.core.pipeline.apply(envelope(shop_domain="named.myshopify.com"))
    adopted.fail(envelope(shop_domain="named.myshopify.com"), caught.value)
    row = adopted.failed_event()
    assert (row["error_class"], row["error_code"]) == ("permanent", "22P02")
    assert "invalid input syntax for type bigint" in row["error_message"]
    assert "acme" not in row["error_message"]


@pytest.mark.parametrize("organization_type", ["text"])
def test_an_index_that_was_there_under_another_name_is_not_made_twice(adopted: World):
    found = adopted.tenant("select tablename, indexdef from pg_indexes where schemaname = 'public'")
    kinds = [(row["tablename"], row["indexdef"].split(" USING ")[1]) for row in found]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("organization_type", ["bigint", "text"])
def test_provisioning_adopted_tables_again_changes_nothing(adopted: World):
    before = catalogue(adopted)
    with db.connect(db.Target(conninfo=adopted.tenant_url), migrate.LIMITS) as connection:
        migrate.apply_again(connection, migrate.Series.TENANT)
    assert catalogue(adopted) == before


def catalogue(world: World) -> list[dict[str, Any]]:
    return world.tenant(
        "select table_name, column_name, data_type, is_nullable from information_schema.columns"
        " where table_schema = 'public' order by 1, 2"
    ) + world.tenant("select indexdef from pg_indexes where schemaname = 'public' order by 1")


# Tables that lack something


@pytest.fixture
def connection(empty_url: str):
    make_earlier(empty_url, "text")
    with db.connect(db.Target(conninfo=empty_url), migrate.LIMITS) as connection:
        yield connection


def test_a_missing_key_is_made(connection):
    connection.execute("alter table shopify_orders drop constraint uniq_orders")
    migrate.apply(connection, migrate.Series.TENANT)
    assert migrate.drift(connection, migrate.Series.TENANT).differences == []
    connection.execute("alter table shopify_orders rename constraint shopify_orders_pkey to x")
    migrate.apply_again(connection, migrate.Series.TENANT)


@pytest.mark.parametrize(
    "key",
    [
        "create unique index k on shopify_orders (organization_id, shop_domain, shopify_id)"
        " where not is_deleted",
        "alter table shopify_orders add constraint k unique"
        " (organization_id, shop_domain, shopify_id) deferrable",
        "create unique index k on shopify_orders (organization_id, shop_domain, shopify_id, topic)",
        "create unique index k on shopify_orders (organization_id, shop_domain, lower(shopify_id))",
        "create index k on shopify_orders (organization_id, shop_domain, shopify_id)",
    ],
)
def test_a_key_that_no_upsert_can_use_is_none(connection, key):
    connection.execute("alter table shopify_orders drop constraint uniq_orders")
    connection.execute(key)
    migrate.apply(connection, migrate.Series.TENANT)
    found = connection.execute("select to_regclass('shopify_orders_key') is not null").fetchone()
    assert found == (True,)


def test_rows_that_no_key_allows_are_an_error_that_says_what_to_do(connection):
    connection.execute("alter table shopify_orders drop constraint uniq_orders")
    connection.execute("update shopify_orders set shopify_id = '1'")
    with pytest.raises(pg.UniqueViolation, match=r"shopify_orders holds several rows .* keep one"):
        migrate.apply(connection, migrate.Series.TENANT)
    pending = migrate.pending(connection, migrate.Series.TENANT)
    assert [m.version for m in pending] == [2, 3], "the rest of the file was undone with it"


def test_columns_of_the_earlier_table_that_are_missing_are_added(connection):
    for column in ("parsed_payload", "is_deleted", "first_seen_at", "last_seen_at"):
        connection.execute(f"alter table shopify_orders drop column {column}")
    for column in ("parsed_payload", "inserted_at"):
        connection.execute(f"alter table shopify_events drop column {column}")
    migrate.apply(connection, migrate.Series.TENANT)
    assert migrate.drift(connection, migrate.Series.TENANT).differences == []


def test_a_column_of_theirs_that_we_cannot_fill_is_reported(connection):
    connection.execute("alter table shopify_orders add tenant int not null default 0")
    connection.execute("alter table shopify_orders alter tenant drop default")
    migrate.apply(connection, migrate.Series.TENANT)
    (difference,) = migrate.drift(connection, migrate.Series.TENANT).differences
    assert "column tenant of table shopify_orders is none of ours" in difference


def test_row_level_security_of_adopted_tables_is_reported_and_can_be_switched_on(connection):
    migrate.apply(connection, migrate.Series.TENANT)
    unsecured = migrate.drift(connection, migrate.Series.TENANT).unsecured
    assert unsecured == sorted(["shopify_events", *(f"shopify_{name}" for name in RESOURCES)])
    migrate.secure(connection, unsecured)
    assert migrate.drift(connection, migrate.Series.TENANT).unsecured == []
    connection.execute(
        "insert into shopify_refunds (organization_id, shop_domain, shopify_id,"
        " topic, event_type) values ('o', 's', '1', 't', 'e')"
    )
