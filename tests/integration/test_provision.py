"""provision_schema: every tenant, one first, each with its own result; and what has drifted."""

import json
import threading
import time

import psycopg
import pytest

from cli import schema
from cli.schema import Result
from dev.postgres import Server
from shared import db, migrate
from tests.integration.test_commands import run
from tests.world import World

NAMES = ("alpha", "beta", "gamma", "delta")


@pytest.fixture
def tenants(world: World, postgres: Server) -> dict[str, str]:
    """Four organizations with empty databases of their own, beside `acme`, which is provisioned."""
    stamp = time.monotonic_ns()
    urls = {name: postgres.create_database(f"{name}_{stamp}") for name in NAMES}
    for name, url in urls.items():
        world.connect_shop(f"{name}.myshopify.com", name, url)
    return urls


def has_tables(url: str) -> bool:
    with psycopg.connect(url) as probe:
        return probe.execute("select to_regclass('shopify_events') is not null").fetchone() == (
            True,
        )


def fingerprint(url: str) -> list[tuple]:
    """The whole catalogue of the database's relations, with their storage."""
    with psycopg.connect(url) as probe:
        return probe.execute(
            "select c.oid, c.relname, c.relrowsecurity, c.relfilenode, c.relnatts from pg_class c"
            " join pg_namespace n on n.oid = c.relnamespace"
            " where n.nspname = 'public' order by 1"
        ).fetchall()


def listed(world: World, *words: str) -> dict[str, dict]:
    done = run(world.environ, "provision_schema", "--all", "--json", *words)
    return {row["organization"]: row for row in json.loads(done.stdout)}


def sql(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[arg-type]


def break_database(world: World, name: str, port: int = 1) -> None:
    world.app(
        "update databases_databasecredential set port = %(port)s where database_id ="
        " (select id from databases_database where organization_id = %(name)s)",
        port=port,
        name=name,
    )


def test_every_tenant_is_provisioned_and_again_is_a_no_op(world, tenants):
    first = run(world.environ, "provision_schema", "--all")
    assert first.returncode == 0, first.stdout + first.stderr
    assert all(has_tables(url) for url in tenants.values())
    assert max(len(line) for line in first.stdout.splitlines()) <= 80
    before = [fingerprint(url) for url in tenants.values()]
    again = run(world.environ, "provision_schema", "--all")
    assert (again.returncode, again.stdout.count("up to date")) == (0, 5)
    assert [fingerprint(url) for url in tenants.values()] == before


def test_where_one_fails_the_others_are_done_and_it_is_named(world, tenants):
    break_database(world, "gamma")
    world.app(
        "delete from databases_databasecredential where database_id ="
        " (select id from databases_database where organization_id = 'delta')"
    )
    done = run(world.environ, "provision_schema", "--all")
    assert done.returncode == 1
    assert "2 not well: delta, gamma" in done.stdout
    assert "StorageConfigurationError" in done.stdout
    assert has_tables(tenants["alpha"])
    assert has_tables(tenants["beta"])
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_where_the_first_fails_the_others_are_not_touched(world, tenants):
    sql(tenants["alpha"], "create view shopify_orders as select 1 as x")
    world.app("delete from databases_database where organization_id = 'acme'")
    done = run(world.environ, "provision_schema", "--all")
    assert (done.returncode, "3 not touched" in done.stdout) == (1, True)
    assert not any(has_tables(tenants[name]) for name in NAMES[1:])
    kept_going = run(world.environ, "provision_schema", "--all", "--keep-going")
    assert (kept_going.returncode, "1 not well: alpha" in kept_going.stdout) == (1, True)
    assert all(has_tables(tenants[name]) for name in NAMES[1:])


def test_a_first_one_that_is_out_of_reach_tells_nothing_and_the_next_goes_first(world, tenants):
    break_database(world, "acme")
    done = run(world.environ, "provision_schema", "--all")
    assert (done.returncode, "1 not well: acme" in done.stdout) == (1, True)
    assert all(has_tables(url) for url in tenants.values())


def test_no_more_than_the_limit_are_worked_on_at_the_same_time():
    lock, now, peak, order = threading.Lock(), [0], [0], []

    def do(name: str) -> Result:
        with lock:
            order.append(name)
            now[0] += 1
            peak[0] = max(peak[0], now[0])
            alone = now[0] == 1
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        assert alone or name != "0"
        return Result(organization=name)

    names = [str(n) for n in range(20)]
    done = list(schema._all_done(names, do, canary=True, parallel=3))
    assert (order[0], peak[0]) == ("0", 3)
    assert sorted(result.organization for result in done) == sorted(names)
    assert done[0].organization == "0"


# --check


def test_a_check_of_what_is_well_says_so_and_changes_nothing(world):
    before = fingerprint(world.tenant_url)
    done = run(world.environ, "provision_schema", "--all", "--check")
    assert (done.returncode, "up to date" in done.stdout) == (0, True)
    assert fingerprint(world.tenant_url) == before


def test_a_check_of_an_empty_database_makes_nothing(world, tenants):
    before = fingerprint(tenants["beta"])
    found = listed(world, "--check")
    assert found["beta"]["pending"] == [m.name for m in migrate.files(migrate.Series.TENANT)]
    assert "table shopify_events is missing" in found["beta"]["differences"]
    assert fingerprint(tenants["beta"]) == before == []


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("drop table shopify_refunds", "table shopify_refunds is missing"),
        (
            "alter table shopify_orders drop column event_id",
            "column event_id of table shopify_orders is missing",
        ),
        (
            "drop index shopify_orders_organization_topic",
            "index on shopify_orders (organization_id, topic) is missing",
        ),
        (
            "alter table shopify_events"
            " drop constraint shopify_events_organization_id_shop_domain_event_id_key",
            "unique index on shopify_events (event_id, organization_id, shop_domain) is missing",
        ),
    ],
)
def test_drift_is_reported_and_repaired(world, change, difference):
    sql(world.tenant_url, change)
    before = fingerprint(world.tenant_url)
    checked = run(world.environ, "provision_schema", "--organization", "acme", "--check", "--json")
    assert checked.returncode == 1
    (row,) = json.loads(checked.stdout)
    assert (row["differences"], row["ok"]) == ([difference], False)
    assert fingerprint(world.tenant_url) == before
    done = run(world.environ, "provision_schema", "--organization", "acme", "--json")
    (row,) = json.loads(done.stdout)
    assert (done.returncode, row["repaired"], row["differences"]) == (0, [difference], [])
    assert listed(world, "--check")["acme"]["ok"] is True


def test_a_check_waits_for_no_lock_and_keeps_nobody_waiting(world):
    with psycopg.connect(world.tenant_url) as writer:
        writer.execute("lock table shopify_orders in access exclusive mode")
        with db.connect(db.Target(conninfo=world.tenant_url), migrate.LIMITS) as connection:
            connection.execute("set lock_timeout = '500ms'")
            assert migrate.drift(connection, migrate.Series.TENANT).differences == []


def test_a_migration_that_changed_after_it_was_applied_is_reported(world):
    world.tenant("update shopify_schema_version set checksum = 'x' where version = 1")
    done = run(world.environ, "provision_schema", "--organization", "acme", "--check")
    assert done.returncode == 1
    assert "MigrationError" in done.stdout


def test_row_level_security_that_is_off_is_reported_and_switched_on_when_asked(world):
    world.tenant("alter table shopify_orders disable row level security")
    checked = listed(world, "--check")["acme"]
    assert (checked["unsecured"], checked["ok"]) == (["shopify_orders"], True)
    assert "row level security is off" in run(world.environ, "provision_schema", "--all").stdout
    assert listed(world, "--enable-rls")["acme"]["secured"] == ["shopify_orders"]
    assert listed(world, "--check")["acme"]["unsecured"] == []
    refused = run(world.environ, "provision_schema", "--all", "--check", "--enable-rls")
    assert refused.returncode == 1


def test_an_organization_with_a_name_does_not_fit_tables_that_number_them(world):
    world.tenant("alter table shopify_events alter column organization_id type bigint using 1")
    found = listed(world, "--check")["acme"]
    assert "organization_id is a number in these tables" in found["differences"][0]
