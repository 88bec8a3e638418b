"""The retry function: what is due is replayed, and the answer counts what came of it."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dev import deliveries
from dev.functions import Function
from dev.pubsub_grpc import PubSubServer
from shared import audit, outbox
from shared.model import Envelope
from tests.functions.rig import NOBODY, PUBSUB_TOPIC, Inbox, Log, Silence, Starter, allowed
from tests.world import SHOP, World, envelope

# A row asked for by its id, and a dry run, are replays only.
REPLAYED = {"retried": 0, "resolved": 0, "failed": 0, "deferred": 0, "lost": 0, "dry_run": False}
NOTIFIED = dict.fromkeys(("sent", "retry", "failed", "expired", "invalid"), 0)
NOTHING = REPLAYED | {"republished": 0, "notified": NOTIFIED}
EMAIL = "jane.planted@example.com"


@pytest.fixture(scope="module")
def retry(start_shared: Starter, world: World) -> Function:
    return start_shared("retry", **world.environ, LOG_LEVEL="DEBUG")


@pytest.fixture(autouse=True)
def _nothing_is_due(world: World) -> None:
    """A run replays whatever is due, so every test begins with an empty failure ledger."""
    world.app("delete from subscriber_subscriberfailedevent returning id")
    world.tenant("delete from shopify_events returning id")
    world.tenant("delete from shopify_orders returning id")


def run(function: Function, **asked: Any) -> dict[str, Any]:
    """What the function answers to a request that it accepts, but for what is left after it."""
    answer = deliveries.post(function.url, json.dumps(asked).encode())
    assert answer.status == 200
    return done(answer)


def done(answer: deliveries.Answer) -> dict[str, Any]:
    """What a run did."""
    return {name: value for name, value in answer.json().items() if name != "left"}


def order() -> Envelope:
    """The event of an order of its own."""
    return envelope({"id": uuid.uuid4().int % 10**15})


def hopeless() -> Envelope:
    """An event that no replay can store."""
    return envelope(b"not JSON")


def states(world: World) -> list[tuple[str, int]]:
    return [(row["status"], row["retry_count"]) for row in world.failed_events()]


def everything(world: World) -> list[Any]:
    """All that a run could change."""
    return [
        world.failed_events(),
        world.attempts(),
        world.tenant("select * from shopify_events order by id"),
        world.tenant("select * from shopify_orders order by id"),
    ]


# What it is asked


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        pytest.param(b"", {}, id="nothing"),
        pytest.param(b"", {"Content-Type": "application/octet-stream"}, id="Cloud Scheduler"),
        pytest.param(b"{}", {"Content-Type": "application/json"}, id="empty object"),
        pytest.param(b" {} \n", {}, id="empty object with spaces"),
        pytest.param(b'{"dry_run": false}', {}, id="no dry run"),
        pytest.param(b'{"limit": null, "event_id": null}', {}, id="options that are null"),
    ],
)
def test_asked_for_nothing_in_particular_it_replays_what_is_due(
    retry: Function, world: World, body: bytes, headers: dict[str, str]
) -> None:
    world.fail(order())
    answer = deliveries.post(retry.url, body, headers)
    assert (answer.status, done(answer)) == (200, NOTHING | {"retried": 1, "resolved": 1})
    assert states(world) == [("resolved", 0)]
    assert len(world.tenant("select id from shopify_events")) == 1


def test_with_nothing_due_every_count_is_zero(retry: Function) -> None:
    assert run(retry) == NOTHING


def test_the_answer_counts_what_was_resolved_and_what_failed_again(
    retry: Function, world: World
) -> None:
    for failing in (order(), hopeless(), order()):
        world.fail(failing)
    assert run(retry) == NOTHING | {"retried": 3, "resolved": 2, "failed": 1}
    assert states(world) == [("resolved", 0), ("pending", 1), ("resolved", 0)]
    assert run(retry) == NOTHING, "what failed is not due yet"


def test_the_answer_and_the_log_say_what_is_left(retry: Function, world: World) -> None:
    world.fail(hopeless())
    log = Log(retry)
    left = deliveries.post(retry.url).json()["left"]
    assert (left["pending"], left["due"], left["failed"], left["outbox"]) == (1, 0, 0, 0)
    assert (left["incidents_open"], left["paused"]) == (0, 0)
    (line,) = log.events("tick.finished")
    assert {name: line[name] for name in left} == left


def test_the_last_failed_replay_counts_as_failed_too(retry: Function, world: World) -> None:
    row = world.fail(hopeless())
    for _ in range(5):
        assert run(retry) == NOTHING | {"retried": 1, "failed": 1}
        world.make_due(row)
    assert states(world) == [("failed", 5)]
    assert run(retry) == NOTHING


def test_limit_caps_the_rows_replayed(retry: Function, world: World) -> None:
    for _ in range(3):
        world.fail(order())
    assert run(retry, limit=2) == NOTHING | {"retried": 2, "resolved": 2}
    assert states(world) == [("resolved", 0), ("resolved", 0), ("pending", 0)]
    assert run(retry, limit=2) == NOTHING | {"retried": 1, "resolved": 1}


def test_without_a_limit_it_goes_on_batch_after_batch(start: Starter, world: World) -> None:
    retry = start("retry", **world.environ, RETRY_BATCH_LIMIT="2")
    for _ in range(7):
        world.fail(order())
    assert run(retry) == NOTHING | {"retried": 7, "resolved": 7}


def test_event_id_picks_one_row_by_its_primary_key(retry: Function, world: World) -> None:
    rows = [world.fail(order()) for _ in range(3)]
    assert run(retry, event_id=rows[1]) == REPLAYED | {"retried": 1, "resolved": 1}
    assert states(world) == [("pending", 0), ("resolved", 0), ("pending", 0)]


@pytest.mark.parametrize("why", ["unknown", "largest", "not due", "leased", "resolved", "failed"])
def test_event_id_of_a_row_that_is_not_to_be_replayed_changes_nothing(
    retry: Function, world: World, why: str
) -> None:
    row = world.fail(order())
    match why:
        case "unknown":
            asked = row + 1000
        case "largest":
            asked = 2**63 - 1
        case _:
            asked = row
            world.app(
                "update subscriber_subscriberfailedevent set"
                " status = case %(why)s when 'resolved' then 'resolved' when 'failed' then 'failed'"
                "   else 'pending' end,"
                " resolved_at = case when %(why)s = 'resolved' then now() end,"
                " resolution = case when %(why)s = 'resolved' then 'replayed' end,"
                " next_retry_at = case when %(why)s = 'not due' then now() + interval '1 hour' end,"
                " lease_token = case when %(why)s = 'leased' then gen_random_uuid() end,"
                " leased_until = case when %(why)s = 'leased' then now() + interval '1 hour' end"
                " where id = %(row)s returning id",
                why=why,
                row=row,
            )
    before = everything(world)
    assert run(retry, event_id=asked) == REPLAYED
    assert everything(world) == before


def test_a_lease_that_ran_out_is_taken_over(retry: Function, world: World) -> None:
    row = world.fail(order())
    token = uuid.uuid4()
    assert [claim.id for claim in world.core.leases.claim(token, 1)] == [row]
    assert run(retry) == NOTHING
    world.expire_lease(row)
    assert run(retry) == NOTHING | {"retried": 1, "resolved": 1}


def test_what_no_time_is_left_for_is_given_back(start: Starter, world: World) -> None:
    retry = start("retry", **world.environ, RETRY_TIME_BUDGET_SECONDS="1")
    world.tenant(
        "create function dawdle() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(1.2); return new; end $$"
    )
    world.tenant(
        "create trigger dawdle before insert on shopify_events for each row"
        " execute function dawdle()"
    )
    for _ in range(3):
        world.fail(order())
    answer = run(retry)
    assert answer == NOTHING | {"retried": 1, "resolved": 1, "deferred": 2}
    assert states(world) == [("resolved", 0), ("pending", 0), ("pending", 0)]
    world.tenant("drop trigger dawdle on shopify_events")
    assert run(retry) == NOTHING | {"retried": 2, "resolved": 2}


def test_a_tick_sends_the_outbox_too(start: Starter, world: World) -> None:
    sent = order()
    row = audit.record(world.core.application, sent)
    outbox.put(world.core.application, row, sent.payload, {"X-Shopify-Webhook-Id": sent.event_id})
    with PubSubServer() as server:
        inbox = Inbox(server)
        settings = {"PUBSUB_TOPIC": PUBSUB_TOPIC, "PUBSUB_EMULATOR_HOST": inbox.host}
        assert run(start("retry", **world.environ, **settings)) == NOTHING | {"republished": 1}
        assert inbox.message(sent.event_id).data == sent.payload


# A dry run


def test_a_dry_run_changes_nothing_and_says_what_would_happen(
    retry: Function, world: World
) -> None:
    first, second = order(), hopeless()
    stored = world.fail(first)
    assert run(retry) == NOTHING | {"retried": 1, "resolved": 1}
    rows = [world.fail(order()), world.fail(second)]
    before = everything(world)
    answer = run(retry, dry_run=True)
    assert everything(world) == before
    assert answer == REPLAYED | {
        "retried": 2,
        "resolved": 1,
        "failed": 1,
        "dry_run": True,
        "rows": [
            {"id": rows[0], "ledger": "inserted", "snapshot": "inserted"},
            {
                "id": rows[1],
                "error_type": "ValueError",
                "error_message": "The body is not JSON: it goes wrong at character 0.",
            },
        ],
    }
    assert stored not in rows
    assert run(retry) == NOTHING | {"retried": 2, "resolved": 1, "failed": 1}


@pytest.mark.parametrize("by", ["limit", "event_id"])
def test_a_dry_run_heeds_the_other_options(retry: Function, world: World, by: str) -> None:
    rows = [world.fail(order()) for _ in range(3)]
    asked = {"limit": 1} if by == "limit" else {"event_id": rows[2]}
    answer = run(retry, dry_run=True, **asked)
    assert [row["id"] for row in answer["rows"]] == [rows[0] if by == "limit" else rows[2]]
    assert states(world) == [("pending", 0)] * 3


# What it refuses


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"limit=1", id="not JSON"),
        pytest.param(b"{", id="cut off"),
        pytest.param(b"\xff\xfe\xfd", id="not text"),
        pytest.param(b"[" * 100_000, id="nested without end"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b'"{}"', id="text"),
        pytest.param(b"7", id="a number"),
        pytest.param(b'{"limt": 1}', id="unknown option"),
        pytest.param(b'{"limit": 1, "force": true}', id="an option too many"),
        pytest.param(b'{"LIMIT": 1}', id="capitals"),
        pytest.param(b'{"limit": 0}', id="limit 0"),
        pytest.param(b'{"limit": -1}', id="limit below 0"),
        pytest.param(b'{"limit": 1.0}', id="limit with a fraction"),
        pytest.param(b'{"limit": 1e1}', id="limit with an exponent"),
        pytest.param(b'{"limit": "1"}', id="limit as text"),
        pytest.param(b'{"limit": true}', id="limit true"),
        pytest.param(b'{"limit": [1]}', id="limit in a list"),
        pytest.param(b'{"limit": NaN}', id="limit NaN"),
        pytest.param(b'{"limit": Infinity}', id="limit infinite"),
        pytest.param(b'{"limit": 9223372036854775808}', id="limit too large"),
        pytest.param(b'{"limit": ' + b"9" * 5000 + b"}", id="limit far too large"),
        pytest.param(b'{"event_id": 0}', id="event_id 0"),
        pytest.param(b'{"event_id": -7}', id="event_id below 0"),
        pytest.param(b'{"event_id": "7"}', id="event_id as text"),
        pytest.param(b'{"event_id": false}', id="event_id false"),
        pytest.param(b'{"event_id": 9223372036854775808}', id="event_id too large"),
        pytest.param(b'{"dry_run": 1}', id="dry_run 1"),
        pytest.param(b'{"dry_run": "true"}', id="dry_run as text"),
        pytest.param(b'{"dry_run": null}', id="dry_run null"),
    ],
)
def test_a_body_that_it_does_not_understand_is_refused_and_nothing_replayed(
    retry: Function, world: World, body: bytes
) -> None:
    world.fail(order())
    answer = deliveries.post(retry.url, body, {"Content-Type": "application/json"})
    assert answer.status == 400
    assert list(answer.json()) == ["error"]
    assert states(world) == [("pending", 0)]


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_only_post_replays(retry: Function, world: World, method: str) -> None:
    world.fail(order())
    assert allowed(retry, method) == (405, "POST")
    assert states(world) == [("pending", 0)]


# The application database


def test_an_application_database_that_is_down_is_a_503(
    start: Starter, environ: dict[str, str]
) -> None:
    url = f"postgresql://app:planted-Pa55@{NOBODY}/app"
    retry = start("retry", **environ | {"APP_DATABASE_URL": url})
    log = Log(retry)
    for body in (b"", b'{"dry_run": true}', b'{"event_id": 1}'):
        answer = deliveries.post(retry.url, body)
        assert answer.status == 503
        assert list(answer.json()) == ["error"]
    assert log.events("replay.unavailable")
    assert "planted" not in log.text()


@pytest.mark.parametrize("auto_migrate", ["true", "false"])
def test_an_application_database_that_never_speaks_is_a_503_too(
    start: Starter, environ: dict[str, str], auto_migrate: str
) -> None:
    with Silence() as database:
        settings = {"APP_DATABASE_URL": database.url, "AUTO_MIGRATE": auto_migrate}
        retry = start("retry", **environ | settings)
        assert deliveries.post(retry.url).status == 503


def test_bad_input_is_bad_input_without_the_database(
    start: Starter, environ: dict[str, str]
) -> None:
    with Silence() as database:
        retry = start("retry", **environ | {"APP_DATABASE_URL": database.url})
        assert deliveries.post(retry.url, b"[]").status == 400
        assert database.callers() == 0


def test_auto_migrate_makes_an_empty_database_ready(
    start: Starter, environ: dict[str, str], empty_url: str, world: World
) -> None:
    settings = environ | {"APP_DATABASE_URL": empty_url, "AUTO_MIGRATE": "true"}
    retry = start("retry", **settings)
    assert [run(retry) for _ in range(2)] == [NOTHING, NOTHING]
    subscriber = start("subscriber", **settings)
    message = {"message": {"data": "e30=", "attributes": deliveries.attributes("a/b", SHOP)}}
    answer = deliveries.post(subscriber.url, json.dumps(message).encode())
    assert answer.status == 204, "kept: the tables are there, the shop is not"
    assert run(retry) == NOTHING | {"retried": 1, "failed": 1}


def test_two_that_migrate_at_the_same_time_do_not_harm_each_other(
    start: Starter, environ: dict[str, str], empty_url: str
) -> None:
    settings = environ | {"APP_DATABASE_URL": empty_url, "AUTO_MIGRATE": "true"}
    servers = [start("retry", **settings) for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda server: deliveries.post(server.url), servers * 2))
    assert [answer.status for answer in answers] == [200] * 4


def test_without_auto_migrate_nothing_is_made(
    start: Starter, environ: dict[str, str], empty_url: str, world: World
) -> None:
    retry = start("retry", **environ | {"APP_DATABASE_URL": empty_url})
    log = Log(retry)
    answer = deliveries.post(retry.url)
    assert (answer.status, answer.body) == (500, b"")
    (event,) = log.events("function.failed")
    assert event["error_type"] == "UndefinedTable"


# Two at the same time


def test_two_servers_called_at_the_same_time_replay_each_row_once(
    start: Starter, world: World
) -> None:
    servers = [start("retry", **world.environ, RETRY_BATCH_LIMIT="2") for _ in range(2)]
    good = [world.fail(order()) for _ in range(30)]
    bad = [world.fail(hopeless()) for _ in range(10)]
    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(run, servers * 2))
    total = {name: sum(report[name] for report in reports) for name in REPLAYED}
    assert total == REPLAYED | {"retried": 40, "resolved": 30, "failed": 10}
    assert sum(report["retried"] > 0 for report in reports) > 1, "they did share the work"
    assert sorted(attempt["failed_event_id"] for attempt in world.attempts()) == good + bad
    assert states(world) == [("resolved", 0)] * 30 + [("pending", 1)] * 10
    assert len(world.tenant("select id from shopify_events")) == 30


# Settings, and what is written down


def test_without_its_settings_the_function_starts_and_names_them(start: Starter) -> None:
    retry = start("retry", RETRY_BATCH_LIMIT="0", AUTO_MIGRATE="perhaps")
    log = Log(retry)
    answer = deliveries.post(retry.url)
    assert (answer.status, answer.body) == (500, b"")
    (event,) = log.events("function.failed")
    for fault in ("APP_DATABASE_URL is missing", "RETRY_BATCH_LIMIT must", "AUTO_MIGRATE must"):
        assert fault in event["error_message"]


def test_nothing_of_a_customer_is_written_down_when_a_replay_fails(
    retry: Function, world: World
) -> None:
    body = json.dumps({"id": 1, "email": EMAIL}).encode()
    log = Log(retry)
    for broken in (body[:-1], b"[" + body + b"]", body + b'{"shop_domain":"a.myshopify.com"}'):
        world.fail(envelope(broken, attributes={"X-Shopify-Name": EMAIL}))
    assert run(retry)["failed"] == 3
    for row in world.failed_events():
        assert EMAIL not in row["error_message"] + row["traceback"]
    assert all(EMAIL not in attempt["error_message"] for attempt in world.attempts())
    assert len(log.events("replay.failed")) == 3
    assert EMAIL not in log.text()


def test_a_verdict_is_dated_with_the_start_of_its_run(retry: Function, world: World) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    for _ in range(2):
        world.fail(order())
    run(retry)
    dates = {row["last_attempted_at"] for row in world.failed_events()}
    assert len(dates) == 1
    assert dates.pop() > before
