"""The commands as a person runs them: `python manage.py COMMAND`, in a process of their own."""

import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from cryptography.fernet import Fernet

from tests.world import SHOP, World, envelope

ROOT = Path(__file__).parents[2]


def run(environ, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "manage.py"), *words]
    clean = {"PATH": "/usr/bin:/bin", "COLUMNS": "80", "TERM": "dumb"}
    return subprocess.run(
        command,
        env=clean | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_command_the_commands_are_shown():
    shown = run({})
    for command in ("migrate", "provision_schema", "connect_shop", "retry_failed_events", "dev"):
        assert command in shown.stdout


@pytest.mark.parametrize(
    "command",
    ["migrate", "provision_schema", "connect_shop", "retry_failed_events", "dev", "demo", "send"],
)
def test_every_commands_help_shows_an_example_and_fits_a_terminal(command):
    shown = run({}, command, "--help")
    assert shown.returncode == 0
    assert f"Example: python manage.py {command}" in shown.stdout
    assert max(len(line) for line in shown.stdout.splitlines()) <= 80


def test_from_empty_databases_to_a_connected_shop(empty_url, postgres):
    tenant_url = postgres.create_database(f"tenant_of_{empty_url.rsplit('/', 1)[1]}")
    environ = {"APP_DATABASE_URL": empty_url, "CREDENTIAL_KEYS": Fernet.generate_key().decode()}
    first, second = run(environ, "migrate"), run(environ, "migrate")
    assert (first.returncode, "applied 0001_core.sql" in first.stdout) == (0, True)
    assert second.stdout == "The application schema is up to date.\n"

    connect = ("connect_shop", "--shop", SHOP, "--organization", "acme")
    connected = run(environ | {"TENANT_DATABASE_URL": tenant_url}, *connect)
    assert connected.returncode == 0, connected.stderr
    assert "3 migrations applied" in connected.stdout
    with psycopg.connect(tenant_url) as tenant:
        assert tenant.execute("select count(*) from shopify_events").fetchone() == (0,)

    checked = run(environ, "provision_schema", "--all", "--check")
    assert (checked.returncode, "up to date" in checked.stdout) == (0, True)


def test_connecting_a_shop_makes_its_failed_events_due(world: World):
    shop = "new.myshopify.com"
    world.fail(envelope(shop_domain=shop))
    world.retry()
    connected = run(
        world.environ,
        *("connect_shop", "--shop", shop, "--organization", "new"),
        *("--database-url", world.tenant_url),
    )
    assert "1 failed events of the shop are due again" in connected.stdout
    kept = world.failed_event()
    assert (kept["organization_id"], kept["retry_count"]) == ("new", 0)
    answered = run(world.environ, "retry_failed_events")
    assert answered.stdout.splitlines()[-1] == "Retried=1 resolved=1 failed=0"


def test_provisioning_reports_each_organization_and_fails_if_one_does(world: World):
    world.connect_shop("down.myshopify.com", "down", world.tenant_url)
    world.app(
        "update databases_databasecredential set port = 1 where database_id ="
        " (select id from databases_database where organization_id = 'down')"
    )
    world.tenant("delete from shopify_schema_version")
    pending = run(world.environ, "provision_schema", "--organization", "acme", "--check")
    assert (pending.returncode, "pending" in pending.stdout) == (1, True)
    done = run(world.environ, "provision_schema", "--all")
    assert done.returncode == 1
    assert "applied" in done.stdout
    assert "OperationalError" in done.stdout
    assert run(world.environ, "provision_schema").returncode == 1, "a scope must be said"


def test_one_batch_of_fifty_is_replayed_and_the_last_line_says_so(world: World):
    for n in range(52):
        world.fail(envelope({"id": n}))
    done = run(world.environ, "retry_failed_events")
    assert done.returncode == 0
    assert done.stdout == "Retried=50 resolved=50 failed=0\n"
    assert run(world.environ, "retry_failed_events").stdout == "Retried=2 resolved=2 failed=0\n"


def test_limit_event_id_and_json(world: World):
    rows = [world.fail(envelope({"id": n})) for n in range(4)]
    limited = run(world.environ, "retry_failed_events", "--limit", "2")
    assert limited.stdout == "Retried=2 resolved=2 failed=0\n"
    named = run(world.environ, "retry_failed_events", "--event-id", str(rows[3]), "--json")
    assert json.loads(named.stdout)["resolved"] == 1
    again = run(world.environ, "retry_failed_events", "--event-id", str(rows[3]))
    assert (again.returncode, again.stdout) == (0, "Retried=0 resolved=0 failed=0\n")


def test_a_dry_run_shows_a_table_and_changes_nothing(world: World):
    world.fail()
    world.fail(envelope(b"[]"))
    shown = run(world.environ, "retry_failed_events", "--dry-run")
    assert "inserted" in shown.stdout
    assert "ValueError" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "Retried=2 resolved=1 failed=1"
    assert {row["status"] for row in world.failed_events()} == {"pending"}


@pytest.mark.parametrize(
    ("environ", "words", "cause"),
    [
        ({}, ("migrate",), "APP_DATABASE_URL is missing"),
        (
            {"APP_DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/x"},
            ("migrate",),
            "Connection refused",
        ),
        (
            {"APP_DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/x"},
            ("connect_shop", "--shop", "x", "--organization", "o", "--database-url", "y"),
            "x is no *.myshopify.com name",
        ),
        ({"LEASE_SECONDS": "soon"}, ("retry_failed_events",), "LEASE_SECONDS must be"),
        ({}, ("send", "orders/create", "--data-dir", "/nonexistent"), "No local stack is running"),
    ],
)
def test_an_error_is_one_line_of_cause_and_remedy(environ, words, cause):
    failed = run(environ, *words)
    assert failed.returncode == 1
    assert cause in failed.stderr
    assert failed.stderr.startswith("Error:")
    assert "Traceback" not in failed.stderr
    assert "hunter2" not in failed.stderr + failed.stdout


def test_debug_shows_the_traceback():
    failed = run({}, "--debug", "migrate")
    assert "Traceback" in failed.stderr


def test_a_wrong_option_is_a_usage_error():
    assert run({}, "retry_failed_events", "--limit", "0").returncode == 2
