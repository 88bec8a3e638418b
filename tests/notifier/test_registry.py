"""The notifier that is missing, broken, too new, or comes while somebody waits for it."""

import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shared import db, migrate
from shared.errors import ConfigurationError
from shared.notifier import install, processor, registry
from tests.functions.rig import eventually
from tests.notifier.relay import BUSY, SENT, Relay, Sender

NEWER = "update pgrelay.registry set interface_version = 7, package_version = '9.9.9'"

# What breaks the notifier, and what an event is told then.
BROKEN: dict[str, tuple[LiteralString, str]] = {
    "uninstalled": ("update pgrelay.registry set uninstalled_at = now()", "notifier_absent"),
    "never registered": ("delete from pgrelay.registry", "notifier_absent"),
    "schema dropped": ("drop schema notifier cascade", "notifier_schema"),
    "table dropped": ("drop table notifier.deliveries", "notifier_schema"),
    "function dropped": (
        "drop function notifier.set_status(bigint, integer, text, text, text, jsonb)",
        "notifier_functions",
    ),
    "too new": (NEWER, "notifier_version"),
}


@contextmanager
def connected(url: str) -> Iterator[db.BoundedConnection]:
    with db.connect(db.Target(conninfo=url), migrate.LIMITS) as connection:
        yield connection


@contextmanager
def standing(relay: Relay, sender: Sender) -> Iterator[processor.Processor]:
    """A processor that goes on, as `manage.py run_processor` does."""
    working = relay.processor(sender)
    thread = threading.Thread(target=working.run)
    thread.start()
    try:
        yield working
    finally:
        working.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was read of the registry, each time that it was."""
    found = []
    read = registry.read

    def counted(connection: psycopg.Connection[Any]) -> registry.Snapshot | None:
        found.append(read(connection))
        return found[-1]

    monkeypatch.setattr(registry, "read", counted)
    return found


@pytest.mark.parametrize("how", BROKEN)
def test_an_event_is_told_what_is_in_the_way_after_one_more_look(
    relay: Relay, readings: list[Any], how: str
) -> None:
    statement, code = BROKEN[how]
    relay.channel()
    id, sender = relay.notify(), Sender()
    relay.rows(statement)
    assert relay.run(sender)["failed"] == 1
    (event,) = relay.queue(id)
    assert (event["outcome"], event["error_code"]) == ("failed", code)
    assert (sender.messages, len(readings)) == ([], 2)


@pytest.mark.parametrize("how", BROKEN)
def test_a_notifier_that_breaks_during_a_run_is_found_out_by_the_next_event(
    relay: Relay, readings: list[Any], how: str
) -> None:
    statement, code = BROKEN[how]
    relay.channel()
    first, second = relay.notify(), relay.notify()

    def breaks(message: Any) -> Any:
        if message.notification_id == first:
            with psycopg.connect(relay.url, autocommit=True) as other:
                other.execute(statement)
                other.execute("select pgrelay.request_reload()")
        return SENT

    relay.run(Sender(breaks), budget_seconds=5)
    (event,) = relay.queue(second)
    assert event["error_code"] == code
    assert relay.outcomes(first) == ["sent"], "what was sent is sent"


def test_what_failed_while_nobody_could_say_so_is_said_when_the_notifier_is_back(
    relay: Relay,
) -> None:
    relay.channel()
    id = relay.notify()
    relay.rows(NEWER)
    relay.run(Sender())
    assert relay.status(id) == "queued"
    relay.rows("update pgrelay.registry set interface_version = 1")
    relay.run(Sender())
    found = relay.notification(id)
    assert (found["status"], found["error_code"]) == ("failed", "notifier_version")


def test_a_version_that_is_not_supported_is_named_beside_those_that_are(relay: Relay) -> None:
    relay.channel()
    id = relay.notify()
    relay.rows(NEWER)
    relay.run(Sender())
    (event,) = relay.queue(id)
    assert "interface version 7 (release 9.9.9)" in event["error"]
    assert "supports 1 to 1" in event["error"]


def test_without_its_grants_the_notifier_is_left_alone_and_says_so(relay: Relay) -> None:
    relay.channel()
    id = relay.notify()
    relay.rows("create role stranger login password 'planted'")
    try:
        relay.rows("grant usage on schema pgrelay to stranger")
        relay.rows("grant select, update on all tables in schema pgrelay to stranger")
        target = db.Target(conninfo=make_conninfo(relay.url, user="stranger", password="planted"))
        working = processor.Processor(target, attempt=Sender())
        assert working.run_once(budget_seconds=1)["failed"] == 1
        assert relay.queue(id)[0]["error_code"] == "notifier_grants"
    finally:
        relay.rows("drop owned by stranger")
        relay.rows("drop role stranger")


@pytest.mark.parametrize("how", ["uninstalled", "never registered", "too new"])
def test_a_notifier_that_comes_while_its_event_is_withheld_gets_the_event(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    relay.channel()
    id, sender = relay.notify(), Sender()
    registered = relay.rows("select * from pgrelay.registry")[0]
    relay.rows(BROKEN[how][0])
    read, times = registry.read, []

    def late(connection: psycopg.Connection[Any]) -> registry.Snapshot | None:
        if times:
            relay.rows("delete from pgrelay.registry")
            relay.rows(
                "insert into pgrelay.registry values (%(component)s, %(schema_name)s,"
                " %(interface_version)s, %(package_version)s)",
                **registered,
            )
        times.append(1)
        return read(connection)

    monkeypatch.setattr(registry, "read", late)
    assert relay.run(sender)["sent"] == 1
    assert (relay.status(id), len(times)) == ("sent", 2)
    assert relay.notification(id)["attempts"] == 1


def test_a_registry_that_cannot_be_read_again_leaves_the_event_untouched(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay.channel()
    id, sender = relay.notify(), Sender()
    before = relay.queue(id)
    relay.rows("update pgrelay.registry set uninstalled_at = now()")
    read, times = registry.read, []

    def unlucky(connection: psycopg.Connection[Any]) -> registry.Snapshot | None:
        times.append(1)
        if len(times) == 2:
            connection.execute("select pg_terminate_backend(pg_backend_pid())")
        return read(connection)

    monkeypatch.setattr(registry, "read", unlucky)
    with pytest.raises(processor.RegistryUnreadError):
        relay.run(sender)
    (event,) = relay.queue(id)
    ours = {"claimed_by", "lease_token", "leased_until"}  # ends by itself: the connection is gone
    assert {k: v for k, v in event.items() if k not in ours} == {
        k: v for k, v in before[0].items() if k not in ours
    }
    relay.rows("update pgrelay.registry set uninstalled_at = null")
    relay.expire_lease(id)
    relay.run(sender)
    assert (relay.status(id), len(sender.messages)) == ("sent", 1)


def test_a_registry_that_is_locked_at_the_second_look_gives_the_event_back(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay.channel()
    id = relay.notify()
    before = relay.queue(id)
    relay.rows("update pgrelay.registry set uninstalled_at = now()")
    read, times = registry.read, []

    def locked(connection: psycopg.Connection[Any]) -> registry.Snapshot | None:
        times.append(1)
        if len(times) == 2:
            raise psycopg.errors.LockNotAvailable
        return read(connection)

    monkeypatch.setattr(registry, "read", locked)
    with pytest.raises(processor.RegistryUnreadError):
        relay.run(Sender())
    (event,) = relay.queue(id)
    assert {**event, "claimed_by": None} == before[0]


def test_an_idle_processor_takes_up_an_installation_without_a_restart(
    relay: Relay, readings: list[Any]
) -> None:
    relay.rows("update pgrelay.registry set uninstalled_at = now()")
    sender = Sender()
    with standing(relay, sender):
        eventually(lambda: readings)
        with connected(relay.url) as connection:
            install.install(connection)
        eventually(lambda: readings[-1].fault is None)
        relay.channel()
        relay.notify()
        eventually(lambda: sender.messages)


def test_a_processor_without_a_relay_waits_for_one(empty_url: str, readings: list[Any]) -> None:
    with Relay(empty_url) as relay:
        sender = Sender()
        assert relay.run(sender) == dict.fromkeys(relay.run(sender), 0)
        readings.clear()
        with standing(relay, sender):
            eventually(lambda: readings)
            with connected(empty_url) as connection:
                install.install(connection)
            relay.channel()
            relay.notify()
            eventually(lambda: sender.messages)


def test_a_processor_outlives_its_connection(relay: Relay) -> None:
    relay.channel()
    sender = Sender()
    with standing(relay, sender):
        relay.notify()
        eventually(lambda: len(sender.messages) == 1)
        relay.rows(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        relay.notify()
        eventually(lambda: len(sender.messages) == 2)


def test_a_verdict_that_finds_the_connection_gone_is_recorded_on_the_next(relay: Relay) -> None:
    relay.channel()
    id = relay.notify()

    def cuts(message: Any) -> Any:
        with psycopg.connect(relay.url, autocommit=True) as other:
            other.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'hookledger' and datname = current_database()"
            )
        return BUSY

    relay.run(Sender(cuts), budget_seconds=1)
    assert relay.outcomes(id) == ["retry", None]


# Installing


def test_an_installation_may_be_repeated_and_reloads_each_time(empty_url: str) -> None:
    with connected(empty_url) as connection, Relay(empty_url) as relay:
        first, second = install.install(connection), install.install(connection)
        assert ([m.version for m in first.applied][:1], first.changed) == ([1], True)
        assert second == install.Done(applied=[], changed=False)
        (row,) = relay.rows("select generation from pgrelay.reload_state")
        assert row["generation"] == 3


def test_an_upgrade_with_nothing_to_do_reloads_nobody(relay: Relay) -> None:
    before = relay.rows("select * from pgrelay.reload_state")
    with connected(relay.url) as connection:
        assert install.upgrade(connection) == install.Done(applied=[], changed=False)
    assert relay.rows("select * from pgrelay.reload_state") == before


def test_installations_side_by_side_do_not_harm_each_other(empty_url: str) -> None:
    def work() -> None:
        with connected(empty_url) as connection:
            install.install(connection)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Relay(empty_url) as relay:
        assert relay.rows("select component from pgrelay.registry") == [{"component": "notifier"}]


def test_what_was_uninstalled_on_purpose_only_an_installation_brings_back(relay: Relay) -> None:
    relay.channel()
    id = relay.notify()
    with connected(relay.url) as connection:
        assert install.uninstall(connection)
        assert not install.uninstall(connection)
        assert not install.upgrade(connection).changed
        assert install.is_uninstalled(connection)
        relay.run(Sender())
        assert relay.queue(id)[0]["error_code"] == "notifier_absent"
        assert install.install(connection).changed
    (row,) = relay.rows("select uninstalled_at from pgrelay.registry")
    assert row["uninstalled_at"] is None


def test_after_an_uninstall_no_notification_gets_the_id_of_an_old_one(relay: Relay) -> None:
    relay.channel()
    old = relay.notify()
    with connected(relay.url) as connection:
        install.uninstall(connection)
        install.install(connection)
    relay.channel()
    new, sender = relay.notify(), Sender()
    assert new > old
    relay.run(sender)
    assert relay.queue(old)[0]["error_code"] == "notification_unknown"
    assert [message.notification_id for message in sender.messages] == [new]


def test_an_installation_heals_a_schema_that_somebody_dropped(relay: Relay) -> None:
    relay.rows("drop schema notifier cascade")
    with connected(relay.url) as connection:
        assert not install.upgrade(connection).applied
        assert install.install(connection).applied
    relay.channel()
    relay.notify()
    assert relay.run(Sender())["sent"] == 1


def test_an_older_release_leaves_a_newer_one_alone(relay: Relay) -> None:
    relay.rows(NEWER)
    with connected(relay.url) as connection:
        assert not install.upgrade(connection).changed
        with pytest.raises(ConfigurationError, match="interface version 7"):
            install.install(connection)


def test_the_registered_release_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == install.PACKAGE_VERSION


def test_a_secret_itself_is_refused_where_a_reference_belongs(relay: Relay) -> None:
    relay.channel()
    for value in ("hunter2", "_env:DATABASE_URL", "_env:NOTIFIER_A\n", "_secret:projects/p/x"):
        with pytest.raises(psycopg.errors.CheckViolation):
            relay.rows(
                "insert into notifier.profile_secrets values ('ops', 'password', %(value)s)",
                value=value,
            )
