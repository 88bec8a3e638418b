"""The outbox: what Pub/Sub did not confirm is sent again, as it was and in order of arrival."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from google.pubsub_v1.types import Subscription, Topic

from dev.pubsub_grpc import PubSubServer
from shared import audit, outbox
from shared import envelope as envelopes
from shared.message import Message
from shared.publish import Publisher
from tests.world import NOW, World, envelope

TOPIC = "projects/p/topics/events"
SUBSCRIPTION = "projects/p/subscriptions/events"


@pytest.fixture
def pubsub(monkeypatch: pytest.MonkeyPatch) -> Iterator[PubSubServer]:
    with PubSubServer() as server:
        server.broker.create_topic(Topic(name=TOPIC))
        server.broker.create_subscription(Subscription(name=SUBSCRIPTION, topic=TOPIC))
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.host)
        yield server


@pytest.fixture
def box(world: World, pubsub: PubSubServer) -> outbox.Outbox:
    publisher = Publisher(TOPIC)
    return outbox.Outbox(world.core.application, world.core.failures, lambda: publisher)


def put(world: World, number: int, **changes) -> tuple[bytes, dict[str, str]]:
    """Leaves one message in the outbox, as the webhook does, and returns it."""
    attributes = {"X-Shopify-Topic": "orders/create", "X-Shopify-Shop-Domain": "acme.myshopify.com"}
    sent = envelope({"id": number}, attributes=attributes | {"X-Shopify-Webhook-Id": f"w{number}"})
    sent = replace(sent, **{"event_id": f"w{number}"} | changes)
    data, named = envelopes.message_data(sent), envelopes.message_attributes(sent)
    outbox.put(world.core.application, audit.record(world.core.application, sent), data, named)
    return data, named


def waiting(world: World) -> int:
    return world.app("select count(*) from shopify_shopifyevent where needs_publish")[0]["count"]


def received(pubsub: PubSubServer) -> list[tuple[bytes, dict[str, str]]]:
    leases = pubsub.broker.pull(SUBSCRIPTION, 100, wait=0.1)
    return [(lease.message.data, dict(lease.message.attributes)) for lease in leases]


def test_what_waits_is_sent_as_it_was_in_the_order_of_arrival(world, pubsub, box):
    late = put(world, 1, received_at=NOW + timedelta(hours=1))
    early = put(world, 2, received_at=NOW)
    assert box.republish(budget_seconds=60) == 2
    assert received(pubsub) == [early, late]
    assert waiting(world) == 0
    assert world.app("select 1 from shopify_shopifyevent where outbox_body is not null") == []
    assert box.republish(budget_seconds=60) == 0


def test_while_pubsub_refuses_everything_stays(world, pubsub, box):
    for n in range(3):
        put(world, n)
    pubsub.broker.refuse_publishes(True)
    assert box.republish(budget_seconds=60) == 0
    assert waiting(world) == 3
    pubsub.broker.refuse_publishes(False)
    assert box.republish(budget_seconds=60) == 3


def test_a_message_that_pubsub_never_takes_goes_to_the_failure_ledger_and_holds_up_nobody(
    world, pubsub, box
):
    put(world, 1)
    put(world, 2)
    world.app(
        "update shopify_shopifyevent set outbox_envelope ="
        " jsonb_set(outbox_envelope, '{attributes,Too-Long}', to_jsonb(repeat('x', 2000)))"
        " where event_id = 'w1'"
    )
    assert box.republish(budget_seconds=60) == 2
    assert [attributes["X-Shopify-Webhook-Id"] for _, attributes in received(pubsub)] == ["w2"]
    kept = world.failed_event()
    assert (kept["event_id"], kept["error_type"], kept["payload"]) == (
        "w1",
        "UnpublishableBodyError",
        b'{"id": 1}',
    )
    assert world.retry().resolved == 1


def test_after_the_budget_the_rest_waits_for_the_next_run(world, pubsub):
    for n in range(3):
        put(world, n)
    seconds = iter([0, 0, 1, 99, 100])
    publisher = Publisher(TOPIC)
    box = outbox.Outbox(
        world.core.application,
        world.core.failures,
        lambda: publisher,
        clock=lambda: next(seconds),
    )
    assert box.republish(budget_seconds=10) == 2
    assert waiting(world) == 1


def test_killed_between_publishing_and_noting_it_the_message_is_sent_twice_and_stored_once(
    world, pubsub, box, monkeypatch
):
    put(world, 1)
    fetch = type(world.core.application).fetch

    def dying(self, factory, statement, parameters=None):
        if statement is outbox._TAKE_OUT:
            raise KeyboardInterrupt
        return fetch(self, factory, statement, parameters)

    with monkeypatch.context() as death:
        death.setattr(type(world.core.application), "fetch", dying)
        with pytest.raises(KeyboardInterrupt):
            box.republish(budget_seconds=60)
    assert box.republish(budget_seconds=60) == 1
    messages = received(pubsub)
    assert len(messages) == 2
    for data, attributes in messages:
        sent = Message(data=base64.b64encode(data).decode(), attributes=attributes)
        assert world.ingester.ingest(sent)
    assert len(world.tenant("select 1 from shopify_events")) == 1


def test_an_empty_outbox_asks_for_no_publisher(world):
    def never():
        raise AssertionError

    box = outbox.Outbox(world.core.application, world.core.failures, never)
    assert box.republish(budget_seconds=60) == 0


def test_without_a_topic_what_waits_stays_and_the_log_says_why(world, capfd):
    put(world, 1)
    assert world.core.outbox().republish(budget_seconds=60) == 0
    stuck = [json.loads(line) for line in capfd.readouterr().out.splitlines()][-1]
    assert stuck["message"] == "outbox.stuck"
    assert "PUBSUB_TOPIC" in stuck["error_message"]


def test_the_oldest_is_found_through_an_index(world):
    put(world, 1)
    world.app("set enable_seqscan = off")
    plan = world.app("explain " + outbox._NEXT)
    assert "shopify_shopifyevent_outbox" in json.dumps(plan)


@pytest.mark.parametrize(
    "half", ["needs_publish = true", "outbox_body = ''", "outbox_envelope = '{}'"]
)
def test_a_row_is_in_the_outbox_whole_or_not_at_all(world, half):
    audit.record(world.core.application, envelope())
    with pytest.raises(psycopg.errors.CheckViolation):
        world.app("update shopify_shopifyevent set " + half)
