"""Streaming pull over the stand-in: what is acknowledged, and what becomes of a broken stream."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from google.pubsub_v1.types import PubsubMessage, Subscription, Topic

from dev.pubsub_grpc import PubSubServer
from shared.message import Message
from shared.streaming import RESTART_SECONDS, Subscriber
from tests.functions.rig import eventually
from tests.world import SHOP, World

TOPIC = "projects/demo/topics/events"
SUBSCRIPTION = "projects/demo/subscriptions/events-pull"
HANG_GUARD_SECONDS = 60


@pytest.fixture
def server() -> Iterator[PubSubServer]:
    with PubSubServer() as server:
        server.broker.create_topic(Topic(name=TOPIC))
        yield server


def subscribe(server: PubSubServer, **more: Any) -> None:
    server.broker.create_subscription(Subscription(name=SUBSCRIPTION, topic=TOPIC, **more))


def publish(server: PubSubServer, *names: str) -> None:
    for name in names:
        attributes = {
            "X-Shopify-Topic": "orders/create",
            "X-Shopify-Shop-Domain": SHOP,
            "X-Shopify-Webhook-Id": name,
        }
        server.broker.publish(TOPIC, [PubsubMessage(data=b'{"id": 1}', attributes=attributes)])


@contextmanager
def running(
    server: PubSubServer, ingest: Callable[[Message], bool], **more: Any
) -> Iterator[Subscriber]:
    """A subscriber at work, which has ended afterwards."""
    subscriber = Subscriber(ingest, SUBSCRIPTION, emulator_host=server.host, **more)
    thread = threading.Thread(target=subscriber.run, daemon=True)
    thread.start()
    try:
        yield subscriber
    finally:
        subscriber.stop()
        thread.join(HANG_GUARD_SECONDS)
        assert not thread.is_alive()


def is_drained(server: PubSubServer) -> bool:
    return server.broker.depth(SUBSCRIPTION) == 0


@pytest.mark.parametrize("exactly_once", [False, True])
def test_events_land_and_their_messages_are_acknowledged(
    world: World, server: PubSubServer, exactly_once: bool
) -> None:
    subscribe(server, enable_exactly_once_delivery=exactly_once)
    publish(server, *(f"event-{n}" for n in range(20)))
    with running(server, world.ingester.ingest):
        eventually(lambda: is_drained(server))
    assert world.tenant("select count(*) as n from shopify_events") == [{"n": 20}]


def test_the_message_is_the_one_that_a_push_would_have_brought(server: PubSubServer) -> None:
    subscribe(server)
    publish(server, "event")
    came: list[Message] = []
    with running(server, lambda message: not came.append(message)):
        eventually(lambda: is_drained(server))
    (message,) = came
    assert message.data == "eyJpZCI6IDF9"
    assert message.attributes["X-Shopify-Webhook-Id"] == "event"
    assert message.message_id
    assert message.publish_time
    assert message.publish_time.endswith("+00:00")


def test_what_cannot_be_kept_is_refused_and_comes_again(server: PubSubServer) -> None:
    subscribe(server)
    publish(server, "event")
    answers = iter([False, False, True])
    with running(server, lambda _: next(answers)) as subscriber:
        eventually(lambda: is_drained(server))
    assert subscriber.run().refused == 2
    assert subscriber.run().acknowledged == 1


def test_a_late_acknowledgement_is_on_record_where_delivery_is_exactly_once(
    server: PubSubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    subscribe(server, enable_exactly_once_delivery=True)
    publish(server, "event")

    def ingest(_: Message) -> bool:
        server.broker.end_leases(SUBSCRIPTION)
        return True

    written: list[str] = []

    def is_on_record() -> bool:
        written.append(capsys.readouterr().out)
        return "subscriber.not_acknowledged" in "".join(written)

    with running(server, ingest):
        eventually(is_on_record)
    assert server.broker.depth(SUBSCRIPTION) == 1


def test_a_stop_finishes_what_has_started_and_gives_back_the_rest(server: PubSubServer) -> None:
    subscribe(server)
    publish(server, *(f"event-{n}" for n in range(20)))
    started, go_on = threading.Semaphore(0), threading.Event()

    def ingest(_: Message) -> bool:
        started.release()
        return go_on.wait(HANG_GUARD_SECONDS)

    with running(server, ingest, threads=2) as subscriber:
        for _ in range(2):
            assert started.acquire(timeout=HANG_GUARD_SECONDS)
        subscriber.stop()
        assert not is_drained(server)
        go_on.set()
    assert server.broker.depth(SUBSCRIPTION) == 18
    given_back = 0
    while given_back < 18:
        given_back += len(server.broker.pull(SUBSCRIPTION, 20, wait=HANG_GUARD_SECONDS))


class Pauses:
    """Takes the place of sleeping: what was slept, and a chance to repair in between."""

    def __init__(self, then: dict[int, Callable[[], None]], most: int) -> None:
        self.seconds: list[float] = []
        self._then = then
        self._most = most
        self.subscriber: Subscriber | None = None

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._then.get(len(self.seconds), lambda: None)()
        if len(self.seconds) == self._most:
            assert self.subscriber
            self.subscriber.stop()


def paused(server: PubSubServer, then: dict[int, Callable[[], None]], most: int, **more: Any):
    """The pauses of a subscriber that is told to stop in the last one."""
    pauses = Pauses(then, most)
    subscriber = Subscriber(
        more.pop("ingest", lambda _: True),
        SUBSCRIPTION,
        emulator_host=server.host,
        sleep=pauses,
        **more,
    )
    pauses.subscriber = subscriber
    subscriber.run()
    return pauses.seconds


def test_the_pauses_between_streams_are_5_10_20_40_and_then_60_seconds(
    server: PubSubServer,
) -> None:
    assert paused(server, {}, most=7) == [5, 10, 20, 40, 60, 60, 60]
    assert RESTART_SECONDS == (5, 10, 20, 40, 60)


def test_a_stream_that_delivered_has_proved_itself_and_the_pauses_begin_again(
    server: PubSubServer,
) -> None:
    def repair() -> None:
        subscribe(server)
        publish(server, "event")

    def ingest(_: Message) -> bool:
        server.broker.delete_subscription(SUBSCRIPTION)
        return True

    assert paused(server, {3: repair}, most=5, ingest=ingest) == [5, 10, 20, 5, 10]


def test_a_stream_that_stood_for_a_minute_has_proved_itself(server: PubSubServer) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 31  # between the start of a stream and its end
        return now[0]

    assert paused(server, {}, most=3, clock=clock) == [5, 10, 20]
    now[0] = 0
    slow = iter([0, 10, 20, 90, 100, 110])
    assert paused(server, {}, most=3, clock=lambda: next(slow)) == [5, 5, 10]


def test_a_broker_that_is_gone_is_noticed_and_found_again_when_it_is_back() -> None:
    servers = [PubSubServer()]
    port = int(servers[0].host.rsplit(":", 1)[1])
    came = threading.Event()

    def begin() -> None:
        servers[0].broker.create_topic(Topic(name=TOPIC))
        subscribe(servers[0])
        publish(servers[0], "event")

    def restart() -> None:
        servers.insert(0, PubSubServer(port=port))
        begin()

    def ingest(_: Message) -> bool:
        came.set()
        return True

    begin()
    pauses = Pauses({2: restart}, most=99)
    with running(servers[0], ingest, sleep=pauses) as subscriber:
        pauses.subscriber = subscriber
        assert came.wait(HANG_GUARD_SECONDS)
        came.clear()
        servers[0].close()
        assert came.wait(HANG_GUARD_SECONDS)
    servers[0].close()
    assert pauses.seconds == [5, 10]
