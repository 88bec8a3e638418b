"""A shop's app is uninstalled and installed again; an operator disconnects a shop."""

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from shared import db, lifecycle
from shared.errors import DirectoryUnavailableError
from tests.world import ORGANIZATION, SHOP, World, envelope

ROOT = Path(__file__).parents[2]
BODY = {"id": 1, "myshopify_domain": SHOP}


def uninstalled(at: datetime):
    return replace(envelope(BODY, "app/uninstalled"), triggered_at=at)


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(minutes=1)


def status(world: World, shop: str = SHOP) -> str:
    (row,) = world.app(
        "select status from shopify_shopifyconnection where myshopify_domain = %(shop)s", shop=shop
    )
    return row["status"]


def disconnect(world: World, shop: str = SHOP, organization: str = "acme"):
    return world.core.application.run(
        lambda connection: lifecycle.disconnect_shop(
            connection, shop_domain=shop, actor="me", reason="moved"
        )
    )


def test_an_uninstalled_app_marks_the_connection_and_events_are_stored_all_the_same(world):
    world.core.pipeline.apply(uninstalled(soon()))
    assert status(world) == "uninstalled"
    world.forget()
    world.core.pipeline.apply(envelope({"id": 1}))
    assert len(world.tenant("select 1 from shopify_events")) == 2


def test_a_replay_marks_it_too(world):
    sent = uninstalled(soon())
    world.break_tenant()
    row = world.fail(sent)
    world.retry()
    assert status(world) == "active"
    world.heal_tenant()
    world.make_due(row)
    world.make_probe_due()
    later = datetime.now(UTC) + timedelta(minutes=1)
    assert later > sent.triggered_at
    world.retry()
    assert status(world) == "uninstalled"


def test_a_later_installation_is_not_undone_by_a_late_delivery(world):
    sent = uninstalled(datetime.now(UTC) - timedelta(seconds=1))
    world.connect_shop()
    for _ in range(2):
        world.core.pipeline.apply(sent)
    assert status(world) == "active"


def test_connecting_makes_it_active_again_and_the_same_event_does_not_end_that(world):
    sent = uninstalled(soon())
    world.core.pipeline.apply(sent)
    world.app("update shopify_shopifyconnection set updated_at = updated_at + interval '1 hour'")
    world.connect_shop()
    world.app("update shopify_shopifyconnection set updated_at = now() + interval '1 hour'")
    world.core.pipeline.apply(sent)
    assert status(world) == "active"


def test_a_rehearsal_marks_nothing(world):
    world.core.pipeline.apply(uninstalled(soon()), dry_run=True)
    assert status(world) == "active"


def test_an_application_database_that_is_away_then_is_no_fault_of_the_tenants(world):
    """Else a replay would open an incident of a tenant that answered."""
    core = world.core
    core.directory.route(SHOP)  # what a warm process remembers
    core.application.close()
    core.application.target = db.Target(conninfo=make_conninfo(world.app_url, port=1))
    with pytest.raises(DirectoryUnavailableError) as raised:
        core.pipeline.apply(uninstalled(soon()))
    assert not db.is_connection_failure(raised.value)
    assert len(world.tenant("select 1 from shopify_events")) == 1


# Disconnecting


def test_disconnecting_ends_the_connection_and_its_credential_and_no_data(world):
    world.core.pipeline.apply(envelope({"id": 1}))
    ended = disconnect(world)
    assert (ended.organizations, ended.credentials) == ([ORGANIZATION], 1)
    assert status(world) == "disconnected"
    assert world.app("select 1 from databases_databasecredential") == []
    assert len(world.app("select 1 from databases_database")) == 1
    assert len(world.tenant("select 1 from shopify_events")) == 1
    (action,) = world.app("select * from subscriber_operatoraction")
    assert (action["actor"], action["action"], action["reason"]) == ("me", "disconnect", "moved")
    assert action["scope"]["shop"] == SHOP
    assert disconnect(world).organizations == [], "once is enough"
    assert len(world.app("select 1 from subscriber_operatoraction")) == 1


def test_a_credential_that_another_shop_needs_stays_until_that_is_disconnected(world):
    world.connect_shop("second.myshopify.com")
    assert disconnect(world).credentials == 0
    assert disconnect(world, "second.myshopify.com").credentials == 1


def test_a_disconnected_shop_is_connected_again_by_connecting_it(world):
    disconnect(world)
    world.connect_shop()
    world.forget()
    world.core.pipeline.apply(envelope({"id": 1}))
    assert status(world) == "active"


def run(world: World, *words: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), *words],
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "100", "TERM": "dumb"} | world.environ,
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, input=answer,
    )  # fmt: skip


def test_the_command_asks_and_then_says_what_it_did(world):
    refused = run(world, "disconnect_shop", "--shop", SHOP, "--reason", "moved", answer="n\n")
    assert (refused.returncode, status(world)) == (1, "active")
    done = run(world, "disconnect_shop", "--shop", SHOP, "--reason", "moved", "--yes")
    assert done.returncode == 0, done.stderr
    assert "credential deleted" in done.stdout
    assert status(world) == "disconnected"
    again = run(world, "disconnect_shop", "--shop", SHOP, "--reason", "moved", "--yes")
    assert (again.returncode, "no connection" in again.stderr) == (1, True)
