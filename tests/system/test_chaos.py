"""A short form of `make chaos`; and that its books notice what does not balance."""

import random
from dataclasses import replace
from itertools import islice

import pytest

from tests.chaos import books
from tests.chaos.events import Event, stream
from tests.chaos.faults import FAULTS
from tests.chaos.run import run
from tests.world import SHOP, World, envelope

SEED = 7
SECONDS = 10
TENANTS = 4


def test_whatever_breaks_every_accepted_event_is_in_its_ledger_and_every_state_the_newest(tmp_path):
    result = run(tmp_path, seed=SEED, seconds=SECONDS, tenants=TENANTS, say=print)
    assert result.differences == []
    assert result.events
    assert result.faults
    assert result.faults.keys() <= FAULTS.keys()


@pytest.fixture
def sent(world: World) -> list[Event]:
    """Events that were all stored, the broken ones kept."""
    events = [*islice(stream(random.Random(SEED), [SHOP]), 60)]
    events.append(replace(events[0], event_id="broken", body=b'{"id": ', is_broken=True))
    for event in events:
        arrived = envelope(
            event.body, event.topic, event_id=event.event_id, triggered_at=event.triggered_at
        )
        if event.is_broken:
            world.fail(arrived, ValueError("no JSON"))
        else:
            world.core.pipeline.apply(arrived)
        if not event.is_native:
            world.app(
                "insert into shopify_shopifyevent"
                " (topic, shop_domain, event_id, payload_sha256, received_at)"
                " values (%(topic)s, %(shop)s, %(id)s, '\\x00', now())",
                topic=event.topic,
                shop=SHOP,
                id=event.event_id,
            )
    return events


def differences(world: World, sent: list[Event]) -> str:
    return "\n".join(books.differences(sent, world.app_url, {SHOP: world.tenant_url}, set()))


def test_books_that_balance(world: World, sent: list[Event]):
    assert differences(world, sent) == ""


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("delete from shopify_events where id = 5", "are lost"),
        ("update shopify_events set event_id = 'x' where id = 5", "are nobody's"),
        ("update shopify_events set payload = '{}' where id = 5", "another payload"),
        ("update shopify_orders set event_id = 'x' where id = 1", "has the state"),
        ("update shopify_orders set is_deleted = not is_deleted where id = 1", "has the state"),
        ("update shopify_orders set payload = '{}' where id = 1", "has the state"),
        ("delete from shopify_orders where id = 1", "are missing"),
    ],
)
def test_a_tenant_that_lacks_something_is_noticed(
    world: World, sent: list[Event], statement: str, words: str
):
    world.tenant(statement)  # type: ignore[arg-type]
    assert words in differences(world, sent)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("delete from subscriber_subscriberfailedevent", "broken events are not kept"),
        (
            "update subscriber_subscriberfailedevent set lease_token = gen_random_uuid(),"
            " leased_until = now()",
            "1 leases are left",
        ),
        ("update subscriber_subscriberfailedevent set event_id = 'x'", "failed event"),
        ("delete from shopify_shopifyevent", "have no audit row"),
        (
            "insert into subscriber_tenantincident (tenant, kind, started_at, next_probe_at, cause)"
            " values ('acme', 'unavailable', now(), now(), 'x')",
            "1 incidents are left",
        ),
    ],
)
def test_what_is_left_open_is_noticed(world: World, sent: list[Event], statement: str, words: str):
    world.app(statement)  # type: ignore[arg-type]
    assert words in differences(world, sent)
