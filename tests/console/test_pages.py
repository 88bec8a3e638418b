"""Every page says what is there, and nothing that must not be shown."""

import re
from urllib.parse import quote

import pytest

from shared import db, figures, migrate, traffic
from shared.errors import StorageConfigurationError
from tests.console.conftest import Client
from tests.world import ORGANIZATION, SHOP, World, envelope

PAGES = ("/", "/failures", "/failures/1", "/kinds", "/notifications", "/privacy")
PLANTED = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[2J\u202eevil"


def ids(text: str) -> list[int]:
    """The failed events in a list."""
    return [int(found) for found in re.findall(r'<th scope="row"><a href="/failures/(\d+)"', text)]


def give_up(world: World, row: int) -> None:
    world.app(
        "update subscriber_subscriberfailedevent set status = 'failed', next_retry_at = null"
        " where id = %(row)s",
        row=row,
    )


def ran(world: World) -> None:
    """The scheduler is on."""
    world.app("update subscriber_retrystate set last_run_finished_at = now()")


# The overview


def test_the_first_line_says_that_nothing_needs_you(world: World, client: Client):
    ran(world)
    assert '<h1 class="well">Nothing needs you</h1>' in client.get("/").text


def test_the_first_line_counts_what_needs_you_and_says_what(world: World, client: Client):
    give_up(world, 1)
    world.app(
        "insert into subscriber_tenantincident (tenant, kind, started_at, next_probe_at, cause)"
        " values ('acme', 'unavailable', now() - interval '2 hours', now(), 'refused')"
    )
    said = client.get("/").said
    assert "3 things need you" in said
    assert "The database of acme has been unavailable for 2 h" in said
    assert "No retry run has ever ended" in said
    assert "1 failed event was given up" in said


def test_a_pause_needs_nobody(world: World, client: Client):
    ran(world)
    world.core.incidents.pause(ORGANIZATION, actor="jane", reason="moving")
    said = client.get("/").said
    assert "Nothing needs you" in said
    assert "moving" in said


def test_an_overdue_request_needs_somebody(world: World, client: Client):
    ran(world)
    world.app(
        "insert into privacy_request (kind, shop_domain, event_id, customer_id, email,"
        " requested_at, due_at) values ('customers/redact', 'a', 'b', '4242424242',"
        " 'ada@example.com', now(), now() - interval '1 day')"
    )
    assert "1 privacy request is overdue" in client.get("/").said
    shown = client.get("/privacy").text
    assert "overdue" in shown
    assert "ada@example.com" not in shown
    assert "4242424242" not in shown


def test_a_figure_that_cannot_be_read_leaves_the_others(world: World, client: Client):
    ran(world)
    world.app("alter table shopify_shopifyevent rename to gone")
    answer = client.get("/")
    assert answer.status == 200
    assert "Not all could be read" in answer.said
    assert "Nothing needs you" not in answer.said
    assert "Tenants with most trouble acme" not in answer.said


def test_without_the_database_a_page_says_so(world: World, client: Client):
    world.app("alter table subscriber_subscriberfailedevent rename to gone")
    answer = client.get("/failures")
    assert answer.status == 503
    assert "UndefinedTable" in answer.said
    assert "Traceback" not in answer.text


def test_the_chart_has_an_hour_for_each_row(world: World, client: Client):
    world.fail()
    world.app(
        "update subscriber_subscriberfailedevent set created_at = now() - interval '5 hours',"
        " status = 'resolved', resolution = 'replayed', resolved_at = now() where id = 1"
    )
    hours = traffic.hourly(world.core.application)
    assert len(hours) == traffic.HOURS
    assert [(each.failed, each.resolved) for each in (hours[-6], hours[-1])] == [(1, 0), (1, 1)]
    assert sum(each.failed for each in hours) == 2
    assert "In 48 hours 2 events failed and 1 were resolved" in client.get("/").text


def test_hours_and_days_begin_where_they_begin(world: World):
    """Ids are halved until the first row of a span is found, wherever gaps are."""
    for _ in range(40):
        world.fail()
    world.app("delete from subscriber_subscriberfailedevent where mod(id, 7) in (0, 3)")
    world.app(
        "update subscriber_subscriberfailedevent set created_at = date_trunc('hour', now())"
        " - make_interval(hours => (40 - id)::int * 2) + interval '1 minute'"
    )
    hours = traffic.hourly(world.core.application)
    found = [47 - i for i, each in enumerate(hours) if each.failed]
    assert found == [(40 - n) * 2 for n in range(17, 41) if n % 7 not in (0, 3)]


def test_deliveries_are_counted_over_24_hours(world: World):
    for minutes in (60 * 30, 60 * 24 + 1, 60 * 24 - 1, 5):
        world.app(
            "insert into shopify_shopifyevent (topic, shop_domain, event_id, payload_sha256,"
            " received_at) values ('t', 's', %(minutes)s, '', now() - make_interval("
            "mins => %(minutes)s))",
            minutes=minutes,
        )
    assert traffic.audited(world.core.application) == 2
    world.app("delete from shopify_shopifyevent")
    assert traffic.audited(world.core.application) == 0


def test_tenants_are_sorted_by_their_trouble(world: World):
    for organization, count in (("a", 1), ("b", 3), ("c", 2)):
        for _ in range(count):
            world.core.failures.record(envelope(), RuntimeError("x"), organization)
    give_up(world, 2)
    found = traffic.troubled(world.core.application, limit=2)
    assert [(each.tenant, each.pending, each.failed) for each in found] == [
        ("b", 2, 1),
        ("c", 2, 0),
    ]


def test_a_page_loads_itself_again_only_when_asked_to(client: Client):
    assert "http-equiv" not in client.get("/").text
    assert '<meta http-equiv="refresh" content="30">' in client.get("/?refresh=1").text
    kept = client.get("/failures?topic=orders%2Fpaid").text
    assert 'href="?topic=orders/paid&amp;refresh=1"' in kept


# Failed events


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ("", [2, 1]),
        ("organization=other", [2]),
        ("shop=OTHER.myshopify.com", [2]),
        ("topic=orders/paid", [2]),
        ("error_type=StorageConfigurationError", [2]),
        ("code=unexpected", [1]),
        ("since=1h", [2, 1]),
        ("until=2020-01-01", []),
        ("status=failed", []),
        ("status=resolved", []),
        ("status=pending&topic=orders/create", [1]),
        ("organization=%00%20", [2, 1]),
    ],
)
def test_each_filter_finds_what_it_says(world: World, client: Client, filters, found):
    error = StorageConfigurationError("no database")
    made = envelope(topic="orders/paid", shop_domain="other.myshopify.com")
    world.core.failures.record(made, error, "other")
    assert ids(client.get(f"/failures?{filters}").text) == found


@pytest.mark.parametrize(
    "said", ["since=yesterday", "status=x", "before=x", "before=99999999999999999999", "id=-1"]
)
def test_a_filter_that_means_nothing_is_said(client: Client, said):
    assert client.get(f"/failures?{said}").status == 400


def test_pages_follow_each_other_by_key(world: World, client: Client):
    for _ in range(50):
        world.fail()
    first = client.get(f"/failures?shop={SHOP}").text
    assert ids(first) == list(range(51, 1, -1))
    link = re.search(r'rel="next" href="([^"]+)"', first)
    assert link
    world.fail()
    second = client.get(link[1].replace("&amp;", "&")).text
    assert ids(second) == [1]
    assert 'rel="next"' not in second


def test_a_kind_leads_to_its_events(world: World, client: Client):
    world.fail(envelope(topic="orders/paid"))
    (_, other) = sorted(figures.groups(world.core.application), key=lambda each: each.topic)
    page = client.get("/kinds").text
    assert f'href="/failures?fingerprint={other.fingerprint}"' in page
    assert ids(client.get(f"/failures?fingerprint={other.fingerprint}").text) == [2]


def test_one_failed_event_has_its_history_and_the_next_step(world: World, client: Client):
    world.make_due(1)
    world.break_tenant()
    world.retry(event_id=1)
    said = client.get("/failures/1").said
    assert "1 of 5 retries failed" in said
    assert "Next step Restore access to the tenant database" in said
    assert "Parked unavailable" in said
    assert "rescheduled" in said


def test_what_is_not_there_is_not_found(client: Client):
    for path in ("/failures/99", "/failures/99999999999999999999", "/failures/x", "/none"):
        assert client.get(path).status == 404


def test_a_payload_is_shown_on_demand_and_that_is_recorded(world: World, client: Client):
    row = world.fail(envelope(b'{"email": "ada@example.com", "total": 1.10}'))
    assert "ada@example.com" not in client.get(f"/failures/{row}").text
    shown = client.post(f"/failures/{row}").said
    assert '"email": "ada@example.com"' in shown
    assert "1.10" in shown
    (action,) = world.app("select actor, action, scope from subscriber_operatoraction")
    assert action == {"actor": "jane@bench", "action": "view", "scope": {"rows": [row]}}


def test_a_large_payload_is_cut(world: World, client: Client):
    row = world.fail(envelope(b'"' + b"x" * 1_000_000 + b'"'))
    answer = client.post(f"/failures/{row}")
    assert len(answer.text) < 300_000
    assert f"manage.py failures show {row} --payload" in answer.said


# Notifications


def test_without_the_notifier_the_page_says_so(client: Client):
    assert "not installed" in client.get("/notifications").said
    assert "Notifier \N{EN DASH} not installed" in client.get("/").said


def test_notifications_have_their_state_and_last_error(world: World, client: Client):
    with db.connect(db.Target(conninfo=world.app_url), migrate.LIMITS) as connection:
        migrate.apply(connection, migrate.Series.NOTIFIER)
    assert "There are none." in client.get("/notifications").said
    world.app(
        "insert into notifier.notifications (channel, severity, kind, subject, body, status,"
        " attempts, error_code, error, finished_at) values ('ops', 'error', 'firing', %(subject)s,"
        " 'the body', 'failed', 4, 'smtp_535', 'The login was refused.', now())",
        subject=PLANTED.replace("\x1b", ""),
    )
    answer = client.get("/notifications")
    assert "smtp_535 The login was refused." in answer.said
    assert "failed" in answer.said
    assert "the body" not in answer.said
    assert "<script" not in answer.text
    ran(world)
    assert "1 notification reached nobody in 24 h" in client.get("/").said


# What must never be on a page


def planted(world: World) -> None:
    """Everything that a sender or an operator can say, said by an enemy."""
    made = envelope(
        topic=PLANTED, shop_domain=PLANTED, event_id=PLANTED, attributes={PLANTED: PLANTED}
    )
    row = world.core.failures.record(made, StorageConfigurationError(PLANTED), PLANTED)
    world.core.incidents.pause(PLANTED.replace("\x1b", ""), actor=PLANTED, reason=PLANTED)
    world.app(
        "insert into subscriber_replayattempt (failed_event_id, attempt, lease_token, started_at,"
        " finished_at, outcome, error_type, error_message) values (%(row)s, 1, gen_random_uuid(),"
        " now(), now(), 'failed', %(x)s, %(x)s)",
        row=row,
        x=PLANTED,
    )
    world.app(
        "insert into subscriber_operatoraction (actor, action, reason, scope, count)"
        " select %(x)s, %(x)s, %(x)s, jsonb_build_object('rows', jsonb_build_array(id)), 1"
        " from subscriber_subscriberfailedevent",
        x=PLANTED,
    )
    world.app(
        "insert into privacy_request (kind, shop_domain, event_id, requested_at, due_at)"
        " values ('shop/redact', %(x)s, 'x', now(), now())",
        x=PLANTED,
    )


def test_what_a_sender_says_is_text_on_every_page(world: World, client: Client):
    planted(world)
    seen = 0
    said = quote(PLANTED)
    for path in (
        *PAGES,
        "/failures/2",
        f"/failures?organization={said}&shop={said}&topic={said}",
        f"/confirm/requeue?organization={said}&status=pending",
        f"/confirm/resolve?reason={said}&topic={said}",
        f"/?refresh=1&{said}={said}",
        f"/none/{said}",
        f"/failures?since={said}",
        f"/failures?status={said}",
    ):
        text = client.get(path).text
        assert "<script" not in text, path
        assert "<img" not in text, path
        assert "\x1b" not in text, path
        assert "\u202e" not in text, path
        seen += text.count("&lt;script&gt;")
    assert seen > 20
    for answer in (client.post("/rehearse", id="2"), client.post("/failures/2")):
        assert answer.status == 200
        assert "<script" not in answer.text


def test_no_secret_is_on_any_page(world: World, client: Client):
    world.break_tenant()
    world.make_due(1)
    world.retry(event_id=1)
    world.app("alter table privacy_request rename to gone")
    secrets = [world.environ["CREDENTIAL_KEYS"], world.environ["PRIVACY_HASH_KEY"], world.app_url]
    secrets += [
        row["password_encrypted"]
        for row in world.app("select password_encrypted from databases_databasecredential")
    ]
    pages = [client.get(path) for path in PAGES] + [client.post("/rehearse", id="1")]
    for answer in pages:
        for secret in secrets:
            assert secret not in answer.text
