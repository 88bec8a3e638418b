"""A tenant is away for a day: its events wait, its neighbours do not, and nobody has to act.

Time passes by moving every time in the application database back; its clock stays the ruler.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import pytest
from psycopg.conninfo import make_conninfo

from shared import db
from tests.world import ORGANIZATION, SHOP, World, envelope

OTHER, OTHER_SHOP = "other", "other.myshopify.com"
SMALL, SMALL_SHOP = "small", "small.myshopify.com"
DAY = 24 * 60

MORE = """
insert into subscriber_subscriberfailedevent
  (event_id, payload_sha256, source, topic, event_type, shop_domain, organization_id, envelope,
   payload, error_type, error_class, error_code, error_message, traceback, fingerprint)
select event_id || '-' || n, payload_sha256, source, topic, event_type, shop_domain,
       organization_id, envelope || jsonb_build_object('event_id', event_id || '-' || n), payload,
       error_type, error_class, error_code, error_message, traceback, fingerprint
from subscriber_subscriberfailedevent, generate_series(2, %(count)s) n
where id = %(row)s"""


class Shut:
    """A port where every connection is accepted and closed at once; it counts them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.knocks = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.knocks += 1
                client.close()


@dataclass(frozen=True, kw_only=True)
class Down:
    """A world with two tenants that are away, and one that is not."""

    world: World
    large: Shut
    small: Shut

    def heal(self) -> None:
        self.world.connect_shop()
        self.world.connect_shop(SMALL_SHOP, SMALL)
        self.world.forget()


@pytest.fixture
def down(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Down]:
    # A minute passes in milliseconds here: the pool shall not still remember the last failure.
    monkeypatch.setattr(db, "FAIL_FAST_SECONDS", 0)
    with Shut() as large, Shut() as small:
        world.connect_shop(url=make_conninfo(world.tenant_url, port=large.port))
        world.connect_shop(SMALL_SHOP, SMALL, make_conninfo(world.tenant_url, port=small.port))
        world.connect_shop(OTHER_SHOP, OTHER)
        world.forget()
        yield Down(world=world, large=large, small=small)


def pass_time(world: World, minutes: int) -> None:
    world.app(
        "update subscriber_subscriberfailedevent set created_at = created_at - d.t,"
        " updated_at = updated_at - d.t, next_retry_at = next_retry_at - d.t,"
        " last_attempted_at = last_attempted_at - d.t, resolved_at = resolved_at - d.t,"
        " leased_until = leased_until - d.t"
        " from (select make_interval(mins => %(minutes)s) as t) d where status <> 'resolved'",
        minutes=minutes,
    )
    world.app(
        "update subscriber_tenantincident set started_at = started_at - d.t,"
        " last_probe_at = last_probe_at - d.t, next_probe_at = next_probe_at - d.t,"
        " ended_at = ended_at - d.t from (select make_interval(mins => %(minutes)s) as t) d",
        minutes=minutes,
    )


def fail(world: World, shop: str, number: int, count: int = 1) -> None:
    """Failed events, all of one order."""
    row = world.fail(envelope({"id": number}, shop_domain=shop))
    world.app(MORE, row=row, count=count)


def states(world: World, organization: str) -> dict[str, int]:
    rows = world.app(
        "select status, count(*) from subscriber_subscriberfailedevent"
        " where organization_id = %(organization)s group by status",
        organization=organization,
    )
    return {row["status"]: row["count"] for row in rows}


def outcomes(world: World, organization: str) -> dict[str, int]:
    rows = world.app(
        "select outcome, count(*) from subscriber_replayattempt a"
        " join subscriber_subscriberfailedevent f on f.id = a.failed_event_id"
        " where organization_id = %(organization)s group by outcome",
        organization=organization,
    )
    return {row["outcome"]: row["count"] for row in rows}


def probes(world: World, organization: str) -> int:
    return sum(i["probe_count"] for i in world.incidents() if i["tenant"] == organization)


def away_for_a_day(down: Down, steps: list[int], a_step: int) -> None:
    """`a_step` events of the large tenant after each of the `steps`, which are minutes."""
    assert sum(steps) == DAY
    world = down.world
    for n in range(3):
        fail(world, SMALL_SHOP, n)
    for number, minutes in enumerate(steps):
        fail(world, SHOP, number, a_step)
        fail(world, OTHER_SHOP, number)
        world.retry()
        assert states(world, OTHER) == {"resolved": number + 1}, "the neighbour never waits"
        pass_time(world, minutes)

    events = len(steps) * a_step
    assert sum(states(world, ORGANIZATION).values()) == events
    assert "resolved" not in states(world, ORGANIZATION)
    assert states(world, SMALL) == {"failed": 3}, "each had its five replays, and was given up"

    # One connection for each probe, and one that opened the incident; one row charged for each.
    assert down.large.knocks == probes(world, ORGANIZATION) + 1 <= DAY / 15 + 6
    assert sum(outcomes(world, ORGANIZATION).values()) == down.large.knocks
    assert down.small.knocks == probes(world, SMALL) + 1 <= DAY / 15 + 6
    assert sum(outcomes(world, SMALL).values()) == 15
    assert sum(outcomes(world, OTHER).values()) == len(steps)
    assert [incident["ended_at"] for incident in world.incidents()] == [None] * 2

    down.heal()
    for number in range(60):
        if all(set(states(world, o)) == {"resolved"} for o in (ORGANIZATION, SMALL)):
            break
        pass_time(world, 1)
        fail(world, OTHER_SHOP, DAY + number)
        world.retry()
        assert set(states(world, OTHER)) == {"resolved"}, "nor while all that comes back"
    assert states(world, ORGANIZATION) == {"resolved": events}
    assert states(world, SMALL) == {"resolved": 3}
    assert all(incident["ended_at"] for incident in world.incidents())
    assert len(world.incidents()) == 2
    actors = world.app(
        "select actor, action, scope ->> 'tenant' as tenant, count from subscriber_operatoraction"
    )
    assert [tuple(action.values()) for action in actors] == [("system", "requeue", SMALL, 3)]
    stored = world.tenant(
        "select count(*), count(distinct event_id) as events from shopify_events"
        " where organization_id = %(organization)s",
        organization=ORGANIZATION,
    )
    assert stored == [{"count": events, "events": events}]
    assert outcomes(world, ORGANIZATION)["resolved"] == events


def test_a_tenant_that_is_away_for_a_day_loses_nothing_and_delays_nobody(down):
    away_for_a_day(down, [1, 2, 4, 8, *[15] * 95], a_step=3)


@pytest.mark.slow
def test_the_same_with_5000_events_and_a_look_every_few_minutes(down):
    away_for_a_day(down, [*[1] * 40, *[5] * 280], a_step=16)
    assert down.world.tenant("select count(*) from shopify_events")[0]["count"] > 5_000


def test_a_tenant_that_comes_and_goes_is_asked_no_more_often_than_it_answers(down):
    world = down.world
    fail(world, SHOP, 1, 20)
    for _ in range(5):
        world.retry()
        pass_time(world, 1)
        down.heal()
        knocks = down.large.knocks
        world.retry()
        assert down.large.knocks == knocks
        world.connect_shop(url=make_conninfo(world.tenant_url, port=down.large.port))
        world.forget()
    assert down.large.knocks <= 5 + 5
    incidents = [i for i in world.incidents() if i["tenant"] == ORGANIZATION]
    assert len(incidents) <= 5
    assert all(i["probe_count"] <= 1 for i in incidents)
