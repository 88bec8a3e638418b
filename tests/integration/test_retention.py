"""Retention: old and resolved goes, open never does, and no step leaves anything half done."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shared import bootstrap, db, retention
from shared.errors import ConfigurationError, EventCollisionError
from shared.model import LedgerOutcome, SnapshotOutcome
from shared.replay import Request
from shared.retention import Policy, Retention
from shared.tick import tick
from tests.world import ORGANIZATION, World, envelope

KEEP = Policy(resolved_payload_days=30)


def keeper(world: World, policy: Policy = KEEP, **options: Any) -> Retention:
    core = world.core
    return Retention(core.application, core.directory, core.tenants, policy, **options)


def maintain(world: World, policy: Policy = KEEP, **options: Any) -> None:
    """One run, whenever the last one was."""
    world.app("update subscriber_retrystate set last_maintenance_at = null")
    keeper(world, policy, **options).run(budget_seconds=60)


def age(world: World, days: int) -> None:
    """Makes the failure ledger and the audit rows older."""
    world.app(
        "update subscriber_subscriberfailedevent set created_at = created_at - %(by)s,"
        " resolved_at = resolved_at - %(by)s",
        by=timedelta(days=days),
    )
    world.app(
        "update shopify_shopifyevent set received_at = received_at - %(by)s",
        by=timedelta(days=days),
    )


def resolved(world: World, days: int, **fields: Any) -> int:
    """A failed event that was resolved so many days ago."""
    row = world.fail(envelope(attributes={"X-Note": "jane@example.com"}, **fields))
    world.app(
        "update subscriber_subscriberfailedevent set status = 'resolved', resolution = 'replayed',"
        " resolved_at = now() - %(ago)s, created_at = now() - %(ago)s where id = %(row)s",
        ago=timedelta(days=days),
        row=row,
    )
    return row


def audited(world: World, days: int, *, waits: bool = False) -> int:
    """An audit row of that age."""
    (row,) = world.app(
        "insert into shopify_shopifyevent (topic, shop_domain, event_id, payload_sha256,"
        " received_at, needs_publish, outbox_envelope, outbox_body)"
        " values ('orders/create', 'acme.myshopify.com', gen_random_uuid()::text, '',"
        " now() - %(ago)s, %(waits)s, case when %(waits)s then '{}'::jsonb end,"
        " case when %(waits)s then ''::bytea end) returning id",
        ago=timedelta(days=days),
        waits=waits,
    )
    return row["id"]


def ids(world: World, query: LiteralString) -> list[int]:
    return [row["id"] for row in world.app(query)]


def stored(world: World, count: int = 1, days: int = 0) -> None:
    """Events in the tenant's ledger, stored so many days ago."""
    for n in range(count):
        world.core.pipeline.apply(envelope({"id": n + 1}))
    world.tenant(
        "update shopify_events set inserted_at = now() - %(ago)s"
        " where inserted_at > now() - interval '1 hour'",
        ago=timedelta(days=days),
    )


def bodies(world: World) -> list[bool]:
    """Of each event in the tenant's ledger, whether its payload is there."""
    rows = world.tenant(
        "select num_nonnulls(payload, parsed_payload, payload_raw) as parts"
        " from shopify_events order by id"
    )
    return [row["parts"] > 0 for row in rows]


# Payloads of resolved failed events


def test_payload_attributes_and_traceback_of_what_was_resolved_long_ago_go(world):
    old, young = resolved(world, 31), resolved(world, 29)
    before = world.failed_events()
    maintain(world)
    gone, kept = world.failed_events()
    assert (gone["id"], kept) == (old, before[1])
    assert (gone["payload"], gone["traceback"], gone["envelope"]["attributes"]) == (None, "", {})
    assert gone["redacted_at"] is not None
    same = set(gone) - {"payload", "traceback", "envelope", "redacted_at", "updated_at"}
    assert {name: gone[name] for name in same} == {name: before[0][name] for name in same}
    assert young == kept["id"]


@pytest.mark.parametrize(
    "state",
    [
        "status = 'failed'",
        "retry_count = 1",
        "lease_token = gen_random_uuid(), leased_until = now() - interval '1 year'",
    ],
    ids=["failed", "pending", "leased"],
)
def test_what_is_open_never_goes_by_age(world, state):
    world.fail()
    world.app("update subscriber_subscriberfailedevent set " + state)
    age(world, 4000)
    before = world.failed_events()
    maintain(world, Policy(resolved_payload_days=1, resolved_days=28, audit_days=28))
    assert world.failed_events() == before


def test_what_is_delivered_and_fails_again_has_its_payload_back(world):
    sent = envelope({"id": 5})
    row = world.fail(sent)
    world.retry()
    age(world, 40)
    maintain(world)
    assert world.failed_event()["payload"] is None
    assert world.fail(sent) == row
    kept = world.failed_event()
    assert (kept["status"], kept["payload"], kept["redacted_at"]) == (
        "pending",
        sent.payload,
        None,
    )
    assert world.retry().resolved == 1


def test_a_backlog_goes_in_bounded_steps(world, monkeypatch):
    monkeypatch.setattr(retention, "STEP_ROWS", 2)
    for _ in range(5):
        resolved(world, 40)
    maintain(world)
    assert {row["payload"] for row in world.failed_events()} == {None}


def test_a_row_that_somebody_holds_is_passed_over_and_goes_next_time(world):
    rows = [resolved(world, 40), resolved(world, 40)]
    with psycopg.connect(world.app_url) as other:
        other.execute(
            "select 1 from subscriber_subscriberfailedevent where id = %s for update", [rows[0]]
        )
        maintain(world)
        assert [row["payload"] is None for row in world.failed_events()] == [False, True]
    maintain(world)
    assert {row["payload"] for row in world.failed_events()} == {None}


def test_the_rows_to_redact_are_found_by_index(world):
    world.app("set enable_seqscan = off")
    (plan,) = world.app("explain (format json) " + retention._REDACT, days=30, rows=500)
    assert "subscriber_failedevent_resolved" in str(plan)


# Rows


def test_resolved_rows_go_altogether_if_a_setting_says_so(world):
    stuck = world.fail()
    resolved(world, 91)
    young = resolved(world, 89)
    age(world, 0)
    world.app(
        "update subscriber_subscriberfailedevent set created_at = now() - interval '1 year'"
        " where id = %(row)s",
        row=stuck,
    )
    maintain(world)
    assert len(world.failed_events()) == 3, "unset keeps them"
    maintain(world, Policy(resolved_payload_days=30, resolved_days=90))
    assert [row["id"] for row in world.failed_events()] == [stuck, young]


def test_a_deleted_rows_history_goes_with_it(world):
    world.fail()
    world.retry()
    age(world, 100)
    maintain(world, Policy(resolved_payload_days=30, resolved_days=90))
    assert (world.failed_events(), world.attempts()) == ([], [])


def test_rows_behind_many_that_stay_are_reached(world, monkeypatch):
    monkeypatch.setattr(retention, "STEP_ROWS", 2)
    stuck = [world.fail() for _ in range(5)]
    age(world, 400)
    resolved(world, 100)
    young = [resolved(world, 1) for _ in range(3)]
    maintain(world, Policy(resolved_payload_days=30, resolved_days=90))
    assert [row["id"] for row in world.failed_events()] == [*stuck, *young]


def test_audit_rows_go_but_not_those_that_wait_to_be_published(world, monkeypatch):
    monkeypatch.setattr(retention, "STEP_ROWS", 2)
    waiting = audited(world, 100, waits=True)
    for _ in range(5):
        audited(world, 91)
    young = audited(world, 89)
    maintain(world)
    assert len(ids(world, "select id from shopify_shopifyevent")) == 7, "unset keeps them"
    maintain(world, Policy(resolved_payload_days=30, audit_days=90))
    assert ids(world, "select id from shopify_shopifyevent order by id") == [waiting, young]


# The tenants' event ledgers

STRIP = Policy(resolved_payload_days=30, event_payload_days=90)


def test_payloads_in_the_event_ledger_go_and_its_rows_and_snapshots_stay(world):
    stored(world, 3, days=91)
    stored(world, 1, days=0)  # a second event of the first order
    snapshots = world.tenant("select * from shopify_orders order by id")
    identity: LiteralString = (
        "select id, event_id, organization_id, shop_domain, topic, event_type, resource_type,"
        " resource_id, received_at, inserted_at, payload_sha256, source_updated_at"
        " from shopify_events order by id"
    )
    before = world.tenant(identity)
    maintain(world)
    assert bodies(world) == [True] * 4, "unset keeps them"
    maintain(world, STRIP)
    assert bodies(world) == [False, False, False, True]
    assert world.tenant(identity) == before
    assert world.tenant("select * from shopify_orders order by id") == snapshots


def test_a_duplicate_of_what_has_lost_its_payload_stays_a_duplicate_without_one(world):
    sent = envelope({"id": 1})
    world.core.pipeline.apply(sent)
    world.tenant("update shopify_events set inserted_at = now() - interval '1 year'")
    maintain(world, STRIP)
    snapshot = world.tenant("select payload, event_id from shopify_orders")
    outcome = world.core.pipeline.apply(sent)
    assert (outcome.ledger, outcome.snapshot) == (LedgerOutcome.DUPLICATE, SnapshotOutcome.STALE)
    assert bodies(world) == [False]
    assert world.tenant("select payload, event_id from shopify_orders") == snapshot
    with pytest.raises(EventCollisionError):
        world.core.pipeline.apply(replace(envelope({"id": 2}), event_id=sent.event_id))


def test_the_next_visit_goes_on_where_the_last_one_ended(world, monkeypatch):
    monkeypatch.setattr(retention, "STEP_ROWS", 2)
    stored(world, 5, days=91)
    seconds = itertools.chain([0] * 4, itertools.repeat(99))
    maintain(world, STRIP, clock=lambda: next(seconds))
    assert bodies(world).count(False) == 2, "its time was over"
    (state,) = world.app("select last_maintenance_at from subscriber_retrystate")
    assert state["last_maintenance_at"] is None, "so the next run goes on"
    (left,) = world.app("select after_id from subscriber_tenantretention")
    assert left["after_id"] == 2
    keeper(world, STRIP).run(budget_seconds=60)
    assert bodies(world) == [False] * 5


def test_a_young_row_among_old_ones_is_not_passed_over_for_good(world):
    stored(world, 3, days=91)
    world.tenant("update shopify_events set inserted_at = now() where id = 2")
    maintain(world, STRIP)
    assert bodies(world) == [False, True, True]
    world.tenant("update shopify_events set inserted_at = now() - interval '1 year'")
    maintain(world, STRIP)
    assert bodies(world) == [False] * 3


def test_another_database_under_the_same_name_is_begun_anew(world):
    stored(world, 2, days=91)
    world.app(
        "insert into subscriber_tenantretention (tenant, after_id, visited_at)"
        " values (%(tenant)s, 1000, now())",
        tenant=ORGANIZATION,
    )
    maintain(world, STRIP)
    assert bodies(world) == [False, False]


def test_a_tenant_that_is_down_is_skipped_and_goes_to_the_end_of_the_line(world):
    stored(world, 1, days=91)
    world.connect_shop("down.myshopify.com", "aaa", make_conninfo(world.tenant_url, port=1))
    maintain(world, STRIP)
    assert bodies(world) == [False]
    visited = world.app("select tenant from subscriber_tenantretention order by visited_at")
    assert [row["tenant"] for row in visited] == ["aaa", ORGANIZATION]


def test_a_few_tenants_are_visited_in_each_run_who_waited_longest_first(world, monkeypatch):
    monkeypatch.setattr(retention, "TENANTS_PER_RUN", 1)
    world.connect_shop("b.myshopify.com", "bbb")
    order = []
    for _ in range(3):
        maintain(world, STRIP)
        (last,) = world.app(
            "select tenant from subscriber_tenantretention order by visited_at desc limit 1"
        )
        order.append(last["tenant"])
    assert order == [ORGANIZATION, "bbb", ORGANIZATION]


def test_a_paused_tenants_database_is_left_alone(world):
    stored(world, 1, days=91)
    world.core.incidents.pause(ORGANIZATION, actor="jane", reason="moving")
    maintain(world, STRIP)
    assert bodies(world) == [True]


def test_one_database_for_all_is_visited_once(world):
    stored(world, 1, days=91)
    world.environ["SHOPIFY_STORAGE_DATABASE_URL"] = world.tenant_url
    world.environ["RETENTION_EVENT_PAYLOAD_DAYS"] = "90"
    world.forget()
    world.core.retention().run(budget_seconds=60)
    assert bodies(world) == [False]
    visited = world.app("select tenant from subscriber_tenantretention")
    assert [row["tenant"] for row in visited] == [""]


# When, and when not


def test_it_runs_once_an_hour(world):
    resolved(world, 40)
    keeper(world).run(budget_seconds=60)
    resolved(world, 40)
    keeper(world).run(budget_seconds=60)
    assert world.failed_events()[1]["payload"] is not None, "not its turn"
    world.app("update subscriber_retrystate set last_maintenance_at = now() - interval '61 min'")
    keeper(world).run(budget_seconds=60)
    assert world.failed_events()[1]["payload"] is None


def test_without_time_nothing_is_begun(world):
    resolved(world, 40)
    keeper(world).run(budget_seconds=0)
    assert world.failed_event()["payload"] is not None
    keeper(world).run(budget_seconds=60)
    assert world.failed_event()["payload"] is None, "the next run need not wait for an hour"


def test_one_part_that_fails_is_logged_and_the_others_go_on(world, capsys):
    audited(world, 91)
    resolved(world, 40)
    world.app("alter table subscriber_subscriberfailedevent add check (redacted_at is null)")
    maintain(world, Policy(resolved_payload_days=30, audit_days=90))
    assert "maintenance.failed" in capsys.readouterr().out
    assert ids(world, "select id from shopify_shopifyevent") == []


def test_a_database_out_of_reach_is_no_fault_of_the_run(world, capsys):
    gone = db.Pool(db.Target(conninfo=make_conninfo(world.app_url, port=1)), size=1)
    core = world.core
    Retention(gone, core.directory, core.tenants, KEEP).run(budget_seconds=60)
    assert "maintenance.failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "tended"),
    [
        (Request(), True),
        (Request(limit=1), True),
        (Request(dry_run=True), False),
        (Request(event_id=1), False),
    ],
    ids=["usual", "limit", "dry run", "one row"],
)
def test_a_tick_ends_with_maintenance_unless_it_is_about_replays_only(world, asked, tended):
    resolved(world, 40)
    core = world.core
    tick(
        asked,
        replayer=core.replayer(),
        outbox=core.outbox(),
        retention=core.retention(),
        budget_seconds=60,
        maintenance_seconds=60,
    )
    assert (world.failed_event()["payload"] is None) is tended


# Identity outlives every way back


@pytest.mark.parametrize("name", ["RETENTION_RESOLVED_DAYS", "RETENTION_AUDIT_DAYS"])
def test_a_time_too_short_for_a_last_return_is_refused_with_the_arithmetic(environ, name):
    with pytest.raises(ConfigurationError) as refused:
        bootstrap.core(environ | {name: "27"})
    for words in (name, "27", "at least 28", "7 (PUBSUB", "14 (DEAD_LETTER", "7 (a redrive)"):
        assert words in str(refused.value)
    assert bootstrap.core(environ | {name: "28"})
    longer = {"PUBSUB_RETENTION_DAYS": "31", "DEAD_LETTER_RETENTION_DAYS": "31"}
    with pytest.raises(ConfigurationError, match="at least 93"):
        bootstrap.core(environ | longer | {name: "90"})


def test_payloads_may_go_sooner_since_identities_stay(environ):
    sooner = {"RETENTION_RESOLVED_PAYLOAD_DAYS": "1", "RETENTION_EVENT_PAYLOAD_DAYS": "1"}
    assert bootstrap.core(environ | sooner)
