"""Fair turns: nobody waits behind another tenant's backlog, outage or slow database."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from shared import replay
from shared.model import Envelope, LedgerOutcome, Outcome, SnapshotOutcome
from shared.replay import Replayer, Report, Request
from tests.proxy import Proxy
from tests.world import ORGANIZATION, SHOP, World, envelope

BIG, BIG_SHOP = "big", "big.myshopify.com"
SLOW, SLOW_SHOP = "slow", "slow.myshopify.com"
BATCH = 50

# Copies of one failed event, each an event of its own: `tenants` of them in turn, oldest first.
MULTIPLY = """
insert into subscriber_subscriberfailedevent
  (event_id, payload_sha256, source, topic, event_type, shop_domain, organization_id, envelope,
   payload, error_type, error_class, error_code, error_message, traceback, fingerprint, created_at)
select event_id || '-' || n, payload_sha256, source, topic, event_type, shop_domain,
       organization_id || case when %(tenants)s > 1
                               then '-' || lpad((n %% %(tenants)s)::text, 4, '0') else '' end,
       envelope || jsonb_build_object('event_id', event_id || '-' || n), payload, error_type,
       error_class, error_code, error_message, traceback, fingerprint,
       created_at - interval '1 day' + make_interval(secs => n / 1000.0)
from subscriber_subscriberfailedevent, generate_series(1, %(rows)s) n
where id = %(row)s"""


def fail_many(world: World, shop: str, rows: int, tenants: int = 1) -> None:
    """`rows` failed events that have waited for a day; for many tenants, their names differ."""
    row = world.fail(envelope({"id": 1}, shop_domain=shop))
    world.app(MULTIPLY, row=row, rows=rows, tenants=tenants)
    world.app("delete from subscriber_subscriberfailedevent where id = %(row)s", row=row)


def due(world: World, organization: str) -> list[dict[str, Any]]:
    return world.app(
        "select * from subscriber_subscriberfailedevent"
        " where organization_id = %(organization)s and status = 'pending' order by id",
        organization=organization,
    )


def run(world: World, budget_seconds: float = 60, **asked: Any) -> Report:
    return world.replayer.run(Request(**asked), budget_seconds=budget_seconds)


# Between tenants


def three_beside(world: World, rows: int) -> None:
    world.connect_shop(BIG_SHOP, BIG)
    fail_many(world, BIG_SHOP, rows)
    for n in range(3):
        world.fail(envelope({"id": n}))
    report = run(world, limit=BATCH)
    assert report.resolved == BATCH
    assert due(world, ORGANIZATION) == []
    assert len(due(world, BIG)) == rows - (BATCH - 3), "and the rest of the batch is not wasted"


def test_three_rows_beside_two_thousand_older_ones_are_in_the_first_batch(world):
    three_beside(world, 2_000)


@pytest.mark.slow
def test_three_rows_beside_a_hundred_thousand_older_ones_are_in_the_first_batch(world):
    three_beside(world, 100_000)


def test_of_700_tenants_none_waits_longer_than_a_round(world):
    fail_many(world, SHOP, 3 * 700, tenants=700)
    claims = [
        claim.tenant for _ in range(3 * 14) for claim in world.core.leases.claim(uuid4(), BATCH)
    ]
    rounds = [claims[n : n + 700] for n in range(0, len(claims), 700)]
    assert [len(set(tenants)) for tenants in rounds] == [700] * 3
    assert rounds[0] == rounds[1] == rounds[2], "each waits for a round, no longer, no shorter"


def test_a_newcomer_waits_no_longer_than_a_round(world):
    fail_many(world, SHOP, 2 * 120, tenants=120)
    world.core.leases.claim(uuid4(), BATCH)
    world.connect_shop(BIG_SHOP, "acme-0010-newcomer")
    world.fail(envelope(shop_domain=BIG_SHOP))
    claims = [claim.tenant for _ in range(3) for claim in world.core.leases.claim(uuid4(), BATCH)]
    assert "acme-0010-newcomer" in claims


def test_within_a_tenant_what_is_due_longest_comes_first(world):
    fail_many(world, SHOP, 300, tenants=3)
    world.app(
        "update subscriber_subscriberfailedevent"
        " set next_retry_at = now() - make_interval(secs => id * 7919 %% 1000)"
    )
    ages = {row["id"]: row["due_at"] for row in world.failed_events()}
    taken: dict[str, list[Any]] = {}
    while claims := world.core.leases.claim(uuid4(), 40):
        for claim in claims:
            taken.setdefault(claim.tenant, []).append(ages[claim.id])
    assert [len(times) for times in taken.values()] == [100] * 3
    assert all(times == sorted(times) for times in taken.values())


def test_turns_go_round_although_four_claim_at_once(world):
    rows, tenants = 4 * 200, 200
    fail_many(world, SHOP, rows, tenants=tenants)
    order: list[tuple[str, int]] = []
    ready = threading.Barrier(4)

    def claim() -> None:
        ready.wait()
        while len(order) < rows:
            order.extend((c.tenant, c.id) for c in world.core.leases.claim(uuid4(), BATCH))

    workers = [threading.Thread(target=claim) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len({row for _, row in order}) == len(order) == rows, "each row once"
    first_half = Counter(tenant for tenant, _ in order[: rows // 2])
    assert len(first_half) == tenants, "everybody had a turn before anybody's third"
    assert max(first_half.values()) <= 3


# Side by side


class Desk:
    """Stands where the pipeline does, and notes who is served when."""

    def __init__(self, serve: Callable[[str], None]) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._now: Counter[str] = Counter()
        self.most_at_once = 0
        self.most_of_one = 0
        self.served: list[str] = []

    def apply(self, envelope: Envelope) -> Outcome:
        tenant = envelope.shop_domain
        with self._lock:
            self._now[tenant] += 1
            self.most_at_once = max(self.most_at_once, self._now.total())
            self.most_of_one = max(self.most_of_one, *self._now.values())
            self.served.append(tenant)
        try:
            self._serve(tenant)
        finally:
            with self._lock:
                self._now[tenant] -= 1
        return Outcome(ledger=LedgerOutcome.INSERTED, snapshot=SnapshotOutcome.INSERTED)


def replayer(world: World, desk: Desk, *, parallelism: int = 8, batch: int = BATCH) -> Replayer:
    core = world.core
    return Replayer(
        core.application,
        core.leases,
        core.incidents,
        desk,  # type: ignore[arg-type]
        batch_limit=batch,
        parallelism=parallelism,
    )


def shops(world: World, names: list[str], rows: int) -> None:
    """Failed events of tenants of these names, in turn."""
    for _, name in itertools.product(range(rows), names):
        world.fail(envelope(shop_domain=f"{name}.myshopify.com"))


def test_tenants_are_served_side_by_side_and_the_rows_of_one_after_another(world):
    shops(world, list("abcdef"), 8)
    desk = Desk(lambda _: time.sleep(0.01))
    report = replayer(world, desk, parallelism=4, batch=10).run(Request(), budget_seconds=60)
    assert report.resolved == 48
    assert (desk.most_at_once, desk.most_of_one) == (4, 1)


def test_after_the_budget_no_row_starts_and_what_was_claimed_is_given_back(world):
    shops(world, ["a", "b"], 20)
    desk = Desk(lambda _: time.sleep(0.25))
    began = time.monotonic()
    report = replayer(world, desk).run(Request(), budget_seconds=0.6)
    assert time.monotonic() - began < 2
    assert report.resolved == len(desk.served), "a started one is finished"
    assert 2 <= report.resolved <= 6
    assert report.deferred == 40 - report.resolved
    left = [row for row in world.failed_events() if row["status"] == "pending"]
    assert len(left) == report.deferred
    assert {(row["lease_token"], row["retry_count"]) for row in left} == {(None, 0)}
    assert len(world.attempts()) == report.resolved


def test_a_slow_tenant_holds_up_nobodys_next_rows(world):
    """All rows of one tenant run into a timeout; meanwhile the others' are all replayed."""
    shops(world, ["slow"], 40)
    shops(world, ["quick", "brisk"], 100)
    desk = Desk(lambda tenant: time.sleep(0.2 if tenant.startswith("slow") else 0))
    report = replayer(world, desk).run(Request(), budget_seconds=4)
    assert desk.served.count("quick.myshopify.com") == 100
    assert desk.served.count("brisk.myshopify.com") == 100
    assert desk.most_of_one == 1
    assert report.resolved >= 200 + 10, "it went on with the slow one too"


def test_slow_tenants_in_every_thread_leave_turns_to_the_others(world, monkeypatch):
    monkeypatch.setattr(replay, "TURN_SECONDS", 0.2)
    shops(world, [f"slow-{n}" for n in range(4)], 25)
    shops(world, ["steady"], 20)  # whose turn comes after theirs
    desk = Desk(lambda tenant: time.sleep(0.1 if tenant.startswith("slow") else 0))
    replayer(world, desk, parallelism=4, batch=125).run(Request(), budget_seconds=2.4)
    assert desk.served.count("steady.myshopify.com") == 20
    assert all(desk.served.count(f"slow-{n}.myshopify.com") >= 2 for n in range(4))


def test_a_limit_holds_however_the_turns_fall(world):
    shops(world, ["slow"], 10)
    shops(world, ["quick"], 30)
    desk = Desk(lambda tenant: time.sleep(0.05 if tenant.startswith("slow") else 0))
    report = replayer(world, desk, batch=8).run(Request(limit=21), budget_seconds=60)
    assert (report.retried, len(desk.served)) == (21, 21)


# Real databases that hang


@pytest.fixture
def neighbour(world: World, postgres: Any, templates: Any) -> str:
    """A tenant database of another organization's, reached through a proxy."""
    url = postgres.create_database(
        f"slow_{world.tenant_url.rsplit('/', 1)[1]}", template=templates["tenant"]
    )
    world.environ["TENANT_STATEMENT_TIMEOUT_SECONDS"] = "1"
    world.forget()
    return url


def test_a_tenant_whose_table_is_locked_delays_no_other(world, neighbour):
    world.connect_shop(SLOW_SHOP, SLOW, neighbour)
    fail_many(world, SLOW_SHOP, 100)
    fail_many(world, SHOP, 150)
    with psycopg.connect(neighbour) as merchant:
        merchant.execute("lock table shopify_events in access exclusive mode")
        report = run(world, budget_seconds=4)
    assert due(world, ORGANIZATION) == []
    assert report.resolved == 150
    slow = due(world, SLOW)
    assert len(slow) == 100
    assert sum(row["retry_count"] for row in slow) == report.failed >= 2
    assert {row["lease_token"] for row in slow} == {None}
    assert {row["error_type"] for row in slow if row["retry_count"]} == {"QueryCanceled"}
    assert world.incidents() == [], "it answers"


def test_a_tenant_whose_server_hangs_delays_no_other(world, neighbour):
    port = int(conninfo_to_dict(neighbour)["port"] or 0)
    with Proxy(port) as proxy:
        world.connect_shop(SLOW_SHOP, SLOW, make_conninfo(neighbour, port=proxy.port))
        fail_many(world, SLOW_SHOP, 100)
        fail_many(world, SHOP, 150)
        proxy.fall_silent()
        report = run(world, budget_seconds=10)
        assert due(world, ORGANIZATION) == []
        assert (report.resolved, report.failed) == (150, 1)
        assert proxy.accepted <= 2
    assert [incident["tenant"] for incident in world.incidents()] == [SLOW]
    assert sum(row["retry_count"] for row in due(world, SLOW)) == 1
