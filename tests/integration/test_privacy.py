"""Compliance requests are recorded, and what they suppress stays away however it comes back."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from shared import db, migrate
from shared.leases import Verdict
from shared.model import LedgerOutcome, Outcome, SnapshotOutcome
from shared.rebuild import Rebuild, Scope
from shared.subjects import Hasher
from tests.world import NOW, ORGANIZATION, SHOP, World, envelope

HOUR = timedelta(hours=1)
SUPPRESSED = Outcome(ledger=LedgerOutcome.SUPPRESSED, snapshot=SnapshotOutcome.SKIPPED)
PEOPLE = "select payload, parsed_payload, shopify_id from shopify_customers"


def customer(hours: float = -1, id_: int = 7, **body: Any):
    """A state of a customer, so many hours after the request."""
    clock = (NOW + hours * HOUR).isoformat()
    sent = envelope({"id": id_, "email": "ada@example.com", "updated_at": clock, **body},
                    "customers/update")  # fmt: skip
    return replace(sent, triggered_at=NOW + hours * HOUR)


def redact(**customer: Any):
    body = {"shop_id": 1, "shop_domain": SHOP, "customer": customer, "orders_to_redact": [41]}
    return replace(envelope(body, "customers/redact"), triggered_at=NOW)


def shop_redact():
    return replace(envelope({"shop_id": 1, "shop_domain": SHOP}, "shop/redact"), triggered_at=NOW)


def data_request():
    body = {"shop_id": 1, "shop_domain": SHOP, "customer": {"id": 7, "email": "ada@example.com"},
            "orders_requested": [41], "data_request": {"id": 9}}  # fmt: skip
    return replace(envelope(body, "customers/data_request"), triggered_at=NOW)


@pytest.fixture
def apply(world: World):
    return world.core.pipeline.apply


def requests(world: World) -> list[dict[str, Any]]:
    return world.app("select * from privacy_request order by id")


def ledger(world: World, event_id: str) -> dict[str, Any]:
    (row,) = world.tenant("select * from shopify_events where event_id = %(e)s", e=event_id)
    return row


# Recording


def test_a_request_is_recorded_once_with_whom_it_is_about_and_when_it_is_due(world, apply):
    sent = data_request()
    for _ in range(2):
        apply(sent)
    (row,) = requests(world)
    assert (row["kind"], row["shop_domain"]) == ("customers/data_request", SHOP)
    assert (row["customer_id"], row["email"]) == ("7", "ada@example.com")
    assert (row["orders"], row["organization_id"]) == (["41"], ORGANIZATION)
    assert row["due_at"] - row["requested_at"] == timedelta(days=30)
    assert row["done_at"] is None
    assert world.tenant("select 1 from shopify_erasures") == []


def test_a_redelivery_of_a_request_does_not_move_its_time(world, apply):
    sent = replace(redact(id=7), triggered_at=None)
    apply(sent)
    apply(replace(sent, received_at=NOW + HOUR))
    (row,) = requests(world)
    assert row["requested_at"] == NOW
    erasures = world.tenant("select distinct erased_at from shopify_erasures")
    assert [each["erased_at"] for each in erasures] == [NOW]


def test_a_request_of_the_future_is_one_of_now(world, apply):
    apply(replace(redact(id=7), triggered_at=datetime(2999, 1, 1, tzinfo=UTC)))
    assert requests(world)[0]["requested_at"] < datetime.now(UTC) + HOUR


@pytest.mark.parametrize("break_it", [World.break_tenant, lambda world: None])
def test_a_request_is_recorded_when_its_event_cannot_be_stored(world, break_it):
    """The database of a shop that left is often gone before the request comes."""
    break_it(world)
    if break_it is not World.break_tenant:
        world.app("update shopify_shopifyconnection set status = 'disconnected'")
    with pytest.raises(Exception, match=r"."):
        world.core.pipeline.apply(shop_redact())
    assert [row["kind"] for row in requests(world)] == ["shop/redact"]


def test_a_rehearsal_records_nothing(world, apply):
    apply(redact(id=7), dry_run=True)
    assert (requests(world), world.tenant("select 1 from shopify_erasures")) == ([], [])


def test_a_signed_body_under_another_topic_erases_nothing(world, apply):
    with pytest.raises(ValueError, match="shop/redact"):
        apply(envelope({"id": 7}, "shop/redact"))
    assert requests(world) == []


def test_without_a_key_an_erasure_waits_in_the_failure_ledger(environ, tenant_url):
    from shared import bootstrap  # noqa: PLC0415

    environ = environ | {"PRIVACY_HASH_KEY": ""}
    with World(bootstrap.core(environ), environ=environ, tenant_url=tenant_url) as world:
        world.connect_shop()
        world.fail(redact(id=7))
        world.retry()
        assert world.failed_event()["error_type"] == "ConfigurationError"
        assert world.core.pipeline.apply(customer()).ledger is LedgerOutcome.INSERTED


def test_without_a_key_nothing_is_stored_of_a_shop_that_has_erasures(world, apply):
    apply(redact(id=7))
    world.environ = world.environ | {"PRIVACY_HASH_KEY": ""}
    world.forget()
    for sent in (customer(), customer(+1), envelope({"id": 3}, "disputes/create")):
        world.fail(sent)
    assert world.retry().failed == 3
    assert {each["error_type"] for each in world.failed_events()} == {"ConfigurationError"}
    assert world.tenant(PEOPLE) == []
    world.app("update subscriber_subscriberfailedevent set next_retry_at = null")
    world.environ = world.environ | {"PRIVACY_HASH_KEY": "a key of the tests"}
    world.forget()
    assert world.retry().resolved == 3
    assert [row["shopify_id"] for row in world.tenant(PEOPLE)] == ["7"], "the later one"


def test_without_a_key_a_rebuild_leaves_shops_that_have_erasures_alone(world, apply):
    sent = customer()
    apply(sent)
    apply(redact(id=7))
    world.tenant("delete from shopify_customers")
    with db.connect(db.Target(conninfo=world.tenant_url), migrate.LIMITS) as connection:
        scope = Scope(organization_id=ORGANIZATION)
        list(Rebuild(connection, scope, hasher=Hasher()).batches())
    assert world.tenant(PEOPLE) == []


# Suppression


@pytest.mark.parametrize(
    ("topic", "body"),
    [("disputes/create", {"id": 5}), ("products/update", {"id": 5})],
    ids=["ledger only", "with a snapshot"],
)
def test_after_a_reinstall_an_event_with_an_old_clock_is_stored_and_stays(
    world, apply, topic, body
):
    """What it is about had changed before the erasure; what happened to it came after."""
    apply(shop_redact())
    old = (NOW - HOUR).isoformat()
    sent = envelope(body | {"updated_at": old, "initiated_at": old}, topic)
    sent = replace(sent, triggered_at=NOW + HOUR)
    assert apply(sent).ledger is LedgerOutcome.INSERTED
    world.core.erasure().run(budget_seconds=60)
    assert apply(sent).ledger is LedgerOutcome.DUPLICATE
    assert ledger(world, sent.event_id)["payload"] == json.loads(sent.payload)
    before = replace(sent, event_id="before", triggered_at=NOW - HOUR)
    assert apply(before) == SUPPRESSED


def test_an_event_from_before_leaves_its_identity_and_nothing_else(world, apply):
    apply(redact(id=7))
    sent = replace(customer(name="\x00"), trace_id="t" * 32)
    assert apply(sent) == SUPPRESSED
    row = ledger(world, sent.event_id)
    assert (row["payload"], row["parsed_payload"], row["payload_raw"]) == (None, None, None)
    assert row["payload_sha256"] == sent.payload_sha256
    assert row["resource_id"].startswith("erased:")
    assert world.tenant(PEOPLE) == []


@pytest.mark.parametrize(
    ("topic", "body"),
    [
        ("orders/updated", {"id": 1, "customer": {"id": 7}}),
        ("orders/updated", {"id": 41}),
        ("refunds/create", {"id": 3, "order_id": 41}),
        ("checkouts/update", {"id": 3, "email": "ADA@example.com"}),
        ("words/unknown", {"id": 3, "customer_id": 7}),
    ],
)
def test_everything_that_is_about_the_subject_is_suppressed(world, apply, topic, body):
    apply(redact(id=7, email="ada@example.com"))
    sent = replace(envelope(body, topic), triggered_at=NOW - HOUR)
    assert apply(sent) == SUPPRESSED
    assert world.tenant("select 1 from shopify_orders") == []


@pytest.mark.parametrize(
    "sent",
    [
        customer(hours=1),
        customer(id_=8),
        replace(envelope({"id": 9, "email": "ada@example.com", "customer": {"id": 8}},
                         "checkouts/update"), triggered_at=NOW - HOUR),
        replace(envelope({"id": 7}, "products/update"), triggered_at=NOW - HOUR),
    ],
    ids=["later", "another customer", "another's checkout with the same address", "a product"],
)  # fmt: skip
def test_all_else_is_stored_as_ever(world, apply, sent):
    apply(redact(id=7, email="ada@example.com"))
    assert apply(sent).ledger is LedgerOutcome.INSERTED
    assert ledger(world, sent.event_id)["payload"] is not None


def test_a_shop_that_is_installed_again_has_its_later_events_stored(world, apply):
    apply(shop_redact())
    assert apply(customer(hours=-1, id_=5)) == SUPPRESSED
    assert apply(customer(hours=1, id_=5)).snapshot is SnapshotOutcome.INSERTED
    elsewhere = replace(customer(hours=-1, id_=5), shop_domain="other.myshopify.com")
    world.connect_shop("other.myshopify.com")
    assert apply(elsewhere).ledger is LedgerOutcome.INSERTED


def test_a_redelivery_goes_by_the_clock_of_the_first_delivery(world, apply):
    """A body without a clock, and a delivery without a triggered-at, has its receipt's."""
    sent = replace(envelope({"id": 7}, "customers/delete"), triggered_at=None)
    apply(replace(sent, received_at=NOW - HOUR))
    world.core.pipeline.apply(redact(id=7))
    world.tenant("update shopify_events set payload = null; truncate shopify_customers")
    again = replace(sent, received_at=NOW + HOUR)
    assert apply(again) == SUPPRESSED
    assert world.tenant(PEOPLE) == []


def test_an_emptied_row_makes_no_snapshot_whatever_clock_its_body_had(world, apply):
    sent = customer(hours=1000)
    apply(sent)
    apply(redact(id=7))
    world.tenant("update shopify_events set payload = null; truncate shopify_customers")
    assert apply(sent) == SUPPRESSED
    assert world.tenant(PEOPLE) == []


def test_what_is_suppressed_leaves_the_failure_ledger_and_the_audit_too(world, apply):
    apply(redact(id=7))
    sent = customer()
    world.app(
        "insert into shopify_shopifyevent (topic, shop_domain, payload, event_id, payload_sha256,"
        " received_at, needs_publish, outbox_envelope, outbox_body) values ('t', %(s)s, '{}',"
        " %(e)s, %(h)s, now(), true, '{}', 'x')",
        s=SHOP, e=sent.event_id, h=sent.payload_sha256,
    )  # fmt: skip
    world.fail(sent)
    report = world.retry()
    assert (report.retried, report.resolved, report.lost) == (1, 1, 0)
    kept = world.failed_event()
    assert (kept["status"], kept["resolution"], kept["payload"]) == ("resolved", "erased", None)
    assert kept["envelope"]["attributes"] == {}
    (row,) = world.app("select * from shopify_shopifyevent")
    assert (row["payload"], row["outbox_body"], row["needs_publish"]) == (None, None, False)
    assert world.fail(sent) == kept["id"]
    kept = world.failed_event()
    assert (kept["status"], kept["payload"]) == ("resolved", None), "and it is not opened again"


@pytest.fixture
def leased(world, apply):
    """A failed event of an erased customer, claimed under a token, with its last retry ahead."""
    apply(redact(id=7))
    sent, token = customer(), uuid4()
    row = world.fail(sent)
    world.app("update subscriber_subscriberfailedevent set retry_count = max_retries - 1")
    assert world.core.leases.claim(token, 1)
    return sent, token, row


def ended(world: World) -> tuple[Any, ...]:
    kept = world.failed_event()
    assert (kept["lease_token"], kept["next_retry_at"]) == (None, None)
    return kept["status"], kept["resolution"], kept["payload"]


def test_a_worker_that_dies_after_the_suppression_leaves_nothing_to_be_replayed(
    world, apply, leased
):
    sent, token, row = leased
    world.core.leases.start(token, row)
    assert apply(sent) == SUPPRESSED
    world.expire_lease(row)
    assert world.retry().retried == 0
    assert ended(world) == ("resolved", "erased", None)


def test_an_event_that_another_had_suppressed_before_its_replay_is_resolved_by_it(
    world, apply, leased
):
    sent, token, row = leased
    assert apply(sent) == SUPPRESSED
    assert world.core.leases.release(token, [row]) == 1
    report = world.retry()
    assert (report.resolved, report.failed) == (1, 0)
    assert ended(world) == ("resolved", "erased", None)


def test_a_replay_that_fails_after_its_event_was_suppressed_is_the_last_one(world, apply, leased):
    sent, token, row = leased
    world.core.leases.start(token, row)
    assert apply(sent) == SUPPRESSED
    verdict = world.core.leases.reschedule(token, row, NOW, OSError(), "orders/create")
    assert verdict is Verdict.RESOLVED
    assert ended(world) == ("resolved", "erased", None)
    assert [each["outcome"] for each in world.attempts()] == ["resolved"]


def test_the_audit_row_that_the_subscriber_owes_holds_no_payload(world, apply):
    from shared import audit  # noqa: PLC0415

    apply(redact(id=7))
    owed = replace(customer(), audited=False)
    apply(owed)
    audit.settle(world.core.application, owed)
    (row,) = world.app("select * from shopify_shopifyevent")
    assert (row["payload"], row["payload_sha256"]) == (None, owed.payload_sha256)


def test_a_rebuild_brings_nothing_back(world, apply):
    apply(customer(id_=7))
    apply(customer(id_=8))
    apply(redact(id=7))  # nothing is emptied yet
    world.tenant("truncate shopify_customers")
    with db.connect(db.Target(conninfo=world.tenant_url), migrate.LIMITS) as connection:
        scope = Scope(organization_id=ORGANIZATION)
        list(Rebuild(connection, scope, hasher=world.core.privacy.hasher).batches())
    assert [row["shopify_id"] for row in world.tenant(PEOPLE)] == ["8"]


def test_a_tenant_that_never_had_the_table_gets_it_with_its_next_event(world, apply):
    world.tenant("drop table shopify_erasures")
    assert apply(customer()).ledger is LedgerOutcome.INSERTED
    assert world.tenant("select 1 from shopify_erasures") == []


def test_the_suppression_is_the_storing_statements_own(world, apply, monkeypatch):
    """No further round trip: the happy path asks the tenant once."""
    apply(customer())
    asked = []
    run = db.Pool.run
    monkeypatch.setattr(db.Pool, "run", lambda pool, work: asked.append(pool) or run(pool, work))
    apply(customer(id_=9))
    assert len(asked) == 1


# The commands


ROOT = Path(__file__).parents[2]


def run(world: World, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "privacy", *words],
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "100", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
        | world.environ,
        cwd=cwd, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_an_export_holds_all_of_the_customer_to_the_digit_and_nothing_of_others(
    world, apply, tmp_path
):
    from shared import audit  # noqa: PLC0415

    digits = envelope(b'{"id": 7, "total_spent": 1.10, "email": "ada@example.com"}',
                      "customers/create")  # fmt: skip
    orders = [
        envelope({"id": 1, "customer": {"id": 7}}, "orders/create"),
        envelope({"id": 3, "order_id": 1}, "refunds/create"),
        envelope({"id": 2, "customer": {"id": 8}}, "orders/create"),
        envelope({"id": 4, "order_id": 2}, "refunds/create"),
    ]
    for one in (digits, *orders):
        apply(one)
        audit.record(world.core.application, one)
        world.fail(replace(one, event_id=one.event_id + "f"))
    world.fail(envelope(b"ada@example.com, no JSON", "orders/create"))
    apply(data_request())
    done = run(world, "export", "1", "--output", str(tmp_path / "ada.json"))
    assert done.returncode == 0, done.stderr
    path = tmp_path / "ada.json"
    assert path.stat().st_mode & 0o077 == 0, "nobody else reads it"
    assert [each.name for each in tmp_path.iterdir()] == ["ada.json"]
    text = path.read_text()
    assert '"total_spent": 1.10' in text
    held = json.loads(text)
    assert held["customer"] == {"id": "7", "email": "ada@example.com"}
    topics = {
        name: sorted(entry["topic"] for entry in entries)
        for name, entries in held.items()
        if isinstance(entries, list) and entries and isinstance(entries[0], dict)
    }
    mine = ["customers/create", "orders/create", "refunds/create"]
    assert topics == {
        "shopify_events": ["customers/create", "customers/data_request", *mine[1:]],
        "shopify_customers": ["customers/create"],
        "shopify_orders": ["orders/create"],
        "shopify_refunds": ["refunds/create"],
        "subscriber_subscriberfailedevent": sorted([*mine, "orders/create"]),
        "shopify_shopifyevent": mine,
    }
    assert requests(world)[0]["done_at"] is not None
    assert run(world, "export", "1", "--output", str(path)).returncode == 1, "it is there already"


def test_an_export_without_one_of_its_databases_is_none(world, apply, tmp_path):
    apply(data_request())
    world.break_tenant()
    failed = run(world, "export", "1", "--output", str(tmp_path / "x.json"))
    assert failed.returncode == 1
    assert list(tmp_path.iterdir()) == []
    assert requests(world)[0]["done_at"] is None


def test_requests_are_listed_shown_and_carried_out(world, apply):
    apply(customer())
    apply(redact(id=7))
    world.app("update privacy_request set due_at = now() - interval '1 day'")
    listed = run(world, "list")
    assert "customers/redact" in listed.stdout
    assert "1 overdue" in listed.stdout
    done = run(world, "run")
    assert (done.returncode, "1 done, 0 left" in done.stdout) == (0, True), done.stderr
    shown = run(world, "show", "1")
    assert "tenant database acme: done" in shown.stdout
    assert "shopify_customers" in shown.stdout
    (held,) = json.loads(run(world, "list", "--json").stdout)
    assert (held["customer_id"], held["is_overdue"]) == (None, False)
    gone = run(world, "export", "1")
    assert (gone.returncode, "names nobody any more" in gone.stderr) == (1, True)
    assert "There is no request 9" in run(world, "show", "9").stderr


def test_what_cannot_be_carried_out_now_is_said(world, apply):
    apply(redact(id=7))
    world.break_tenant()
    left = run(world, "run")
    assert (left.returncode, "0 done, 1 left" in left.stdout) == (1, True)
    assert "refused" in run(world, "show", "1").stdout
