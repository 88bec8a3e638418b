"""The claim's plan: what it reads follows from what it takes, never from how long the ledger is."""

import json
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final
from uuid import uuid4

import psycopg
import pytest

from shared import db, incidents, leases
from tests.world import World

TABLE: Final = "subscriber_subscriberfailedevent"
BY_ID: Final = (f"{TABLE}_pkey", "subscriber_failedevent_unresolved")
LIMIT: Final = 100
TENANTS: Final = 500

# As wide as in life, lest reading a small table whole is cheaper than its indexes.
# 100 rows of a ledger in turn: 10 are due, 5 are scheduled, 1 was given up, the rest is resolved.
FILL: Final = """
insert into subscriber_subscriberfailedevent
  (event_id, payload_sha256, source, topic, event_type, shop_domain, organization_id, envelope,
   payload, error_type, error_class, error_code, error_message, traceback, fingerprint, status,
   next_retry_at, resolved_at, resolution, created_at)
select 'event-' || n, '\\x00', 'pubsub', 'orders/create', 'create', 'shop-' || tenant,
       'org-' || lpad(tenant::text, 4, '0'), '{}', convert_to(repeat('x', %(width)s), 'UTF8'),
       'RuntimeError', 'transient', 'unexpected', 'x', 'x', 'f',
       case when place < 15 then 'pending' when place = 15 then 'failed' else 'resolved' end,
       case when place between 10 and 14 then now() + interval '1 hour' end,
       case when place > 15 then now() end, case when place > 15 then 'replayed' end,
       now() - make_interval(secs => n %% 86400)
from (select n, n %% %(tenants)s as tenant, n / %(tenants)s %% 100 as place
      from generate_series(0, %(rows)s - 1) n) g"""

# What the planner may believe: nothing yet, the truth, or what was true before the burst.
Knowledge = str
KNOWLEDGE: Final = ("none", "true", "outdated")


def filled(
    world: World, rows: int, knowledge: Knowledge, tenants: int = TENANTS, width: int = 800
) -> None:
    world.app(f"alter table {TABLE} set (autovacuum_enabled = false)")  # pyright: ignore[reportArgumentType]
    if knowledge == "outdated":
        world.fail()
        world.app(f"analyze {TABLE}")  # pyright: ignore[reportArgumentType]
        world.app(f"delete from {TABLE}")  # pyright: ignore[reportArgumentType]
    world.app(FILL, rows=rows, tenants=tenants, width=width)
    if knowledge == "true":
        world.app("analyze")


@pytest.fixture
def session(world: World) -> Iterator[psycopg.Connection[Any]]:
    """A session as the pool opens it; plans are for any parameters, as after five executions."""
    with db.connect(db.Target(conninfo=world.app_url), db.Limits(statement=60)) as connection:
        connection.execute("set plan_cache_mode = force_generic_plan")
        yield connection


def explained(
    session: psycopg.Connection[Any], statement: str, parameters: dict[str, Any]
) -> list[dict[str, Any]]:
    """The nodes of the plan, with what they did; the statement's effects are rolled back."""
    explain = "explain (analyze, timing off, buffers off, format json) " + statement
    with session.transaction(force_rollback=True):
        row = session.execute(explain, parameters, prepare=True).fetchone()  # pyright: ignore[reportArgumentType]
    assert row
    return list(_nodes(row[0][0]["Plan"]))


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from _nodes(part)


def claim(limit: int = LIMIT) -> dict[str, Any]:
    return {"token": uuid4(), "lease_seconds": 120, "limit": limit, "busy": ["org-0060"]}


def read(nodes: list[dict[str, Any]]) -> float:
    """Rows of the ledger that were looked at, those that a filter threw away included."""
    thrown = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
    return sum(
        node["Actual Loops"] * (node["Actual Rows"] + sum(node.get(name, 0) for name in thrown))
        for node in _scans(nodes)
    )


def _scans(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        node for node in nodes if node.get("Relation Name") == TABLE and "Scan" in node["Node Type"]
    ]


def is_index_driven(nodes: list[dict[str, Any]]) -> None:
    for node in _scans(nodes):
        assert node["Node Type"] in ("Index Scan", "Index Only Scan"), json.dumps(node)
        if node["Index Name"] in BY_ID:
            assert node["Index Cond"].startswith("(id = "), node
        else:
            assert node["Index Name"] == "subscriber_failedevent_due", node
    assert {"subscriber_failedevent_due"} <= {node["Index Name"] for node in _scans(nodes)}


def part(nodes: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The common table expression of that name."""
    return next(node for node in nodes if node.get("Subplan Name") == f"CTE {name}")


def turn_from(world: World, tenant: str) -> None:
    world.app("update subscriber_retrystate set last_tenant = %(tenant)s", tenant=tenant)


def holds(world: World, session: psycopg.Connection[Any]) -> None:
    turn_from(world, "org-0050")
    nodes = explained(session, leases._CLAIM, claim())
    is_index_driven(nodes)
    # Each row taken is met when its tenant is found, as its head, when it is locked and changed.
    assert read(nodes) <= 5 * LIMIT
    assert part(nodes, "start")["Actual Loops"] == 0, "enough tenants come after the last turn"
    ring = part(nodes, "ring")
    assert ring["Plans"][1]["Actual Loops"] == 0, "a first turn of each was enough"


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_a_claim_reads_what_it_takes_and_nothing_else(world, session, knowledge):
    filled(world, 20_000, knowledge, tenants=200)
    holds(world, session)


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_so_it_does_for_one_tenant_alone(world, session, knowledge):
    filled(world, 20_000, knowledge, tenants=1)
    nodes = explained(session, leases._CLAIM, claim())
    is_index_driven(nodes)
    assert read(nodes) <= 5 * LIMIT


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_a_claim_that_finds_nothing_asks_each_tenant_once(world, session, knowledge):
    filled(world, 20_000, knowledge, tenants=200)
    world.app(
        f"update {TABLE} set next_retry_at = now() + interval '1 hour' where status = 'pending'"  # pyright: ignore[reportArgumentType]
    )
    nodes = explained(session, leases._CLAIM, claim())
    is_index_driven(nodes)
    assert read(nodes) <= 2 * 200


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_tenants_without_canary_are_found_without_reading_the_ledger(world, session, knowledge):
    filled(world, 20_000, knowledge, tenants=200)
    world.app(
        "insert into subscriber_tenantincident (tenant, kind, started_at, next_probe_at, cause)"
        " select 'org-' || n, 'unavailable', now(), now(), 'x' from generate_series(1, 20) n"
    )
    nodes = explained(session, incidents._WITHOUT_CANARY, {"lease_seconds": 120})
    assert {node["Node Type"] for node in _scans(nodes)} <= {"Index Scan", "Index Only Scan"}
    assert read(nodes) <= 20


def test_no_claim_is_compiled(world, session):
    (row,) = session.execute("show jit").fetchall()
    assert row == ("off",), "the estimate of a recursion is large, and compiling takes 40 ms"


@pytest.mark.slow
@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_a_claim_from_a_million_rows(world, session, knowledge):
    filled(world, 1_000_000, knowledge, width=2)
    (due,) = world.app(
        f"select count(*), count(distinct tenant) as tenants from {TABLE}"  # pyright: ignore[reportArgumentType]
        " where status = 'pending' and due_at <= now()"
    )
    assert due == {"count": 100_000, "tenants": TENANTS}
    holds(world, session)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        assert len(world.core.leases.claim(uuid4(), LIMIT)) == LIMIT
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 0.05, "a scan of what is due takes three times as long"
