"""Erasures carried out: what is gone, what stays, and that one may die anywhere meanwhile."""

import itertools
import json
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shared import audit, db, erasure, holdings
from shared.model import LedgerOutcome
from tests.world import NOW, ORGANIZATION, SHOP, World, envelope

HOUR = timedelta(hours=1)
MARKER = "planted"
PERSON = {"id": 7, "email": "ada@example.com", "first_name": MARKER}


def sent(topic: str, body: dict[str, Any], hours: float = -1, **fields: Any):
    made = envelope(body, topic, **fields)
    return replace(made, triggered_at=NOW + hours * HOUR)


def redact(topic: str = "customers/redact", orders=(), **customer: Any):
    body: dict[str, Any] = {"shop_id": 1, "shop_domain": SHOP}
    if topic == "customers/redact":
        body |= {"customer": customer or {"id": 7, "email": "ada@example.com"},
                 "orders_to_redact": list(orders)}  # fmt: skip
    return replace(envelope(body, topic), triggered_at=NOW)


HISTORY = [
    ("customers/create", PERSON),
    ("customers/update", PERSON),
    ("orders/create", {"id": 1, "customer": PERSON, "total_price": "9.90", "currency": "EUR"}),
    ("refunds/create", {"id": 3, "order_id": 1}),
    ("fulfillments/create", {"id": 4, "order_id": 1, "email": "ada@example.com"}),
    ("order_transactions/create", {"id": 5, "order_id": 1}),
    ("checkouts/create", {"id": 6, "email": "Ada@Example.com"}),
    ("draft_orders/create", {"id": 8, "customer": PERSON}),
    ("customer.tags_added", {"customerId": "gid://shopify/Customer/7"}),
    ("orders/create", {"id": 41}),
]
HISTORY = [(topic, {"note": MARKER, **body}) for topic, body in HISTORY]
OTHERS = [
    ("customers/create", {"id": 70, "email": "bob@example.com", "tags": "stays"}),
    ("orders/create", {"id": 10, "customer": {"id": 70}, "tags": "stays"}),
    ("refunds/create", {"id": 30, "order_id": 10, "note": "stays"}),
    ("products/create", {"id": 7, "title": "stays"}),
]


@pytest.fixture
def live(world: World) -> World:
    """A customer's history, and another's, in every store."""
    for n, (topic, body) in enumerate(HISTORY + OTHERS):
        one = sent(topic, body, hours=-100 + n)
        world.core.pipeline.apply(one)
        audit.record(world.core.application, one)
        world.fail(sent(topic, body, hours=-50 + n))
    return world


def erase(world: World, **options: Any) -> erasure.Report:
    return world.core.erasure().run(budget_seconds=60, **options)


def everything(world: World) -> str:
    """All that both databases hold, as text."""
    tables = (
        [(world.tenant, name) for name in (holdings.EVENTS, *holdings.SNAPSHOTS,
                                           *holdings.OTHER_SNAPSHOTS, "shopify_erasures")]
        + [(world.app, name) for name in (holdings.FAILED, holdings.AUDIT, "privacy_request",
                                          "privacy_receipt")]
    )  # fmt: skip
    texts = []
    for ask, name in tables:
        texts += [str(row["t"]) for row in ask(f"select t::text from {name} t")]  # type: ignore[arg-type]
    raw = world.app(
        "select payload from subscriber_subscriberfailedevent where payload is not null"
    )
    return "\n".join([*texts, *(bytes(row["payload"]).decode() for row in raw)])


def receipts(world: World) -> dict[str, dict[str, Any]]:
    return {row["database"]: row for row in world.app("select * from privacy_receipt")}


def open_requests(world: World) -> list[Any]:
    return world.app("select id from privacy_request where done_at is null")


def test_all_of_a_customer_is_gone_everywhere_and_the_others_are_not_touched(live):
    before = live.tenant("select event_id, payload_sha256 from shopify_events order by id")
    live.core.pipeline.apply(redact(orders=[41]))
    report = erase(live)
    assert (report.done, report.waiting) == (1, 0)
    text = everything(live).lower()
    for personal in (MARKER, "ada@example.com"):
        assert personal not in text
    assert text.count("bob@example.com") >= 3
    mine = live.tenant("select topic, payload from shopify_events where payload is not null")
    assert sorted(row["topic"] for row in mine) == sorted(topic for topic, _ in OTHERS)
    after = live.tenant("select event_id, payload_sha256 from shopify_events order by id")
    assert after[: len(before)] == before, "the identity stays"
    assert live.tenant("select 1 from shopify_events where resource_id = '7'"
                       " and resource_type like 'customer%%'") == []  # fmt: skip


def test_snapshots_keep_what_tells_of_nobody(live):
    live.core.pipeline.apply(redact())
    erase(live)
    (row,) = live.tenant("select * from shopify_orders where shopify_id = '1'")
    assert (row["payload"], row["is_deleted"]) == (None, False)
    assert row["parsed_payload"] == {"id": "1", "total_price": "9.90", "currency": "EUR"}
    gone = live.tenant("select * from shopify_customers where is_deleted")
    assert [each["shopify_id"][:7] for each in gone] == ["erased:"]
    assert gone[0]["parsed_payload"] is None


def test_failed_events_end_as_erased_and_others_wait_as_before(live):
    live.core.pipeline.apply(redact(orders=[41]))
    erase(live)
    rows = live.failed_events()
    ended = [row for row in rows if row["resolution"] == "erased"]
    assert len(ended) == len(HISTORY)
    for row in ended:
        assert (row["status"], row["payload"], row["next_retry_at"]) == ("resolved", None, None)
        assert row["resolved_at"] is not None
        assert row["redacted_at"] is not None
    assert {row["status"] for row in rows if row not in ended} == {"pending"}


def test_who_is_replaying_an_erased_event_has_lost_it(live):
    from uuid import uuid4  # noqa: PLC0415

    token = uuid4()
    leases = live.core.leases
    (claim,) = leases.claim(token, 1)
    assert leases.start(token, claim.id) is not None
    started = leases.run_started()
    live.core.pipeline.apply(redact())
    erase(live)
    assert leases.resolve(token, claim.id, started) == "lost"
    (row,) = [row for row in live.failed_events() if row["id"] == claim.id]
    assert (row["resolution"], row["lease_token"]) == ("erased", None)
    assert {attempt["outcome"] for attempt in live.attempts()} == {"lost"}


def test_the_receipts_count_what_was_removed_where_and_name_nobody(live):
    live.core.pipeline.apply(redact(orders=[41]))
    erase(live)
    found = receipts(live)
    assert found["application"]["counts"] == {
        holdings.FAILED: len(HISTORY), holdings.AUDIT: len(HISTORY)
    }  # fmt: skip
    assert found["tenant"]["counts"] == {
        "shopify_events": len(HISTORY) + 1,  # the request's own
        "shopify_customers": 1, "shopify_orders": 2, "shopify_draft_orders": 1,
        "shopify_checkouts": 1, "shopify_fulfillments": 1, "shopify_refunds": 1,
        "shopify_order_transactions": 1,
    }  # fmt: skip
    assert {row["state"] for row in found.values()} == {"done"}
    assert {row["progress"] for row in found.values()} == {None}
    (request,) = live.app("select * from privacy_request")
    assert (request["customer_id"], request["email"], request["orders"]) == (None, None, [])
    (row,) = live.tenant("select progress from shopify_erasures where progress is not null")
    assert "orders" not in row["progress"]


def test_the_requests_own_event_is_emptied_wherever_it_is(live):
    asked = redact()
    audit.record(live.core.application, asked)
    live.fail(asked)
    live.core.pipeline.apply(asked)
    erase(live)
    (row,) = live.tenant("select * from shopify_events where topic = 'customers/redact'")
    assert (row["payload"], row["parsed_payload"]) == (None, None)
    (row,) = live.app("select * from shopify_shopifyevent where topic = 'customers/redact'")
    assert row["payload"] is None
    kept = [row for row in live.failed_events() if row["topic"] == "customers/redact"]
    assert [row["payload"] for row in kept] == [None]


def test_nothing_that_comes_again_brings_the_customer_back(live):
    live.core.pipeline.apply(redact(orders=[41]))
    erase(live)
    for n, (topic, body) in enumerate(HISTORY):
        again = sent(topic, body, hours=-100 + n)
        assert live.core.pipeline.apply(again).ledger is LedgerOutcome.SUPPRESSED, topic
    assert MARKER not in everything(live)


def test_what_comes_later_stays(live):
    later = sent("customers/update", PERSON, hours=1)
    live.core.pipeline.apply(redact())
    live.core.pipeline.apply(later)
    erase(live)
    (row,) = live.tenant("select * from shopify_customers where shopify_id = '7'")
    assert row["payload"]["first_name"] == MARKER


def test_a_second_request_of_the_same_customer_is_carried_out_as_well(live):
    for hours in (0, 5):
        live.core.pipeline.apply(sent("customers/update", PERSON, hours=hours - 1))
        live.core.pipeline.apply(replace(redact(), triggered_at=NOW + hours * HOUR))
        assert erase(live).done == 1
    rows = live.tenant("select * from shopify_customers where is_deleted")
    assert len(rows) == 1
    assert live.tenant("select 1 from shopify_customers where shopify_id = '7'") == []


def test_a_customer_of_whom_only_the_address_is_known(live):
    live.core.pipeline.apply(redact(email="ADA@example.com"))
    erase(live)
    assert live.tenant("select 1 from shopify_customers where payload ->> 'id' = '7'") == []
    assert live.tenant("select 1 from shopify_checkouts where payload is not null") == []
    assert "ada@example.com" not in everything(live).lower()


def test_a_whole_shop_and_no_other(live):
    other = "other.myshopify.com"
    live.connect_shop(other)
    stays = sent("customers/create", PERSON, shop_domain=other)
    live.core.pipeline.apply(stays)
    live.core.pipeline.apply(redact("shop/redact"))
    report = erase(live)
    assert report.done == 1
    assert live.tenant("select 1 from shopify_events where payload is not null"
                       " and shop_domain = 'acme.myshopify.com'") == []  # fmt: skip
    assert len(live.tenant("select 1 from shopify_events where payload is not null")) == 1
    for table in (*holdings.SNAPSHOTS, *holdings.OTHER_SNAPSHOTS):
        left = live.tenant(
            f"select 1 from {table} where shop_domain = 'acme.myshopify.com'"  # type: ignore[arg-type]
            " and (num_nonnulls(payload, parsed_payload) > 0 or not is_deleted)"
        )
        assert left == [], table
    assert {row["resolution"] for row in live.failed_events()} == {"erased"}
    assert live.app("select 1 from shopify_shopifyevent where payload is not null") == []


def test_what_was_there_before_the_request_is_from_before_whatever_its_clock_says(live):
    body = PERSON | {"id": 7, "updated_at": "2999-01-01T00:00:00Z"}
    live.core.pipeline.apply(sent("customers/update", body))
    live.tenant("update shopify_events set inserted_at = '2026-11-01'")
    live.core.pipeline.apply(redact())
    erase(live)
    assert "ada@example.com" not in everything(live).lower()


def test_a_payload_that_retention_took_leaves_no_id_behind(live):
    live.tenant("update shopify_events set payload = null, parsed_payload = null")
    live.core.pipeline.apply(redact())
    erase(live)
    assert live.tenant("select 1 from shopify_events where resource_type = 'customers'"
                       " and resource_id = '7'") == []  # fmt: skip


def test_a_failed_event_that_is_no_json_is_searched_as_it_is(world):
    world.fail(envelope(b'{"email": "Ada@example.com" oops', "customers/create"))
    world.fail(envelope(b"oops", "customers/create"))
    world.core.pipeline.apply(redact())
    world.app("update subscriber_subscriberfailedevent set created_at = '2026-11-01'")
    erase(world)
    assert [row["resolution"] for row in world.failed_events()] == ["erased", None]


# Bounded, resumable, beside itself


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(holdings, "PAGE_ROWS", 2)


class Killed(BaseException):
    """What no handler takes for a fault."""


def test_whoever_dies_anywhere_is_followed_by_one_that_goes_on(live, small_pages, monkeypatch):
    """Before and after every statement that changes anything, in both databases."""
    live.core.pipeline.apply(redact(orders=[41]))
    whole = psycopg.Connection.execute
    step, deaths = 0, 0
    while open_requests(live):
        countdown, step = step, step + 3
        assert step < 1000

        def dying(self, query, *args, **kwargs):
            nonlocal countdown
            if "update" in str(query) or "insert" in str(query):
                countdown -= 1
                if countdown == 0:
                    raise Killed
                answer = whole(self, query, *args, **kwargs)
                if countdown == -1:
                    raise Killed
                return answer
            return whole(self, query, *args, **kwargs)

        monkeypatch.setattr(psycopg.Connection, "execute", dying)
        try:
            erase(live)
        except Killed:
            deaths += 1
        finally:
            monkeypatch.setattr(psycopg.Connection, "execute", whole)
    assert deaths > 3
    test = receipts(live)
    assert test["tenant"]["counts"]["shopify_events"] == len(HISTORY) + 1, "each counted once"
    assert test["application"]["counts"][holdings.FAILED] == len(HISTORY)
    assert "ada@example.com" not in everything(live).lower()


@pytest.mark.parametrize("method", ["_found", "_finish"])
def test_whoever_dies_between_the_databases_is_followed_by_one_that_goes_on(
    live, monkeypatch, method
):
    live.core.pipeline.apply(redact(orders=[41]))
    whole = getattr(erasure._Pass, method)
    for deadly in range(1, 4):
        calls = 0

        def dying(self, *args, _deadly=deadly, **kwargs):
            nonlocal calls
            calls += 1
            if calls == _deadly:
                raise Killed
            return whole(self, *args, **kwargs)

        monkeypatch.setattr(erasure._Pass, method, dying)
        with suppress(Killed):
            erase(live)
        monkeypatch.setattr(erasure._Pass, method, whole)
    erase(live)
    assert open_requests(live) == []
    assert receipts(live)["tenant"]["counts"]["shopify_events"] == len(HISTORY) + 1
    assert receipts(live)["application"]["counts"][holdings.AUDIT] == len(HISTORY)


def test_a_run_stops_at_its_budget_and_the_next_one_goes_on(live, small_pages):
    live.core.pipeline.apply(redact())
    ticks = iter(range(10_000))
    runs = 0
    while open_requests(live):
        core = live.core
        erasure.Erasure(core.application, core.directory, core.privacy,
                        clock=lambda: next(ticks)).run(budget_seconds=12)  # fmt: skip
        runs += 1
        assert runs < 100
    assert runs > 2
    assert receipts(live)["tenant"]["counts"]["shopify_events"] == len(HISTORY)


def test_two_beside_each_other_count_each_row_once(live, small_pages, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    page, calls = holdings.tenant_page, itertools.count()

    def slow(*args):
        rows = page(*args)
        # One falls behind the others, who would be pages further by now, if they may.
        time.sleep(0.2 if next(calls) % 5 == 0 else 0)
        return rows

    monkeypatch.setattr(holdings, "tenant_page", slow)
    live.core.pipeline.apply(redact(orders=[41]))
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: erase(live), range(3)))
    erase(live)
    assert open_requests(live) == []
    assert receipts(live)["tenant"]["counts"]["shopify_events"] == len(HISTORY) + 1
    assert receipts(live)["application"]["counts"][holdings.FAILED] == len(HISTORY)


def test_a_store_that_began_before_the_suppression_is_waited_for(live):
    """Its statement cannot see the suppression, and its row would come after the page."""
    live.core.pipeline.apply(redact())
    with psycopg.connect(live.tenant_url) as slow:
        slow.execute("select 1 from shopify_erasures limit 1")  # as a store does
        report = erase(live)
        assert (report.done, report.waiting) == (0, 1)
        assert "lock" in receipts(live)["tenant"]["reason"]
    assert erase(live).done == 1


# Tenants that are away


def test_a_tenant_that_is_down_waits_and_says_why(live):
    live.core.pipeline.apply(redact())
    live.break_tenant()
    assert (erase(live).waiting, len(open_requests(live))) == (1, 1)
    found = receipts(live)
    assert (found["tenant"]["state"], "refused" in found["tenant"]["reason"]) == ("open", True)
    mine = [row for row in live.failed_events() if b"ada@" in bytes(row["payload"] or b"")]
    assert mine == [], "what we hold ourselves is gone meanwhile"
    live.heal_tenant()
    assert erase(live).done == 1
    assert receipts(live)["tenant"]["counts"]["shopify_events"] > 0


@pytest.mark.parametrize("loss", ["credential", "database", "connection"])
def test_a_tenant_that_is_gone_is_said_so(world, postgres, loss):
    match loss:
        case "credential":
            world.app("delete from databases_databasecredential")
        case "database":
            world.connect_shop(url=make_conninfo(world.tenant_url, dbname="dropped"))
        case "connection":
            world.app("delete from shopify_shopifyconnection")
    world.forget()
    asked = redact("shop/redact")
    with pytest.raises(Exception, match=r"."):
        world.core.pipeline.apply(asked)
    world.fail(asked)
    assert erase(world).done == 1
    found = receipts(world)
    assert (found["tenant"]["state"], bool(found["tenant"]["reason"])) == ("gone", True)
    assert found["application"]["counts"] == {holdings.FAILED: 1}
    assert world.failed_event()["resolution"] == "erased"


def test_an_order_that_only_a_failed_event_names_is_erased_in_the_tenant_too(world):
    world.fail(sent("orders/create", {"id": 1, "customer": PERSON}))
    world.core.pipeline.apply(sent("refunds/create", {"id": 3, "order_id": 1}))
    world.core.pipeline.apply(redact())
    erase(world)
    (row,) = world.tenant("select * from shopify_refunds")
    assert row["payload"] is None


def test_orders_found_late_are_looked_for_again(live):
    """The tenant that names them was down when our own tables were emptied."""
    live.app("delete from subscriber_subscriberfailedevent; delete from shopify_shopifyevent")
    live.fail(sent("refunds/create", {"id": 3, "order_id": 1}))
    live.core.pipeline.apply(redact())
    live.break_tenant()
    erase(live)
    assert live.failed_event()["payload"] is not None, "nothing tells whose refund it is"
    live.heal_tenant()
    assert erase(live).done == 1
    assert live.failed_event()["payload"] is None


def test_a_dropped_table_is_made_again(live):
    live.core.pipeline.apply(redact())
    live.tenant("drop table shopify_erasures")
    assert erase(live).done == 1
    assert live.tenant("select 1 from shopify_erasures limit 1") != []


def test_a_request_that_is_overdue_is_logged_once_a_day(live, capsys):
    live.core.pipeline.apply(redact())
    live.app("update privacy_request set due_at = now() - interval '1 day'")
    assert live.core.privacy.log_overdue() == 1
    assert live.core.privacy.log_overdue() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "overdue" in line]
    assert [(line["severity"], line["kind"]) for line in lines] == [("ERROR", "customers/redact")]


def test_a_tick_carries_out_what_is_open(live):
    from shared.replay import Request  # noqa: PLC0415
    from shared.tick import tick  # noqa: PLC0415

    live.core.pipeline.apply(redact())
    core = live.core
    tick(Request(), replayer=core.replayer(), outbox=core.outbox(), retention=core.retention(),
         erasure=core.erasure(), budget_seconds=60, maintenance_seconds=60)  # fmt: skip
    assert open_requests(live) == []


def test_an_application_database_that_is_away_ends_the_run(live):
    core = live.core
    core.application.close()
    core.application.target = db.Target(conninfo=make_conninfo(live.app_url, port=1))
    with pytest.raises(db.UNREACHABLE):
        core.erasure().run(budget_seconds=5)
    assert ORGANIZATION
