"""Incidents: an outage costs its tenant one canary at a time, and the others nothing."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shared import db, faults, incidents, leases
from shared.errors import DatabaseTimeoutError
from tests.world import ORGANIZATION, World, envelope, message

OTHER = "other.myshopify.com"


def counts(report):
    return report.retried, report.resolved, report.failed, report.deferred


@pytest.fixture
def down(world: World) -> World:
    """A tenant whose database nobody serves, with four failed events; the incident is open."""
    world.break_tenant()
    for n in range(4):
        world.fail(envelope({"id": n}))
    assert counts(world.retry()) == (1, 0, 1, 3)
    return world


def charged(world: World) -> list[int]:
    return [row["retry_count"] for row in world.failed_events()]


def test_a_connection_failure_opens_one_incident_and_charges_one_row(down):
    (incident,) = down.incidents()
    assert (incident["tenant"], incident["kind"]) == (ORGANIZATION, "unavailable")
    assert "refused" in incident["cause"]
    assert incident["ended_at"] is None
    assert charged(down) == [1, 0, 0, 0]
    first = down.failed_events()[0]
    assert first["last_attempted_at"] == incident["started_at"], "the start of the run"


def test_the_end_of_a_run_says_how_many_tenants_are_unavailable(down, capsys):
    def said() -> list[int]:
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [line["incidents_open"] for line in lines if line["message"] == "replay.finished"]

    down.retry()
    assert said() == [1]
    down.heal_tenant()
    down.make_probe_due()
    down.retry()
    assert said() == [0]


def test_a_parked_tenants_rows_are_left_alone(down):
    assert counts(down.retry()) == (0, 0, 0, 0)
    assert charged(down) == [1, 0, 0, 0]


def test_new_failures_of_a_parked_tenant_are_parked_too(down):
    down.fail(envelope({"id": 9}))
    assert counts(down.retry()) == (0, 0, 0, 0)


def test_when_the_probe_is_due_the_longest_due_row_alone_is_the_canary(down):
    down.make_probe_due()
    assert counts(down.retry()) == (1, 0, 1, 0)
    assert charged(down) == [1, 1, 0, 0]
    assert counts(down.retry()) == (0, 0, 0, 0), "the next probe is not due yet"


def test_probes_come_after_1_2_4_8_and_then_every_15_minutes(down):
    waits = []
    for _ in range(7):
        (incident,) = down.incidents()
        (now,) = down.app("select now()")[0].values()
        waits.append(round((incident["next_probe_at"] - now).total_seconds() / 60))
        down.make_probe_due()
        for row in down.failed_events():
            down.make_due(row["id"])
        down.retry()
    assert waits == [1, 2, 4, 8, 15, 15, 15]
    assert down.incidents()[0]["probe_count"] == 7


def test_while_the_canary_is_out_there_is_no_second_one(down):
    down.make_probe_due()
    assert len(down.core.leases.claim(uuid4(), 50)) == 1
    assert down.core.leases.claim(uuid4(), 50) == []


def test_once_the_tenant_answers_all_come_back_by_themselves(down):
    down.heal_tenant()
    down.make_probe_due()
    assert counts(down.retry()) == (1, 1, 0, 0)
    (incident,) = down.incidents()
    assert incident["ended_at"] is not None
    waiting = [row for row in down.failed_events() if row["status"] == "pending"]
    assert [row["retry_count"] for row in waiting] == [1, 0, 0]
    for row in waiting:
        down.make_due(row["id"])
    assert counts(down.retry()) == (3, 3, 0, 0)


def test_parked_rows_come_back_spread_out_in_the_order_in_which_they_came_due(world):
    world.break_tenant()
    for n in range(120):
        world.fail(envelope({"id": n}))
    world.retry()
    world.heal_tenant()
    world.make_probe_due()
    world.retry()
    parked = [row for row in world.failed_events() if row["status"] == "pending"]
    times = [row["next_retry_at"] for row in parked[1:]]
    assert times == sorted(times)
    assert times[-1] - times[0] > timedelta(seconds=2)


def test_rows_that_come_due_while_the_others_are_spread_are_not_moved(world, monkeypatch):
    world.break_tenant()
    for n in range(3):
        world.fail(envelope({"id": n}))
    world.retry()
    waiting = world.failed_events()[0]["id"]
    monkeypatch.setattr(incidents, "PARKED_BATCH", 1)
    batches = []

    def one_batch(row_factory, statement, parameters=None):
        if statement is incidents._STAGGER:
            batches.append(parameters)
            world.app(
                "update subscriber_subscriberfailedevent"
                " set next_retry_at = clock_timestamp() where id = %(row)s",
                row=waiting,
            )
        return fetch(row_factory, statement, parameters)

    fetch = world.core.application.fetch
    monkeypatch.setattr(world.core.application, "fetch", one_batch)
    world.core.incidents.answered(ORGANIZATION)
    assert len(batches) == 3, "two parked rows, one by one, and then none"
    (due,) = [row for row in world.failed_events() if row["id"] == waiting]
    assert due["next_retry_at"] <= world.app("select now() as now")[0]["now"]


def test_a_canary_that_fails_for_its_own_reasons_ends_the_incident_all_the_same(down):
    down.heal_tenant()
    down.tenant("alter table shopify_orders drop column parsed_payload")
    down.make_probe_due()
    assert counts(down.retry()) == (1, 0, 1, 0)
    assert down.incidents()[0]["ended_at"] is not None


def unreadable(world: World) -> None:
    """Makes the tenant's longest due row one that fails before any database is asked."""
    row = world.fail(envelope(b"[]"))
    world.app(
        "update subscriber_subscriberfailedevent set next_retry_at = now() - interval '1 day'"
        " where id = %(row)s",
        row=row,
    )


def test_a_canary_that_never_came_to_the_database_proves_nothing(down):
    unreadable(down)
    down.make_probe_due()
    down.retry()
    assert down.incidents()[0]["ended_at"] is None, "the tenant is still down"
    down.heal_tenant()
    unreadable(down)
    down.make_probe_due()
    down.retry()
    assert down.incidents()[0]["ended_at"] is not None, "and was asked for itself"


def test_what_was_given_up_during_the_outage_is_requeued_by_the_system(down):
    for _ in range(4):
        down.make_probe_due()
        for row in down.failed_events()[:1]:
            down.make_due(row["id"])
        down.app(
            "update subscriber_subscriberfailedevent set next_retry_at = now() + interval '1 hour'"
            " where id > %(row)s",
            row=down.failed_events()[0]["id"],
        )
        down.retry()
    first = down.failed_events()[0]
    assert (first["status"], first["retry_count"]) == ("failed", 5)
    down.heal_tenant()
    down.make_probe_due()
    down.make_due(down.failed_events()[1]["id"])
    down.retry(limit=1)
    first = down.failed_events()[0]
    assert (first["status"], first["retry_count"]) == ("pending", 0)
    (action,) = down.app("select * from subscriber_operatoraction")
    assert (action["actor"], action["action"], action["count"]) == ("system", "requeue", 1)
    assert action["scope"]["tenant"] == ORGANIZATION


def give_up(world: World, row: int) -> UUID:
    """Leases the row for its last replay; returns the token."""
    world.app(
        "update subscriber_subscriberfailedevent set retry_count = max_retries - 1"
        " where id = %(row)s",
        row=row,
    )
    world.make_due(row)
    token = uuid4()
    world.core.leases.claim(token, 1, row)
    world.core.leases.start(token, row)
    return token


def test_a_verdict_that_comes_after_the_end_of_the_incident_makes_a_new_one(down):
    row = down.failed_events()[0]["id"]
    token = give_up(down, row)
    down.core.incidents.answered(ORGANIZATION)
    error = psycopg.OperationalError("connection refused")
    run_started_at = down.app("select now() as now")[0]["now"]
    verdict = down.core.leases.reschedule(token, row, run_started_at, error, "orders/create")
    assert verdict == "failed"
    assert [incident["ended_at"] is None for incident in down.incidents()] == [False, True]
    down.core.incidents.answered(ORGANIZATION)
    assert down.failed_events()[0]["status"] == "pending"


def test_the_end_of_an_incident_waits_for_the_verdicts_that_are_under_way(down):
    row = down.failed_events()[0]["id"]
    token = give_up(down, row)
    error = psycopg.OperationalError("connection refused")
    run_started_at = down.app("select now() as now")[0]["now"]
    with (
        psycopg.connect(down.app_url) as late,
        ThreadPoolExecutor(1) as beside,
    ):
        same = db.Pool(db.Target(conninfo=down.app_url), size=1)
        parameters = {"token": token, "id": row, "run_started_at": run_started_at}
        parameters |= leases._SCHEDULE | faults.describe(error, "orders/create")
        late.execute(leases._RESCHEDULE, parameters | {"is_connection_failure": True})
        end = beside.submit(incidents.Incidents(same, lease_seconds=120).answered, ORGANIZATION)
        wait_for_lock(down, end)
        late.commit()
        end.result()
        same.close()
    assert down.failed_events()[0]["status"] == "pending", "the end brought it back"


def wait_for_lock(world: World, work: Future[None]) -> None:
    """Until the work waits for another session's lock; or is done, without having waited."""
    while not work.done() and not world.app(
        "select 1 from pg_stat_activity where wait_event_type = 'Lock'"
    ):
        time.sleep(0.01)


def test_what_was_given_up_before_the_outage_or_for_other_reasons_stays_given_up(world):
    before, other = world.fail(), world.fail()
    world.app(
        "update subscriber_subscriberfailedevent set status = 'failed',"
        " error_code = 'connection_failed', last_attempted_at = now() - interval '1 day'"
        " where id = %(row)s",
        row=before,
    )
    world.app(
        "update subscriber_subscriberfailedevent set status = 'failed', error_code = '42703',"
        " last_attempted_at = now() + interval '1 day' where id = %(row)s",
        row=other,
    )
    world.break_tenant()
    world.fail(envelope({"id": 5}))
    world.retry()
    world.heal_tenant()
    world.fail(envelope({"id": 6}))
    world.make_probe_due()
    world.retry()
    assert [row["status"] for row in world.failed_events()][:2] == ["failed", "failed"]
    assert world.app("select 1 from subscriber_operatoraction") == []


def test_a_tenant_whose_rows_are_all_given_up_is_still_probed(down):
    down.app(
        "update subscriber_subscriberfailedevent set status = 'failed', next_retry_at = null,"
        " error_code = 'connection_failed', last_attempted_at = now()"
    )
    down.make_probe_due()
    down.retry()
    (incident,) = down.incidents()
    assert (incident["ended_at"], incident["probe_count"]) == (None, 1)
    down.heal_tenant()
    down.make_probe_due()
    down.retry()
    assert down.incidents()[0]["ended_at"] is not None
    assert "failed" not in {row["status"] for row in down.failed_events()}


def test_naming_a_parked_row_makes_it_the_canary(down):
    third = down.failed_events()[2]["id"]
    assert counts(down.retry(event_id=third)) == (1, 0, 1, 0)
    assert charged(down) == [1, 0, 1, 0]
    down.heal_tenant()
    assert counts(down.retry(event_id=down.failed_events()[3]["id"])) == (1, 1, 0, 0)
    assert down.incidents()[0]["ended_at"] is not None


def test_another_tenants_outage_costs_nobody_else(down, postgres, templates):
    url = postgres.create_database(
        f"neighbour_of_{down.tenant_url.rsplit('/', 1)[1]}", template=templates["tenant"]
    )
    down.connect_shop(OTHER, "other", url)
    for n in range(3):
        down.fail(envelope({"id": n}, shop_domain=OTHER))
    assert counts(down.retry()) == (3, 3, 0, 0)


def test_missing_configuration_is_no_incident(world):
    world.app("delete from databases_databasecredential")
    world.fail()
    world.fail(envelope(shop_domain="nobody.myshopify.com"))
    assert counts(world.retry()) == (2, 0, 2, 0)
    assert world.incidents() == []


def test_an_application_database_out_of_reach_is_no_incident_of_the_tenant(world):
    world.fail()
    directory = world.core.directory
    gone = db.Target(conninfo=make_conninfo(world.app_url, port=1))
    directory._application = db.Pool(gone, size=1)
    assert counts(world.retry()) == (1, 0, 1, 0)
    assert world.failed_event()["error_type"] == "DirectoryUnavailableError"
    assert world.incidents() == []


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (psycopg.OperationalError("connection refused"), True),
        (psycopg.errors.ConnectionTimeout("timeout"), True),
        (psycopg.errors.InvalidPassword("28P01"), True),
        (psycopg.errors.InvalidCatalogName("3D000"), True),
        (psycopg.errors.TooManyConnections("53300"), True),
        (psycopg.errors.AdminShutdown("57P01"), True),
        (psycopg.errors.CannotConnectNow("57P03"), True),
        (DatabaseTimeoutError("silent"), True),
        (psycopg.errors.QueryCanceled("57014"), False),
        (psycopg.errors.DeadlockDetected("40P01"), False),
        (psycopg.errors.DiskFull("53100"), False),
        (psycopg.errors.UndefinedColumn("42703"), False),
        (ValueError("x"), False),
        (RuntimeError("x"), False),
    ],
)
def test_what_is_a_connection_failure(error, is_one):
    assert db.is_connection_failure(error) is is_one


# Pauses


def pause(world: World, reason="migrating") -> bool:
    return world.core.incidents.pause(ORGANIZATION, actor="jane", reason=reason)


def test_a_paused_organizations_events_wait_in_the_failure_ledger_uncharged(world):
    assert pause(world)
    assert not pause(world), "it was paused already"
    world.forget()
    assert world.ingester.ingest(message())
    kept = world.failed_event()
    assert (kept["error_type"], kept["error_class"]) == ("TenantPaused", "transient")
    assert world.tenant("select 1 from shopify_events") == []
    world.make_probe_due()
    assert counts(world.retry()) == (0, 0, 0, 0)
    assert counts(world.retry(event_id=kept["id"])) == (0, 0, 0, 0), "nor by name"
    assert world.core.incidents.unpause(ORGANIZATION, actor="jane", reason="done")
    assert not world.core.incidents.unpause(ORGANIZATION, actor="jane", reason="done")
    world.forget()
    world.make_due(kept["id"])
    assert counts(world.retry()) == (1, 1, 0, 0)
    assert world.failed_event()["retry_count"] == 0
    actions = world.app("select actor, action, reason from subscriber_operatoraction order by id")
    assert [tuple(action.values()) for action in actions] == [
        ("jane", "pause", "migrating"),
        ("jane", "unpause", "done"),
    ]


def test_a_pause_takes_over_an_open_incident_and_is_never_probed(down):
    assert pause(down)
    down.heal_tenant()
    down.make_probe_due()
    assert counts(down.retry()) == (0, 0, 0, 0)
    (incident,) = down.incidents()
    assert (incident["kind"], incident["next_probe_at"]) == ("paused", None)
    (shown,) = down.core.incidents.open()
    assert (shown.kind, shown.cause) == ("paused", "migrating")
