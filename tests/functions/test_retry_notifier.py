"""The notifier in the retry function: beside the replays, and never in their way."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import LiteralString

import psycopg
import pytest

from dev import deliveries
from dev.functions import Function
from dev.postgres import Server
from shared import db, migrate
from shared.notifier import install
from tests.functions.rig import Log, Silence, Starter
from tests.notifier.relay import Relay
from tests.world import World, envelope

BUDGET_SECONDS = 3
NOTIFIED = dict.fromkeys(("sent", "retry", "failed", "expired", "invalid"), 0)
SETTINGS = {"NOTIFIER_TIME_BUDGET_SECONDS": str(BUDGET_SECONDS), "RETRY_TIME_BUDGET_SECONDS": "20"}


@pytest.fixture(scope="module")
def app_url(postgres: Server, templates: dict[migrate.Series, str]) -> str:
    """An application database with the notifier."""
    url = postgres.create_database("retry_notifier", template=templates[migrate.Series.APP])
    with db.connect(db.Target(conninfo=url), migrate.LIMITS) as connection:
        install.install(connection)
    return url


@pytest.fixture
def relay(app_url: str) -> Iterator[Relay]:
    with Relay(app_url) as relay, db.connect(db.Target(conninfo=app_url), migrate.LIMITS) as own:
        relay.rows("delete from subscriber_subscriberfailedevent")
        install.uninstall(own)
        relay.rows("delete from pgrelay.queue")
        install.install(own)
        yield relay


@contextmanager
def held(url: str, statement: LiteralString) -> Iterator[None]:
    """A transaction that holds its locks for the whole block."""
    with psycopg.connect(url) as connection:
        connection.execute(statement)
        yield
        connection.rollback()


def replayed_meanwhile(world: World, retry: Function) -> dict[str, int]:
    """A tick replays what is due; what it says of the notifier."""
    world.fail(envelope({"id": uuid.uuid4().int % 10**15}))
    answer = deliveries.post(retry.url)
    assert answer.status == 200
    said = answer.json()
    assert (said["retried"], said["resolved"]) == (1, 1)
    return said["notified"]


@pytest.mark.parametrize(
    "lock",
    [
        "lock table pgrelay.registry in access exclusive mode",
        "lock table pgrelay.queue in access exclusive mode",
        "lock table notifier.notifications in access exclusive mode",
        "select pg_advisory_xact_lock(1213154635, hashtext('notifier.install'))",
    ],
)
@pytest.mark.parametrize("auto_migrate", ["true", "false"])
def test_replays_go_on_while_the_notifier_is_locked(
    start: Starter, world: World, relay: Relay, lock: LiteralString, auto_migrate: str
) -> None:
    relay.channel()
    relay.notify()
    retry = start("retry", **world.environ, **SETTINGS, AUTO_MIGRATE=auto_migrate)
    with held(relay.url, lock):
        replayed_meanwhile(world, retry)
    (event,) = world.app("select * from subscriber_replayattempt order by id desc limit 1")
    assert event["outcome"] == "resolved"


@pytest.mark.parametrize(
    "damage",
    [
        "drop schema notifier cascade",
        "drop schema pgrelay cascade",
        "drop table notifier.channels cascade",
        "alter table pgrelay.queue rename column due_at to later",
        "update pgrelay.registry set interface_version = 7",
    ],
)
def test_replays_go_on_while_the_notifier_is_broken(
    start: Starter, world: World, relay: Relay, damage: LiteralString
) -> None:
    relay.channel()
    relay.notify()
    relay.rows(damage)
    try:
        retry = start("retry", **world.environ, **SETTINGS)
        replayed_meanwhile(world, retry)
    finally:
        relay.rows("drop schema if exists notifier cascade")
        relay.rows("drop schema if exists pgrelay cascade")
        relay.rows("delete from notifier_schema_version")
        with db.connect(db.Target(conninfo=relay.url), migrate.LIMITS) as connection:
            install.install(connection)


def test_a_mail_server_that_says_nothing_holds_up_no_replay(
    start: Starter, world: World, relay: Relay
) -> None:
    retry = start("retry", **world.environ, **SETTINGS)
    with Silence() as server:
        settings = {"host": "127.0.0.1", "port": server.port, "tls": "none"}
        relay.channel(settings=settings | {"sender": "hookledger@example.com"}, timeout_seconds=5)
        id = relay.notify()
        started = time.monotonic()
        assert replayed_meanwhile(world, retry)["retry"] == 1
        took = time.monotonic() - started
        attempt = relay.attempts(id)[0]
        assert server.callers() >= 1
    (replay,) = world.app("select * from subscriber_replayattempt order by id desc limit 1")
    assert replay["finished_at"] < attempt["finished_at"], "it waited for nobody"
    assert took < 60


def test_what_is_due_is_told_beside_the_replays(start: Starter, world: World, relay: Relay) -> None:
    id = relay.notify("nobody")
    retry = start("retry", **world.environ, **SETTINGS)
    log = Log(retry)
    assert replayed_meanwhile(world, retry)["invalid"] == 1
    (event,) = log.events("notification.failed")
    assert (event["notification"], event["status"], event["severity"]) == (id, "invalid", "ERROR")


def test_auto_migrate_installs_the_notifier_but_not_against_an_operators_will(
    start: Starter, environ: dict[str, str], empty_url: str
) -> None:
    settings = environ | {"APP_DATABASE_URL": empty_url, "AUTO_MIGRATE": "true"}
    retry = start("retry", **settings)
    with Relay(empty_url) as relay:
        assert deliveries.post(retry.url).json()["notified"] == NOTIFIED
        assert relay.rows("select uninstalled_at from pgrelay.registry") == [
            {"uninstalled_at": None}
        ]
        with db.connect(db.Target(conninfo=empty_url), migrate.LIMITS) as connection:
            install.uninstall(connection)
        assert deliveries.post(retry.url).json()["notified"] == NOTIFIED
        assert relay.rows("select to_regnamespace('notifier') as notifier") == [{"notifier": None}]


def test_a_migration_of_the_notifier_that_fails_fails_nothing_else(
    start: Starter, environ: dict[str, str], empty_url: str
) -> None:
    with psycopg.connect(empty_url) as connection:
        connection.execute("create schema notifier")  # somebody else's
    settings = environ | {"APP_DATABASE_URL": empty_url, "AUTO_MIGRATE": "true"}
    retry = start("retry", **settings)
    log = Log(retry)
    assert deliveries.post(retry.url).json()["notified"] == NOTIFIED
    assert log.events("notifier.not_upgraded")
