"""preflight: each fault is found under its name, with a cause and a remedy; nothing is changed."""

import json
import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from google.cloud.scheduler_v1.types import Job
from google.protobuf.duration_pb2 import Duration
from google.pubsub_v1.types import DeadLetterPolicy, ExpirationPolicy, PushConfig, RetryPolicy
from google.pubsub_v1.types import Subscription as Made
from google.rpc.status_pb2 import Status

from cli import scheduler as commands
from cli.preflight import application, pubsub, scheduler
from cli.preflight.finding import Severity, guarded
from dev.postgres import Server
from dev.pubsub_grpc import PubSubServer
from shared import config
from tests.integration.test_commands import run
from tests.integration.test_failures_commands import fits
from tests.integration.test_scheduler import JOB, LAST, Scheduler
from tests.world import ORGANIZATION, World

TOPIC = "projects/local/topics/events"
SUBSCRIPTION = "projects/local/subscriptions/events"
PARTS_NOT_HERE = ("scheduler", "pubsub", "settings", "notifier")
DEAD_LETTERS = "projects/local/subscriptions/dead-letters"


def findings(world: World, *words: str, **environ: str) -> dict[str, list[dict]]:
    """What preflight finds that is not in order, by the check's name."""
    done = run({**world.environ, **environ}, "preflight", "--json", *words)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    found: dict[str, list[dict]] = {}
    for each in report["findings"]:
        if each["severity"] != "ok":
            assert each["cause"]
            assert each["remedy"]
            found.setdefault(each["check"], []).append(each)
    return found


def sql(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[arg-type]


def test_all_is_well_where_all_is_well(world: World):
    world.retry()
    found = findings(world)
    assert {name for name in found if not name.startswith(PARTS_NOT_HERE)} == set()
    assert all(each["severity"] == "warning" for name in found for each in found[name])


def test_the_report_fits_a_terminal_and_ends_with_a_count(world: World):
    world.fail()
    world.app(
        "update subscriber_subscriberfailedevent"
        " set status = 'failed', next_retry_at = null, retry_count = 5"
    )
    world.break_tenant()
    done = run(world.environ, "preflight")
    assert fits(done.stdout)
    assert "1 failed event given up." in done.stdout
    assert "→ Restore access to the tenant database" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Errors: 1,")


@pytest.mark.parametrize("strict", [False, True])
def test_warnings_fail_only_on_demand(world: World, strict: bool):
    world.retry()
    done = run(world.environ, "preflight", *(["--strict"] if strict else []))
    assert done.returncode == int(strict)


def test_every_malformed_setting_is_an_error_of_its_own(world: World):
    found = findings(world, LEASE_SECONDS="soon", RETENTION_AUDIT_DAYS="3")
    assert [each["severity"] for each in found["settings"]] == ["error", "error"]


def test_a_key_that_is_no_key_is_found(world: World):
    (found,) = findings(world, CREDENTIAL_KEYS="hunter2")["settings:keys"]
    assert "hunter2" not in found["cause"]


def test_an_application_database_out_of_reach_is_the_only_thing_said_of_it(world: World):
    found = findings(world, APP_DATABASE_URL="postgresql://nobody:secret@127.0.0.1:1/none")
    assert "secret" not in json.dumps(found)
    assert {name for name in found if not name.startswith(PARTS_NOT_HERE)} == {
        "application:connection"
    }


def test_pending_migrations_of_the_application_are_an_error(world: World):
    world.app("delete from subscriber_schema_version where version = 6")
    (found,) = findings(world)["application:schema"]
    assert "0006_privacy.sql" in found["cause"]
    assert found["remedy"] == "Run manage.py migrate."


def test_a_role_that_may_not_write_is_found(world: World):
    world.app("create role reader")
    try:
        world.app("grant select on all tables in schema public to reader")
        with psycopg.connect(world.app_url) as connection:
            connection.execute("set role reader")
            found = list(application.grants(connection, ("shopify_shopifyevent",), "application"))
        assert [each.severity for each in found] == [Severity.ERROR]
        assert "shopify_shopifyevent (delete, insert, update)" in found[0].cause
    finally:
        world.app("drop owned by reader")
        world.app("drop role reader")


def test_a_clock_that_is_wrong_is_found(world: World, monkeypatch: pytest.MonkeyPatch):
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() - 60)
    with psycopg.connect(world.app_url) as connection:
        (found,) = application.clock(connection, "application")
    assert found.severity is Severity.WARNING
    assert found.cause.startswith("Its clock is 60 s ahead of")


def test_what_waits_too_long_is_found(world: World):
    row = world.fail()
    world.app(
        "update subscriber_subscriberfailedevent"
        " set created_at = now() - interval '1 hour' where id = %(row)s",
        row=row,
    )
    world.app("update subscriber_retrystate set last_run_finished_at = now() - interval '1 hour'")
    found = findings(world)
    assert found["events:due"][0]["severity"] == "warning"
    assert found["events:last_run"][0]["severity"] == "error"


def test_shops_that_lead_to_no_database_or_to_two_are_found(world: World):
    world.connect_shop("lost.myshopify.com", "lost")
    world.app("update databases_database set deleted_at = now() where organization_id = 'lost'")
    world.app(
        "insert into shopify_shopifyconnection (organization_id, myshopify_domain, status)"
        " values ('other', 'acme.myshopify.com', 'active')"
    )
    found = findings(world)
    assert "lost" in found["routes:database"][0]["cause"]
    assert "acme.myshopify.com" in found["routes:ambiguous"][0]["cause"]


def test_each_tenant_is_looked_at_and_one_fault_hides_no_other(world: World, postgres: Server):
    bare = postgres.create_database(f"bare_{time.monotonic_ns()}")
    world.connect_shop("bare.myshopify.com", "bare", bare)
    world.connect_shop("down.myshopify.com", "down")
    world.app(
        "update databases_databasecredential set port = 1 where database_id ="
        " (select id from databases_database where organization_id = 'down')"
    )
    sql(world.tenant_url, "drop table shopify_refunds")
    sql(world.tenant_url, "alter table shopify_events disable row level security")
    found = findings(world)
    assert "0001" in found["tenant:bare:schema"][0]["cause"]
    assert "shopify_refunds" in found[f"tenant:{ORGANIZATION}:schema"][0]["cause"]
    assert found[f"tenant:{ORGANIZATION}:rls"][0]["severity"] == "warning"
    assert found["tenant:down"][0]["remedy"].startswith("Restore access")
    assert "tenant:down" not in findings(world, "--organization", ORGANIZATION)
    assert "2 of 3 tenants" in findings(world, "--limit", "1")["tenants"][0]["cause"]


def test_the_lag_is_from_receipt_to_row(world: World):
    for seconds in (1, 2, 60):
        sql(
            world.tenant_url,
            "insert into shopify_events (event_id, organization_id, shop_domain, topic, event_type,"
            " resource_type, received_at, payload_sha256)"
            f" values ('{seconds}', 'acme', 'acme.myshopify.com', 'orders/create', 'create',"
            f" 'orders', now() - interval '{seconds} seconds', '\\x00')",
        )
    report = json.loads(run(world.environ, "preflight", "--json").stdout)
    lag = report["lag"][ORGANIZATION]
    assert (lag["events"], round(lag["p50_seconds"])) == (3, 2)
    assert 50 < lag["p99_seconds"] <= 61


def test_a_check_that_fails_itself_is_a_finding():
    def broken():
        raise RuntimeError("the check fell over")

    (found,) = guarded("x", broken)
    assert (found.check, found.severity) == ("x", Severity.ERROR)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch):
    with PubSubServer() as server:
        server.broker.create_topic(_topic(TOPIC))
        server.broker.create_topic(_topic(f"{TOPIC}-dead"))
        yield server


def _topic(name: str):
    from google.pubsub_v1.types import Topic  # noqa: PLC0415 - beside its only use

    return Topic(name=name)


def looked_at(broker: PubSubServer, **environ: str) -> dict[str, list[str]]:
    settings = config.load(
        {
            "PUBSUB_TOPIC": TOPIC,
            "PUBSUB_SUBSCRIPTION": SUBSCRIPTION,
            "PUBSUB_DEAD_LETTER_SUBSCRIPTION": DEAD_LETTERS,
            "PUBSUB_EMULATOR_HOST": broker.host,
            **environ,
        }
    )
    found: dict[str, list[str]] = {}
    for each in pubsub.look(settings):
        found.setdefault(each.check, []).append(f"{each.severity}: {each.cause}")
    return found


def test_a_topic_and_subscriptions_that_do_not_exist_are_errors(broker: PubSubServer):
    found = looked_at(broker, PUBSUB_TOPIC="projects/local/topics/other")
    assert found.keys() == {"pubsub:topic", "pubsub:subscription", "pubsub:dead_letters"}
    assert all(causes == ["error: It does not exist."] for causes in found.values())


def test_subscriptions_as_terraform_makes_them_are_in_order(broker: PubSubServer):
    week, fortnight = Duration(seconds=7 * 86400), Duration(seconds=14 * 86400)
    broker.broker.create_subscription(
        Made(
            name=SUBSCRIPTION,
            topic=TOPIC,
            push_config=PushConfig(push_endpoint="http://127.0.0.1:1/"),
            message_retention_duration=week,
            retry_policy=RetryPolicy(
                minimum_backoff=Duration(seconds=10), maximum_backoff=Duration(seconds=600)
            ),
            dead_letter_policy=DeadLetterPolicy(
                dead_letter_topic=f"{TOPIC}-dead", max_delivery_attempts=100
            ),
            expiration_policy=ExpirationPolicy(),
        )
    )
    broker.broker.create_subscription(
        Made(name=DEAD_LETTERS, topic=f"{TOPIC}-dead", message_retention_duration=fortnight)
    )
    assert {
        name: [cause[:2] for cause in causes] for name, causes in looked_at(broker).items()
    } == {
        "pubsub:topic": ["ok"],
        "pubsub:subscription": ["ok"],
        "pubsub:dead_letters": ["ok"],
    }


def test_subscriptions_that_lose_messages_are_found(broker: PubSubServer):
    broker.broker.create_subscription(
        Made(
            name=SUBSCRIPTION,
            topic=f"{TOPIC}-dead",
            expiration_policy=ExpirationPolicy(ttl=Duration(seconds=31 * 86400)),
            message_retention_duration=Duration(seconds=600),
        )
    )
    broker.broker.create_subscription(
        Made(
            name=DEAD_LETTERS,
            topic=f"{TOPIC}-dead",
            push_config=PushConfig(push_endpoint="http://127.0.0.1:1/"),
            message_retention_duration=Duration(seconds=31 * 86400),
        )
    )
    found = looked_at(broker)
    said = "\n".join(found["pubsub:subscription"])
    for words in ("belongs to", "no dead-letter topic", "without a growing", "31 idle", "0:10:00"):
        assert words in said
    said = "\n".join(found["pubsub:dead_letters"])
    for words in ("31 days, and DEAD_LETTER_RETENTION_DAYS says 14", "It pushes"):
        assert words in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "ok: The job is on"),
        ({"state": Job.State.PAUSED}, "warning: Somebody paused"),
        ({"state": Job.State.DISABLED}, "error: The job is DISABLED"),
        ({"status": Status(code=7)}, "error: The last attempt ended with PERMISSION_DENIED"),
        ({"last_attempt_time": LAST - timedelta(hours=1)}, "error: The last attempt was 1 h ago"),
        ({"last_attempt_time": None}, "warning: The job has never run"),
        ({"name": "projects/acme/locations/l/jobs/other"}, "error: It does not exist"),
    ],
)
def test_the_schedulers_job_is_looked_at(monkeypatch: pytest.MonkeyPatch, changes, words):
    settings = config.load({"SCHEDULER_JOB": JOB})
    with Scheduler() as server:
        server.job.last_attempt_time = datetime.now(UTC) - timedelta(minutes=1)
        for name, value in changes.items():
            setattr(server.job, name, value)
        monkeypatch.setattr(commands, "connected", server.client)
        (found,) = scheduler.look(settings)
    assert f"{found.severity}: {found.cause}".startswith(words)
