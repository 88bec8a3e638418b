"""The SQL on the pages runs, finds something, and the tables are described column by column."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg.rows import dict_row

from dev import samples
from shared import topics
from tests.world import SHOP, World, envelope, message

ROOT = Path(__file__).parents[2]
SHOPS = (SHOP, "closed.myshopify.com")  # in the second one everything is deleted in the end


def blocks(name: str, language: str = "sql") -> list[LiteralString]:
    """The fenced blocks of a page."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)
    return cast("list[LiteralString]", found)


@pytest.fixture
def filled(world: World) -> World:
    """One organization's database with all samples: a shop in business, and one that is closed."""
    triggered_at = (datetime.now(UTC) - timedelta(minutes=5)).isoformat()
    for shop in SHOPS:
        world.connect_shop(shop=shop)
        for topic in sorted({*samples.topics()} - {"customers/redact"}):  # that erases
            gone = topics.lookup(topic).is_deletion or topic == "orders/cancelled"
            if gone and shop == SHOP:
                continue
            body = samples.load(topic, shop)
            sent = message(body, topic=topic, shop_domain=shop, triggered_at=triggered_at)
            assert world.ingester.ingest(sent)
    assert world.failed_events() == []
    return world


@pytest.fixture
def failing(world: World) -> World:
    """A failure ledger with rows in each state; the first one, id 1, has a history."""
    row = world.fail(envelope(b"no JSON"))
    world.retry(event_id=row)
    world.fail()
    for status in ("failed", "resolved"):
        world.app(
            "update subscriber_subscriberfailedevent set status = %(status)s, next_retry_at = null,"
            " resolved_at = case when %(status)s = 'resolved' then now() end,"
            " resolution = case when %(status)s = 'resolved' then 'by hand' end"
            " where id = %(row)s",
            status=status,
            row=world.fail(),
        )
    assert row == 1
    return world


def run(url: str, query: LiteralString) -> list[dict[str, Any]]:
    """A query's rows; what it changed is rolled back."""
    with psycopg.connect(url, row_factory=dict_row) as connection:
        rows = connection.execute(query).fetchall()
        connection.rollback()
    return rows


def test_every_query_for_analysts_finds_something_in_the_samples(filled: World) -> None:
    queries = blocks("docs/schema.md")
    assert len(queries) >= 10
    for query in queries:
        assert run(filled.tenant_url, query), query


def test_the_queries_give_what_they_say(filled: World) -> None:
    day, month, refunds, stock, open_orders, transactions, changed, *_ = (
        run(filled.tenant_url, query) for query in blocks("docs/schema.md")
    )
    assert [(r["shop_domain"], r["currency"], r["orders"], r["total"]) for r in day] == [
        (SHOP, "JPY", 1, 10600)
    ]
    assert [(r["month"], r["revenue"]) for r in month] == [("2025-03", 10600)]
    assert [(r["pieces"], r["refunded"]) for r in refunds] == [(1, 4200)] * len(SHOPS)
    assert [(r["location"], r["sku"], r["available"]) for r in stock] == [
        ("Quai Nord", "LANTERN-BRASS", 13)
    ]
    assert [r["name"] for r in open_orders] == ["#HL-2047"]
    assert {(r["kind"], r["amount"]) for r in transactions} == {("sale", 10600)}
    assert {r["is_deleted"] for r in changed} == {False, True}


def test_another_role_reads_nothing_before_the_policy_and_everything_after_it(
    filled: World,
) -> None:
    (grants,) = blocks("docs/schema.md", "pgsql")
    with psycopg.connect(filled.tenant_url) as connection:
        connection.execute("create role analyst")
        connection.execute("grant select on shopify_orders to analyst")
        assert _orders_seen_by_the_analyst(connection) == 0
        connection.execute(grants)
        assert _orders_seen_by_the_analyst(connection) == len(SHOPS)
        connection.rollback()  # the role too: roles are the whole server's


def _orders_seen_by_the_analyst(connection: psycopg.Connection[Any]) -> int:
    connection.execute("set local role analyst")
    seen = connection.execute("select from shopify_orders").rowcount
    connection.execute("reset role")
    return seen


@pytest.mark.parametrize("name", ["docs/lifecycle.md", "docs/operations.md"])
def test_every_query_for_operators_finds_something(failing: World, name: str) -> None:
    queries = blocks(name)
    assert len(queries) >= 3
    for query in queries:
        assert run(failing.app_url, query), query


def test_a_requeued_row_is_replayed_and_one_that_was_resolved_by_hand_stays(
    failing: World,
) -> None:
    updates = [query for query in blocks("docs/operations.md") if "failedevent" in query]
    for query in updates:
        if query.startswith("update"):
            failing.app(query)
    failing.retry()
    assert {row["resolution"] for row in failing.failed_events()} == {
        "replayed",
        "by hand",
        "not ours: a test of the publisher",
    }


def columns(url: str) -> dict[str, dict[str, str]]:
    rows = run(
        url,
        "select table_name, column_name, data_type from information_schema.columns"
        " where table_schema = 'public' order by ordinal_position",
    )
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        kind = {"timestamp with time zone": "timestamptz"}.get(row["data_type"], row["data_type"])
        found.setdefault(row["table_name"], {})[row["column_name"]] = kind
    return found


def described(text: str, heading: str) -> dict[str, str]:
    """Names and types of the columns in the first table below a heading."""
    table = text.split(heading, 1)[1].split("| column |", 1)[1].split("\n\n", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", table, re.MULTILINE))


def test_every_table_is_described_column_by_column(world: World) -> None:
    text = (ROOT / "docs/schema.md").read_text()
    ours = columns(world.app_url)
    ours.pop("subscriber_schema_version")
    for table, found in ours.items():
        assert described(text, f"\n### `{table}`\n\n") == found, table
    tenant = columns(world.tenant_url)
    tenant.pop("shopify_schema_version")
    for column in tenant.pop("shopify_erasures"):
        assert f"`{column}`" in text
    assert described(text, "\n### Event ledger\n") == tenant.pop("shopify_events")
    for table, found in tenant.items():
        assert f"`{table}`" in text
        assert described(text, "\n### Snapshots\n") == found, table
