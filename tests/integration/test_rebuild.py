"""Snapshots made again from the event ledger: exactly what was there, and nothing else."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dev import samples
from shared import db, fields, migrate, rebuild
from shared.rebuild import RESOURCES, Rebuild, Report, Scope
from shared.topics import TOPICS
from tests.world import NOW, ORGANIZATION, SHOP, World, envelope

ROOT = Path(__file__).parents[2]
HOUR = timedelta(hours=1)


def order(id_: int, hours: float, topic: str = "orders/updated", **body: Any):
    updated_at = (NOW + hours * HOUR).isoformat()
    return envelope({"id": id_, "updated_at": updated_at, **body}, topic)


def gone(id_: int, hours: float):
    sent = envelope({"id": id_}, "orders/delete")
    return replace(sent, triggered_at=NOW + hours * HOUR)


@pytest.fixture
def apply(world: World):
    return world.core.pipeline.apply


@pytest.fixture
def rebuilt(world: World):
    """Rebuilds, and returns the report."""

    def run(*, dry_run: bool = False, **scope: Any) -> Report:
        target = db.Target(conninfo=world.tenant_url)
        with db.connect(target, migrate.LIMITS) as connection:
            whole = Scope(organization_id=ORGANIZATION)
            passing = Rebuild(connection, replace(whole, **scope), dry_run=dry_run)
            list(passing.batches())
            return passing.report()

    return run


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rebuild, "BATCH_ROWS", 2)


def counts(report: Report) -> tuple[int, int, int]:
    return report.inserted, report.overwritten, report.kept


def snapshots(world: World, table: str = "shopify_orders") -> list[dict[str, Any]]:
    """The rows without what tells when something came; the payload as text, with every digit."""
    return world.tenant(
        "select organization_id, shop_domain, shopify_id, topic, event_type, parsed_payload,"
        " payload::text as payload, is_deleted, source_updated_at, source_triggered_at, event_id"
        f" from {table} order by shop_domain, shopify_id"  # type: ignore[arg-type]
    )


def to_the_byte(world: World) -> list[dict[str, Any]]:
    return world.tenant("select s::text, xmin::text, ctid::text from shopify_orders s order by id")


def history(apply) -> None:
    """Three orders: one updated and seen late, one deleted, one deleted and back again."""
    for sent in (
        order(1, 0, "orders/create"),
        order(2, 0, "orders/create"),
        order(3, 0, "orders/create"),
        order(1, 2, "orders/paid", total_price="9.90"),
        order(1, 1),
        gone(2, 3),
        order(2, 2),
        gone(3, 1),
        order(3, 4, note="back"),
    ):
        apply(sent)


@pytest.mark.usefixtures("small_batches")
def test_rebuilding_an_intact_database_writes_nothing_at_all(world, apply, rebuilt):
    history(apply)
    before = to_the_byte(world)
    assert counts(rebuilt()) == (0, 0, 3)
    assert to_the_byte(world) == before


@pytest.mark.parametrize("topic", samples.topics())
def test_an_intact_snapshot_of_any_topic_stays(world, apply, rebuilt, topic):
    apply(envelope(samples.load(topic, SHOP), topic))
    has_snapshot = int(TOPICS[topic].table is not None)
    assert counts(rebuilt()) == (0, 0, has_snapshot)


@pytest.mark.parametrize(
    "body",
    [
        b'{"id": 1, "total_price": 1e2, "order_number": 1E+2, "total_tax": -0.00}',
        b'{"id": 1e3, "total_price": 1.50e1, "subtotal_price": 12e-3}',
        b'{"id": 1, "total_price": "1", "total_price": "2.10"}',
        b'{"id": 1, "name": "a\\u0000b", "tags": "\\ud800, x"}',
        b'{"id": 1, "order_number": ' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf{"id": 1, "email": "\\u00e9"}',
    ],
    ids=["exponents", "fractions", "keys twice", "nul", "long integer", "byte order mark"],
)
def test_a_body_that_jsonb_spells_otherwise_is_parsed_to_the_same(world, apply, rebuilt, body):
    apply(envelope(body))
    before = snapshots(world)
    assert counts(rebuilt()) == (0, 0, 1)
    world.tenant("truncate shopify_orders")
    rebuilt()
    assert snapshots(world) == before


@pytest.mark.usefixtures("small_batches")
def test_lost_rows_come_back_as_they_were(world, apply, rebuilt):
    history(apply)
    before = snapshots(world)
    world.tenant("delete from shopify_orders where shopify_id = '2'")
    assert counts(rebuilt()) == (1, 0, 2)
    assert snapshots(world) == before
    world.tenant("truncate shopify_orders")
    assert counts(rebuilt()) == (3, 0, 0)
    assert snapshots(world) == before


def test_a_row_that_is_made_has_its_times_from_the_ledger(world, apply, rebuilt):
    apply(replace(order(1, 0), received_at=NOW))
    apply(replace(order(1, -1), received_at=NOW + HOUR))
    world.tenant("truncate shopify_orders")
    rebuilt()
    (row,) = world.tenant("select first_seen_at, last_seen_at from shopify_orders")
    assert row == {"first_seen_at": NOW, "last_seen_at": NOW + HOUR}


def test_a_dropped_table_comes_back(world, apply, rebuilt):
    history(apply)
    before = snapshots(world)
    world.tenant("drop table shopify_orders")
    assert counts(rebuilt()) == (3, 0, 0)
    assert snapshots(world) == before


@pytest.mark.usefixtures("small_batches")
def test_spoilt_and_stale_rows_are_overwritten(world, apply, rebuilt):
    history(apply)
    before = snapshots(world)
    world.tenant("update shopify_orders set payload = '{}' where shopify_id = '2'")
    world.tenant(
        "update shopify_orders s set (topic, event_type, payload, parsed_payload, is_deleted,"
        " source_updated_at, source_triggered_at, event_id)"
        " = (select topic, event_type, payload, parsed_payload, false, source_updated_at,"
        " triggered_at, event_id from shopify_events e where e.resource_id = '1'"
        " order by id limit 1) where shopify_id = '1'"
    )
    assert counts(rebuilt()) == (0, 2, 1)
    assert snapshots(world) == before


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    "damage",
    [
        "truncate shopify_orders",
        "delete from shopify_orders where shopify_id = '1'",
        "update shopify_orders set parsed_payload = '{}'",
        "update shopify_orders set source_updated_at = null, event_id = null",
        "select 1",
    ],
)
def test_a_dry_run_counts_the_same_and_writes_nothing(world, apply, rebuilt, damage):
    history(apply)
    world.tenant(damage)
    before = world.tenant("select s::text from shopify_orders s order by id")
    told = rebuilt(dry_run=True)
    assert world.tenant("select s::text from shopify_orders s order by id") == before
    assert told == rebuilt()


def test_a_snapshot_newer_than_the_ledger_is_kept(world, apply, rebuilt):
    history(apply)
    world.tenant("delete from shopify_events where topic = 'orders/paid'")
    before = to_the_byte(world)
    assert counts(rebuilt()) == (0, 0, 3)
    assert to_the_byte(world) == before


def test_events_without_payload_are_skipped_and_counted(world, apply, rebuilt):
    history(apply)
    world.tenant("update shopify_events set payload = null where resource_id = '1'")
    world.tenant("truncate shopify_orders")
    report = rebuilt()
    assert (counts(report), report.without_payload, report.events) == ((2, 0, 0), 3, 9)


def test_events_that_name_no_resource_or_are_no_object_are_skipped_and_counted(
    world, apply, rebuilt
):
    apply(envelope({"note": "no id"}, "orders/updated"))
    apply(order(1, 0))
    world.tenant("update shopify_events set payload = '[1]' where resource_id = '1'")
    apply(envelope({"id": 1}, "themes/update"))
    report = rebuilt()
    assert (counts(report), report.without_snapshot, report.events) == ((0, 0, 0), 2, 2)


def test_a_corrected_rule_takes_effect(world, apply, rebuilt, monkeypatch):
    apply(order(1, 0, total_price="9.90"))
    more = fields._fields(text="note", money="total_price")
    monkeypatch.setitem(fields.FIELDS, "orders", more)  # type: ignore[arg-type]
    fields._plan.cache_clear()
    try:
        apply(order(2, 0, note="new"))
        assert counts(rebuilt()) == (0, 1, 1)
    finally:
        fields._plan.cache_clear()
    (first, _) = snapshots(world)
    assert first["parsed_payload"] == {"id": "1", "total_price": "9.90"}
    (kept, _) = world.tenant("select parsed_payload from shopify_events order by id")
    assert "updated_at" in kept["parsed_payload"], "the ledger keeps what it was given"


def test_the_ledgers_own_clocks_count(world, apply, rebuilt):
    apply(replace(envelope({"id": 1, "n": 1}), triggered_at=NOW + HOUR))
    apply(replace(envelope({"id": 1, "n": 2}), triggered_at=None, published_at=NOW + 2 * HOUR))
    before = snapshots(world)
    assert before[0]["payload"] == '{"n": 2, "id": 1}'
    world.tenant("truncate shopify_orders")
    rebuilt()
    assert snapshots(world) == before


def test_rows_of_the_earlier_system_are_taken_in(world, apply, rebuilt):
    apply(order(1, 1, total_price="2"))
    apply(order(1, 0, total_price="1"))
    world.tenant(
        "update shopify_events set source_updated_at = null, triggered_at = null,"
        " payload_sha256 = null"
    )
    world.tenant(
        "update shopify_orders set payload = '{}', event_id = null, source_updated_at = null,"
        " source_triggered_at = null"
    )
    assert counts(rebuilt()) == (0, 1, 0)
    (row,) = snapshots(world)
    assert (row["parsed_payload"]["total_price"], row["source_updated_at"]) == ("2", NOW + HOUR)
    assert counts(rebuilt()) == (0, 0, 1)


def test_ids_are_compared_by_bytes_whatever_the_databases_language(world, apply, rebuilt):
    """In English `a` sorts before `B`; by bytes, as in Python, it does not."""
    try:
        world.tenant("create collation english (provider = icu, locale = 'en-US')")
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this PostgreSQL was built without ICU")
    assert world.tenant("select 'a' < 'B' collate english as so") == [{"so": True}]
    for table in ("shopify_events", "shopify_orders"):
        world.tenant(f"alter table {table} alter column event_id type text collate english")
    small, great = replace(order(1, 0), event_id="B"), replace(order(1, 0), event_id="a")
    for arrival in ((small, great), (great, small)):
        world.tenant("truncate shopify_orders, shopify_events")
        for sent in arrival:
            apply(sent)
        before = snapshots(world)
        assert before[0]["event_id"] == "a"
        world.tenant("truncate shopify_orders")
        assert counts(rebuilt()) == (1, 0, 0)
        assert snapshots(world) == before


def test_only_what_was_asked_for_is_rebuilt(world, apply, rebuilt):
    other = "other.myshopify.com"
    world.connect_shop(other)
    world.connect_shop("third.myshopify.com", "third")
    apply(order(1, 0))
    apply(replace(order(1, 0), shop_domain=other, received_at=NOW + HOUR))
    apply(replace(order(1, 0), shop_domain="third.myshopify.com"))
    apply(envelope({"id": 1}, "products/update"))
    empty = "truncate shopify_orders, shopify_products"
    for scope, made in (
        ({"shop_domain": SHOP}, 2),
        ({"resource": "orders"}, 2),
        ({"resource": "products"}, 1),
        ({"since": NOW + HOUR}, 1),
        ({"until": NOW + HOUR}, 2),
        ({"organization_id": "third"}, 1),
        ({"organization_id": "nobody"}, 0),
        ({}, 3),
    ):
        world.tenant(empty)
        assert counts(rebuilt(**scope)) == (made, 0, 0), scope


def test_it_goes_on_behind_any_row(world, apply, rebuilt):
    for n in range(4):
        apply(order(n, 0))
    ids = [row["id"] for row in world.tenant("select id from shopify_events order by id")]
    world.tenant("truncate shopify_orders")
    assert rebuilt(after=ids[1]).inserted == 2
    assert counts(rebuilt()) == (2, 0, 2)
    assert rebuilt(after=ids[-1]).events == 0


def test_a_batch_is_bounded_in_bytes_too(world, apply, monkeypatch):
    monkeypatch.setattr(rebuild, "BATCH_BYTES", 1)
    for n in range(3):
        apply(order(n, 0))
    with db.connect(db.Target(conninfo=world.tenant_url), migrate.LIMITS) as connection:
        steps = list(Rebuild(connection, Scope(organization_id=ORGANIZATION)).batches())
    assert len(steps) == 3
    assert steps[-1].done == steps[-1].last


def test_beside_live_writers_nothing_is_lost_and_nothing_goes_back(world, apply, rebuilt):
    world.tenant("truncate shopify_orders")
    for n in range(40):
        apply(order(n % 5, n))
    faults: list[BaseException] = []

    def write() -> None:
        try:
            for n in range(60):
                apply(order(n % 5, 100 + n))
        except BaseException as fault:  # noqa: BLE001 - told by the main thread
            faults.append(fault)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        rebuilt()
    for writer in writers:
        writer.join()
    assert faults == []
    end = snapshots(world)
    assert [row["source_updated_at"] for row in end] == [NOW + (155 + n) * HOUR for n in range(5)]
    assert counts(rebuilt()) == (0, 0, 5)


# -- the command


def command(environ, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "rebuild_snapshots", *words],
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "80", "TERM": "dumb"} | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_rebuilds_and_reports(world, apply):
    history(apply)
    world.tenant("delete from shopify_orders where shopify_id = '2'")
    asked = ("--organization", ORGANIZATION, "--resource", "orders", "--json")
    rehearsed = command(world.environ, *asked, "--dry-run")
    assert json.loads(rehearsed.stdout) == {
        "inserted": 1,
        "overwritten": 0,
        "kept": 2,
        "events": 9,
        "without_payload": 0,
        "without_snapshot": 0,
        "dry_run": True,
    }
    shown = command(world.environ, "--organization", ORGANIZATION, "--shop", SHOP)
    assert shown.returncode == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["│", "inserted", "│", "1", "│"] in lines
    assert json.loads(command(world.environ, *asked).stdout)["kept"] == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--resource", "themes"), "orders, products"),
        (("--since", "yesterday"), "no time in ISO 8601"),
        (("--organization", "nobody"), "StorageConfigurationError"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(world, words, told):
    refused = command(world.environ, "--organization", ORGANIZATION, *words)
    assert refused.returncode == 1
    assert told in " ".join(refused.stderr.split())


def test_its_help_shows_an_example_and_fits_a_terminal():
    shown = command({}, "--help")
    assert "Example: python manage.py rebuild_snapshots" in shown.stdout
    assert max(len(line) for line in shown.stdout.splitlines()) <= 80


def test_every_snapshot_table_is_some_resources():
    assert len(RESOURCES) == 12
