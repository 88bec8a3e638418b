"""Whatever the order of arrival, and however often, alone or at once: the same state in the end.

The reference is the rule in Python: of a resource's states the greatest source version holds.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import db, migrate
from shared.model import Envelope
from shared.rebuild import Rebuild, Scope
from tests.world import NOW, ORGANIZATION, SHOP, World, envelope

# Those that tell when something came, and that depend on it.
EXEMPT_EVENT = ("id", "received_at", "inserted_at", "trace_id")
EXEMPT_SNAPSHOT = ("id", "first_seen_at", "last_seen_at")
MINUS_INFINITY = datetime.min.replace(tzinfo=UTC)
EMPTY = "truncate shopify_orders, shopify_events"

common = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
QUICK = settings(common, max_examples=60)
LONG = settings(common, max_examples=400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One event of order 1, in few values, so that ties are many."""

    event_id: str
    operation: str
    own_clock: int | None  # hours; None: the body has none
    offset: int  # of the zone in which it is written
    triggered: int | None
    published: int

    @property
    def clock(self) -> datetime:
        """As the design says it: the body's own, else triggered-at, else publish time."""
        known = (self.own_clock, self.triggered, self.published)
        return NOW + timedelta(hours=next(hours for hours in known if hours is not None))

    @property
    def triggered_at(self) -> datetime | None:
        return None if self.triggered is None else NOW + timedelta(hours=self.triggered)

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"id": 1, "note": self.event_id}
        if self.own_clock is not None:
            moment = NOW + timedelta(hours=self.own_clock)
            zone = timezone(timedelta(hours=self.offset))
            body["updated_at"] = moment.astimezone(zone).isoformat()
        return body

    @property
    def version(self) -> tuple[datetime, bool, datetime, bytes]:
        deleted = self.operation == "delete"
        return (
            self.clock,
            deleted,
            self.triggered_at or MINUS_INFINITY,
            self.event_id.encode(),
        )

    def envelope(self, received: int = 0) -> Envelope:
        return envelope(
            self.body,
            f"orders/{self.operation}",
            event_id=self.event_id,
            triggered_at=self.triggered_at,
            published_at=NOW + timedelta(hours=self.published),
            received_at=NOW + timedelta(seconds=received),
        )


HOURS = st.integers(0, 2)
OPERATIONS = st.sampled_from(["create", "updated", "paid", "delete"])
IDS = st.text("aBcé\N{GRINNING FACE}~_", min_size=1, max_size=2)


@st.composite
def events(draw: st.DrawFn, most: int) -> list[Sent]:
    """Some events of one order; a deletion's body has no clock."""
    sent = []
    for event_id in draw(st.lists(IDS, min_size=2, max_size=most, unique=True)):
        operation = draw(OPERATIONS)
        own_clock = None if operation == "delete" else draw(st.none() | HOURS)
        sent.append(
            Sent(
                event_id=event_id,
                operation=operation,
                own_clock=own_clock,
                offset=draw(st.sampled_from([0, 9, -5])),
                triggered=draw(st.none() | HOURS),
                published=draw(HOURS),
            )
        )
    return sent


@st.composite
def arrivals(draw: st.DrawFn, most: int) -> tuple[list[Sent], list[list[Sent]]]:
    """Some events, and three orders of arrival, each with duplicates of its own."""
    sent = draw(events(most))
    again = st.lists(st.sampled_from(sent), max_size=3)
    return sent, [list(draw(st.permutations(sent + draw(again)))) for _ in range(3)]


def expected(sent: Sequence[Sent]) -> dict[str, Any]:
    """What must be in both tables."""
    newest = max(sent, key=lambda event: event.version)
    return {
        "events": {
            event.event_id: (
                f"orders/{event.operation}",
                event.operation,
                "1",
                event.body,
                event.clock,
                event.triggered_at,
            )
            for event in sent
        },
        "snapshot": {
            "organization_id": ORGANIZATION,
            "shop_domain": SHOP,
            "shopify_id": "1",
            "topic": f"orders/{newest.operation}",
            "event_type": newest.operation,
            "payload": newest.body,
            "is_deleted": newest.operation == "delete",
            "source_updated_at": newest.clock,
            "source_triggered_at": newest.triggered_at,
            "event_id": newest.event_id,
        },
    }


def found(world: World) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is in both tables: in the form of `expected`, and as it is but for what is exempt."""
    events = world.tenant('select * from shopify_events order by event_id collate "C"')
    (snapshot,) = world.tenant("select * from shopify_orders")
    ledger = {
        row["event_id"]: (
            row["topic"],
            row["event_type"],
            row["resource_id"],
            row["payload"],
            row["source_updated_at"],
            row["triggered_at"],
        )
        for row in events
    }
    rows = [_without(row, EXEMPT_EVENT) for row in events] + [_without(snapshot, EXEMPT_SNAPSHOT)]
    assert rows[-1]["parsed_payload"]["id"] == "1"
    shown = _without(snapshot, (*EXEMPT_SNAPSHOT, "parsed_payload"))
    return {"events": ledger, "snapshot": shown}, rows


def _without(row: dict[str, Any], exempt: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in exempt}


def converges(world: World, sent: Sequence[Sent], runs: Sequence[Callable[[], None]]) -> None:
    ends = []
    for run in runs:
        world.tenant(EMPTY)
        run()
        shown, rows = found(world)
        assert shown == expected(sent)
        ends.append(rows)
    assert all(rows == ends[0] for rows in ends)


def one_by_one(world: World, arrival: Sequence[Sent]) -> Callable[[], None]:
    """Each is received a second after the one before."""

    def run() -> None:
        for second, event in enumerate(arrival):
            world.core.pipeline.apply(event.envelope(second))

    return run


def at_once(world: World, arrival: Sequence[Sent], threads: int = 4) -> Callable[[], None]:
    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            sent = [event.envelope(second) for second, event in enumerate(arrival)]
            list(pool.map(world.core.pipeline.apply, sent))

    return run


def everything(world: World, sent: list[Sent], orders: list[list[Sent]]) -> None:
    alone = [one_by_one(world, arrival) for arrival in orders]
    converges(world, sent, [*alone, at_once(world, orders[0]), at_once(world, orders[1])])
    world.tenant("truncate shopify_orders")
    with db.connect(db.Target(conninfo=world.tenant_url), migrate.LIMITS) as connection:
        list(Rebuild(connection, Scope(organization_id=ORGANIZATION)).batches())
    shown, _ = found(world)
    assert shown == expected(sent), "rebuilt from the ledger"


@QUICK
@given(arrivals(most=4))
def test_every_arrival_of_a_few_events_ends_in_the_reference(world, drawn):
    everything(world, *drawn)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@LONG
@given(arrivals(most=8))
def test_every_arrival_of_more_events_ends_in_the_reference(world, drawn):
    everything(world, *drawn)


TIE = Sent(event_id="B", operation="updated", own_clock=1, offset=0, triggered=1, published=0)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(
            [replace(TIE, event_id=event_id) for event_id in ("a", "B", "é", "_")],
            id="equal in all but the event id",
        ),
        pytest.param(
            [replace(TIE, event_id=str(hours), offset=hours) for hours in (0, 9, -5)],
            id="equal clocks, written in three zones",
        ),
        pytest.param(
            [
                TIE,
                replace(TIE, event_id="z", operation="delete", own_clock=None),
                replace(TIE, event_id="c", operation="create", triggered=2),
            ],
            id="a deletion at the clock of its updates",
        ),
        pytest.param(
            [
                replace(TIE, event_id="0", triggered=None),
                replace(TIE, event_id="1", triggered=None, own_clock=None, published=1),
                replace(TIE, event_id="2", own_clock=None),
            ],
            id="clocks from three places, all equal",
        ),
    ],
)
def test_ties_are_broken_alike_in_every_order(world, sent):
    every = list(itertools.permutations(sent))
    converges(world, sent, [one_by_one(world, arrival) for arrival in every])


def test_a_crowd_at_once_ends_in_the_reference(world):
    sent = [
        Sent(
            event_id=f"{n:02}",
            operation=("create", "updated", "delete")[n % 3],
            own_clock=None,
            offset=0,
            triggered=n % 4,
            published=0,
        )
        for n in range(30)
    ]
    crowd = random.sample(sent * 2, k=60)
    converges(world, sent, [at_once(world, crowd), one_by_one(world, crowd)])
