"""Alerts: what is told, when, how often, and that nothing is forgotten on the way."""

import threading
import time

import psycopg
import pytest

from shared import db
from shared.notifier import causes, digest
from shared.notifier.digest import Digest
from shared.notifier.processor import LIMITS
from tests.notifier.alerts import Alerts
from tests.notifier.relay import REFUSED, Relay, Sender

THREE = "(array['42703', '23505', '22003'])[1 + mod(n, 3)]"
DISTINCT = "'code_' || n"


@pytest.fixture
def alerts(relay: Relay) -> Alerts:
    return Alerts(relay)


def channel(alerts: Alerts, name: str, **rules: object) -> None:
    alerts.relay.channel(name)
    alerts.rules(name, group_wait="0 s", **rules)


def test_a_storm_of_three_causes_is_three_messages(alerts: Alerts) -> None:
    alerts.give_up(10_000, code=THREE)
    assert alerts.tick() == 3
    assert alerts.unalerted() == 0
    assert [subject for _, subject in alerts.told()] == [
        f"CRITICAL: {count} failed events given up: UndefinedColumn ({code})"
        for count, code in [("3,333", "22003"), ("3,334", "23505"), ("3,333", "42703")]
    ]
    assert alerts.tick() == 0


def test_a_storm_of_ten_thousand_causes_stays_below_the_cap(alerts: Alerts) -> None:
    alerts.give_up(10_000, code=DISTINCT)
    alerts.rules("ops", max_per_hour=5)
    assert alerts.tick() == 5
    assert len(alerts.groups()) == causes.CAUSES + 1
    assert sum(group["total"] for group in alerts.groups()) == 10_000
    bodies = alerts.relay.rows("select body from notifier.notifications")
    assert all("16 more alerts suppressed for now" in row["body"] for row in bodies)
    alerts.later("5 minutes")
    assert alerts.tick() == 0
    alerts.later("1 hour")
    assert alerts.tick() == 5


def test_new_causes_do_not_wear_the_cap_out_tick_by_tick(alerts: Alerts) -> None:
    for number in range(3):
        alerts.give_up(30, code=f"'c{number}_' || n")  # type: ignore[arg-type]
        alerts.tick()
    assert len(alerts.groups()) == causes.CAUSES + 1


def test_a_tick_marks_a_bounded_number_and_the_next_ones_the_rest(
    alerts: Alerts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(causes._PARAMETERS, "rows", 10)
    monkeypatch.setattr(causes, "ROWS", 10)
    alerts.give_up(10 * digest.STEPS + 7)
    alerts.tick()
    assert alerts.unalerted() == 7
    alerts.tick()
    assert (alerts.unalerted(), alerts.groups()[0]["total"]) == (0, 57)


def test_the_first_message_waits_for_others_like_it(alerts: Alerts) -> None:
    alerts.rules("ops", group_wait="30 s")
    alerts.give_up()
    assert alerts.tick() == 0
    alerts.give_up()
    alerts.later("30 s")
    assert alerts.tick() == 1
    assert alerts.told() == [("firing", "ERROR: 2 failed events given up: UndefinedColumn (42703)")]


def test_more_of_the_same_is_told_after_the_interval(alerts: Alerts) -> None:
    alerts.give_up()
    alerts.tick()
    alerts.give_up()
    assert alerts.tick() == 0
    alerts.later("5 minutes")
    assert alerts.tick() == 1
    assert "of them 1 new" in alerts.relay.rows(
        "select body from notifier.notifications order by id desc limit 1"
    )[0]["body"].replace("\n", " ")


def test_another_cause_is_told_at_once(alerts: Alerts) -> None:
    alerts.give_up()
    alerts.tick()
    alerts.give_up(code="'23505'")
    assert alerts.tick() == 1


def test_what_goes_on_is_repeated_and_not_before_its_time(alerts: Alerts) -> None:
    alerts.give_up()
    alerts.tick()
    alerts.later("3 hours 59 minutes")
    assert alerts.tick() == 0
    alerts.later("1 minute")
    assert alerts.tick() == 1


def test_what_gets_worse_is_told_at_once(alerts: Alerts) -> None:
    alerts.give_up(causes.MANY - 1)
    alerts.tick()
    alerts.give_up()
    assert alerts.tick() == 1
    assert [subject.split(":")[0] for _, subject in alerts.told()] == ["ERROR", "CRITICAL"]


def test_what_is_over_for_two_ticks_is_resolved_by_one_message(alerts: Alerts) -> None:
    alerts.give_up()
    alerts.tick()
    alerts.requeue()
    assert alerts.tick() == 0
    assert alerts.tick() == 0
    alerts.later()
    assert alerts.tick() == 1
    assert alerts.told()[-1] == (
        "resolved",
        "RESOLVED: 1 failed event given up: UndefinedColumn (42703)",
    )
    alerts.later()
    assert alerts.tick() == 0


def test_what_comes_back_between_two_ticks_is_not_over(alerts: Alerts) -> None:
    alerts.give_up()
    alerts.tick()
    alerts.requeue()
    alerts.tick()
    alerts.later()
    alerts.give_up()
    alerts.tick()
    assert [group["state"] for group in alerts.groups()] == ["firing"]


def test_no_end_is_told_of_what_was_never_told(alerts: Alerts) -> None:
    alerts.give_up()
    alerts.tick(Sender(REFUSED))
    alerts.requeue()
    alerts.clear()
    assert alerts.kinds() == ["firing"]
    assert [group["state"] for group in alerts.groups()] == ["resolved"]


def test_what_was_over_and_comes_again_is_a_new_alert_after_the_interval(alerts: Alerts) -> None:
    alerts.give_up()
    alerts.tick()
    alerts.requeue()
    alerts.clear()
    alerts.give_up()
    assert alerts.tick() == 0
    alerts.later("5 minutes")
    assert alerts.tick() == 1
    assert alerts.kinds() == ["firing", "resolved", "firing"]
    assert alerts.groups()[0]["total"] == 1


def test_what_reached_nobody_is_due_again_and_goes_to_the_fallback_once_an_hour(
    alerts: Alerts, capsys: pytest.CaptureFixture[str]
) -> None:
    channel(alerts, "spare")
    alerts.give_up()
    alerts.tick(Sender(REFUSED))
    alerts.tick(Sender(lambda message: REFUSED))
    assert '"message": "alert.undelivered"' in capsys.readouterr().out
    alerts.tick(Sender(REFUSED))
    assert alerts.kinds() == ["firing"] * 3
    assert alerts.told("spare") == [("message", "ERROR: 1 alert undelivered: ops")]
    assert len(alerts.digest.problems(alerts.relay.connection)) == 1
    alerts.later("1 hour")
    alerts.tick(Sender(REFUSED))
    assert len(alerts.told("spare")) == 2
    alerts.tick()
    alerts.tick()
    assert alerts.groups()[0]["is_told"]
    assert alerts.digest.problems(alerts.relay.connection) == []


def test_an_alert_goes_to_every_channel_whose_severity_it_reaches(alerts: Alerts) -> None:
    channel(alerts, "all", min_severity="info")
    channel(alerts, "pager", min_severity="critical")
    channel(alerts, "none")
    alerts.give_up()
    alerts.tick()
    assert [alerts.kinds(name) for name in ("ops", "all", "pager", "none")] == [
        ["firing"],
        ["firing"],
        [],
        [],
    ]
    alerts.give_up(causes.MANY)
    alerts.tick()
    assert alerts.kinds("pager") == ["firing"]


def test_a_disabled_channel_is_not_told(alerts: Alerts) -> None:
    alerts.rules("ops", enabled=False)
    channel(alerts, "all", min_severity="info")
    alerts.give_up()
    alerts.tick()
    assert (alerts.kinds(), alerts.kinds("all")) == ([], ["firing"])


def test_without_a_channel_nothing_is_marked_and_a_later_one_hears_of_all(
    relay: Relay, capsys: pytest.CaptureFixture[str]
) -> None:
    alerts = Alerts(relay)
    relay.rows("update notifier.channels set enabled = false")
    digest._say_that_nobody_is_told.cache_clear()
    alerts.give_up(5)
    alerts.tick()
    alerts.tick()
    assert (alerts.unalerted(), alerts.groups()) == (5, [])
    assert capsys.readouterr().out.count("alert.no_channel") == 1
    assert "channels add" in alerts.digest.problems(relay.connection)[0].remedy
    relay.rows("update notifier.channels set enabled = true")
    assert alerts.tick() == 1
    assert alerts.unalerted() == 0


@pytest.mark.parametrize("quiet", ["silenced", "acknowledged"])
def test_what_is_quiet_is_not_told_until_its_time_is_over(alerts: Alerts, quiet: str) -> None:
    alerts.give_up()
    alerts.tick()
    alerts.relay.rows(
        "update notifier.alert_groups set quiet = %(quiet)s, quiet_by = 'ada', quiet_reason = 'x',"
        " quiet_until = now() + interval '2 hours'",
        quiet=quiet,
    )
    alerts.give_up()
    alerts.later("1 hour")
    assert alerts.tick() == 0
    alerts.later("1 hour")
    assert alerts.tick() == 1


@pytest.mark.parametrize(("quiet", "messages"), [("silenced", 0), ("acknowledged", 1)])
def test_an_acknowledged_alert_tells_when_it_gets_worse_or_ends_and_a_silenced_one_does_not(
    alerts: Alerts, quiet: str, messages: int
) -> None:
    alerts.give_up()
    alerts.tick()
    alerts.relay.rows(
        "update notifier.alert_groups set quiet = %(quiet)s, quiet_by = 'ada', quiet_reason = 'x',"
        " quiet_until = now() + interval '1 year'",
        quiet=quiet,
    )
    alerts.give_up(causes.MANY)
    assert alerts.tick() == messages
    alerts.requeue()
    alerts.clear()
    assert alerts.kinds().count("resolved") == messages
    assert (alerts.groups()[0]["quiet"] is None) == bool(messages)


def test_an_incident_is_told_once_when_it_opens_and_once_when_it_ends(alerts: Alerts) -> None:
    alerts.open_incident()
    for _ in range(3):
        alerts.tick()
    alerts.end_incident()
    for _ in range(3):
        alerts.clear()
    assert alerts.told() == [
        ("firing", "ERROR: tenant database unavailable: acme"),
        ("resolved", "RESOLVED: tenant database unavailable: acme"),
    ]
    (incident,) = alerts.relay.rows(
        "select opened_alerted_at, closed_alerted_at from subscriber_tenantincident"
    )
    assert incident["opened_alerted_at"] < incident["closed_alerted_at"]


def test_many_incidents_at_once_are_few_messages(alerts: Alerts) -> None:
    for number in range(causes.CAUSES + 10):
        alerts.open_incident(f"tenant{number}")
    alerts.rules("ops", max_per_hour=100)
    assert alerts.tick() == causes.CAUSES + 1
    assert "ERROR: 10 more tenant databases unavailable" in [s for _, s in alerts.told()]


def test_a_pause_by_an_operator_alerts_nobody(alerts: Alerts) -> None:
    alerts.open_incident(kind="paused")
    assert alerts.tick() == 0
    alerts.end_incident()
    alerts.clear()
    assert alerts.told() == []


def test_a_canary_that_is_given_up_alerts_nothing_beside_its_incident(alerts: Alerts) -> None:
    alerts.open_incident()
    alerts.give_up(code="'08006'")
    alerts.give_up(code="'08006'", tenant="other")
    alerts.tick()
    assert sorted(group["dedupe_key"] for group in alerts.groups()) == [
        "failed:UndefinedColumn:08006",
        "incident:acme",
    ]
    assert [group["total"] for group in alerts.groups()] == [1, 1]


def test_what_is_given_up_for_another_reason_alerts_during_an_incident_too(alerts: Alerts) -> None:
    alerts.open_incident()
    alerts.give_up()
    assert alerts.tick() == 2


def test_data_requests_are_told_when_they_come_and_again_when_they_are_overdue(
    alerts: Alerts,
) -> None:
    alerts.relay.rows(
        "insert into privacy_request (kind, shop_domain, event_id, customer_id, email,"
        " requested_at, due_at) values ('customers/data_request', 'a.myshopify.com', 'e', '1',"
        " 'ada@example.com', now(), now() + interval '30 days'),"
        " ('customers/redact', 'a.myshopify.com', 'f', '1', 'ada@example.com', now(),"
        " now() + interval '30 days')"
    )
    alerts.tick()
    assert alerts.told() == [("firing", "WARNING: 1 data request to answer")]
    alerts.relay.rows(
        "update privacy_request set alerted_at = alerted_at - interval '1 day',"
        " due_at = now() - interval '1 minute'"
    )
    alerts.tick()
    assert alerts.told()[1:] == [("firing", "ERROR: 2 compliance requests overdue")]
    alerts.relay.rows("update privacy_request set done_at = now()")
    alerts.clear()
    assert alerts.kinds()[2:] == ["resolved", "resolved"]
    assert "ada" not in str(alerts.relay.rows("select * from notifier.notifications"))


def test_an_outbox_that_does_not_empty_is_told_once_and_when_it_is_empty(alerts: Alerts) -> None:
    alerts.relay.rows(
        "insert into shopify_shopifyevent (topic, shop_domain, event_id, payload_sha256,"
        " received_at, needs_publish, outbox_envelope, outbox_body)"
        " select 'orders/create', 'a.myshopify.com', n::text, '', now() - interval '11 minutes',"
        " true, '{}', '' from generate_series(1, 3) n"
    )
    alerts.tick()
    alerts.later("5 minutes")
    alerts.tick()
    alerts.relay.rows("delete from shopify_shopifyevent")
    alerts.clear()
    assert alerts.told() == [
        ("firing", "ERROR: the outbox does not empty"),
        ("resolved", "RESOLVED: the outbox does not empty"),
    ]


def test_what_is_committed_late_is_told_too(alerts: Alerts) -> None:
    alerts.give_up(2)
    with psycopg.connect(alerts.relay.url) as late:
        late.execute("update subscriber_subscriberfailedevent set updated_at = now() where id = 1")
        alerts.tick()
        assert alerts.groups()[0]["total"] == 1
        late.commit()
    alerts.tick()
    assert (alerts.groups()[0]["total"], alerts.unalerted()) == (2, 0)


def test_of_two_digests_side_by_side_one_does_the_work(alerts: Alerts) -> None:
    alerts.give_up(2000, code=THREE)
    started, counts = threading.Barrier(4), []

    def run() -> None:
        with db.connect(db.Target(conninfo=alerts.relay.url), LIMITS) as connection:
            started.wait(60)
            for _ in range(3):
                counts.append(alerts.digest(connection))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (sum(counts), len(alerts.told())) == (3, 3)
    assert sum(group["total"] for group in alerts.groups()) == 2000


def test_a_digest_that_dies_between_marking_and_counting_has_done_neither(alerts: Alerts) -> None:
    alerts.give_up(3)
    alerts.relay.rows("alter table notifier.alert_groups add constraint never check (total < 0)")
    with (
        db.connect(db.Target(conninfo=alerts.relay.url), LIMITS) as connection,
        pytest.raises(psycopg.errors.CheckViolation),
    ):
        alerts.digest(connection)
    assert alerts.unalerted() == 3


def test_a_group_is_told_in_the_transaction_that_queues_its_message(alerts: Alerts) -> None:
    alerts.give_up()
    alerts.relay.rows(
        "alter table notifier.alert_groups add constraint never check (notification_id is null)"
    )
    with (
        db.connect(db.Target(conninfo=alerts.relay.url), LIMITS) as connection,
        pytest.raises(psycopg.errors.CheckViolation),
    ):
        alerts.digest(connection)
    assert alerts.told() == []
    alerts.relay.rows("alter table notifier.alert_groups drop constraint never")
    assert alerts.tick() == 1


def test_writers_of_the_failure_ledger_are_not_held_up_and_nothing_deadlocks(
    alerts: Alerts,
) -> None:
    """The longest of many small writes, beside digests and without: a ratio, with much room."""
    alerts.give_up(8000, code=THREE)
    stop, faults = threading.Event(), []

    def digests() -> None:
        with db.connect(db.Target(conninfo=alerts.relay.url), LIMITS) as connection:
            while not stop.is_set():
                try:
                    alerts.digest(connection)
                except psycopg.Error as error:
                    faults.append(error)

    def writes(count: int) -> float:
        """The median of the seconds that a writer takes for a new row and an old one."""
        taken = []
        with psycopg.connect(alerts.relay.url, autocommit=True) as connection:
            for number in range(count):
                begun = time.monotonic()
                connection.execute(
                    "update subscriber_subscriberfailedevent set status = 'failed',"
                    " next_retry_at = null, alerted_at = null, updated_at = now() where id = %s",
                    [1 + number * 7 % 8000],
                )
                taken.append(time.monotonic() - begun)
        return sorted(taken)[len(taken) // 2]

    alone = writes(300)
    beside = threading.Thread(target=digests)
    beside.start()
    writers = [threading.Thread(target=writes, args=[300]) for _ in range(3)]
    for writer in writers:
        writer.start()
    crowded = writes(300)
    for writer in writers:
        writer.join(120)
    stop.set()
    beside.join(60)
    assert faults == []
    assert crowded < alone * 100
    alerts.tick()
    assert alerts.unalerted() == 0


def test_a_message_says_what_how_many_why_and_what_to_do_and_nothing_of_a_customer(
    alerts: Alerts,
) -> None:
    alerts.give_up(7)
    alerts.tick()
    (row,) = alerts.relay.rows("select * from notifier.notifications")
    assert row["subject"] == (
        "[acme-test] ERROR: 7 failed events given up: UndefinedColumn (42703)"
    )
    for words in (
        "Examples      7, 6, 5, 4, 3\n",
        "Correct the tenant's table",
        "  python manage.py failures requeue --error-type UndefinedColumn \\\n      --code 42703\n",
        "  python manage.py notify silence failed:UndefinedColumn:42703 --for 4h",
        "docs/alerts.md#failed-events-were-given-up",
        "https://console.cloud.google.com/logs/query?project=acme-test",
    ):
        assert words in row["body"]
    assert max(map(len, row["body"].splitlines())) <= 78
    assert "example.com" not in row["body"]


def test_a_channel_with_a_heartbeat_says_that_it_is_alive_when_it_has_been_silent(
    alerts: Alerts,
) -> None:
    alerts.tick()
    assert alerts.told() == []
    alerts.rules("ops", heartbeat="1 day")
    alerts.tick()
    alerts.later("23 hours")
    alerts.tick()
    assert alerts.told() == [("message", "INFO: the notifier is alive")]
    alerts.later("1 hour")
    alerts.tick()
    assert len(alerts.told()) == 2


def test_a_fallback_that_is_not_there_is_a_problem_and_harms_nothing(alerts: Alerts) -> None:
    (problem,) = alerts.digest.problems(alerts.relay.connection)
    assert "NOTIFIER_FALLBACK_CHANNEL" in problem.cause
    alerts.give_up()
    alerts.tick(Sender(REFUSED))
    alerts.tick()
    alerts.tick()
    assert Digest(alert_channel="ops").problems(alerts.relay.connection) == []


def test_a_digest_with_nothing_new_reads_no_ledger_from_end_to_end(alerts: Alerts) -> None:
    alerts.give_up(20_000, code=THREE)
    for _ in range(3):
        alerts.tick()
    alerts.relay.rows("analyze")
    with alerts.relay.connection.cursor() as cursor:
        for statement in (causes._FAILED + causes._COUNTED, causes._CLEAR):
            cursor.execute("explain " + statement, causes._PARAMETERS | {"alert": "ops"})
            plan = "\n".join(str(row["QUERY PLAN"]) for row in cursor.fetchall())
            assert "Seq Scan on subscriber_subscriberfailedevent" not in plan, plan
