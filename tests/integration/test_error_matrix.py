"""The error matrix: every kind of failure, provoked for real, with what is written down of it.

Each row of the table is met twice, at the first try and in a replay; then its cause is removed.
"""

import base64
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from shared import db
from shared import envelope as envelopes
from shared.leases import FailedEvent
from shared.message import Message
from tests.world import NOW, ORGANIZATION, SHOP, World, message

EMAIL = "ada.planted@example.com"
CARD = "4111111111111111"
PASSWORD = "planted-password"
BODY = b'{"id": 7, "email": "ada.planted@example.com", "note": "4111111111111111"}'
OTHER = "other.myshopify.com"

# Short, so that the timeouts in the table cost little; longer than a deadlock takes to be found.
LIMITS = db.Limits(statement=0.8, lock=0.4)

Trouble = Callable[[World], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A failure: how to provoke it, what to see of it, and how to end it for good."""

    name: str
    error_type: str
    error_code: str
    error_class: str
    trouble: Trouble = lambda _: nullcontext()
    sent: Message | None = None
    organization: str | None = ORGANIZATION
    cure: Callable[[World], Any] | None = lambda _: None  # None: nothing but a new message helps
    is_outage: bool = False


# The tenant's schema


@contextmanager
def missing_column(world: World) -> Iterator[None]:
    world.tenant("alter table shopify_orders drop column if exists parsed_payload")
    yield


@contextmanager
def incompatible_column(world: World) -> Iterator[None]:
    world.tenant("alter table shopify_events alter column payload type integer using 1")
    yield


def right_column(world: World) -> None:
    world.tenant("alter table shopify_events alter column payload type jsonb using null")


@contextmanager
def merchants_own_constraint(world: World) -> Iterator[None]:
    world.tenant("alter table shopify_orders drop constraint if exists own")
    world.tenant("alter table shopify_orders add constraint own check (payload->>'id' <> '7')")
    yield


# Triggers in the tenant's database


def raising(statement: str) -> Trouble:
    @contextmanager
    def trouble(world: World) -> Iterator[None]:
        world.tenant(
            "create or replace function trip() returns trigger language plpgsql as $$ begin "  # pyright: ignore[reportArgumentType]
            + statement
            + " return new; end $$"
        )
        world.tenant(
            "create or replace trigger trip before insert on shopify_events"
            " for each row execute function trip()"
        )
        yield

    return trouble


def no_trigger(world: World) -> None:
    world.tenant("drop trigger trip on shopify_events")


# Contention


@contextmanager
def locked_table(world: World) -> Iterator[None]:
    with psycopg.connect(world.tenant_url) as other:
        other.execute("lock table shopify_events in access exclusive mode")
        yield


@contextmanager
def locked_row(world: World) -> Iterator[None]:
    with psycopg.connect(world.tenant_url) as other:
        other.execute(
            "insert into shopify_orders (organization_id, shop_domain, shopify_id, topic,"
            " event_type, payload, parsed_payload, is_deleted, first_seen_at, last_seen_at)"
            " values ('acme', %s, '7', 't', 'e', '{}', '{}', false, now(), now())",
            [SHOP],
        )
        yield
        other.rollback()


@contextmanager
def deadlock(world: World) -> Iterator[None]:
    """Another session holds the snapshot; when ours waits for it, it wants what ours holds."""
    name = conninfo_to_dict(world.tenant_url)["dbname"]
    world.tenant(f"alter database {name} set deadlock_timeout = '20ms'")  # pyright: ignore[reportArgumentType]
    fresh(world)
    with psycopg.connect(world.tenant_url) as other:
        other.execute("set deadlock_timeout = '1min'")  # so that ours is the one that gives in
        other.execute(
            "insert into shopify_orders (organization_id, shop_domain, shopify_id, topic,"
            " event_type, payload, parsed_payload, is_deleted, first_seen_at, last_seen_at)"
            " values ('acme', %s, '7', 't', 'e', '{}', '{}', false, now(), now())",
            [SHOP],
        )
        circle = threading.Thread(target=_want_the_event, args=(world.tenant_url, other))
        circle.start()
        yield
        circle.join()
        other.rollback()


def _want_the_event(url: str, other: psycopg.Connection[Any]) -> None:
    with psycopg.connect(url, autocommit=True) as watcher:
        for _ in range(200):
            waiting = watcher.execute(
                "select 1 from pg_stat_activity where datname = current_database()"
                " and application_name = 'hookledger' and wait_event_type = 'Lock'"
            ).fetchone()
            if waiting:
                break
            time.sleep(0.005)
    other.execute(
        "insert into shopify_events (event_id, organization_id, shop_domain, topic, event_type,"
        " resource_type, payload, parsed_payload, received_at)"
        " values ('the-event', 'acme', %s, 't', 'e', 'r', '{}', '{}', now())",
        [SHOP],
    )


# Connections


def elsewhere(**changes: Any) -> Trouble:
    @contextmanager
    def trouble(world: World) -> Iterator[None]:
        world.connect_shop(url=make_conninfo(world.tenant_url, **changes))
        fresh(world)
        yield

    return trouble


def connected(world: World) -> None:
    world.connect_shop()


# Configuration


@contextmanager
def no_credential(world: World) -> Iterator[None]:
    world.app("delete from databases_databasecredential")
    fresh(world)
    yield


@contextmanager
def no_database(world: World) -> Iterator[None]:
    world.app("update databases_database set deleted_at = now()")
    fresh(world)
    yield


@contextmanager
def two_connections(world: World) -> Iterator[None]:
    world.app(
        "insert into shopify_shopifyconnection (organization_id, myshopify_domain)"
        " select 'second', %(shop)s where not exists"
        " (select from shopify_shopifyconnection where organization_id = 'second')",
        shop=SHOP,
    )
    fresh(world)
    yield


def one_connection(world: World) -> None:
    world.app("delete from shopify_shopifyconnection where organization_id = 'second'")


def other_shop_connected(world: World) -> None:
    world.connect_shop(OTHER)
    world.core.failures.requeue_shop(OTHER, ORGANIZATION, actor="jane")


# Our own code


@contextmanager
def handler_bug(_world: World) -> Iterator[None]:
    def bug(envelope: Any) -> None:
        raise KeyError(envelope.payload.decode())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shared.pipeline.parse", bug)
        yield


CASES = [
    Case(
        name="invalid JSON",
        sent=message(b"ada.planted@example.com 4111111111111111"),
        error_type="ValueError",
        error_code="invalid_value",
        error_class="permanent",
        cure=None,
    ),
    Case(
        name="not an object",
        sent=message(b'["ada.planted@example.com", 4111111111111111]'),
        error_type="ValueError",
        error_code="invalid_value",
        error_class="permanent",
        cure=None,
    ),
    Case(
        name="undecodable message",
        sent=replace(message(), data="*** ada.planted@example.com ***"),
        error_type="UndecodableMessageError",
        error_code="message_undecodable",
        error_class="permanent",
        organization=ORGANIZATION,
        cure=None,
    ),
    Case(
        name="no credential",
        trouble=no_credential,
        error_type="StorageConfigurationError",
        error_code="storage_configuration",
        error_class="permanent",
        cure=connected,
    ),
    Case(
        name="no database",
        trouble=no_database,
        error_type="StorageConfigurationError",
        error_code="storage_configuration",
        error_class="permanent",
        cure=connected,
    ),
    Case(
        name="unknown shop",
        sent=message(BODY, shop_domain=OTHER),
        error_type="UnknownShopError",
        error_code="shop_unknown",
        error_class="permanent",
        organization=None,
        cure=other_shop_connected,
    ),
    Case(
        name="two connections",
        trouble=two_connections,
        error_type="AmbiguousShopError",
        error_code="shop_ambiguous",
        error_class="permanent",
        cure=one_connection,
    ),
    Case(
        name="bad password",
        trouble=elsewhere(password=PASSWORD),
        error_type="InvalidPassword",
        error_code="28P01",
        error_class="permanent",
        cure=connected,
        is_outage=True,
    ),
    Case(
        name="connection refused",
        trouble=elsewhere(port=1, password=PASSWORD),
        error_type="OperationalError",
        error_code="connection_failed",
        error_class="transient",
        cure=connected,
        is_outage=True,
    ),
    Case(
        name="unknown host",
        trouble=elsewhere(host="db.nowhere.invalid", password=PASSWORD),
        error_type="HostNotFoundError",
        error_code="host_not_found",
        error_class="transient",
        cure=connected,
        is_outage=True,
    ),
    Case(
        name="missing column",
        trouble=missing_column,
        error_type="UndefinedColumn",
        error_code="42703",
        error_class="permanent",
        cure=lambda world: world.tenant(
            "alter table shopify_orders add column parsed_payload jsonb"
        ),
    ),
    Case(
        name="incompatible column",
        trouble=incompatible_column,
        error_type="DatatypeMismatch",
        error_code="42804",
        error_class="permanent",
        cure=right_column,
    ),
    Case(
        name="a constraint of the merchant's own",
        trouble=merchants_own_constraint,
        error_type="CheckViolation",
        error_code="23514",
        error_class="permanent",
        cure=lambda world: world.tenant("alter table shopify_orders drop constraint own"),
    ),
    Case(
        name="deadlock",
        trouble=deadlock,
        sent=message(BODY, webhook_id="the-event"),
        error_type="DeadlockDetected",
        error_code="40P01",
        error_class="transient",
    ),
    Case(
        name="lock timeout on the table",
        trouble=locked_table,
        error_type="LockNotAvailable",
        error_code="55P03",
        error_class="transient",
    ),
    Case(
        name="lock timeout on the snapshot",
        trouble=locked_row,
        error_type="LockNotAvailable",
        error_code="55P03",
        error_class="transient",
    ),
    Case(
        name="statement timeout",
        trouble=raising("perform pg_sleep(60);"),
        error_type="QueryCanceled",
        error_code="57014",
        error_class="transient",
        cure=no_trigger,
    ),
    Case(
        name="disk full",
        trouble=raising(
            "raise exception using errcode = '53100',"
            " message = 'could not extend file \"base/1/2\": no space left, ' || new.payload::text;"
        ),
        error_type="DiskFull",
        error_code="53100",
        error_class="transient",
        cure=no_trigger,
    ),
    Case(
        name="a trigger's own exception",
        trouble=raising("raise exception 'rejected: %%', new.payload::text;"),
        error_type="RaiseException",
        error_code="P0001",
        error_class="transient",
        cure=no_trigger,
    ),
    Case(
        name="a fault in our own code",
        trouble=handler_bug,
        error_type="KeyError",
        error_code="unexpected",
        error_class="transient",
    ),
]


def fresh(world: World) -> None:
    """A process that remembers nothing, with the limits of this module."""
    world.forget()
    world.core.tenants._limits = LIMITS


def seen(kept: dict[str, Any]) -> tuple[Any, ...]:
    return kept["error_type"], kept["error_code"], kept["error_class"]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_failure_is_written_down_whole_and_heals_once_its_cause_is_gone(world, case):
    sent = case.sent or message(BODY)
    fresh(world)
    world.core.directory.route(SHOP)  # a process that has served this shop before

    with case.trouble(world):
        assert world.ingester.ingest(sent) is True
    captured(world, sent, case)

    with case.trouble(world):
        report = world.retry()
    assert (report.retried, report.failed) == (1, 1)
    replayed(world, case)

    fresh(world)
    if case.cure:
        case.cure(world)
    row = world.failed_event()["id"]
    world.make_due(row)
    world.make_probe_due()
    report = world.retry()
    kept = world.failed_event()
    assert all(incident["ended_at"] for incident in world.incidents())
    if case.cure is None:
        assert (report.failed, kept["status"], kept["retry_count"]) == (1, "pending", 2)
        assert seen(kept) == (case.error_type, case.error_code, case.error_class)
    else:
        assert (report.resolved, kept["status"], kept["resolution"]) == (1, "resolved", "replayed")
        (stored,) = world.tenant("select event_id, payload from shopify_events")
        assert stored == {"event_id": kept["event_id"], "payload": PARSED}


PARSED = {"id": 7, "email": EMAIL, "note": CARD}


def captured(world: World, sent: Message, case: Case) -> None:
    """What is there after the first try."""
    kept = world.failed_event()
    assert seen(kept) == (case.error_type, case.error_code, case.error_class)
    assert (kept["status"], kept["retry_count"], kept["next_retry_at"]) == ("pending", 0, None)
    assert (kept["last_attempted_at"], kept["lease_token"]) == (None, None)
    assert kept["organization_id"] == case.organization
    expected = envelopes.from_message(sent, NOW)
    received = {"received_at": kept["envelope"]["received_at"]}
    assert kept["envelope"] == envelopes.to_json(expected) | received
    assert (kept["payload"], kept["payload_sha256"]) == (expected.payload, expected.payload_sha256)
    assert (kept["event_id"], kept["shop_domain"]) == (expected.event_id, expected.shop_domain)
    assert (kept["topic"], kept["event_type"]) == ("orders/create", "create")
    kept_event = FailedEvent(
        id=1, envelope=kept["envelope"], payload=kept["payload"], retry_count=0
    ).as_envelope()
    assert replace(kept_event, received_at=NOW) == expected, "all that a replay needs"
    assert len(kept["fingerprint"]) == 16
    scrubbed(kept)


def replayed(world: World, case: Case) -> None:
    """What is there after a replay that met the same trouble."""
    kept = world.failed_event()
    assert seen(kept) == (case.error_type, case.error_code, case.error_class)
    assert (kept["status"], kept["retry_count"], kept["lease_token"]) == ("pending", 1, None)
    assert kept["next_retry_at"] - kept["updated_at"] == timedelta(minutes=2)
    assert kept["last_attempted_at"] is not None
    (attempt,) = world.attempts()
    assert (attempt["outcome"], attempt["error_type"]) == ("rescheduled", case.error_type)
    assert [incident["tenant"] for incident in world.incidents()] == [ORGANIZATION] * case.is_outage
    scrubbed(kept)
    assert world.tenant("select 1 from shopify_events") == []


def scrubbed(kept: dict[str, Any]) -> None:
    """There is a traceback, and it quotes no customer and no secret."""
    assert "File " in kept["traceback"]
    assert kept["error_type"] in kept["traceback"]
    assert kept["error_message"]
    for planted in (EMAIL, "planted", CARD, PASSWORD, base64.b64encode(BODY).decode()):
        assert planted not in kept["error_message"]
        assert planted not in kept["traceback"]


def test_a_failure_that_cannot_be_kept_is_refused_until_it_can(world):
    sent = message(BODY)
    world.break_tenant()
    world.app("alter table subscriber_subscriberfailedevent rename to away")
    assert world.ingester.ingest(sent) is False
    world.app("alter table away rename to subscriber_subscriberfailedevent")
    assert world.failed_events() == []
    assert world.ingester.ingest(sent) is True
    assert world.failed_event()["payload"] == BODY


def test_with_both_databases_away_the_message_is_refused_in_time(world):
    world.break_tenant()
    world.core.directory.route(SHOP)  # what a warm process remembers
    for pool in (world.core.application, world.core.failures._application):
        pool.close()
        pool.target = db.Target(conninfo=make_conninfo(world.app_url, port=1))
    began = time.monotonic()
    assert world.ingester.ingest(message(BODY)) is False
    assert time.monotonic() - began < 2
    assert world.failed_events() == []


def test_a_row_that_cannot_be_read_has_its_verdict_and_delays_nobody(world):
    """As an operator's hand or an older revision may leave it."""
    row = world.fail()
    world.app("update subscriber_subscriberfailedevent set envelope = '{}'")
    others = [world.fail() for _ in range(3)]
    report = world.retry()
    assert (report.retried, report.resolved, report.failed, report.lost) == (4, 3, 1, 0)
    kept = {failed["id"]: failed for failed in world.failed_events()}
    assert (kept[row]["status"], kept[row]["retry_count"]) == ("pending", 1)
    assert {kept[other]["status"] for other in others} == {"resolved"}
